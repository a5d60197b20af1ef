"""The part of an update that hints have: pack, pass, add, measure."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.core import records
from composer_jax.rl import batching, comparison
from composer_jax.rl import step as steps
from composer_jax.rl.hints import batching as hint_batching
from composer_jax.rl.hints import distill


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hinted:
  """What a step had of hints; on the device where it had any.

  Attributes:
    packed: counts, on the host.
    stats: None where no hint was packed.
  """

  packed: hint_batching.Packed
  stats: distill.HintStats | None

  def metrics(self, scale: float) -> dict[str, float]:
    """By the names that `telemetry` explains; waits for the device."""
    told: dict[str, float] = {
      'hints': self.packed.num_hints,
      'hint_tokens': self.packed.num_tokens,
      'hints_dropped': self.packed.num_dropped,
    }
    if self.stats is None:
      return told
    return told | distill.metrics(jax.device_get(self.stats), scale)


def add(
  sums: steps.StepSums,
  groups: list[records.Group],
  functions: steps.Functions,
  shape: batching.BatchShape,
  values: Any,
  teacher: Any,
  *,
  replay: bool,
) -> tuple[steps.StepSums, Hinted]:
  """Adds the gradient of all hints of a step, of whatever advantage.

  Nothing is computed where there are none.

  Args:
    sums: of the step, donated.
    groups: of the step, sorted by id.
    functions: of `rl.step.build`.
    shape: of the microbatches.
    values: of the policy that is trained.
    teacher: of the policy that reads the hints.
    replay: whether the student takes its recorded routes.
  """
  packed = hint_batching.pack(groups, shape, num_parts=functions.parts)
  found: list[distill.HintStats] = []
  for batch in packed.microbatches:
    if not replay:
      batch = batch.replace(student=comparison.fresh(batch.student))
    sums, stats = functions.add_hints(values, teacher, sums, batch)
    found.append(stats)
  stats = None
  if found:
    stats = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), found)
  return sums, Hinted(packed=packed, stats=stats)
