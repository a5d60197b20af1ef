"""What a run ran on, for its report; no figure means much without it."""

import importlib.metadata
import os
import pathlib
import platform
import re

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


def describe() -> dict[str, str]:
  """Returns names and values for people, without importing what it names."""
  found = {
    'system': f'{platform.system()} {platform.release()}',
    'processor': _processor(),
    'cores': f'{usable_cores()} of {os.cpu_count()} usable',
    'Python': platform.python_version(),
  }
  memory = _memory_bytes()
  if memory is not None:
    found['memory'] = f'{memory / 2**30:.1f} GiB'
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = 'not installed'
  return found


def usable_cores() -> int:
  # Containers and taskset narrow the set; macOS does not tell.
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _processor() -> str:
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    text = ''
  model = re.search(r'^model name\s*: (.*)$', text, re.M)
  name = model[1] if model else platform.processor()
  return f'{name or "unknown"} ({platform.machine()})'


def _memory_bytes() -> int | None:
  try:
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  except (ValueError, OSError, AttributeError):
    return None
