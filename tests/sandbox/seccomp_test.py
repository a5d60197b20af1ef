"""The system-call filter of each machine, whichever this one is."""

import struct

import pytest

from composer_jax.sandbox import seccomp


def _interpret(program, number, architecture, argument):
  """Runs the filter as the kernel would: the little of BPF that it uses."""
  data = {0: number, 4: architecture, 16: argument}
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


@pytest.mark.parametrize('machine, architecture, calls', [
    ('x86_64', 0xC000003E,
     {'read': 0, 'clone': 56, 'clone3': 435, 'socket': 41, 'socketpair': 53,
      'mount': 165}),
    ('aarch64', 0xC00000B7,
     {'read': 63, 'clone': 220, 'clone3': 435, 'socket': 198,
      'socketpair': 199, 'mount': 40}),
])  # fmt: skip
def test_the_filter_of_each_machine(machine, architecture, calls):
  program = seccomp.assemble((1, 2, 10), machine)
  allowed, kill, errno_ = 0x7FFF0000, 0x80000000, 0x00050000

  def ask(name, argument=0):
    return _interpret(program, calls[name], architecture, argument)

  assert ask('read') == allowed
  assert ask('mount') == errno_ | 1
  assert ask('clone3') == errno_ | 38
  assert ask('clone', 0x3D0F00) == allowed  # what a thread is made with
  for bit in (17, 25, 26, 27, 28, 29, 30):
    assert ask('clone', 17 | 1 << bit) == errno_ | 1
  for family in range(50):
    expected = allowed if family in (1, 2, 10) else errno_ | 97
    assert ask('socket', family) == expected
    assert ask('socketpair', family) == (
      allowed if family == 1 else errno_ | 97
    )
  assert _interpret(program, calls['read'], 0x40000003, 0) == kill
  if machine == 'x86_64':
    assert _interpret(program, 0x40000000, architecture, 0) == errno_ | 38


def test_a_machine_without_a_table_is_named():
  with pytest.raises(ValueError, match="no system-call table for 'riscv64'"):
    seccomp.assemble((1,), 'riscv64')
