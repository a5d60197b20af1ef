"""Names the machine and packages of a run, without which no timing counts."""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


def describe() -> dict[str, str]:
  """Returns names and values to read, without importing the packages named."""
  facts = {
    'system': f'{platform.system()} {platform.release()}',
    'processor': _processor(),
    'cores': f'{usable_cores()} of {os.cpu_count()} usable',
    'Python': platform.python_version(),
  }
  # Not every system tells.
  with contextlib.suppress(ValueError, OSError, AttributeError):
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    facts['memory'] = f'{memory / 2**30:.1f} GiB'
  for name in _PACKAGES:
    try:
      facts[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      facts[name] = 'not installed'
  return facts


def usable_cores() -> int:
  # Containers and taskset narrow the set; macOS has no such call.
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def _processor() -> str:
  path = pathlib.Path('/proc/cpuinfo')
  text = path.read_text() if path.exists() else ''
  model = re.search(r'^model name\s*: (.*)$', text, re.M)
  name = model[1] if model else platform.processor()
  return f'{name or "unknown"} ({platform.machine()})'
