"""Creates parameters that carry the names of their axes."""

from typing import Any

import flax.linen as nn
import jax


def create(
  module: nn.Module,
  name: str,
  initializer: nn.initializers.Initializer,
  axes: tuple[str, ...],
  shape: tuple[int, ...],
) -> jax.Array:
  """Declares a parameter of `module`; `parallel.layouts` reads its axes."""
  boxed = nn.with_logical_partitioning(initializer, axes)
  # Linen unboxes what it hands back, which its annotations do not say.
  value: Any = module.param(name, boxed, shape)
  return value
