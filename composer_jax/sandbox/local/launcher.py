"""Starts one zygote inside the namespaces of its level and waits for it.

Run by path by the base interpreter, standard library only. It stays the parent
of the zygote, which the kernel kills when this process dies. The host cannot be
that parent, because the kernel goes by the end of the *thread* that forked.

The file system that the code sees is read-only and built from nothing: the
system's programs and shared libraries, the interpreter with its packages
masked, a virtual environment, a few devices, a small /etc, an empty folder for
the workspace, and a /proc and a /tmp of each run; no home of the host. Names
are neutral, since a process can list its mounts.
"""

import contextlib
import glob
import json
import os
import resource
import shutil
import signal
import struct
import sys

sys.path.insert(0, os.path.abspath(f'{__file__}/../../../..'))

from composer_jax.sandbox.inside import confine

_PYTHON, _WORK = '/python', '/work'
_BOOT = '/boot/composer_jax/sandbox/inside'  # has `_BOOT_FILES` only
_LIBRARY_TREES = ('/usr/lib', '/usr/lib32', '/usr/lib64', '/lib', '/lib32',
                  '/lib64', '/nix/store')  # fmt: skip
_DEVICE_LINKS = [
    ('/proc/self/fd', '/dev/fd'), ('/proc/self/fd/0', '/dev/stdin'),
    ('/proc/self/fd/1', '/dev/stdout'), ('/proc/self/fd/2', '/dev/stderr'),
    ('/tmp', '/dev/shm'), ('/tmp', '/var/tmp'),
]  # fmt: skip
_DEVICES = ('/dev/null', '/dev/zero', '/dev/full', '/dev/random',
            '/dev/urandom')  # fmt: skip
_BOOT_FILES = (
    'zygote.py', 'runner.py', 'confine.py', 'seccomp.py', 'beneath.py',
    'box_runs.py', 'keeper.py', 'programs.py', 'syscalls.py',
    'trees.py', 'wire.py',
)  # fmt: skip
_PROGRAM_TREES = ('/usr/bin', '/bin', '/usr/share/zoneinfo',
                  '/usr/share/git-core', '/usr/share/terminfo')  # fmt: skip
_EMPTY = ('/etc', '/tmp', '/boxes', '/proc', '/venv')
# -I without its -E, which would ignore the hash seed: random hashes would make
# verdicts irreproducible. The environment is built here from nothing.
_FLAGS = ('-s', '-P', '-S')
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_PR_SET_PDEATHSIG, _FIXED_ADDRESSES = 1, 0x0040000
_NEW_USER = 0x10000000
_NEW_OTHERS = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
_PIVOT_ROOT = {'x86_64': 155, 'aarch64': 41}
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 6, 7, 21


class RootPlan:
  """The file system inside: folders, binds (source, target), links, devices."""

  def __init__(self, config: dict):
    here = os.path.abspath(f'{__file__}/../../inside')
    self.executable = os.path.realpath(sys.executable)
    stdlib = os.path.dirname(os.path.realpath(os.__file__))
    lib = os.path.dirname(stdlib)
    inner_lib = f'{_PYTHON}/{sys.platlibdir}'
    name = f'python{sys.version_info.major}.{sys.version_info.minor}'
    self.python = f'{_PYTHON}/bin/{name}'
    self.libraries = inner_lib
    self.binds = [(lib, inner_lib)]
    # Copied, not bound: the list of mounts would show the sources' paths.
    self.boot = [(f'{here}/{file}', f'{_BOOT}/{file}') for file in _BOOT_FILES]
    self.boot.append((self.executable, self.python))
    self.links = []
    self.proc = config['proc']
    self.empty = [_WORK, confine.STAGE, confine.EMPTY, *_EMPTY]
    for path in _LIBRARY_TREES + _PROGRAM_TREES:
      if os.path.islink(path):
        self.links.append((os.readlink(path), path))
      elif os.path.isdir(path):
        self.binds.append((path, path))
    for source, target in (
      (config['images'], '/images'),
      (config['packages'], '/packages'),
      ('/etc/alternatives', '/boot/alternatives'),
    ):
      if source and os.path.isdir(source):
        self.binds.append((source, target))
    self.links += _DEVICE_LINKS
    # Absolute paths of tasks made for containers lie in the workspace.
    self.links += [(f'{_WORK}/{x}', f'/{x}') for x in config['folders']]
    self.devices = [path for path in _DEVICES if os.path.exists(path)]
    # Installed packages could include this project with its task generators.
    self.masks = sorted(
      inner + folder.removeprefix(outer)
      for outer, inner in self.binds
      if os.path.isdir(outer)
      for pattern in ('site-packages', 'dist-packages')
      for folder in glob.glob(f'{outer}/python*/{pattern}')
      if not os.path.islink(folder)
    )

  def environment(self) -> dict[str, str]:
    return {
        'LD_LIBRARY_PATH': self.libraries, 'LANG': 'C.UTF-8', 'HOME': _WORK,
        'TMPDIR': _WORK, 'PYTHONHASHSEED': '0', 'PYTHONUTF8': '1',
        'PYTHONDONTWRITEBYTECODE': '1',
    }  # fmt: skip

  def command(self, config: dict) -> list[str]:
    # Programs can read this as the command of pid 1: no more than is needed.
    omitted = ('cores', 'priority')
    inner = {name: x for name, x in config.items() if name not in omitted}
    return [self.python, *_FLAGS, f'{_BOOT}/zygote.py', json.dumps(inner)]


def _has(*capabilities: int) -> bool:
  try:
    with open('/proc/self/status') as file:
      held = int(file.read().partition('CapEff:')[2].split()[0], 16)
  except (FileNotFoundError, IndexError):
    return False
  return os.geteuid() == 0 and all(held >> bit & 1 for bit in capabilities)


def _maps(uid: int) -> bool:
  """Returns true if this user namespace has such a user and group.

  Root of a namespace that maps one user only (`unshare -r`, some rootless
  containers) has every capability but can become nobody else.
  """
  try:
    for name in ('uid_map', 'gid_map'):
      with open(f'/proc/self/{name}') as file:
        ranges = [[int(x) for x in line.split()] for line in file]
      if not any(first <= uid < first + count for first, _, count in ranges):
        return False
    with open('/proc/self/setgroups') as file:
      return file.read().strip() != 'deny'
  except FileNotFoundError:  # no user namespaces here
    return True


def _user_processes() -> int:
  """Counts processes and threads of this user, as RLIMIT_NPROC may do."""
  count = 0
  for path in glob.glob('/proc/[0-9]*/task'):
    try:
      if os.stat(path).st_uid == os.getuid():
        count += len(os.listdir(path))
    except OSError:  # it ended, or may not be inspected
      continue
  return count


def _enter(privileged: bool) -> None:
  """Unshares; the next child is the init of the new pid namespace."""
  uid, gid = os.geteuid(), os.getegid()
  flags = _NEW_OTHERS if privileged else _NEW_OTHERS | _NEW_USER
  confine.check(confine.libc.unshare(flags), 'unshare of namespaces')
  if not privileged:
    for name, text in (
      ('setgroups', 'deny'),
      ('uid_map', f'0 {uid} 1'),
      ('gid_map', f'0 {gid} 1'),
    ):
      with open(f'/proc/self/{name}', 'w') as file:
        file.write(text)


def _build_root(plan: RootPlan) -> None:
  confine.mount('', '/', '', _MS_REC | _MS_PRIVATE)
  # Covers /sys in this namespace only; no source of a bind is below it.
  root = '/sys'
  confine.mount(
    'tmpfs',
    root,
    'tmpfs',
    confine.MS_NOSUID | confine.MS_NODEV,
    'mode=0755,size=64m',
  )
  for directory in (*plan.empty, _BOOT, '/dev'):
    os.makedirs(root + directory, 0o755)
  for source, target in [*plan.binds, *((x, x) for x in plan.devices)]:
    if os.path.isdir(source):
      os.makedirs(root + target, 0o755, exist_ok=True)
    else:
      os.makedirs(os.path.dirname(root + target), 0o755, exist_ok=True)
      with open(root + target, 'w'):
        pass
    confine.mount(source, root + target, '', confine.MS_BIND | _MS_REC)
    if source not in plan.devices:
      _make_read_only(root + target)
  for source, target in plan.boot:
    os.makedirs(os.path.dirname(root + target), 0o755, exist_ok=True)
    shutil.copyfile(source, root + target)
    os.chmod(root + target, 0o755)
  for target in plan.masks:
    confine.mount(
      'tmpfs', root + target, 'tmpfs', confine.MS_RDONLY, 'size=4k,mode=0755'
    )
  for text, path in plan.links:
    os.makedirs(os.path.dirname(root + path), 0o755, exist_ok=True)
    os.symlink(text, root + path)
  if plan.proc:
    confine.mount(
      'proc',
      root + '/proc',
      'proc',
      confine.MS_NOSUID | confine.MS_NODEV | confine.MS_NOEXEC,
    )
  os.chdir(root)
  pivot = _PIVOT_ROOT[os.uname().machine]
  confine.check(confine.libc.syscall(pivot, b'.', b'.'), 'pivot_root')
  confine.unmount('.')  # the old root
  os.chdir('/')
  _make_read_only('/', recursive=False)
  # The folder of images is bound once more by the zygote.
  folders = [path for _, path in plan.binds if path != '/images']
  confine.own_files(folders, plan.masks)
  confine.own_devices(plan.devices)


def _make_read_only(path: str, recursive: bool = True) -> None:
  attributes = struct.pack(
    'QQQQ', confine.MS_RDONLY | confine.MS_NOSUID | confine.MS_NODEV, 0, 0, 0
  )
  flags = _AT_RECURSIVE if recursive else 0
  if not confine.libc.syscall(
    _MOUNT_SETATTR, -100, path.encode(), flags, attributes, len(attributes)
  ):
    return
  # Before Linux 5.12. A user namespace may not drop flags that it inherited.
  kept = confine.MS_NOSUID | confine.MS_NODEV | confine.MS_NOEXEC | 0x1C00
  kept &= os.statvfs(path).f_flag
  flags = (
    confine.MS_REMOUNT
    | confine.MS_BIND
    | confine.MS_RDONLY
    | confine.MS_NOSUID
    | kept
  )
  confine.mount('', path, '', flags)


def _start(config: dict, plan: RootPlan) -> None:
  """Becomes the zygote."""
  if hasattr(confine.libc, 'prctl'):
    confine.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Before Python 3.12 None hashes to its address, which orders sets.
    confine.libc.personality(_FIXED_ADDRESSES)
  if config['level'] == 'unshare':
    os.setsid()
    _build_root(plan)
    os.execve(plan.python, plan.command(config), plan.environment())
  script = os.path.abspath(f'{__file__}/../../inside/zygote.py')
  environment = {**plan.environment(), 'HOME': '/', 'TMPDIR': config['scratch']}
  environment['LD_LIBRARY_PATH'] = ''
  command = [plan.executable, *_FLAGS, script, json.dumps(config)]
  os.execve(command[0], command, environment)


def _arrange_boxes(config: dict, plan: RootPlan) -> None:
  """Replaces the host's paths by those that the zygote sees."""
  inside = config['level'] != 'rlimits'
  top = '' if inside else config['scratch']
  config['boxes'], config['venv'] = f'{top}/boxes', f'{top}/venv'
  config['interpreter'] = plan.python if inside else plan.executable
  config['python'] = f'{config["venv"]}/bin/python'
  if inside:
    for name in ('images', 'packages'):
      config[name] = config[name] and f'/{name}'
  environment = plan.environment()
  environment['PATH'] = f'{config["venv"]}/bin:/usr/bin:/bin'
  if not inside:
    del environment['LD_LIBRARY_PATH']
  config['environment'] = environment


def _reachable(path: str) -> bool:
  """Returns true if every user may enter all folders above `path`."""
  while path != '/':
    path = os.path.dirname(path)
    if not os.stat(path).st_mode & 1:
      return False
  return True


def _place(cores: list[int] | None, priority: int) -> None:
  """Takes the pool's cores and priority instead of the starting thread's."""
  if cores is not None:
    os.sched_setaffinity(0, cores)
  # Only root may raise a priority again; others keep the thread's lower one.
  with contextlib.suppress(PermissionError):
    os.setpriority(os.PRIO_PROCESS, 0, priority)


def main() -> None:
  config = json.loads(sys.argv[1])
  _place(config['cores'], config['priority'])
  with contextlib.suppress(ValueError, OSError):  # it may be 0 for good
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # as confine.set_limits
  os.umask(0o022)
  plan = RootPlan(config)
  privileged = _has(_CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN)
  may_change_uid = privileged
  if config['level'] == 'rlimits':
    may_change_uid = (
      _has(_CAP_SETGID, _CAP_SETUID)
      # Otherwise imports would fail as another user.
      and _reachable(os.__file__)
      and _reachable(config['packages'] or '/')
    )
  if not (may_change_uid and _maps(config['uid'])):
    config['uid'] = None
  config['workspace'] = _WORK
  config['user_processes'] = _user_processes()
  _arrange_boxes(config, plan)
  descriptors = [os.open(x, os.O_WRONLY) for x in config.pop('cgroup_procs')]
  config['cgroup_fds'] = descriptors
  config['host_pidfd'] = None
  if hasattr(os, 'pidfd_open'):
    try:
      config['host_pidfd'] = os.pidfd_open(config['host_pid'])
      descriptors = [*descriptors, config['host_pidfd']]
    except OSError:
      pass  # the end of the control socket must do
  if os.getppid() != config['host_pid']:
    return
  for descriptor in [*descriptors, config['control']]:
    os.set_inheritable(descriptor, True)
  if config['level'] == 'unshare':
    _enter(privileged)
  pid = os.fork()
  if pid == 0:
    try:
      _start(config, plan)
    except OSError as error:
      print(error, file=sys.stderr)
    finally:
      os._exit(1)
  # Otherwise the host would not see the sockets close when the zygote ends.
  for name in ('control', 'keeper'):
    os.close(config[name])
  sys.exit(os.waitpid(pid, 0)[1] != 0)


if __name__ == '__main__':
  try:
    main()
  except OSError as error:
    sys.exit(str(error))
