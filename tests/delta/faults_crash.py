"""Kills real processes at their n-th file operation, for each n.

  python -m tests.delta.faults_crash FOLDER '[[SCENARIO, ACTION, STEP, FIRST]]'

A child is forked for each n, from a process that never had another thread. It
counts what an audit hook sees, each `fsync`, and the moment after a file was
opened to be written, and does what ACTION says at the n-th operation:

  kill       SIGKILL to itself
  error      the operation fails once, with EIO
  full       from there on nothing can be made or renamed, with ENOSPC; later
             there is room, and the same process goes on
  tear       the kernel ends it where a file reaches n bytes: a torn file

Another child then looks at what stands, recovers and goes on. What it finds
must be what one finds where nothing happened. The last line of output is JSON:
at how many points each job let something happen.
"""

import builtins
import contextlib
import dataclasses
import errno
import io
import json
import logging
import os
import pathlib
import resource
import shutil
import signal
import sys
import traceback

from composer_jax.delta.store import folder
from tests.delta import faults, faults_scenarios

_EVENTS = frozenset({
  'open', 'os.rename', 'os.remove', 'os.mkdir', 'os.rmdir', 'os.link',
  'os.utime', 'os.truncate', 'os.scandir', 'os.listdir', 'fcntl.flock',
  'fsync', 'opened',
})  # fmt: skip
_MAKING = frozenset({'os.rename', 'os.mkdir', 'os.link', 'opened'})
_IS_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Their paths are relative to a descriptor, or they have none.
_NO_MORE = 3  # There are not so many operations.
_ANYWHERE = frozenset({'fcntl.flock', 'fsync'})


@dataclasses.dataclass
class Trigger:
  """Acts at the n-th operation below `root`."""

  root: str
  action: str
  at: int
  count: int = 0
  is_armed: bool = False

  def install(self):
    fsync = os.fsync

    def counted(descriptor):
      self('fsync', (descriptor,))
      fsync(descriptor)

    plain_open = builtins.open

    def opened(*arguments, **named):
      file = plain_open(*arguments, **named)
      if file.writable():
        try:
          # Made or emptied, and nothing is in it yet.
          self('opened', (file.name,))
        except OSError:
          file.close()
          raise
      return file

    os.fsync = counted
    builtins.open = io.open = opened
    sys.addaudithook(self)

  def __call__(self, event, arguments):
    if not self.is_armed or event not in _EVENTS:
      return
    path = str(arguments[0])
    if event not in _ANYWHERE and path[:1] == '/' and self.root not in path:
      return
    if event == 'open' and path[:1] != '/':
      return
    self.count += 1
    if self.action == 'kill' and self.count == self.at:
      os.kill(os.getpid(), signal.SIGKILL)
    if self.action == 'error' and self.count == self.at:
      raise OSError(errno.EIO, f'injected into {event}', path)
    if self.action == 'full' and self.count >= self.at:
      makes = event in _MAKING
      if event == 'open' and isinstance(arguments[2], int):
        makes = bool(arguments[2] & _IS_WRITING)
      if makes:
        raise OSError(errno.ENOSPC, f'injected into {event}', path)

  @contextlib.contextmanager
  def armed(self):
    """Lets the n-th operation inside fail; the failure itself is expected."""
    try:
      self.is_armed = True
      yield
    except (ValueError, OSError) as error:
      if 'injected' not in str(error):
        raise
    finally:
      self.is_armed = False


def child(work):
  """Runs it in a process of its own; returns its exit code."""
  sys.stdout.flush()
  pid = os.fork()
  if not pid:
    try:
      work()
      os._exit(0)
    finally:  # of a failure: nothing returns from the line before
      traceback.print_exc()
      sys.stderr.flush()
      os._exit(1)
  return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def crash(scenario, root, action, at):
  """Runs a scenario in this process, until something happens to it."""
  if action == 'tear':
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    actor = scenario.begin(root)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, hard))
    scenario.act(actor)
    return
  actor = scenario.begin(root)
  trigger = Trigger(str(root), action, at)
  trigger.install()
  with trigger.armed():
    scenario.act(actor)
  if action in ('error', 'full'):
    # The process lives and does it again.
    scenario.act(actor)
  if trigger.count < at:
    os._exit(_NO_MORE)


def run(folder, name, action, step, first):
  """Returns the points at which something happened."""
  scenario = faults_scenarios.SCENARIOS[name]
  template = folder / 'template'
  assert child(lambda: scenario.prepare(template)) == 0
  ends, points, at = {}, 0, first
  while True:
    root = folder / str(at)
    shutil.copytree(template, root)
    code = child(lambda: crash(scenario, root, action, at))  # noqa: B023
    assert code in _ENDS[action], (name, action, at, code)
    end = folder / 'end'
    assert child(lambda: _look(scenario, root, end)) == 0, (name, action, at)  # noqa: B023
    ends.setdefault(end.read_text(), []).append(at)
    shutil.rmtree(root)
    if code in (0, _NO_MORE) and (action == 'tear' or code == 3):
      break
    points, at = points + 1, at + step
  assert len(ends) == 1, (name, action, ends)
  return points


_ENDS = {
  'kill': (-signal.SIGKILL, _NO_MORE),
  'tear': (-signal.SIGXFSZ, 0),
  'error': (0, _NO_MORE),
  'full': (0, _NO_MORE),
}


def _look(scenario, root, end):
  """What stands after a crash, then recovery; writes down how it ends."""
  scenario.look(root)
  text = json.dumps(scenario.recover(root), sort_keys=True)
  # Sweeping waits for a while, lest it take what is being written.
  folder.TORN_S = 0.0
  scenario.collect(root)
  left = [
    path.relative_to(root).as_posix()
    for path in sorted(root.rglob('*'))
    if path.name.endswith('.tmp')
  ]
  assert not left, left
  end.write_text(text)


def main():
  folder, jobs = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
  logging.disable(logging.CRITICAL)
  with faults.small_chunks():
    # Children inherit what is loaded and compiled here.
    faults.build('floats', versions=3)
    points = []
    for number, job in enumerate(jobs):
      points.append(run(folder / str(number), *job))
    print(json.dumps(points))


if __name__ == '__main__':
  main()
