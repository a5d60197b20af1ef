"""What a zygote of boxes does beyond one of calls: its keeper, its programs.

Standard library only: runs inside the sandbox, where calls do not import it.
"""

import functools
import os
import signal
import socket
from collections.abc import Callable

from composer_jax.sandbox.inside import (
  beneath,
  confine,
  furnish,
  keeper,
  programs,
  wire,
)

sweep = programs.sweep


def prepare(zygote) -> int:
  """Furnishes the sandbox and starts the keeper of its files.

  Returns:
    The keeper's pid.
  """
  config = zygote.config
  config['counts_memory'] &= zygote.cgroup != 'none'
  furnish.furnish(config)
  overlay = config['proc_options'] = None
  if zygote.namespaces:
    config['proc_options'] = confine.working_proc()
    overlay = confine.working_overlay(config['boxes'])
  channel = socket.socket(fileno=config['keeper'])
  pid = os.fork()
  if pid == 0:
    zygote.control.close()
    keeper.serve(keeper.Keeper(config, overlay), channel)
    os._exit(0)
  channel.close()
  config['warm'] = furnish.adopt(config)
  zygote.about |= {
      'overlay': overlay is not None, 'warm': config['warm'],
      'proc': config['proc_options'] is not None,
  }  # fmt: skip
  return pid


def init(zygote, report: int) -> Callable[[], None]:
  """Prepares a program, runs it in a child and outlives it.

  Returns:
    In the program's process, what makes it the program: to be called when all
    frames below are left, so that none of ours with its variables lies under
    the program's own. Nowhere else does it return.
  """
  code = 1
  try:
    os.setsid()
    request, blobs, descriptors = wire.receive(zygote.control)
    confine.join(descriptors[2:])
    arrange = programs.mount_place if zygote.namespaces else programs.make_place
    stdin, *given = blobs
    place = arrange(zygote.config, request, given)
    program = programs.resolve(zygote.config, request, place)
    pid = os.fork()
    if pid == 0:
      _start(zygote, request, stdin, (*descriptors[:2], report))
      programs.enter(program, place, request['folder'])
      return functools.partial(programs.become, program)
    for descriptor in descriptors:
      os.close(descriptor)
    status = confine.reap_until(pid)
    os.write(report, f'status {status}\n'.encode())
    code = 0
    if not zygote.namespaces:
      os.killpg(0, signal.SIGKILL)  # the session, this process included
  except (OSError, ValueError, beneath.RefusedError) as error:
    os.write(report, f'error {error}'[:500].replace('\n', ' ').encode())
  os._exit(code)  # the kernel kills the rest of the namespace


def _start(zygote, request: dict, stdin: bytes, descriptors) -> None:
  """Gives up what the program may not have."""
  started = programs.STARTED_FD
  try:
    # Its number may become that of a file of the program.
    zygote.control.detach()
    programs.take_descriptors(descriptors, stdin)
    if zygote.uid is not None:  # else nobody could open /dev/stdout
      for descriptor in (programs.OUTPUT_FD, programs.REPORT_FD):
        os.fchown(descriptor, zygote.uid, zygote.uid)
    programs.set_limits(zygote.config, zygote.processes)
    confine.become_nobody(zygote.uid, zygote.filter)
    os.write(started, f'started {request["wall_s"]}\n'.encode())
  except OSError as error:
    os.write(started, f'error {error}'[:500].replace('\n', ' ').encode())
    os._exit(1)
  os.close(started)
