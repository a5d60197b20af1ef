"""The platform that a program is traced for, which may not be this machine's.

Choices by platform (a kernel, a dtype) use it instead of
`jax.default_backend()`, so that the planner can trace on a CPU what another
platform's compiler will compile.
"""

import contextlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp

# A JAX user context, since JAX's caches of traces depend on it.
_target = jax.make_user_context(None)


def current() -> str:
  """Returns 'cpu', 'gpu' or 'tpu': the target, or JAX's default backend."""
  return _target.value[0] if _target.value else jax.default_backend()


def kind() -> str:
  """Returns the kind of the devices in small letters, such as 'tpu7x'."""
  if _target.value:
    return _target.value[1] or _target.value[0]
  return jax.devices()[0].device_kind.lower()


def is_elsewhere() -> bool:
  """Returns true if the program is traced for another machine."""
  return _target.value is not None


def targeting(
  platform: str, kind: str = ''
) -> contextlib.AbstractContextManager[None]:
  """Traces for another platform than this machine's, and a kind of devices."""
  return _target((platform, kind))


def after(earlier: Sequence[jax.Array], x: jax.Array) -> jax.Array:
  """Returns x, but not before `earlier` exist.

  XLA drops barriers before it schedules, so x is selected by a condition on
  `earlier` that always holds, which the compiler cannot know.
  """
  for before in earlier:
    first = before[(0,) * before.ndim].astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(first, jnp.uint32) >> 1
    x = jnp.where(bits.astype(jnp.int32) >= 0, x, jnp.zeros_like(x))
  return x
