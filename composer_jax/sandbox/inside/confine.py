"""System calls by which a process mounts, limits and confines itself.

Standard library only: imported inside the sandbox.
"""

import ctypes
import errno
import fcntl
import functools
import math
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable

from composer_jax.sandbox.inside import seccomp

# Descriptors of the untrusted process; the report is closed before it begins.
OUTPUT_FD, RESULT_FD, REPORT_FD = 1, 3, 4
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_PIDS, _NEW_NETWORK = 0x20000000, 0x40000000
_NEW_CGROUP, _NEW_TIME = 0x02000000, 0x00000080
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, _MS_MOVE = 32, 4096, 8192
# Where a mount is made before it takes its place; what lies above the host's.
STAGE, EMPTY = '/boot/stage', '/boot/empty'
_HOST_NAME = b'sandbox'
_MNT_DETACH = 2
# Strongest first: only own processes are visible, and nothing else of /proc.
_PROC_OPTIONS = ('hidepid=2,subset=pid', 'hidepid=2', '')
# Renames stay in one layer and copies are whole, so that the upper layer can be
# read by itself. Without privileges its marks are user attributes.
_OVERLAY_OPTIONS = (
  'redirect_dir=off,metacopy=off,index=off',
  'metacopy=off,index=off,userxattr',  # which implies no redirection
)
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 24, 36
_CAPABILITY_VERSION = 0x20080522
_CLONE_NUMBER = {'x86_64': 56, 'aarch64': 220}

# PyDLL, because calls then keep the interpreter lock, which the process that
# clone() makes must hold.
libc = ctypes.PyDLL(None, use_errno=True)


def check(outcome: int, call: str) -> int:
  if outcome < 0:
    code = ctypes.get_errno()
    raise OSError(code, f'{call}: {os.strerror(code)}')
  return outcome


def clone_into_namespaces() -> int:
  """Forks into new namespaces; returns as `os.fork` does.

  Those of pids, mounts, IPC, names and the network: nothing that a run does to
  them can be seen by the next one. `leave_shared` renews the others.

  The child is the init of its namespace. Python does not notice this fork: only
  a process that has one thread and soon calls `os.fork` may use it.
  """
  flags = _NEW_PIDS | _NEW_MOUNTS | _NEW_IPC | _NEW_UTS | _NEW_NETWORK
  flags |= 17  # SIGCHLD
  zero = ctypes.c_long(0)
  return check(
      libc.syscall(
          ctypes.c_long(_CLONE_NUMBER[os.uname().machine]),
          ctypes.c_long(flags), zero, zero, zero, zero,
      ),
      'clone with namespaces',
  )  # fmt: skip


def mount(source, target, kind, flags, options='') -> None:
  encoded = [x.encode() for x in (source, target, kind, options)]
  outcome = libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3])
  check(outcome, f'mount of {target}')


def mount_workspace(path: str, num_bytes: int, num_files: int) -> None:
  options = f'size={num_bytes},nr_inodes={num_files},mode=0777'
  mount('tmpfs', path, 'tmpfs', MS_NOSUID | MS_NODEV, options)


def bind(source: str, target: str) -> None:
  mount(source, target, '', MS_BIND)


def make_read_only(path: str) -> None:
  flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
  mount('', path, '', flags)


def unmount(path: str) -> None:
  """Removes a mount and all mounts below it."""
  check(libc.umount2(path.encode(), _MNT_DETACH), f'umount of {path}')


def mount_overlay(
  lower: str, upper: str, work: str, target: str, options: str
) -> None:
  """Mounts layers; their paths must not contain the characters , : and \\."""
  layers = f'lowerdir={lower},upperdir={upper},workdir={work},{options}'
  mount('overlay', target, 'overlay', MS_NOSUID | MS_NODEV, layers)


def opaque_mark(options: str) -> str:
  """Returns the attribute of folders that hide those of the layers below."""
  prefix = 'user' if 'userxattr' in options else 'trusted'
  return f'{prefix}.overlay.opaque'


def leave_shared() -> None:
  """Enters what `clone_into_namespaces` cannot make, and furnishes the rest.

  The cgroup that was joined before looks like the root cgroup; children have
  clocks of their own where the kernel knows them; the loopback interface is up.
  """
  check(libc.unshare(_NEW_CGROUP), 'unshare of the cgroup namespace')
  libc.unshare(_NEW_TIME)  # since Linux 5.6
  libc.sethostname(_HOST_NAME, len(_HOST_NAME))
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    request = struct.pack('16sH14x', b'lo', 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
    fcntl.ioctl(probe, 0x8914, request)  # SIOCSIFFLAGS


def own_files(folders: list[str], masks: list[str]) -> None:
  """Puts an overlay in the place of each bind of the host's files.

  The list of mounts shows where a bind comes from, and locks and watches on its
  files meet those of other sandboxes. Where the kernel refuses overlays, the
  binds stay. `masks` are folders below that are covered.
  """
  flags = MS_RDONLY | MS_NOSUID | MS_NODEV
  for folder in folders:
    try:
      mount('overlay', STAGE, 'overlay', flags, f'lowerdir={EMPTY}:{folder}')
    except OSError:
      return
    for mask in masks:
      if mask.startswith(f'{folder}/'):
        inner = STAGE + mask.removeprefix(folder)
        mount('tmpfs', inner, 'tmpfs', flags, 'size=4k,mode=0755')
    unmount(folder)
    mount(STAGE, folder, '', _MS_MOVE)


def own_devices(paths: list[str]) -> None:
  """Replaces the host's device files; read-only, so that no time changes.

  Without the right to make devices the binds stay, and show others' locks.
  """
  flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID
  mount('tmpfs', STAGE, 'tmpfs', MS_NOSUID | MS_NOEXEC, 'size=64k,mode=0755')
  try:
    for path in paths:
      made = f'{STAGE}/{os.path.basename(path)}'
      os.mknod(made, 0o020666, os.stat(path).st_rdev)
      os.chmod(made, 0o666)
      open(made, 'rb').close()  # a namespace may allow the file only
  except OSError:
    unmount(STAGE)
    for path in paths:
      mount('', path, '', flags)
    return
  for link in filter(os.path.islink, map('/dev/{}'.format, os.listdir('/dev'))):
    os.symlink(os.readlink(link), f'{STAGE}/{os.path.basename(link)}')
  for path in paths:
    unmount(path)
  mount(STAGE, '/dev', '', _MS_MOVE)
  mount('', '/dev', '', flags)


def mount_proc(options: str | None) -> None:
  """Mounts /proc for this namespace; options of None cover the one there."""
  if options is None:
    mount('tmpfs', '/proc', 'tmpfs', MS_RDONLY | MS_NOSUID, 'size=4k')
  else:
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    mount('proc', '/proc', 'proc', flags, options)


def working_proc() -> str | None:
  """Returns options by which /proc mounts in a new namespace, or None."""
  for options in _PROC_OPTIONS:
    mount = functools.partial(mount_proc, options)
    if _succeeds(mount, clone_into_namespaces):
      return options
  return None


def working_overlay(folder: str) -> str | None:
  """Returns options by which overlayfs works, or None."""

  def attempt(layers: list[str], options: str) -> None:
    lower, upper, work, merged = layers
    mount_overlay(lower, upper, work, merged, options)
    os.rmdir(f'{merged}/a/b')  # leaves a whiteout
    os.rmdir(f'{merged}/a')
    os.mkdir(f'{merged}/a')  # an opaque folder

  for index, options in enumerate(_OVERLAY_OPTIONS):
    layers = [f'{folder}/{name}{index}' for name in ('l', 'u', 'w', 'm')]
    for path in (*layers, f'{layers[0]}/a', f'{layers[0]}/a/b'):
      os.mkdir(path)
    mount = functools.partial(attempt, layers, options)
    if _succeeds(mount, clone_into_namespaces):
      return options
  return None


def _succeeds(
  attempt: Callable[[], object], fork: Callable[[], int] = os.fork
) -> bool:
  """Tries in a child; false if the attempt raises OSError."""
  pid = fork()
  if pid == 0:
    code = 1
    try:
      attempt()
      code = 0
    except OSError:
      pass
    finally:
      os._exit(code)
  return os.waitpid(pid, 0)[1] == 0


def become_subreaper() -> bool:
  """Makes orphans of the calls children of this process, to be killed."""
  return hasattr(libc, 'prctl') and not libc.prctl(
    _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
  )


def drop_bounding_set() -> None:
  for capability in range(64):
    if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
      return  # past the last one, or not permitted: no_new_privs must do


def _drop_capabilities() -> None:
  header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
  data = (ctypes.c_uint32 * 6)()
  check(libc.capset(header, data), 'capset')


def set_limits(limits: dict, processes: int) -> None:
  """Lowers soft and hard limits; lower hard limits are kept."""
  cpu_s = math.ceil(limits['cpu_s'])
  pairs = {
    'RLIMIT_CPU': (cpu_s, cpu_s + 1),  # SIGXCPU, then SIGKILL
    'RLIMIT_AS': (limits['memory_bytes'],) * 2,
    'RLIMIT_FSIZE': (limits['file_bytes'],) * 2,
    'RLIMIT_NPROC': (processes, processes),
    'RLIMIT_NOFILE': (256, 256),
    # No core is that small. At 0 a program in core_pattern, which the kernel
    # starts outside of all namespaces, would still receive cores.
    'RLIMIT_CORE': (1, 1),
    'RLIMIT_MSGQUEUE': (0, 0),
    'RLIMIT_MEMLOCK': (0, 0),
  }
  for name, (soft, hard) in pairs.items():
    kind = getattr(resource, name, None)
    if kind is None or soft == resource.RLIM_INFINITY:
      continue
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
      soft, hard = min(soft, ceiling), min(hard, ceiling)
    try:
      resource.setrlimit(kind, (soft, hard))
    except (OSError, ValueError):
      if name != 'RLIMIT_AS':  # macOS has the name and refuses the call
        raise


def become_nobody(uid: int | None, filter_: bytes | None) -> None:
  """Drops identity and privileges for good.

  Args:
    uid: uid and gid to become; None keeps them (not root, or the only uid that
      the user namespace maps).
    filter_: system-call filter; None where there is none.
  """
  if uid is not None:
    os.setgroups([])
    if hasattr(os, 'setresgid'):
      os.setresgid(uid, uid, uid)
      os.setresuid(uid, uid, uid)
    else:
      os.setgid(uid)
      os.setuid(uid)
  if hasattr(libc, 'prctl'):
    _drop_capabilities()
    check(libc.prctl(seccomp.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 'no_new_privs')
  if filter_ is not None:
    seccomp.install(filter_, libc)


def working_filter(families: tuple[int, ...]) -> tuple[bytes | None, str]:
  """Returns the filter, tried in a child, and 'on'; or None and the reason."""
  try:
    filter_ = seccomp.assemble(families, os.uname().machine)
  except ValueError as error:
    return None, str(error)
  if not hasattr(libc, 'prctl'):
    return None, 'not a Linux system'
  if not _succeeds(lambda: seccomp.install(filter_, libc)):
    return None, 'the kernel refuses seccomp filters'
  return filter_, 'on'


def can_join(groups: list[int]) -> bool:
  """Tries in a child to join the cgroups with these open `cgroup.procs`."""
  return _succeeds(lambda: join(groups))


def join(groups: list[int]) -> None:
  for descriptor in groups:
    os.write(descriptor, b'0')  # 0 is the writer itself


def process_limit(processes: int, others: int, uid: int | None) -> int:
  """Returns the RLIMIT_NPROC that leaves room for `processes`.

  Kernels before 5.14 count the user's processes outside the user namespace too,
  so that a uid shared with the host can exceed the limit from the start.

  Args:
    processes: processes that the call may have.
    others: processes of this user on the host.
    uid: uid that only the call has; None if it keeps that of the host.
  """
  if uid is not None:
    return processes + 1  # init keeps another uid

  def fork_at_limit() -> None:
    try:
      if hasattr(libc, 'prctl'):
        _drop_capabilities()
      resource.setrlimit(resource.RLIMIT_NPROC, (processes,) * 2)
      inner = os.fork()
      if inner == 0:
        os._exit(0)
      os.waitpid(inner, 0)
    except OSError as error:
      if error.errno == errno.EAGAIN:
        raise

  counts_others = not _succeeds(fork_at_limit)
  # Zygote, keeper, init and its helper share the uid with the code.
  return processes + 4 + (others if counts_others else 0)


def outlive(pid: int, report: int, is_init: bool) -> None:
  """Reaps orphans until a child ends, and reports its status.

  Kills the whole session, this process included, unless this process
  is the init of a pid namespace, which the kernel ends with it.
  """
  reaped = status = 0
  while reaped != pid:
    reaped, status = os.wait()
  os.write(report, f'status {status}\n'.encode())
  if not is_init:
    os.killpg(0, signal.SIGKILL)


def report_error(report: int, error: Exception) -> None:
  os.write(report, f'error {error}'[:500].replace('\n', ' ').encode())


def take_descriptors(result: int, output: int, report: int) -> None:
  """Gives the pipes their final numbers and closes all other descriptors."""
  # First to numbers above the final ones, which may be in use.
  result, output, report = (
    os.dup2(descriptor, 100 + index)
    for index, descriptor in enumerate((result, output, report))
  )
  os.dup2(output, OUTPUT_FD)
  os.dup2(output, 2)
  os.dup2(result, RESULT_FD)
  os.dup2(report, REPORT_FD, inheritable=False)
  os.closerange(REPORT_FD + 1, os.sysconf('SC_OPEN_MAX'))
