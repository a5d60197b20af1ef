"""Learning-rate schedules: pure functions of the step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def warmup_stable_decay(
  peak: float,
  *,
  total_steps: int,
  warmup_steps: int,
  decay_steps: int,
  final_ratio: float,
) -> Schedule:
  """Linear warm-up, constant, linear decay (WSD, arXiv 2404.06395).

  Args:
    peak: value of the stable phase.
    total_steps: the decay ends here and the value stays final_ratio * peak.
    warmup_steps: step t < warmup_steps uses peak * (t + 1) / warmup_steps, so
      that the first step already moves; 0 for none.
    decay_steps: length of the decay; 0 for none.
    final_ratio: share of `peak` reached at the end.

  Raises:
    ValueError: warm-up and decay do not fit, or a value is out of range.
  """
  if min(total_steps, warmup_steps, decay_steps) < 0 or (
    warmup_steps + decay_steps > total_steps
  ):
    raise ValueError(
      f'warmup_steps ({warmup_steps}) + decay_steps ({decay_steps}) must fit '
      f'in total_steps ({total_steps}), none of them negative.'
    )
  if not 0 <= final_ratio <= 1:
    raise ValueError(f'final_ratio must lie in [0, 1], not {final_ratio}.')

  def schedule(step):
    step = jnp.asarray(step, jnp.float32)
    warmup = (step + 1) / max(warmup_steps, 1)
    left = (total_steps - step) / max(decay_steps, 1)
    decay = final_ratio + (1 - final_ratio) * jnp.clip(left, 0, 1)
    return peak * jnp.minimum(jnp.minimum(warmup, 1.0), decay)

  return schedule
