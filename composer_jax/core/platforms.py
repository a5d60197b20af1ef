"""The platform that a program is traced for, which need not be this machine's.

What is chosen by platform (a kernel, a dtype between two products) asks here
instead of `jax.default_backend()`, so that the planner can trace on a CPU what
the compiler of another platform will compile.
"""

import contextlib

import jax

PLATFORMS = ('cpu', 'gpu', 'tpu')

# Of JAX's own making: its caches tell traces for one target from another's.
_target = jax.make_user_context(None)


def current() -> str:
  """Returns one of PLATFORMS: the target, or else JAX's default backend."""
  return _target.value or jax.default_backend()


def is_elsewhere() -> bool:
  """Whether the program is for a device that this process may not have."""
  return _target.value is not None


def targeting(platform: str) -> contextlib.AbstractContextManager[None]:
  """Traces for another platform than this machine's."""
  if platform not in PLATFORMS:
    raise ValueError(
      f'platform {platform!r} is not in {PLATFORMS}; every NVIDIA card is '
      "'gpu'."
    )
  return _target(platform)
