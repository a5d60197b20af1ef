"""What the process that runs untrusted code gives up before it runs it.

Standard library only: imported by the zygote inside the sandbox.
"""

import ctypes
import errno
import math
import os
import resource

from composer_jax.sandbox import seccomp

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x08000000, 0x20000000
MS_NOSUID, MS_NODEV = 2, 4
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 24, 36
_CAPABILITY_VERSION = 0x20080522
_CLONE_NUMBER = {'x86_64': 56, 'aarch64': 220}

# PyDLL: the calls keep the interpreter lock, so that the copy of the process
# that clone() makes wakes up holding it.
libc = ctypes.PyDLL(None, use_errno=True)


def check(outcome: int, what: str) -> int:
  if outcome < 0:
    code = ctypes.get_errno()
    raise OSError(code, f'{what}: {os.strerror(code)}')
  return outcome


def clone_into_namespaces() -> int:
  """Forks into new pid, mount and IPC namespaces in one call.

  Python is not told of this fork. Only a process that has one thread and soon
  forks again (properly) may call it.

  Returns:
    The child's pid; 0 in the child, which is the init of its namespace.
  """
  flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | 17  # SIGCHLD
  zero = ctypes.c_long(0)
  return check(
      libc.syscall(
          ctypes.c_long(_CLONE_NUMBER[os.uname().machine]),
          ctypes.c_long(flags), zero, zero, zero, zero,
      ),
      'clone with namespaces',
  )  # fmt: skip


def mount_workspace(path: str, num_bytes: int, num_files: int) -> None:
  options = f'size={num_bytes},nr_inodes={num_files},mode=0777'
  check(
      libc.mount(
          b'tmpfs', path.encode(), b'tmpfs', MS_NOSUID | MS_NODEV,
          options.encode(),
      ),
      'mount of the workspace',
  )  # fmt: skip


def become_subreaper() -> bool:
  """Makes orphans of the calls our children, so that they can be found."""
  return hasattr(libc, 'prctl') and not libc.prctl(
    _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
  )


def drop_bounding_set() -> None:
  for capability in range(64):
    if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
      return  # past the last one, or no right to: no_new_privs holds anyway


def _drop_capabilities() -> None:
  header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
  data = (ctypes.c_uint32 * 6)()
  check(libc.capset(header, data), 'capset')


def set_limits(limits: dict, processes: int) -> None:
  """Lowers soft and hard limits; a hard limit below is kept."""
  cpu_s = math.ceil(limits['cpu_s'])
  wanted = {
    'RLIMIT_CPU': (cpu_s, cpu_s + 1),  # SIGXCPU, then SIGKILL
    'RLIMIT_AS': (limits['memory_bytes'],) * 2,
    'RLIMIT_FSIZE': (limits['file_bytes'],) * 2,
    'RLIMIT_NPROC': (processes, processes),
    'RLIMIT_NOFILE': (256, 256),
    'RLIMIT_CORE': (0, 0),
    'RLIMIT_MSGQUEUE': (0, 0),
    'RLIMIT_MEMLOCK': (0, 0),
  }
  for name, (soft, hard) in wanted.items():
    kind = getattr(resource, name, None)
    if kind is None:
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
  """Drops identity and privileges; nothing undoes it.

  Args:
    uid: real, effective and saved uid and gid; None keeps them (not root, or
      the only uid that the user namespace maps).
    filter_: system-call filter; None where the kernel or the machine has none.
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
  """Assembles the filter and tries it in a child.

  Returns:
    The filter and 'on', or None and the reason why there is none.
  """
  try:
    filter_ = seccomp.assemble(families, os.uname().machine)
  except ValueError as error:
    return None, str(error)
  if not hasattr(libc, 'prctl'):
    return None, 'not a Linux system'
  pid = os.fork()
  if pid == 0:
    try:
      seccomp.install(filter_, libc)
      os._exit(0)
    finally:
      os._exit(1)
  _, status = os.waitpid(pid, 0)
  if status:
    return None, 'the kernel refuses seccomp filters'
  return filter_, 'on'


def can_join(groups: list[int]) -> bool:
  """Tries in a child whether the entrances of the cgroups let it in."""
  pid = os.fork()
  if pid == 0:
    code = 1
    try:
      join(groups)
      code = 0
    finally:
      os._exit(code)
  return os.waitpid(pid, 0)[1] == 0


def join(groups: list[int]) -> None:
  for descriptor in groups:
    os.write(descriptor, b'0')  # 0 is the writer itself


def process_limit(processes: int, others: int, uid: int | None) -> int:
  """The RLIMIT_NPROC that leaves room for `processes`.

  Kernels before 5.14 count all processes of the user, also outside a user
  namespace, so an unprivileged uid that is shared starts above the limit.
  """
  if uid is not None:
    return processes + 1  # init keeps another uid
  pid = os.fork()
  if pid == 0:
    code = 1
    try:
      _drop_capabilities() if hasattr(libc, 'prctl') else None
      resource.setrlimit(resource.RLIMIT_NPROC, (processes,) * 2)
      inner = os.fork()
      if inner == 0:
        os._exit(0)
      os.waitpid(inner, 0)
      code = 0
    except OSError as error:
      code = 0 if error.errno != errno.EAGAIN else 1
    finally:
      os._exit(code)
  _, status = os.waitpid(pid, 0)
  # Zygote, init and the helper of bwrap share the uid with the code.
  return processes + 4 + (others if status else 0)
