"""A sandbox in a machine of its own: QEMU's micro VM, with KVM or without.

The guest runs the sandbox of namespaces. Code that breaks out of that is still
in a machine without network, writable disk or other users, which a restart
resets. Without KVM the guest is emulated: isolation is the same, and code runs
some ten times slower against the same wall limits.
"""

import dataclasses
import functools
import logging
import os
import pathlib
import secrets
import shutil
import tempfile
import time

from composer_jax.sandbox import base
from composer_jax.sandbox.remote import messages, protocol, renewed
from composer_jax.sandbox.remote.microvm import image as microvm_image
from composer_jax.sandbox.remote.microvm import qemu as microvm_qemu

_PROBE_S = 4.0  # a machine with a working KVM answers within one
_START_S = 150.0  # emulated, on a host that does much else
_GRACE_S = 180.0  # more than what the sandbox inside allows itself
_OVERHEAD_MB = 256  # the guest's kernel, its zygotes and the files of boxes


@functools.cache
def choose_accelerator() -> tuple[str, str]:
  """Starts a guest under KVM to see if it works; once per process.

  That /dev/kvm opens, or that it makes a virtual processor, proves nothing: the
  guest may still hang at an instruction.

  Returns:
    'kvm' or 'tcg', and the reason.

  Raises:
    ValueError: there is no QEMU.
  """
  microvm_image.program('qemu-system-x86_64', 'qemu-system-x86')
  accelerator, reason = _probe_kvm()
  logging.info('Micro VMs run under %s: %s.', accelerator, reason)
  return accelerator, reason


def _probe_kvm(deadline_s: float = _PROBE_S) -> tuple[str, str]:
  if not os.access('/dev/kvm', os.R_OK | os.W_OK):
    return 'tcg', 'no usable /dev/kvm'
  kernel = microvm_image.find_kernel()
  archive = microvm_image.initrd(kernel, microvm_image.PROBE, {})
  with tempfile.TemporaryDirectory(prefix='composer-vm-') as folder:
    path = pathlib.Path(folder, 'initrd')
    path.write_bytes(archive)
    guest = microvm_qemu.Guest(
      microvm_qemu.VirtualMachine(
          kernel=str(kernel.image), initrd=str(path), disks={}, memory_mb=128,
          cores=1, accelerator='kvm',
      )
    )  # fmt: skip
    try:
      if guest.wait_for_line(deadline_s) == 'up':
        return 'kvm', 'a probe guest answered'
      guest.close()
      if words := ' '.join(guest.console.split())[-200:]:
        return 'tcg', f'a KVM guest gave no answer but {words!r}'
      return 'tcg', f'a KVM guest gave no answer within {deadline_s:g} s'
    finally:
      guest.close()


class MicroVM(renewed.RenewedSandbox):
  """A sandbox whose calls and boxes run in one guest, replaced when lost."""

  level = 'microvm'

  def __init__(
    self,
    limits: base.Limits,
    *,
    size: int = 1,
    images: pathlib.Path | None = None,
    packages: pathlib.Path | None = None,
  ):
    """Boots a guest and waits for its sandbox.

    Args:
      limits: limits of each call, with time by the guest's clock.
      size: number of calls at a time, and of cores of the guest.
      images: folder of images, which is copied onto a disk.
      packages: folder that `packages.gather` returned, which is copied, too.

    Raises:
      ValueError: the host lacks a program or a kernel.
      base.SandboxLost: the guest does not start.
    """
    accelerator, reason = choose_accelerator()
    self.limits = limits
    self._folder = pathlib.Path(tempfile.mkdtemp(prefix='composer-vm-'))
    try:
      self._machine = self._describe(size, images, packages, accelerator)
      super().__init__(self._boot, 'A micro VM')
    except BaseException:
      shutil.rmtree(self._folder, ignore_errors=True)
      raise
    self.about['accelerator'] = f'{accelerator}: {reason}'

  def _describe(
    self, size, images, packages, accelerator
  ) -> microvm_qemu.VirtualMachine:
    kernel = microvm_image.find_kernel()
    disks = {'root': str(microvm_image.system_disk())}
    for name, folder in (('images', images), ('packages', packages)):
      if folder is not None:
        target = self._folder / f'{name}.ext4'
        disks[name] = str(microvm_image.pack(folder, target))
    config = {
      'limits': dataclasses.asdict(self.limits),
      'size': size,
      'packages': packages is not None,
    }
    initrd = self._folder / 'initrd'
    initrd.write_bytes(microvm_image.initrd(kernel, microvm_image.INIT, config))
    memory = size * self.limits.memory_bytes >> 20
    return microvm_qemu.VirtualMachine(
        kernel=str(kernel.image), initrd=str(initrd), disks=disks,
        memory_mb=_OVERHEAD_MB + memory, cores=size, accelerator=accelerator,
    )  # fmt: skip

  def _boot(self) -> protocol.RemoteSandbox:
    guest = microvm_qemu.Guest(self._machine)
    transport = messages.StreamTransport(guest.agent)
    try:
      # A guest has no clock of its own, and little to draw randomness from.
      seed = secrets.token_hex(32)
      awake = {'do': 'awake', 'time': time.time(), 'seed': seed}
      transport.ask(awake, (), _START_S)
      sandbox = protocol.RemoteSandbox(
          transport, self.limits, level=self.level, size=self._machine.cores,
          grace_s=_GRACE_S, on_close=guest.close,
      )  # fmt: skip
    except base.SandboxLost as error:
      transport.close()
      guest.close()
      words = ' '.join(guest.console.split())[-600:]
      raise base.SandboxLost(
        f'the guest does not start: {error}; its last output: {words!r}'
      ) from error
    self._guest = guest
    return sandbox

  def close(self) -> None:
    """May be called twice."""
    super().close()
    shutil.rmtree(self._folder, ignore_errors=True)
