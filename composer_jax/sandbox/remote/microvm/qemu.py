"""One QEMU process: its command, its end, and its saved states.

The machine is QEMU's `microvm`: no PCI, no network card, read-only disks, a
virtio serial port to the agent. The emulator runs under its own system-call
filter and, if root starts it, as nobody.
"""

import array
import contextlib
import dataclasses
import json
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
from typing import Any

from composer_jax.sandbox import base
from composer_jax.sandbox.remote.microvm import image

_BOOT = (
  'console=ttyS0 quiet panic=-1 reboot=t mitigations=off random.trust_cpu=on '
  'cgroup_no_v1=all'
)
# Nested hosts offer a register of the processor's faults and refuse to set it.
_CPUS = {'kvm': 'host,-arch-capabilities', 'tcg': 'max'}
_CONSOLE_BYTES = 8192
_STATE_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VirtualMachine:
  """Parts of a guest; a saved state fits the same machine only.

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

  def command(self, agent: int, monitor: int, incoming: int | None):
    """Returns program and arguments for the descriptors that it inherits."""
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
        '-chardev', f'socket,id=monitor,fd={monitor}',
        '-mon', 'chardev=monitor,mode=control',
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
    if incoming is not None:
      command += ['-incoming', f'fd:{incoming}']
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

  def __init__(
    self, machine: VirtualMachine, state: pathlib.Path | None = None
  ):
    """Starts the machine, from a saved state if there is one."""
    self.machine = machine
    self.agent, agent = socket.socketpair()
    self._monitor, monitor = socket.socketpair()
    self._console = b''
    self._inbox = b''
    keeper = pathlib.Path(__file__).with_name('keeper.py')
    python = getattr(sys, '_base_executable', None) or sys.executable
    with contextlib.ExitStack() as closing:
      closing.enter_context(agent)
      closing.enter_context(monitor)
      descriptors, incoming = [agent.fileno(), monitor.fileno()], None
      if state:
        incoming = closing.enter_context(open(state, 'rb')).fileno()
        descriptors.append(incoming)
      command = machine.command(descriptors[0], descriptors[1], incoming)
      self._process = subprocess.Popen(
          [python, '-I', '-S', str(keeper), *command], pass_fds=descriptors,
          stdin=subprocess.PIPE, stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT, start_new_session=True,
          env={
              'PATH': os.environ.get('PATH', ''),
              'TMPDIR': tempfile.gettempdir(),
          },
      )  # fmt: skip
    assert self._process.stdin and self._process.stdout
    self._lifeline, self._output = self._process.stdin, self._process.stdout
    self._drainer = threading.Thread(target=self._drain, daemon=True)
    self._drainer.start()
    self._is_greeted = False
    if state:
      self._resume()

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

  def save(self, path: pathlib.Path) -> None:
    """Stops the guest for good and writes its state, memory included."""
    self._execute('stop')
    # The memory does not change meanwhile; the default is 128 MB/s.
    self._execute('migrate-set-parameters', {'max-bandwidth': 1 << 40})
    with open(path, 'wb') as file:
      self._execute('getfd', {'fdname': 'state'}, file.fileno())
    self._execute('migrate', {'uri': 'fd:state'})
    self._wait_until('query-migrate', ('completed',))

  def _resume(self) -> None:
    # It was saved while stopped, and is stopped when all is read.
    try:
      self._wait_until('query-status', ('paused', 'postmigrate'))
      self._execute('cont')
    except base.SandboxLost:
      self.close()
      raise

  def _wait_until(self, question: str, wanted: tuple[str, ...]) -> None:
    end = time.monotonic() + _STATE_S
    status = None
    while time.monotonic() < end:
      status = self._execute(question).get('status')
      if status in wanted:
        return
      if status in ('failed', 'cancelled', 'internal-error'):
        break
      time.sleep(0.005)
    raise base.SandboxLost(f'QEMU cannot save or load a guest: {status}')

  def _execute(
    self, name: str, arguments: dict | None = None, descriptor: int = -1
  ) -> dict[str, Any]:
    if not self._is_greeted:
      self._is_greeted = True
      self._execute('qmp_capabilities')
    text = json.dumps({'execute': name, 'arguments': arguments or {}})
    rights = array.array('i', [descriptor] if descriptor >= 0 else [])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
    self._monitor.settimeout(30.0)
    try:
      self._monitor.sendmsg([text.encode()], ancillary if rights else [])
      while True:
        while b'\n' not in self._inbox:
          piece = self._monitor.recv(65536)
          if not piece:
            raise base.SandboxLost(f'QEMU ended: {self.console[-300:]}')
          self._inbox += piece
        line, _, self._inbox = self._inbox.partition(b'\n')
        message = json.loads(line)
        if 'error' in message:
          raise base.SandboxLost(f'QEMU refuses {name}: {message["error"]}')
        if 'return' in message:
          return message['return']
    except OSError as error:
      raise base.SandboxLost(f'QEMU does not answer: {error}') from error

  def close(self) -> None:
    """Kills it; may be called twice."""
    self.agent.close()
    self._monitor.close()
    self._lifeline.close()  # upon which the keeper kills QEMU
    try:
      self._process.wait(5.0)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._drainer.join(1.0)  # for the last output
