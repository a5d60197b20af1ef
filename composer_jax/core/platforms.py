"""The platform that a program is traced for, which need not be this machine's.

What is chosen by platform (a kernel, a dtype between two products) asks here
instead of `jax.default_backend()`, so that the planner can trace on a CPU what
the compiler of another platform will compile.
"""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

PLATFORMS = ('cpu', 'gpu', 'tpu')

# Of JAX's own making: its caches tell traces for one target from another's.
_target = jax.make_user_context(None)
_lines: contextvars.ContextVar[set[str] | None] = contextvars.ContextVar(
  'lines', default=None
)


def current() -> str:
  """Returns one of PLATFORMS: the target, or else JAX's default backend."""
  return _target.value or jax.default_backend()


def is_elsewhere() -> bool:
  """Whether the program is for a device that this process may not have."""
  return _target.value is not None


def stands_in(what: str) -> None:
  """Tells whoever traces for elsewhere that a reference replaces a kernel.

  A kernel that must ask its device for something cannot be built without it.

  Args:
    what: the kernel, the reference and the reason, in one line.
  """
  lines = _lines.get()
  if lines is not None:
    lines.add(what)


@contextlib.contextmanager
def targeting(platform: str) -> Iterator[set[str]]:
  """Traces for another platform than this machine's.

  Yields:
    The lines of `stands_in`, which grow while something is traced anew.
  """
  if platform not in PLATFORMS:
    raise ValueError(
      f'platform {platform!r} is not in {PLATFORMS}; every NVIDIA card is '
      "'gpu'."
    )
  lines: set[str] = set()
  token = _lines.set(lines)
  try:
    with _target(platform):
      yield lines
  finally:
    _lines.reset(token)
