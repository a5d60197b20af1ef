"""The section `live` of a config: how a policy learns from live use."""

import dataclasses
import pathlib

from composer_jax.core import checks
from composer_jax.live import pricing, shipping
from composer_jax.live import trial as trials
from composer_jax.tasks import calibration, scoring


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveOptions:
  """Learning from recorded episodes, in cycles.

  A step of a cycle has as many episodes as one of RL: rl.prompts x
  rl.rollouts_per_prompt.

  Attributes:
    steps: most optimizer steps of a cycle; each takes fresh episodes.
    least_steps: steps that there must be episodes for before a cycle begins.
    max_age: versions that an episode may be behind when its cycle begins.
    similarity: share of runs of four tokens that two prompts of a group have in
      common; 1 groups equal prompts alone.
    keep_days: days after which a recorded episode is deleted; 0 keeps it until
      its user withdraws.
    judge: rubric of follow-ups that come as texts, and model behind a `url`; ''
      for none. Its answers must hold before they pay.
    prices: what events are worth.
    gate: what a candidate may lose on suites and canaries.
    trial: the trial of a candidate on some users.
  """

  steps: int = 4
  least_steps: int = 1
  max_age: int = 4
  similarity: float = 0.8
  keep_days: float = 30.0
  judge: scoring.RubricOptions = scoring.RubricOptions(
    file='configs/rubrics/follow_up.toml',
    calibration='configs/rubrics/follow_up.jsonl',
  )
  prices: pricing.PriceOptions = pricing.PriceOptions()
  gate: shipping.ShippingOptions = shipping.ShippingOptions()
  trial: trials.TrialOptions = trials.TrialOptions()

  def __post_init__(self):
    checks.at_least(self, 1, 'steps', 'least_steps')
    checks.at_least(self, 0, 'max_age')
    is_reached = self.least_steps <= self.steps
    rule = f'be at most steps ({self.steps})'
    checks.require(self, 'least_steps', is_reached, rule)
    checks.require(
      self, 'similarity', 0 < self.similarity <= 1, 'lie in (0, 1]'
    )
    checks.number(self, 0, 'keep_days')

  def open_judge(
    self, folder: pathlib.Path
  ) -> tuple[scoring.Scorer | None, str]:
    """Calibrates the judge, or raises a ValueError; says how that went."""
    if not self.judge.url:
      return None, ''
    line, scorer = calibration.try_judge(self.judge), self.judge.scorer()
    if scorer is None or scorer.rubric.asked(relative=True):
      raise ValueError(
        f'--config.live.judge.file ({self.judge.file!r}) must be a rubric '
        'without relative criteria: a message is judged alone.'
      )
    scorer.remember(folder, reasons=False)
    return scorer, line
