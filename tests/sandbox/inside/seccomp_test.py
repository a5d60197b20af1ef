"""The system-call filters of all machines, interpreted."""

import struct

import pytest

from composer_jax.sandbox.inside import seccomp, syscalls

ALLOWED, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS, EAFNOSUPPORT = ERRNO | 1, ERRNO | 38, ERRNO | 97
ARCHITECTURES = {'x86_64': 0xC000003E, 'aarch64': 0xC00000B7}


def number_of(name, machine):
  """The system call's number."""
  table = {**syscalls.ALLOWED, **syscalls.DENIED, **seccomp.EXAMINED}
  return table[name][0 if machine == 'x86_64' else 1]


def _interpret(program, number, architecture, first=0, second=0):
  """Runs the filter as the kernel would, with the BPF operations it uses."""
  data = {0: number, 4: architecture, 16: first, 24: second}
  code, position, value = list(struct.iter_unpack('HBBI', program)), 0, 0
  while True:
    operation, yes, no, constant = code[position]
    position += 1
    if operation == 0x20:
      value = data[constant]
    elif operation == 0x06:
      return constant
    else:
      taken = {
          0x15: value == constant, 0x35: value >= constant,
          0x45: bool(value & constant),
      }[operation]  # fmt: skip
      position += yes if taken else no


@pytest.fixture(params=ARCHITECTURES)
def machine(request):
  return request.param


@pytest.fixture
def ask(machine):
  """A function from a call's name or number to the filter's action."""
  program = seccomp.assemble((1, 2, 10), machine)

  def ask(call, first=0, second=0):
    if isinstance(call, str):
      call = number_of(call, machine)
    return _interpret(program, call, ARCHITECTURES[machine], first, second)

  return ask


def test_calls_with_an_argument_that_matters(ask):
  assert ask('clone3') == ENOSYS
  assert ask('clone', 0x3D0F00) == ALLOWED  # what a thread is made with
  for bit in (17, 25, 26, 27, 28, 29, 30):
    assert ask('clone', 17 | 1 << bit) == EPERM
  for family in range(50):
    expected = ALLOWED if family in (1, 2, 10) else EAFNOSUPPORT
    assert ask('socket', family) == expected
    expected = ALLOWED if family == 1 else EAFNOSUPPORT
    assert ask('socketpair', family) == expected
  for request in (0x5412, 0x541C):  # typing into a terminal, pasting
    assert ask('ioctl', 0, request) == EPERM
  for request in (0x5401, 0x5411, 0x5413, 0x541B, 0x5421):
    assert ask('ioctl', request, request) == ALLOWED
  for persona, expected in ((0xFFFFFFFF, ALLOWED), (0, ALLOWED), (8, EPERM)):
    assert ask('personality', persona) == expected


def test_every_number_is_allowed_refused_or_unknown(ask, machine):
  column = list(ARCHITECTURES).index(machine)
  allowed = {pair[column] for pair in syscalls.ALLOWED.values()}
  denied = {pair[column] for pair in syscalls.DENIED.values()}
  assert not allowed & denied - {None}
  special = {
    number_of(name, machine)
    for name in ('clone', 'socket', 'socketpair', 'ioctl', 'personality')
  }
  for number in set(range(700)) - special:
    expected = EPERM if number in denied else ENOSYS
    assert ask(number) == (ALLOWED if number in allowed else expected)
  assert ask('read') == ALLOWED and ask('mount') == EPERM
  assert not {'io_uring_setup', 'unshare', 'sync'} & syscalls.ALLOWED.keys()


def test_calls_of_another_architecture_are_fatal_or_unknown(ask, machine):
  program = seccomp.assemble((1,), machine)
  assert _interpret(program, 0, 0x40000003) == KILL
  if machine == 'x86_64':
    assert ask(0x40000000) == ENOSYS


def test_a_machine_without_a_table_is_named():
  with pytest.raises(ValueError, match="no system-call table for 'riscv64'"):
    seccomp.assemble((1,), 'riscv64')
