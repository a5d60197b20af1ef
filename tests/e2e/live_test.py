"""Users of two servers teach a run: episodes, cycles, a trial, a withdrawal."""

import contextlib
import itertools
import re
import shutil
import signal

import openai
import pytest

from composer_jax.core import files
from composer_jax.live import events, learning, plans, trial
from composer_jax.telemetry import writer as writers
from tests.e2e import jobs
from tests.fleet import job_test, trainer_test

pytestmark = pytest.mark.slow
# Seconds for minutes and hours.
WINDOWS = [
  f'--config.record.{name}={seconds}'
  for name, seconds in {
    'edit_kept_s': 5.0,
    'follow_up_s': 5.0,
    'thumb_s': 5.0,
    'tool_call_s': 5.0,
    'kept_after_s': 0.0,
  }.items()
]
LEARNING = [
  f'--config.live.{name}={value}'
  for name, value in {
    'steps': 1,
    'least_steps': 1,
    'max_age': 100,
    'gate.margin': 0.9,
    'gate.canary_margin': 0.9,
    'gate.alpha': 0.5,
    'trial.margin': 0.5,
    'trial.alpha': 0.2,
    'trial.most_users': 60,
  }.items()
]
SUITES = """[[suites]]
name = "names"
config = "configs/composer/tiny.py:smoke"
split = "unseen_names"
tasks = 4
fields = {"sandbox.level" = "static"}
"""


class Users:
  """Users who ask the server of their arm, and give a thumb.

  Attributes:
    withdrawals: token of withdrawal of each user.
    pleased: names of the arms whose answers please.
  """

  def __init__(self, urls):
    self._clients = {
      arm: openai.OpenAI(base_url=url, api_key='none', timeout=600)
      for arm, url in urls.items()
    }
    self._count = itertools.count()
    self.withdrawals, self.pleased = {}, {trial.CANDIDATE}

  def come(self):
    """One user comes; returns the arm."""
    name = f'user{next(self._count)}'
    opened = self._clients[trial.CONTROL].post(
      '/live/episodes',
      cast_to=object,
      body={'user': name, 'consent': True, 'domain': 'lists'},
    )
    self.withdrawals[name] = opened['withdrawal']
    client = self._clients[opened['arm']]
    client.chat.completions.create(
      model='live',
      messages=[{'role': 'user', 'content': f'Write f{name} in m.py.'}],
      max_tokens=8,
      metadata={'episode': opened['episode']},
    )
    # In the run's own time every second user is pleased; in a trial by arm.
    happy = opened['arm'] in self.pleased or int(name[4:]) % 4 == 0
    body = {'episode': opened['episode'], 'id': 'thumb', 'kind': 'thumb'}
    told = client.post(
      '/live/events', cast_to=object, body={**body, 'value': 2 * happy - 1}
    )
    # On a busy machine seconds pass before a user says anything.
    assert told['fate'] in (events.COUNTED, events.LATE)
    return opened['arm']

  def withdraw(self, token):
    return self._clients[trial.CONTROL].post(
      '/live/withdrawal', cast_to=object, body={'withdrawal': token}
    )


def serve(workdir, arm, log):
  store = learning.served_from(workdir, arm)
  flags = ['--follow', f'--source={workdir}', f'--store={store}', '--port=0']
  flags += [f'--record={workdir / "live" / "record"}', f'--arm={arm}']
  return job_test.process(
    'experiments.serve', '--name=live', *flags, *WINDOWS, log=log
  )


def learn(workdir, cycles, log):
  flags = ['--users=real', f'--suites={workdir / "suites.toml"}']
  flags += [f'--cycles={cycles}', *LEARNING]
  return job_test.process(
    'experiments.live', *jobs.arguments(workdir, *flags), log=log
  )


def test_users_of_two_servers_teach_a_run(straight, tmp_path):
  workdir, log = tmp_path / 'run', tmp_path / 'learner'
  shutil.copytree(straight, workdir)
  (workdir / 'suites.toml').write_text(SUITES)
  arms = (trial.CONTROL, trial.CANDIDATE)
  record, results = workdir / 'live' / 'record', []
  with contextlib.ExitStack() as stack:
    logs = {arm: tmp_path / arm for arm in arms}
    servers = {
      arm: stack.enter_context(serve(workdir, arm, logs[arm])) for arm in arms
    }
    for server in servers.values():
      trainer_test.wait_for((record / 'windows.json').exists, server.pid)
    users = None
    for cycle, pleased in ((1, trial.CANDIDATE), (2, trial.CONTROL)):
      with learn(workdir, cycle, log) as learner:
        if users is None:
          found = lambda arm: trainer_test.wait_for(
            lambda: re.search(r'Serving .* at (\S+)', logs[arm].read_text()),
            servers[arm].pid,
          )
          users = Users({arm: found(arm)[1] for arm in arms})
        users.pleased = {pleased}
        while learner.poll() is None:
          users.come()
        assert learner.returncode == 0, log.read_text()[-3000:]
      path = workdir / 'live' / 'cycles' / f'{cycle:04d}' / 'result.json'
      results.append(files.read_json(path))
    # A user of the first cycle leaves, and everything of theirs.
    known = plans.Plans(workdir / 'live' / 'cycles')
    first, second = (known.load(cycle) for cycle in (1, 2))
    assert not first.spent & second.spent
    kept = {
      p.parent.name: p.parent for p in record.glob('users/*/*/claim.json')
    }
    gone = kept[min(first.terms)]
    token = next(
      t for t in users.withdrawals.values() if t.startswith(gone.parent.name)
    )
    assert users.withdraw(token) == {'episodes': 1}
    assert not gone.parent.exists()
    for arm in arms:
      servers[arm].send_signal(signal.SIGTERM)
      assert servers[arm].wait() == 0, logs[arm].read_text()[-3000:]
  decisions = [row['decision'] for row in results]
  assert decisions == [trial.PROMOTE, trial.ROLL_BACK], results
  assert results[0]['version'] == results[1]['version'] > results[0]['base']
  assert all(row['trial']['pairs'] for row in results)
  lines = [r for r in writers.read(workdir / 'live') if r['stage'] == 'live']
  assert [r['step'] for r in lines] == [1, 2]
  assert all(r['cycle_s'] > 0 for r in lines)
  assert 'Learning from live use' in (workdir / 'report.html').read_text()
