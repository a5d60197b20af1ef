"""The section `hints` of a run's config."""

import dataclasses

from composer_jax.rl.hints import distill
from composer_jax.tasks import mistakes


@dataclasses.dataclass(frozen=True, kw_only=True)
class HintSection(mistakes.HintOptions):
  """Textual feedback on faulty turns, which a teacher reads.

  Attributes:
    loss: weight and shape of the hint loss; weight 0 turns hints off.
  """

  loss: distill.HintLossOptions = distill.HintLossOptions(weight=1.0)

  def __post_init__(self):
    mistakes.HintOptions.__post_init__(self)
    if self.loss.weight and not (self.templates and self.max_hints):
      raise ValueError(
        f'--config.hints.loss.weight ({self.loss.weight}) needs '
        '--config.hints.templates, and max_hints of at least 1.'
      )
