"""The sections of a run's config for tasks and demonstrations."""

import dataclasses

from composer_jax.core import checks
from composer_jax.tasks import auditor as auditors
from composer_jax.tasks import scoring
from composer_jax.tasks.harbor import environment as directories
from composer_jax.tasks.list_functions import demonstrations
from composer_jax.tasks.repository import environment, task_set
from composer_jax.tasks.verifiers import options as harnesses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
  """Where tasks come from, and the tools of their episodes.

  Attributes:
    family: 'list_functions', whose tasks are generated; 'deletion', 'harbor',
      'pivots' and 'verifiers', whose tasks are read from a folder or a file;
      'mixed', several of these; or MODULE:CLASS, a family of your own.
    folder: task set that `experiments.make_tasks` made; with 'harbor' a folder
      of task directories, with 'pivots' a file of conversations, with
      'verifiers' the TOML file of an environment; '' for families that need
      none.
    mixture: with 'mixed', parts in the form FAMILY:WEIGHT:FOLDER, and behind
      another colon the tools of a part if they differ.
    tiers: kinds of deletion, () for all.
    repository: tools of tasks on repositories; tasks of list functions have
      terse tools of their own.
    harbor: which task directories are played, and when they are solved.
    verifiers: how environments of verifiers are run and graded.
    auditor: model that reads every episode before it is graded; none by
      default.
    rubric: what episodes are scored by beside their tests; none by default.
  """

  family: str = 'list_functions'
  folder: str = ''
  mixture: tuple[str, ...] = ()
  tiers: tuple[str, ...] = ()
  repository: environment.RepositoryOptions = environment.RepositoryOptions()
  harbor: directories.HarborOptions = directories.HarborOptions()
  verifiers: harnesses.VerifiersOptions = harnesses.VerifiersOptions()
  auditor: auditors.AuditorOptions = auditors.AuditorOptions()
  rubric: scoring.RubricOptions = scoring.RubricOptions()

  def __post_init__(self):
    if unknown := set(self.tiers) - set(task_set.TIERS):
      raise ValueError(
        f'--config.tasks.tiers must be of {task_set.TIERS}; there is no '
        f'{sorted(unknown)}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstrationOptions(demonstrations.Noise):
  """SFT transcripts: their number, and the noise that RL has to unlearn.

  Attributes:
    count: number of transcripts, all on training tasks; those of a folder are
      then no tasks of RL, which needs rl.steps x rl.prompts others.
    conversations: file of the user's own conversations to learn beside them,
      for an imported model; '' for none.
    functions: number of finished functions of lists, with descriptions, that
      SFT shows before transcripts: there the code of a word is learnt soonest.
    practice: number of short functions of the corpus whose bodies SFT shows
      beside the solutions of a folder's tasks, through the tool 'body'.
    context_loss: share of transcripts of list functions, and of practice, with
      loss on prompt and answers as well as on calls: their files repeat names
      and describe code.
  """

  count: int = 7000
  conversations: str = ''
  functions: int = 7000
  practice: int = 0
  context_loss: float = 0.0
  wrong_tool: float = 0.1
  wrong_edit: float = 0.1
  broken_edit: float = 0.3
  skip_test: float = 0.5
  give_up: float = 0.6
  cut_short: float = 0.1

  def __post_init__(self):
    checks.at_least(self, 1, 'count')
    checks.at_least(self, 0, 'functions', 'practice')
    checks.number(self, 0, 'context_loss', highest=1)
    demonstrations.Noise.__post_init__(self)
