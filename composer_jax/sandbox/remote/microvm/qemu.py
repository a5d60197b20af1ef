"""One QEMU process: its command and its end.

The machine is QEMU's `microvm`: no PCI, no network card, read-only disks, a
virtio serial port to the agent. The emulator runs under its own system-call
filter and, if root starts it, as nobody.
"""

import dataclasses
import os
import pathlib
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time

from composer_jax.sandbox.remote.microvm import image

_BOOT = (
  'console=ttyS0 quiet panic=-1 reboot=t mitigations=off random.trust_cpu=on '
  'cgroup_no_v1=all'
)
# Nested hosts offer a register of the processor's faults and refuse to set it.
_CPUS = {'kvm': 'host,-arch-capabilities', 'tcg': 'max'}
_CONSOLE_BYTES = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class VirtualMachine:
  """Parts of a guest.

  Attributes:
    kernel: path of the kernel.
    initrd: path of the initial file system.
    disks: name -> image: 'root', and others named by their mount points.
    memory_mb: memory in MiB.
    cores: number of virtual processors.
    accelerator: 'kvm' or 'tcg'.
  """

  kernel: str
  initrd: str
  disks: dict[str, str]
  memory_mb: int
  cores: int
  accelerator: str

  def command(self, agent: int) -> list[str]:
    """Returns program and arguments; it inherits the agent's descriptor."""
    command = [
        image.program('qemu-system-x86_64', 'qemu-system-x86'),
        '-M', f'microvm,accel={self.accelerator},memory-backend=memory',
        '-object', f'memory-backend-ram,id=memory,size={self.memory_mb}M',
        '-cpu', _CPUS[self.accelerator],
        '-m', f'{self.memory_mb}', '-smp', f'{self.cores}',
        '-nodefaults', '-no-user-config', '-no-reboot', '-display', 'none',
        '-nic', 'none', '-serial', 'stdio',
        '-kernel', self.kernel, '-initrd', self.initrd,
        '-append', _BOOT + (_clock() if self.accelerator == 'tcg' else ''),
        '-device', 'virtio-serial-device',
        '-chardev', f'socket,id=agent,fd={agent}',
        '-device', 'virtserialport,chardev=agent,name=agent',
    ]  # fmt: skip
    for name, path in self.disks.items():
      command += [
          '-drive', f'file={path},if=none,id={name},format=raw,readonly=on,'
          'file.locking=off',
          '-device', f'virtio-blk-device,drive={name},serial={name}',
      ]  # fmt: skip
    filter_ = 'on,obsolete=deny,spawn=deny,resourcecontrol=deny'
    if os.geteuid() == 0:
      # A filter that denies changes of identity would deny -runas.
      command += ['-runas', '65534:65534', '-sandbox', filter_]
    else:
      command += ['-sandbox', f'{filter_},elevateprivileges=deny']
    return command


def _clock() -> str:
  """Tells an emulated guest the rate of its clock.

  By default it counts ticks between emulated interrupts, which some kernels
  never finish on a busy host.
  """
  text = pathlib.Path('/proc/cpuinfo').read_text()
  match = re.search(r'^cpu MHz\s*: ([0-9.]+)$', text, re.MULTILINE)
  megahertz = float(match[1]) if match else 2000.0
  return f' tsc=reliable tsc_early_khz={megahertz * 1000:.0f}'


class Guest:
  """A running machine; `agent` is the host's end of the agent's port."""

  def __init__(self, machine: VirtualMachine):
    """Starts the machine."""
    self.agent, agent = socket.socketpair()
    self._console = b''
    keeper = pathlib.Path(__file__).with_name('keeper.py')
    python = getattr(sys, '_base_executable', None) or sys.executable
    with agent:
      command = machine.command(agent.fileno())
      self._process = subprocess.Popen(
          [python, '-I', '-S', str(keeper), *command],
          pass_fds=[agent.fileno()], stdin=subprocess.PIPE,
          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
          start_new_session=True,
          env={
              'PATH': os.environ.get('PATH', ''),
              'TMPDIR': tempfile.gettempdir(),
          },
      )  # fmt: skip
    assert self._process.stdin and self._process.stdout
    self._lifeline, self._output = self._process.stdin, self._process.stdout
    self._drainer = threading.Thread(target=self._drain, daemon=True)
    self._drainer.start()

  def _drain(self) -> None:
    """Reads the console, on which a hostile guest could write without end."""
    while piece := os.read(self._output.fileno(), 4096):
      self._console = (self._console + piece)[-_CONSOLE_BYTES:]
    self._output.close()

  @property
  def console(self) -> str:
    """The last output of the guest or QEMU."""
    return self._console.decode('ascii', 'replace')

  def wait_for_line(self, deadline_s: float) -> str:
    """Returns the first line on the agent's port; '' if none comes in time."""
    data, end = b'', time.monotonic() + deadline_s
    while b'\n' not in data and (wait_s := end - time.monotonic()) > 0:
      if not select.select([self.agent], [], [], wait_s)[0]:
        break
      if not (piece := self.agent.recv(64)):
        break
      data += piece
    return data.partition(b'\n')[0].decode('ascii', 'replace')

  def close(self) -> None:
    """Kills it; may be called twice."""
    self.agent.close()
    self._lifeline.close()  # upon which the keeper kills QEMU
    try:
      self._process.wait(5.0)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._drainer.join(1.0)  # for the last output
