"""The process inside the sandbox that forks once per program.

Standard library only, run by path with the site machinery off: the package is
not installed where this runs. It never reads a request: the child of the
program does, so that the next program inherits no memory of this one.

Consumes: requests on the control socket, one at a time; the frame carries the
  write ends of the pipes for the result and the output, and cgroups to join.
Waits for: the control socket, the death of the host process.
Woken by: a request; end of file or the host's death, upon which it exits and
  its namespaces end; during a program also by the wall limit.
Produces: one JSON line per program on the control socket.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

if __name__ == '__main__':
  # In the sandbox these few files are all of the package.
  sys.path.insert(0, os.path.abspath(f'{__file__}/../../../..'))

from composer_jax.sandbox.inside import box_runs, confine, programs, seccomp

_config = json.loads(sys.argv[1]) if __name__ == '__main__' else {}
if __name__ == '__main__':
  del sys.path[0]
  for _name in [x for x in sys.modules if x.split('.')[0] == 'composer_jax']:
    del sys.modules[_name]  # untrusted code must not import them


class HostGoneError(Exception):
  """The host process has ended."""


class Zygote:
  """State shared by all programs: limits, filter and descriptors."""

  def __init__(self, config: dict):
    self.config = config
    self.limits = config['limits']
    self.namespaces = config['level'] != 'rlimits'
    self.control = socket.socket(fileno=config['control'])
    self.host = config['host_pidfd']
    self.uid = config['uid']
    self.cgroup = config['cgroup']
    if not confine.can_join(config['cgroup_fds']):
      self.cgroup = 'none'
    families = (seccomp.AF_UNIX, seccomp.AF_INET, seccomp.AF_INET6)
    # Without a network namespace no family may open a socket.
    self.filter, self.seccomp = confine.working_filter(
      families if self.namespaces else ()
    )
    self.processes = confine.process_limit(
      self.limits['processes'], config['user_processes'], self.uid
    )
    self.about = {
        'seccomp': self.seccomp, 'uid': self.uid,
        'processes': self.processes, 'cgroup': self.cgroup,
    }  # fmt: skip
    self.keeper = box_runs.prepare(self)
    if self.namespaces:
      confine.drop_bounding_set()
    else:
      confine.become_subreaper()

  def serve(self) -> Callable[[], None] | None:
    """Answers requests until the host closes its end or dies.

    Returns:
      In the process of a box's program, the function that becomes it.
    """
    self._say(self.about)
    poller = select.poll()
    poller.register(self.control, select.POLLIN)
    if self.host is not None:
      poller.register(self.host, select.POLLIN)
    while True:
      events = dict(poller.poll())
      if self.host in events or not self._has_request():
        return None
      if become := self._call():
        return become

  def _has_request(self) -> bool:
    try:
      return bool(self.control.recv(1, socket.MSG_PEEK))
    except ConnectionError:
      return False

  def _say(self, value: dict) -> None:
    self.control.sendall(json.dumps(value).encode() + b'\n')

  def _call(self) -> Callable[[], None] | None:
    read_end, write_end = os.pipe()
    start = time.monotonic()
    pid = confine.clone_into_namespaces() if self.namespaces else os.fork()
    if pid == 0:
      os.close(read_end)
      return box_runs.init(self, write_end)
    os.close(write_end)
    try:
      report, timed_out = self._watch(read_end)
    finally:
      os.close(read_end)
      os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is its own
      os.waitpid(pid, 0)
      if not self.namespaces:
        _sweep(self.config['scratch'], self.keeper)
    lines = report.decode('utf-8', 'replace').splitlines()
    self._say(
      {
        'timed_out': timed_out,
        'report': lines,
        'wall_s': time.monotonic() - start,
      }
    )

  def _watch(self, read_end: int) -> tuple[bytes, bool]:
    """Reads the init's report until it dies or its time is up."""
    poller = select.poll()
    poller.register(read_end, select.POLLIN)
    if self.host is not None:
      poller.register(self.host, select.POLLIN)
    report, started = b'', False
    deadline = time.monotonic() + self.config['setup_s']
    while True:
      wait_s = deadline - time.monotonic()
      events = dict(poller.poll(wait_s * 1000)) if wait_s > 0 else {}
      if not events:
        return report, True
      if self.host in events or self.control.fileno() in events:
        raise HostGoneError  # a living host sends nothing during a call
      if read_end in events:
        piece = os.read(read_end, 4096)
        if not piece:
          return report, False
        report += piece
        if not started and b'\n' in report and report.startswith(b'started'):
          started = True
          stated = report.split(b'\n')[0].removeprefix(b'started')
          deadline = time.monotonic() + float(stated)
          # Not earlier, because init reads the request from this socket.
          poller.register(self.control, select.POLLIN)


def _sweep(scratch: str, keeper_pid: int) -> None:
  """Removes processes and files of a program without a pid namespace."""
  while survivors := [x for x in _children() if x != keeper_pid]:
    for pid in survivors:
      os.kill(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
  programs.sweep(scratch)


def _children() -> list[int]:
  """Returns own children and adopted orphans; none where /proc lacks them."""
  try:
    with open(f'/proc/self/task/{os.getpid()}/children') as file:
      return [int(pid) for pid in file.read().split()]
  except FileNotFoundError:
    return []


def main() -> Callable[[], None] | None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host handles Ctrl-C
  zygote = Zygote(_config)
  gc.collect()
  gc.freeze()  # children would copy every page that a collection touches
  with contextlib.suppress(HostGoneError, BrokenPipeError):
    return zygote.serve()
  return None


if __name__ == '__main__':
  if _become := main():
    _become()
