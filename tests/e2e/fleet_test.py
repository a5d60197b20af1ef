"""Workers are processes elsewhere: they share a bucket with the run, no files.

The bucket's server answers slowly, badly or not at all; workers and trainer are
killed, stopped, sent away and added. The weights are those of the main job.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from composer_jax.fleet import joining
from composer_jax.fleet.leases import ledger as ledgers
from tests.delta import s3_server
from tests.e2e import jobs

STORE = f's3://{s3_server.BUCKET}/run'


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


class Crew:
  """The trainer and its workers, as processes."""

  def __init__(self, workdir, folder):
    self._workdir, self._folder = workdir, folder
    self.workers, self._started = {}, 0
    self.trainer = None

  def _start(self, name, *arguments):
    with (self._folder / f'{name}.log').open('ab') as log:
      return subprocess.Popen(
        [sys.executable, '-m', *arguments],
        cwd=jobs.ROOT,
        env=jobs.environment(),
        stdout=log,
        stderr=log,
      )

  def start_trainer(self):
    more = (f'--config.delta.store={STORE}', '--config.delta.poll_s=0.2')
    more += ('--config.fleet.workers=0', '--config.fleet.members=2')
    more += ('--config.fleet.lease_s=6.0',)
    command = jobs.arguments(self._workdir, *more)
    self.trainer = self._start('trainer', 'experiments.composer', *command)

  def start_worker(self):
    name, self._started = f'w{self._started}', self._started + 1
    key = self._workdir / 'delta.key'
    flags = (f'--store={STORE}', f'--key={key}', f'--name={name}')
    self.workers[name] = self._start(name, 'experiments.worker', *flags)
    return name

  def signal(self, name, number):
    os.kill(self.workers[name].pid, number)

  def log(self):
    return '\n'.join(
      f'{path.name}: {path.read_text()[-1500:]}'
      for path in sorted(self._folder.glob('*.log'))
    )

  def wait_for(self, condition):
    deadline = time.monotonic() + jobs.TIMEOUT_S
    while not condition():
      assert time.monotonic() < deadline
      assert self.trainer.poll() in (None, 0), self.log()
      time.sleep(0.05)

  def close(self):
    for process in [self.trainer, *self.workers.values()]:
      process.kill()
      process.wait()


def run(straight, tmp_path, seed, script):
  """Runs RL with a crew and a script; returns its workdir and ledger."""
  workdir, folder = tmp_path / 'run', tmp_path / 'logs'
  folder.mkdir()
  jobs.copy_before_rl(straight, workdir)
  with s3_server.run() as server, contextlib.ExitStack() as stack:
    crew = stack.enter_context(contextlib.closing(Crew(workdir, folder)))
    crew.start_trainer()
    crew.wait_for((workdir / 'delta.key').exists)
    for _ in range(3):
      crew.start_worker()
    server.trouble = Trouble(seed)
    script(crew, lambda step: lambda: step <= len(jobs.steps(workdir, 'rl')))
    crew.wait_for(lambda: crew.trainer.poll() == 0)
    server.trouble = []
    docs = joining.open_documents(STORE, workdir / 'delta.key', 'policy')
    ledger = ledgers.from_json(docs.read_ledger()[0])
    # Workers that were not sent away end by themselves.
    for name, worker in crew.workers.items():
      with contextlib.suppress(ProcessLookupError):
        crew.signal(name, signal.SIGCONT)
      # A notice ends one at once that has not joined yet.
      codes = (0, -signal.SIGKILL, -signal.SIGTERM)
      assert worker.wait(120) in codes, crew.log()
    print(crew.log(), ledger.lost)
  return workdir, ledger


def assert_same(workdir, straight, ledger):
  weights, expected = jobs.weights(workdir, 'rl'), jobs.weights(straight, 'rl')
  for name, array in expected.items():
    np.testing.assert_array_equal(weights[name], array, err_msg=name)
  of_rl = lambda path: [r for r in jobs.metrics(path) if r['stage'] == 'rl']
  assert of_rl(workdir) == of_rl(straight)
  assert ledger.totals() == {'trained': {'list_functions': 8}}


@pytest.mark.slow
def test_kills_stops_and_newcomers_by_script_change_no_bit(straight, tmp_path):
  def script(crew, reached):
    crew.wait_for(reached(1))
    crew.signal('w0', signal.SIGKILL)
    crew.start_worker()
    crew.wait_for(reached(2))
    crew.signal('w1', signal.SIGSTOP)
    crew.trainer.kill()
    crew.trainer.wait()
    crew.start_trainer()
    crew.wait_for(reached(3))
    crew.signal('w2', signal.SIGTERM)

  workdir, ledger = run(straight, tmp_path, 0, script)
  assert_same(workdir, straight, ledger)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(3))
def test_twenty_events_at_random_change_no_bit(straight, tmp_path, seed):
  rng = random.Random(seed)

  def script(crew, reached):
    for _ in range(20):
      time.sleep(rng.uniform(0.2, 4.0))
      if reached(4)():
        return
      alive = [n for n, w in crew.workers.items() if w.poll() is None]
      name = rng.choice(alive) if alive else None
      event = rng.choice(['kill', 'stop', 'go on', 'notice', 'add', 'trainer'])
      if event == 'trainer' and crew.trainer.poll() is None:
        crew.trainer.kill()
        crew.trainer.wait()
        crew.start_trainer()
      elif event == 'add' or name is None:
        crew.start_worker()
      else:
        numbers = dict(kill=signal.SIGKILL, stop=signal.SIGSTOP)
        numbers |= {'go on': signal.SIGCONT, 'notice': signal.SIGTERM}
        crew.signal(name, numbers.get(event, signal.SIGCONT))
    for name in list(crew.workers):
      with contextlib.suppress(ProcessLookupError):
        crew.signal(name, signal.SIGCONT)
    crew.start_worker()

  workdir, ledger = run(straight, tmp_path, seed, script)
  assert_same(workdir, straight, ledger)
