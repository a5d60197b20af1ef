"""The sections of a run's config that say what is practised, and with what.

The other sections are in `pipeline.sections`.
"""

import dataclasses

from composer_jax.agent import mistakes
from composer_jax.rl.hints import distill
from composer_jax.tasks.list_functions import family as list_functions
from composer_jax.tasks.repository import environment
from composer_jax.tasks.repository import task_set as repository

FAMILIES = (list_functions.FAMILY, repository.FAMILY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tasks:
  """Where tasks come from, and the tools of their episodes.

  Attributes:
    family: 'list_functions', which are generated, or 'deletion', which are
      read from a folder.
    folder: of a set that `experiments.make_tasks` made; '' for the other.
    tiers: of deletions, () for all.
    repository: tools of deletion tasks and their bounds. The other family has
      terse ones of its own (`tasks.list_functions.environment`).
  """

  family: str
  folder: str
  tiers: tuple[str, ...]
  repository: environment.RepositoryOptions

  def __post_init__(self):
    if self.family not in FAMILIES:
      raise ValueError(
        f'--config.tasks.family must be one of {FAMILIES}, not {self.family!r}.'
      )
    if self.is_deletion != bool(self.folder):
      raise ValueError(
        f'--config.tasks.folder ({self.folder!r}) is of family '
        f'{repository.FAMILY!r} and of no other, and '
        f'--config.tasks.family is {self.family!r}. A folder is made by '
        '`python -m experiments.make_tasks --out=FOLDER`.'
      )
    if unknown := set(self.tiers) - set(repository.TIERS):
      raise ValueError(
        f'--config.tasks.tiers must be of {repository.TIERS}; there is no '
        f'{sorted(unknown)}.'
      )

  @property
  def is_deletion(self) -> bool:
    return self.family == repository.FAMILY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hints:
  """Textual feedback on faulty turns; see `agent.mistakes`.

  Attributes:
    templates: (kind of mistake, text) pairs.
    max_hints: of an episode.
    loss: what they weigh; weight 0 makes none.
  """

  templates: tuple[tuple[str, str], ...]
  max_hints: int
  loss: distill.HintLossOptions

  def __post_init__(self):
    unknown = {kind for kind, _ in self.templates} - set(mistakes.DETECTORS)
    if unknown:
      raise ValueError(
        f'--config.hints.templates names {sorted(unknown)}; mistakes are of '
        f'{sorted(mistakes.DETECTORS)}.'
      )
    options = mistakes.HintOptions(
      templates=self.templates, max_hints=self.max_hints
    )
    if self.loss.weight and not (options.templates and options.max_hints):
      raise ValueError(
        f'--config.hints.loss.weight ({self.loss.weight}) needs '
        '--config.hints.templates, and max_hints of at least 1.'
      )

  def options(self) -> mistakes.HintOptions | None:
    """Which mistakes get a hint; None where hints weigh nothing."""
    if not self.loss.weight:
      return None
    return mistakes.HintOptions(
      templates=self.templates, max_hints=self.max_hints
    )
