"""Memory and process limits of whole calls, where a cgroup can be made.

Knows version 1 (one tree per controller), version 2 (one tree) and hybrids;
where none can be made, resource limits must do. Only calls join the group, not
the zygote, so that the out-of-memory killer does not choose the zygote.
"""

import functools
import logging
import os
import pathlib
import time

_NAME = 'composer-sandbox'


class ControlGroup:
  """A limited group per controller.

  Attributes:
    version: 'v1', 'v2' or 'none'.
    directories: directory of the group in each controller tree.
    counts_memory: true if one of them limits memory.
  """

  def __init__(self, version: str, directories: list[pathlib.Path]):
    self.version = version
    self.directories = directories
    self.counts_memory = False

  def entrances(self) -> list[str]:
    """Returns the files to which a process writes 0 to join."""
    return [str(path / 'cgroup.procs') for path in self.directories]

  def remove(self) -> None:
    """Removes the group, once its last process has left."""
    for path in self.directories:
      for attempt in range(50):
        try:
          path.rmdir()
          break
        except FileNotFoundError:
          break
        except OSError as error:
          if attempt == 49:
            logging.warning('Cannot remove the cgroup %s: %s', path, error)
          time.sleep(0.01)
    self.directories = []


def make(name: str, memory_bytes: int, processes: int) -> ControlGroup:
  """Makes a group below the group of this process.

  Args:
    name: name of the group, unique in this process.
    memory_bytes: limit of all processes and their files in memory.
    processes: limit of processes and threads.
  """
  groups = _own_groups()
  full_name = f'{_NAME}-{os.getpid()}-{name}'
  v1 = [
      (groups.get('memory'), {
          'memory.limit_in_bytes': memory_bytes,
          'memory.memsw.limit_in_bytes': memory_bytes,
      }),
      (groups.get('pids'), {'pids.max': processes + 1}),
  ]  # fmt: skip
  if any(parent for parent, _ in v1):
    version, plan = 'v1', [(p, s) for p, s in v1 if p]
  elif groups.get(''):
    version, plan = 'v2', [(groups[''], {
        'memory.max': memory_bytes, 'memory.swap.max': 0,
        'pids.max': processes + 1,
    })]  # fmt: skip
  else:
    return ControlGroup('none', [])
  group = ControlGroup(version, [])
  for parent, settings in plan:
    try:
      _make_one(group, parent / full_name, settings)
    except OSError:
      continue
  return group if group.directories else ControlGroup('none', [])


def _make_one(group, path: pathlib.Path, settings: dict[str, int]) -> None:
  if group.version == 'v2':
    control = path.parent / 'cgroup.subtree_control'
    control.write_text('+memory +pids')
  path.mkdir()
  try:
    for file, value in settings.items():
      if 'sw' in file and not (path / file).exists():
        continue  # a kernel that does not account swap
      (path / file).write_text(str(value))
  except OSError:
    path.rmdir()
    raise
  group.directories.append(path)
  group.counts_memory |= any(file.startswith('memory') for file in settings)


@functools.cache
def _own_groups() -> dict[str, pathlib.Path]:
  """Returns controller -> own group's directory; '' stands for version 2.

  Clears away what host processes left there that were killed.
  """
  try:
    lines = pathlib.Path('/proc/self/cgroup').read_text().splitlines()
    mounts = pathlib.Path('/proc/self/mounts').read_text().splitlines()
  except OSError:
    return {}
  roots = {}
  for fields in (line.split() for line in mounts):
    if fields[2] == 'cgroup2':
      roots.setdefault('', fields[1])
    elif fields[2] == 'cgroup':
      for option in fields[3].split(','):
        roots.setdefault(option, fields[1])
  groups = {}
  for line in lines:
    _, controllers, path = line.split(':', 2)
    for controller in controllers.split(','):
      root = roots.get(controller)
      directory = pathlib.Path(f'{root}/{path.lstrip("/")}')
      if root and os.access(directory, os.W_OK):
        groups[controller] = directory
  for directory in set(groups.values()):
    _sweep(directory)
  return groups


def _sweep(parent: pathlib.Path) -> None:
  """Removes the groups of host processes that were killed."""
  for path in parent.glob(f'{_NAME}-*'):
    pid = path.name.split('-')[2]
    if not pathlib.Path(f'/proc/{pid}').exists():
      try:
        path.rmdir()
      except OSError:
        continue  # another process removed it, or its zygote is still dying
