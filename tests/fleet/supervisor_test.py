"""A supervisor with processes that need no jax: deaths, stalls, other hosts."""

import json
import os
import re
import sys
import threading
import time

import pytest

from composer_jax.core import processes
from composer_jax.fleet import hosts, supervisor

# Each process says that it was here, then obeys the order for its start.
TRAINER = """
import json, os, pathlib, signal, sys, time
ticket = json.loads(os.environ['COMPOSER_JAX_TICKET'])
workdir, orders = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
epoch, me = pathlib.Path(ticket['folder']).name, ticket['process']
beat = pathlib.Path(ticket['beat'])
with (workdir / f'seen_{me}').open('a') as seen:
  seen.write(json.dumps([epoch, ticket['address'], ticket['count']]) + chr(10))
order = orders.get(f'{epoch[6:]}/{me}', orders.get(f'*/{me}', 'done'))
# As `jax.distributed` waits for all.
while order != 'alone' and not all(
  path.exists() and epoch in path.read_text()
  for path in (workdir / f'seen_{i}' for i in range(ticket['count']))
):
  time.sleep(0.01)
beat.write_bytes(b''); os.utime(beat)
if order == 'kill':
  os.kill(os.getpid(), signal.SIGKILL)
if order == 'stop':
  os.kill(os.getpid(), signal.SIGSTOP)
if order == 'refuse':
  print('error: a bad value')
  sys.exit(1)
while order == 'work':
  beat.write_bytes(b''); os.utime(beat); time.sleep(0.02)
if order == 'emulate':
  sys.exit(os.environ.get('JAX_PLATFORMS') != 'cpu')
if order == 'hang':
  time.sleep(1000)
if order == 'lost':
  time.sleep(0.1); sys.exit(75)
"""


@pytest.fixture
def start(tmp_path):
  """Runs supervisors; returns why the trainer failed and what was said."""

  def run(orders, place=None, config=None, **options):
    said = []
    kept = supervisor.Supervisor(
      [sys.executable, '-c', TRAINER, str(tmp_path), json.dumps(orders)],
      place or hosts.Hosts(processes=2),
      supervisor.SupervisorOptions(
        **{'stall_s': 20.0, 'start_s': 120.0, **options}
      ),
      workdir=tmp_path,
      own_identity=config or {'config.seed': 0},
      say=said.append,
    )
    return kept.run(), said

  return run


def seen(workdir, process):
  lines = (workdir / f'seen_{process}').read_text().splitlines()
  return [json.loads(line) for line in lines]


def assert_gone(said):
  """No process of any start is left."""
  pids = [int(p) for line in said for p in re.findall(r': (\d+)[,}]', line)]
  assert pids
  for pid in pids:
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)


def test_a_trainer_that_ends_well_is_started_once(start):
  reason, said = start({})
  assert reason is None
  assert len(said) == 1 and said[0].startswith('start 1: 2 processes at ')
  # The same command goes on, with a start of another number.
  assert start({})[1][0].startswith('start 2: ')


def test_emulated_devices_are_those_of_a_cpu(start, monkeypatch):
  """Also where there are accelerators, on which two processes would meet."""
  monkeypatch.setenv('JAX_PLATFORMS', 'cuda')
  assert start({'*/0': 'emulate'}, hosts.Hosts(devices=2))[0] is None
  assert start({'*/0': 'emulate'}, hosts.Hosts())[0] is not None


@pytest.mark.parametrize('victim', [0, 1])
def test_a_death_restarts_all_at_another_address(start, tmp_path, victim):
  other = 1 - victim
  reason, said = start({f'1/{victim}': 'kill', f'1/{other}': 'hang'})
  assert reason is None
  assert f'process {victim} died by SIGKILL; starting again, 4' in said[1]
  for process in (0, 1):
    (first, address, count), (second, other_address, _) = seen(
      tmp_path, process
    )
    assert (first, second, count) == ('epoch_1', 'epoch_2', 2)
    assert address != other_address
  assert_gone(said)


def test_no_progress_restarts_all(start):
  """A stopped process holds its peers, of which one works on."""
  reason, said = start({'1/0': 'work', '1/1': 'stop'}, stall_s=2.0)
  assert reason is None
  # On a busy machine the other may not have worked, either.
  assert re.match(
    r'no progress of process (0, )?1 \(stopped\) for 2 s', said[1]
  )
  assert_gone(said)


def test_a_refusal_is_not_repeated(start):
  reason, said = start({'1/1': 'refuse', '1/0': 'hang'})
  assert 'process 1 ended with an error (exit code 1)' in reason
  assert 'error: a bad value' in reason  # From its log.
  assert len(said) == 1
  assert_gone(said)


def test_an_error_that_a_death_led_to_is_repeated(start):
  reason, said = start({'1/0': 'refuse', '1/1': 'lost'})
  assert reason is None
  assert 'process 0 ended with an error (exit code 1); starting' in said[1]


def test_restarts_run_out(start):
  reason, said = start({'*/1': 'kill', '*/0': 'hang'}, restarts=2)
  assert reason.startswith('process 1 died by SIGKILL; no restarts are left')
  assert sum('start ' in line for line in said) == 3
  assert_gone(said)


def test_restarts_grow_back():
  now = [0.0]
  restarts = supervisor.Restarts(2, 10.0, clock=lambda: now[0])
  assert [restarts.take() for _ in range(3)] == [1, 0, None]
  now[0] = 9.9
  assert restarts.take() is None
  now[0] = 10.1
  assert restarts.take() == 0
  now[0] = 1000.0
  assert [restarts.take() for _ in range(3)] == [1, 0, None]


def test_a_second_supervisor_is_refused(start, tmp_path):
  """Also of a run that an earlier start, cut off, left behind."""
  errors = []

  def second():
    while not (tmp_path / 'seen_0').exists():
      time.sleep(0.01)
    try:
      start({})
    except ValueError as error:
      errors.append(str(error))

  thread = threading.Thread(target=second)
  thread.start()
  start({'1/0': 'work', '1/1': 'stop'}, stall_s=1.0)
  thread.join()
  assert errors and 'Another process' in errors[0]


def both(start, orders, **second):
  """Runs hosts 0 and 1 of two, each with a process; returns their results."""
  results = {}

  def run(index, **options):
    try:
      results[index] = start(
        orders, hosts.Hosts(index=index, count=2), **options
      )
    except ValueError as error:
      results[index] = (f'refused: {error}', [])

  threads = [
    threading.Thread(target=run, args=[0]),
    threading.Thread(target=run, args=[1], kwargs=second),
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return results


@pytest.mark.parametrize('victim', [0, 1])
def test_hosts_restart_together(start, tmp_path, victim):
  # As a start that was cut off left it.
  (tmp_path / 'fleet').mkdir()
  old = {'epoch': 6, 'address': 'x:1', 'identity': {}, 'end': None}
  (tmp_path / 'fleet' / 'gang.json').write_text(json.dumps(old))
  (tmp_path / 'fleet' / 'leader').write_text('1')
  orders = {f'7/{victim}': 'kill', f'7/{1 - victim}': 'hang'}
  results = both(start, orders)
  assert [results[i][0] for i in (0, 1)] == [None, None]
  for process in (0, 1):
    epochs = [epoch for epoch, _, _ in seen(tmp_path, process)]
    assert epochs == ['epoch_7', 'epoch_8']
  addresses = [[a for _, a, _ in seen(tmp_path, p)] for p in (0, 1)]
  assert addresses[0] == addresses[1]


def test_all_hosts_end_with_a_refusal(start):
  results = both(start, {'1/1': 'refuse', '1/0': 'hang'})
  assert 'process 1 ended with an error' in results[0][0]
  assert results[1][0] == results[0][0]


def test_a_host_with_another_config_is_refused_before_it_joins(start, tmp_path):
  orders = {'1/0': 'alone'}
  results = both(start, orders, config={'config.seed': 1})
  assert results[1][0] == (
    'refused: Host 1 may not join: config.seed is 0 on host 0 and 1 on host '
    '1. Start all hosts with one checkout and one command.'
  )
  assert not (tmp_path / 'seen_1').exists()


def test_a_host_alone_waits_no_longer_than_it_may(start, tmp_path):
  reason, _ = start({}, hosts.Hosts(index=1, count=2), start_s=0.3)
  assert 'host 0 gave no sign of life' in reason


def test_a_ticket_is_taken_once(monkeypatch):
  ticket = processes.Ticket(folder='f', address='a:1', process=0, count=1)
  for name, value in ticket.to_environment().items():
    monkeypatch.setenv(name, value)
  assert processes.take_ticket() == ticket
  # What this process starts is no member.
  assert processes.take_ticket() is None
