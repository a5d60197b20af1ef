"""What an episode's effort costs: the concave length penalty of Composer 2.

  C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)),   C'(x) = (1 + k x)^-q

(Composer 2 report, section 4). The first tokens cost most, so that easy tasks
are done quickly while hard ones may still take long. Its constants are not
published; x here is the sampled tokens, summaries included, plus a share of
what tools answered and a price per turn, which stands for what a tool call
costs beside its tokens.
"""

import dataclasses
import math


def concave(x: float, k: float, q: float) -> float:
  """C(x), continuous in q: x at q = 0, log(1 + k x) / k at q = 1.

  Args:
    x: effort, at least 0.
    k: per unit of effort, positive.
    q: how fast the marginal cost falls, at least 0; bounded by
      1 / (k (q - 1)) for q > 1.
  """
  log = math.log1p(k * x)
  power = (1 - q) * log
  # expm1(p) / p is 1 in the limit, where the quotient is 0 / 0.
  return (math.expm1(power) / power if power else 1.0) * log / k


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EffortOptions:
  """The penalty of an episode.

  Attributes:
    coefficient: reward lost at `scale` units of effort if it were linear; 0
      turns the penalty off.
    scale: 1 / k, in sampled tokens; about the effort of a usual episode.
    q: of `concave`.
    turn_tokens: a turn costs as much as so many sampled tokens.
    answer_weight: of a token of a tool's answer, in sampled tokens.
  """

  coefficient: float = 0.0
  scale: float = 100.0
  q: float = 0.5
  turn_tokens: float = 0.0
  answer_weight: float = 0.0

  def __post_init__(self):
    for name in ('coefficient', 'q', 'turn_tokens', 'answer_weight'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(
          f'--config.rewards.effort_{name} must be at least 0, not '
          f'{getattr(self, name)}.'
        )
    if not 0 < self.scale < math.inf:
      raise ValueError(
        f'--config.rewards.effort_scale must be positive, not {self.scale}.'
      )

  def penalty(
    self, num_sampled: int, num_turns: int, num_answered: int = 0
  ) -> float:
    """Reward lost by an episode of so many tokens and turns."""
    if not self.coefficient:
      return 0.0
    effort = num_sampled + self.turn_tokens * num_turns
    effort += self.answer_weight * num_answered
    return (
      self.coefficient * concave(effort, 1 / self.scale, self.q) / self.scale
    )
