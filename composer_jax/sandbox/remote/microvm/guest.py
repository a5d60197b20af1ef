"""The first process of a micro VM, and the agent that answers its host.

Run by path inside the guest, standard library only. The agent opens the
sandbox of namespaces as on any machine, with cgroups of version 2.

Consumes: messages on the virtio port (see `remote.messages`).
Waits for: the port.
Woken by: a message; the host closing its end, upon which the guest powers off.
Produces: answers; a traceback on the console if it cannot start.
"""

import ctypes
import fcntl
import json
import os
import pathlib
import struct
import sys
import time
import traceback

if __name__ == '__main__':
  sys.path.insert(0, os.path.abspath(f'{__file__}/../../../../..'))

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from composer_jax.sandbox.remote import protocol

_PORT = '/dev/vport0p1'
_POWER_OFF = 0x4321FEDC
_ADD_ENTROPY, _RESEED = 0x40085203, 0x5207


def _awake(header: dict) -> dict:
  """Sets the clock, and adds to what random numbers are drawn from."""
  time.clock_settime(time.CLOCK_REALTIME, header['time'])
  seed = bytes.fromhex(header['seed'])
  with open('/dev/urandom', 'wb', buffering=0) as random:
    entropy = struct.pack('ii', 8 * len(seed), len(seed)) + seed
    fcntl.ioctl(random, _ADD_ENTROPY, entropy)
    fcntl.ioctl(random, _RESEED)
  return {}


def _agent() -> None:
  config = json.loads(pathlib.Path('/run/config.json').read_text())
  port = os.open(_PORT, os.O_RDWR)
  packages = pathlib.Path('/packages') if config['packages'] else ()
  sandbox = sandbox_open.open_sandbox(
      'unshare', base.Limits(**config['limits']), size=config['size'],
      images=pathlib.Path('/images'), packages=packages,
  )  # fmt: skip

  def send(data: bytes) -> None:
    view = memoryview(data)
    while view:
      view = view[os.write(port, view) :]

  protocol.serve(
      os.fdopen(port, 'rb', closefd=False).read, send, sandbox,
      size=config['size'], extra={'awake': _awake},
  )  # fmt: skip


def main() -> None:
  os.environ['PATH'] = '/usr/bin:/bin'
  agent = os.fork()
  if agent == 0:
    try:
      _agent()
    # The console, which the host keeps, is the only place to report it.
    except BaseException:  # noqa: BLE001
      traceback.print_exc()
    os._exit(0)
  while os.wait()[0] != agent:  # the first process has to reap all orphans
    pass
  ctypes.CDLL(None).reboot(_POWER_OFF)


if __name__ == '__main__':
  main()
