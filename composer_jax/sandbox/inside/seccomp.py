"""A system-call filter, assembled as BPF instructions.

Needed because namespaces leave some interfaces open: AF_VSOCK and AF_NETLINK
sockets, new user namespaces, keyrings, userfaultfd, and io_uring, which opens
sockets without the socket call. The filter is an allow-list: calls that it does
not name fail as on a kernel without them (ENOSYS), well-known dangerous ones
with EPERM. Five allowed calls are judged by an argument.

Standard library only: imported inside the sandbox. Why no library builds the
filter is in docs/decisions/system_calls.md.
"""

import ctypes
import errno
import os
import struct

from composer_jax.sandbox.inside import syscalls

AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10

_ARCHITECTURES = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}

# Numbers of the calls that are judged by an argument, as in `syscalls`.
EXAMINED = {
    'clone': (56, 220), 'clone3': (435, 435), 'socket': (41, 198),
    'socketpair': (53, 199), 'ioctl': (16, 29), 'personality': (135, 92),
}  # fmt: skip
# Typing into a terminal and pasting on a console, should a terminal leak in.
_TERMINAL_REQUESTS = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
# The question for the personality, plain Linux, and Linux without random
# addresses, which memory debuggers use; others bring back obsolete behaviour.
_PERSONALITIES = (0xFFFFFFFF, 0, 0x0040000)
# All CLONE_NEW* but CLONE_NEWTIME, whose bit belongs to the exit signal in
# clone() and exists only in unshare() and clone3().
_NAMESPACE_FLAGS = 0x7E020000
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2


class _Program(ctypes.Structure):
  _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_void_p)]


def assemble(families: tuple[int, ...], machine: str) -> bytes:
  """Builds the filter as an array of BPF instructions.

  Args:
    families: socket families that are allowed; others give EAFNOSUPPORT, as
      on a kernel without them. Socket pairs are AF_UNIX only.
    machine: name of the processor architecture, as in `os.uname()`.

  Raises:
    ValueError: the table has no system calls of the machine.
  """
  if machine not in _ARCHITECTURES:
    raise ValueError(
      f'no system-call table for {machine!r}; there is one for '
      f'{sorted(_ARCHITECTURES)}.'
    )
  column = 0 if machine == 'x86_64' else 1
  examined = {name: pair[column] for name, pair in EXAMINED.items()}
  code = [
      (_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
      (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER),
  ]  # fmt: skip
  if machine == 'x86_64':  # x32: the same calls under other numbers
    code += [(_AT_LEAST, 0, 1, _X32_BIT), _fail(errno.ENOSYS)]
  # clone3 hides its flags behind a pointer; libc falls back to clone.
  code += [(_EQUAL, 0, 1, examined['clone3']), _fail(errno.ENOSYS)]
  code += [
      (_EQUAL, 0, 4, examined['clone']), (_LOAD, 0, 0, _ARGUMENT_0),
      (_ANY_BIT, 0, 1, _NAMESPACE_FLAGS), _fail(errno.EPERM),
      (_RETURN, 0, 0, _ALLOW),
  ]  # fmt: skip
  code += _only(examined['socket'], families, errno.EAFNOSUPPORT)
  code += _only(examined['socketpair'], (AF_UNIX,), errno.EAFNOSUPPORT)
  code += _only(examined['personality'], _PERSONALITIES, errno.EPERM)
  typing, pasting = _TERMINAL_REQUESTS
  code += [
      (_EQUAL, 0, 5, examined['ioctl']), (_LOAD, 0, 0, _ARGUMENT_1),
      (_EQUAL, 1, 0, typing), (_EQUAL, 0, 1, pasting), _fail(errno.EPERM),
      (_RETURN, 0, 0, _ALLOW),
  ]  # fmt: skip
  for first, last in _ranges(column):
    code += [
      (_AT_LEAST, 0, 2, first),
      (_AT_LEAST, 1, 0, last + 1),
      (_RETURN, 0, 0, _ALLOW),
    ]
  for pair in syscalls.DENIED.values():
    if pair[column] is not None:
      code += [(_EQUAL, 0, 1, pair[column]), _fail(errno.EPERM)]
  code.append(_fail(errno.ENOSYS))
  return b''.join(struct.pack('HBBI', *instruction) for instruction in code)


def _ranges(column: int) -> list[tuple[int, int]]:
  """Returns the first and last number of each run of allowed calls."""
  columns = [pair[column] for pair in syscalls.ALLOWED.values()]
  numbers = sorted(value for value in columns if value is not None)
  ranges: list[tuple[int, int]] = []
  for value in numbers:
    if ranges and ranges[-1][1] == value - 1:
      ranges[-1] = (ranges[-1][0], value)
    else:
      ranges.append((value, value))
  return ranges


def _fail(error: int) -> tuple[int, int, int, int]:
  return (_RETURN, 0, 0, _ERRNO | error)


def _only(call: int, values: tuple[int, ...], error: int) -> list[tuple]:
  """Allows a call with these first arguments only."""
  body = [(_LOAD, 0, 0, _ARGUMENT_0)]
  for value in values:
    body += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
  body.append(_fail(error))
  return [(_EQUAL, 0, len(body), call), *body]


def install(filter_: bytes, libc: ctypes.CDLL) -> None:
  """Binds the calling process and its children for good; OSError if refused."""
  buffer = ctypes.create_string_buffer(filter_, len(filter_))
  program = _Program(len(filter_) // 8, ctypes.addressof(buffer))
  if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
    PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0
  ):
    code = ctypes.get_errno()
    raise OSError(code, f'seccomp refused: {os.strerror(code)}')
