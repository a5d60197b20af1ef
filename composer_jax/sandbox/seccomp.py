"""A system-call filter, assembled by hand for want of a library.

Standard library only: the zygote imports this file inside the sandbox, where
the package does not exist. Namespaces do not cover everything: AF_VSOCK and
AF_NETLINK sockets, new user namespaces, keyrings and userfaultfd stay open in
them, and io_uring opens sockets without the socket call.

The filter is a list of denials. Everything it does not name is left to the
namespaces, the uid and the lack of capabilities.
"""

import ctypes
import errno
import os
import struct

AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10

_ARCHITECTURES = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}

# name: (x86-64, aarch64); None where the architecture has no such call.
_DENIED = {
  'acct': (163, 89),
  'add_key': (248, 217),
  'adjtimex': (159, 171),
  'bpf': (321, 280),
  'chroot': (161, 51),
  'clock_adjtime': (305, 266),
  'clock_settime': (227, 112),
  'delete_module': (176, 106),
  'fanotify_init': (300, 262),
  'finit_module': (313, 273),
  'fsconfig': (431, 431),
  'fsmount': (432, 432),
  'fsopen': (430, 430),
  'fspick': (433, 433),
  'init_module': (175, 105),
  'io_uring_enter': (426, 426),
  'io_uring_register': (427, 427),
  'io_uring_setup': (425, 425),
  'ioperm': (173, None),
  'iopl': (172, None),
  'kcmp': (312, 272),
  'kexec_file_load': (320, 294),
  'kexec_load': (246, 104),
  'keyctl': (250, 219),
  'modify_ldt': (154, None),
  'mount': (165, 40),
  'mount_setattr': (442, 442),
  'move_mount': (429, 429),
  'name_to_handle_at': (303, 264),
  'open_by_handle_at': (304, 265),
  'open_tree': (428, 428),
  'open_tree_attr': (467, 467),
  'perf_event_open': (298, 241),
  'pidfd_getfd': (438, 438),
  'pivot_root': (155, 41),
  'process_vm_readv': (310, 270),
  'process_vm_writev': (311, 271),
  'ptrace': (101, 117),
  'quotactl': (179, 60),
  'reboot': (169, 142),
  'request_key': (249, 218),
  'setdomainname': (171, 162),
  'sethostname': (170, 161),
  'setns': (308, 268),
  'settimeofday': (164, 170),
  'swapoff': (168, 225),
  'swapon': (167, 224),
  'syslog': (103, 116),
  'umount2': (166, 39),
  'unshare': (272, 97),
  'userfaultfd': (323, 282),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
# All CLONE_NEW* but CLONE_NEWTIME, whose bit belongs to the exit signal in
# clone() and exists only in unshare() and clone3().
_NAMESPACE_FLAGS = 0x7E020000
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2


class _Program(ctypes.Structure):
  _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_void_p)]


def number(name: str, machine: str) -> int | None:
  """The system call's number, for tests that make the call directly."""
  extra = {'clone': _CLONE, 'clone3': _CLONE3, 'socket': _SOCKET}
  return {**_DENIED, **extra}[name][0 if machine == 'x86_64' else 1]


def assemble(families: tuple[int, ...], machine: str) -> bytes:
  """Builds the filter as an array of BPF instructions.

  Args:
    families: socket families that may be created; every other one gives
      EAFNOSUPPORT, as on a kernel that lacks it. Pairs are AF_UNIX only.
    machine: `os.uname().machine`.

  Raises:
    ValueError: for a machine whose system calls are not in the table.
  """
  if machine not in _ARCHITECTURES:
    raise ValueError(
      f'no system-call table for {machine!r}; there is one for '
      f'{sorted(_ARCHITECTURES)}.'
    )
  column = 0 if machine == 'x86_64' else 1
  code = [
    (_LOAD, 0, 0, _ARCHITECTURE),
    (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
    (_RETURN, 0, 0, _KILL),
    (_LOAD, 0, 0, _NUMBER),
  ]
  if machine == 'x86_64':  # the same calls once more, under other numbers
    code += [(_AT_LEAST, 0, 1, _X32_BIT), _fail(errno.ENOSYS)]
  for pair in _DENIED.values():
    if pair[column] is not None:
      code += [(_EQUAL, 0, 1, pair[column]), _fail(errno.EPERM)]
  # clone3 hides its flags behind a pointer; libc falls back to clone.
  code += [(_EQUAL, 0, 1, _CLONE3[column]), _fail(errno.ENOSYS)]
  code += [
    (_EQUAL, 0, 4, _CLONE[column]),
    (_LOAD, 0, 0, _ARGUMENT_0),
    (_ANY_BIT, 0, 1, _NAMESPACE_FLAGS),
    _fail(errno.EPERM),
    (_RETURN, 0, 0, _ALLOW),
  ]
  code += _families_only(_SOCKET[column], families)
  code += _families_only(_SOCKETPAIR[column], (AF_UNIX,))
  code.append((_RETURN, 0, 0, _ALLOW))
  return b''.join(struct.pack('HBBI', *instruction) for instruction in code)


def _fail(error: int) -> tuple[int, int, int, int]:
  return (_RETURN, 0, 0, _ERRNO | error)


def _families_only(call: int, families: tuple[int, ...]) -> list[tuple]:
  body = [(_LOAD, 0, 0, _ARGUMENT_0)]
  for family in families:
    body += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
  body.append(_fail(errno.EAFNOSUPPORT))
  return [(_EQUAL, 0, len(body), call), *body]


def install(filter_: bytes, libc: ctypes.CDLL) -> None:
  """Binds the calling process and all it starts, for good.

  Raises:
    OSError: where the kernel refuses filters.
  """
  buffer = ctypes.create_string_buffer(filter_, len(filter_))
  program = _Program(len(filter_) // 8, ctypes.addressof(buffer))
  if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
    PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
  ):
    code = ctypes.get_errno()
    raise OSError(code, f'seccomp refused: {os.strerror(code)}')
