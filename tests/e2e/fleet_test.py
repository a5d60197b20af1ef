"""Workers are processes elsewhere: they share a bucket with the run, no files.

The trainer is two processes. The bucket's server answers slowly, badly or not
at all; workers and trainer processes are killed, stopped, sent away and added.
The weights are those of an undisturbed run. Events come with uploads, not with
time, and one at a time: each that is counted befell somebody, and has shown its
effect before the next comes.
"""

import contextlib
import os
import random
import re
import signal
import time

import numpy as np
import pytest

from composer_jax.fleet import joining
from composer_jax.fleet.leases import ledger as ledgers
from tests import programs
from tests.delta import s3_server
from tests.e2e import jobs
from tests.fleet import trainer_test

pytestmark = pytest.mark.slow

STORE = f's3://{s3_server.BUCKET}/run'
STEPS = 8
EVENTS = (
  *('dies', 'dies', 'stops', 'goes on', 'leaves', 'joins', 'joins'),
  *('trainer dies', 'trainer stops'),
)
RUN = (
  *trainer_test.QUICK,
  '--config.sft.optimizer=adam',
  '--config.evaluation.episodes=4',
  f'--config.rl.steps={STEPS}',
)
TWO = '--config.rl.mesh.replica=2'
ONE = '--config.model.numerics=batch_invariant'
NUM_GROUPS, SIZE = 2 * STEPS, 4


class Trouble(list):
  """What befalls each request, at random: a server's `trouble`."""

  def __init__(self, seed):
    super().__init__()
    self._random = random.Random(seed)

  def __bool__(self):
    return True

  def pop(self, index=0):
    draw = self._random.random()
    time.sleep(0.002)
    for share, trouble in ((0.01, 503), (0.02, 'lose'), (0.03, 'drop')):
      if draw < share:
        return trouble
    return 'ok'


class Slot:
  """A process at a time, forked from one that has the imports.

  Attributes:
    log: file with what all of them say.
    name: name of the worker; '' for a trainer.
    pid: process id of the last one; None before the first.
    is_stopped: true from SIGSTOP to SIGCONT.
  """

  def __init__(self, log):
    self._zygote, self.log, self.name = programs.Zygote(), log, ''
    self.pid, self.code, self.is_stopped = None, None, False

  def start(self, *command):
    with self.log.open('ab') as log:
      self.pid = self._zygote.start(
        command,
        env=jobs.environment(),
        out=log.fileno(),
        err=log.fileno(),
        imports=trainer_test.IMPORTS,
      )
    self.code, self.is_stopped = None, False

  @property
  def is_running(self):
    if self.pid is not None and self.code is None:
      with contextlib.suppress(TimeoutError):
        self.code = self._zygote.exit_code(0)
    return self.pid is not None and self.code is None

  def signal(self, number):
    with contextlib.suppress(ProcessLookupError):
      os.kill(self.pid, number)
    if number in (signal.SIGSTOP, signal.SIGCONT):
      self.is_stopped = number == signal.SIGSTOP

  def wait(self):
    self.signal(signal.SIGCONT)
    while self.is_running:
      time.sleep(0.05)
    return self.code

  def close(self):
    if self.is_running:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self.pid, signal.SIGKILL)
    self._zygote.close()


class Crew:
  """The trainer's supervisor and four places for workers."""

  def __init__(self, workdir, folder, launch, more):
    self._workdir, self.folder = workdir, folder
    self._launch, self._more = launch, more
    self.trainer = Slot(folder / 'trainer.log')
    self.slots = [Slot(folder / f'w{i}.log') for i in range(4)]
    self.codes, self._started = [], 0

  def start_trainer(self):
    more = (f'--config.delta.store={STORE}', '--config.delta.poll_s=0.2')
    more += ('--config.fleet.workers=0', '--config.fleet.members=1')
    more += ('--config.fleet.lease_s=6.0', '--config.fleet.save_s=0.2')
    main = ['-m', 'experiments.composer']
    main += jobs.arguments(self._workdir, *RUN, *more, *self._more)
    command = ['-c', trainer_test.FORKED, self._launch, str(self._workdir)]
    self.trainer.start(*command, '', '100', *main)

  def start_worker(self, slot):
    slot.name, self._started = f'w{self._started}', self._started + 1
    if slot.code is not None:
      self.codes.append(slot.code)
    key = self._workdir / 'delta.key'
    flags = (f'--store={STORE}', f'--key={key}', f'--name={slot.name}')
    slot.start('-m', 'experiments.worker', *flags)

  def starts(self):
    """Returns the processes of each start of the trainer."""
    text = (self.folder / 'trainer.log').read_text()
    found = re.findall(r'start \d+: .* here {(0: .*)}', text)
    return [[int(p.split(':')[1]) for p in line.split(',')] for line in found]

  def log(self):
    return '\n'.join(
      f'{path.name}: {path.read_text()[-2500:]}'
      for path in sorted(self.folder.glob('*.log'))
    )

  def check(self):
    assert self.trainer.is_running or self.trainer.code == 0, self.log()

  def close(self):
    for slot in [self.trainer, *self.slots]:
      slot.close()


SIGNALS = {
  'dies': signal.SIGKILL,
  'stops': signal.SIGSTOP,
  'leaves': signal.SIGTERM,
  'trainer dies': signal.SIGKILL,
  'trainer stops': signal.SIGSTOP,
}


def act(crew, event):
  """Lets an event happen, and returns what tells that it showed its effect.

  Returns None if there is nobody to whom it can happen.
  """
  running = [s for s in crew.slots if s.is_running and not s.is_stopped]
  stopped = [s for s in crew.slots if s.is_running and s.is_stopped]
  free = [s for s in crew.slots if not s.is_running]
  if event.startswith('trainer'):
    starts = crew.starts()
    # Before the supervisor knows of the last one, it may hit the same.
    with contextlib.suppress(ProcessLookupError, IndexError):
      os.kill(starts[-1][-1], SIGNALS[event])
      begins = lambda: len(crew.starts()) > len(starts)
      return lambda: begins() or not crew.trainer.is_running
  elif event == 'goes on' and stopped:
    stopped[0].signal(signal.SIGCONT)
    return lambda: True
  elif event == 'joins' and free:
    crew.start_worker(free[0])
    serves = f'{free[0].name} serves version'
    has_joined = lambda: serves in free[0].log.read_text()
    return lambda: has_joined() or not free[0].is_running
  elif event in SIGNALS and running:
    running[0].signal(SIGNALS[event])
    return lambda: event == 'stops' or not running[0].is_running
  return None


def keep_going(crew):
  """Leaves a worker that can do something."""
  if not any(s.is_running and not s.is_stopped for s in crew.slots):
    act(crew, 'goes on') or act(crew, 'joins')


def run(undisturbed, tmp_path, seed, events, launch, *more):
  """Runs RL with a crew; returns its workdir and ledger.

  Events come in even distances by the number of members that were uploaded, up
  to three quarters of them. One that can happen to nobody changes places with
  another, drawn from all.
  """
  workdir, folder = tmp_path / 'run', tmp_path / 'logs'
  folder.mkdir()
  jobs.copy_before_rl(undisturbed, workdir)
  with s3_server.run() as server, contextlib.ExitStack() as stack:
    crew = Crew(workdir, folder, launch, more)
    stack.enter_context(contextlib.closing(crew))
    crew.start_trainer()
    while not (workdir / 'delta.key').exists():
      crew.check()
      time.sleep(0.05)
    for slot in crew.slots[:3]:
      crew.start_worker(slot)
    server.trouble = Trouble(seed)
    uploads, seen, due = set(), 0, list(events)
    rng, has_shown = random.Random(seed), lambda: True
    while crew.trainer.is_running:
      crew.check()
      new, seen = server.seen[seen:], len(server.seen)
      uploads |= {s[1] for s in new if s[0] == 'PUT' and '/groups/' in s[1]}
      count = 1 + len(events) - len(due)
      wanted = count * NUM_GROUPS * SIZE * 3 // (4 * len(events))
      if due and len(uploads) >= wanted and has_shown():
        event, shows = due[0], act(crew, due[0])
        if shows is None:
          due[0] = rng.choice(EVENTS)
        else:
          print(f'{len(uploads)} uploads: a worker or process {event}')
          has_shown = shows
          due.pop(0)
      if len(jobs.steps(workdir, 'rl')) < STEPS:
        keep_going(crew)
      time.sleep(0.05)
    crew.check()
    assert not due
    server.trouble = []
    docs = joining.open_documents(STORE, workdir / 'delta.key', 'policy')
    ledger = ledgers.from_json(docs.read_ledger()[0])
    # Workers that were not sent away end by themselves.
    codes = {slot.wait() for slot in crew.slots if slot.pid}
    # A notice ends one at once that has not joined yet.
    ends = {0, -signal.SIGKILL, -signal.SIGTERM}
    assert codes | set(crew.codes) <= ends, crew.log()
    print(ledger.lost, ledger.totals())
  return workdir, ledger


def assert_same(workdir, undisturbed, ledger):
  weights = jobs.weights(workdir, 'rl')
  for name, array in jobs.weights(undisturbed, 'rl').items():
    np.testing.assert_array_equal(weights[name], array, err_msg=name)
  of_rl = lambda path: [r for r in jobs.metrics(path) if r['stage'] == 'rl']
  assert of_rl(workdir) == of_rl(undisturbed)
  assert ledger.totals() == {'trained': {'list_functions': NUM_GROUPS}}


def alone(workdir, *more):
  done = jobs.run(workdir, *RUN, *more)
  assert done.returncode == 0, done.stderr[-3000:]
  return workdir


@pytest.fixture(scope='module')
def by_two_devices(tmp_path_factory):
  return alone(tmp_path_factory.mktemp('two') / 'run', TWO)


def test_events_by_script_change_no_bit(by_two_devices, tmp_path):
  events = ['dies', 'trainer dies', 'stops']
  found = run(by_two_devices, tmp_path, 0, events, 'local:2x1', TWO)
  assert_same(found[0], by_two_devices, found[1])


def test_sixty_events_at_random_change_no_bit(by_two_devices, tmp_path):
  events = random.Random(0).choices(EVENTS, k=60)
  found = run(by_two_devices, tmp_path, 1, events, 'local:2x1', TWO)
  assert_same(found[0], by_two_devices, found[1])


def test_episodes_go_on_elsewhere_and_change_no_bit(tmp_path):
  """One process, whose numerics let turns be replayed bit for bit."""
  straight = alone(tmp_path / 'alone', ONE)
  rng = random.Random(2)
  events = rng.choices(['dies', 'leaves', 'leaves', 'joins'], k=30)
  found = run(straight, tmp_path, 2, events, 'local:1x1', ONE)
  assert_same(found[0], straight, found[1])
  rows = jobs.writers.read(found[0] / jobs.writers.RECEIVED)
  assert sum(row.get('resumed', 0) for row in rows) > 0
  assert sum(row.get('anew', 0) for row in rows) == 0
