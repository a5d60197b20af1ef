"""The sections of a run's config that say what is practised and shown."""

import dataclasses

from composer_jax.tasks.list_functions import demonstrations
from composer_jax.tasks.repository import environment, task_set


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
  """Where tasks come from, and the tools of their episodes.

  Attributes:
    family: 'list_functions', whose tasks are generated, or 'deletion', whose
      tasks are read from a folder.
    folder: set of tasks that `experiments.make_tasks` made; '' for families
      that need none.
    tiers: kinds of deletion, () for all.
    repository: tools of tasks on repositories. Tasks of list functions have
      terse ones of their own.
  """

  family: str = 'list_functions'
  folder: str = ''
  tiers: tuple[str, ...] = ()
  repository: environment.RepositoryOptions = environment.RepositoryOptions()

  def __post_init__(self):
    if unknown := set(self.tiers) - set(task_set.TIERS):
      raise ValueError(
        f'--config.tasks.tiers must be of {task_set.TIERS}; there is no '
        f'{sorted(unknown)}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstrationOptions:
  """SFT transcripts: how many, and the noise that RL has to unlearn.

  Attributes:
    count: transcripts, on training tasks only.
    conversations: file of the user's own conversations to learn beside them,
      for an imported model; '' for none.
    wrong_tool: probability that a call is to a tool that does not exist.
    wrong_arguments: probability that a call names a file or function that is
      not there, or has an argument too few.
    detour: probability of a valid call that is of no use.
    skip_read: probability of an edit without having read.
    wrong_edit: probability that a body is that of a near composition.
    broken_edit: probability that a body lacks its last bracket or word.
    skip_test: probability of finishing after an edit without a test.
    give_up: probability of finishing after an error or a failed test.
  """

  count: int = 7000
  conversations: str = ''
  wrong_tool: float = 0.1
  wrong_arguments: float = 0.05
  detour: float = 0.03
  skip_read: float = 0.02
  wrong_edit: float = 0.08
  broken_edit: float = 0.1
  skip_test: float = 0.5
  give_up: float = 0.35

  def __post_init__(self):
    if self.count < 1:
      raise ValueError(
        f'--config.demonstrations.count must be at least 1, not {self.count}.'
      )
    self.noise()

  def noise(self) -> demonstrations.Noise:
    names = [f.name for f in dataclasses.fields(demonstrations.Noise)]
    return demonstrations.Noise(**{name: getattr(self, name) for name in names})
