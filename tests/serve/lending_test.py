"""A server that lends its engine: clients first, then rollouts, which go on."""

import contextlib
import dataclasses
import itertools
import threading
import types

import numpy as np
import pytest

from composer_jax.core import records, seams
from composer_jax.core.routes import codec
from composer_jax.fleet.leases import holder
from composer_jax.pipeline import rollout_worker
from composer_jax.rl import collect
from composer_jax.serve import lending
from composer_jax.serve.api import chat_format
from tests.fleet import groups, worlds
from tests.serve import scripted, service_test

ROUTES = codec.RouteScheme(num_experts=4, num_active=2, layers=(0, 1))
RULES = dataclasses.replace(groups.RULES, routes=ROUTES)
VERSION, TURNS = 1, 6


def policy(version, letter='a'):
  return seams.PlacedPolicy(
    version=version,
    target_id=64 * letter,
    variables=types.SimpleNamespace(version=version),
    received={},
  )


def request(session, token):
  return records.SampleRequest(
    session=session,
    context_T=np.array([token], np.int32),
    max_new_tokens=1,
    stop_tokens=(),
    seed=(0,),
  )


def play(task, policy, *, group, member, seed):
  """An episode of some turns, whose rollout any worker would make."""
  del task, seed
  for turn in range(TURNS):
    policy.complete(request(f'{group}/{member}', turn))
  policy.close(f'{group}/{member}')
  return groups.make_group(group, 0, range(member, member + 1)).rollouts[0]


@pytest.fixture
def lent(tmp_path, tokenizer):
  """A server, its world of trainers and workers, and what it submitted."""
  world = worlds.World(tmp_path)
  world.trainer.announce(VERSION)
  script = lambda r: service_test.ENDLESS if is_clients(r.session) else [5]
  engine = scripted.ScriptedEngine(script, num_slots=4, version=0, max_len=2000)
  log, submit = [], engine.submit

  def submitted(request, *arguments, **options):
    log.append((request.session, [*engine.works]))
    submit(request, *arguments, **options)

  engine.submit = submitted
  names = map('lender-{}'.format, itertools.count())

  def join():
    leases = holder.StoredLeases(
      world.docs(),
      next(names),
      holder.HolderTimes(beat_s=0.0, poll_s=0.01),
      capacity=8,
      setup=world.trainer._digest,
      rules=RULES,
      while_waiting=lambda: world.turn([], seconds=0.01),
    )
    leases.start = lambda: None
    leases.deliver = delivering(world, leases)
    return leases

  leases, news = join(), [policy(VERSION)]
  receiver = types.SimpleNamespace(
    take=lambda: news.pop() if news else None,
    drop=lambda weights_before: None,
    served=lambda policy, **_: dict(stage='received', step=0, time=0.0),
  )
  served = rollout_worker.Served(engine, policy(0), receiver, leases.note)
  collector = collect.Collector(
    task_of_group=lambda group: None, play=play, rollouts_per_group=4, seed=0
  )
  worker = rollout_worker.RolloutWorker(
    collector, {}, leases, served, join=join, is_lent=True
  )
  with contextlib.ExitStack() as stack:
    stack.callback(worker.close)
    server = stack.enter_context(
      scripted.serving(
        engine,
        tokenizer,
        chat_format.OwnFormat(tokenizer),
        guest=lending.Lender(worker),
      )
    )
    yield types.SimpleNamespace(
      world=world,
      server=server,
      log=log,
      leases=leases,
      news=news,
      worker=worker,
    )


def delivering(world, leases):
  deliver = leases.deliver

  def of_policy_zero(lease, group):
    del group  # Rewards and routes are those of `groups`.
    members = range(lease.first, lease.stop)
    version = lease.order.min_version
    deliver(lease, groups.make_group(lease.order.group, version, members))

  return of_policy_zero


def is_clients(session):
  return session.startswith('request/')


def rollouts_of(log):
  return [entry for entry in log if not is_clients(entry[0])]


def test_rollouts_wait_while_a_client_asks_and_go_on_after(lent):
  scripted.wait_for(lambda: len(lent.log) > 8)
  for _ in range(3):
    sock = service_test._begin(lent.server, {'max_tokens': 150})
    scripted.wait_for(lambda: any(map(is_clients, [*lent.server.engine.works])))
    service_test._read(sock)
    sock.close()
    begun = len(lent.log)
    scripted.wait_for(
      lambda begun=begun: (
        len(lent.log) > begun + 4 or lent.world.version == worlds.STEPS
      )
    )
  scripted.wait_for(lambda: lent.world.version == worlds.STEPS)
  # No turn of an episode was begun beside a client, and nothing else changed.
  works = [name for _, names in rollouts_of(lent.log) for name in names]
  assert not [*filter(is_clients, works)]
  assert lent.world.trained == worlds.expected()


def test_episodes_leave_slots_free(lent):
  scripted.wait_for(lambda: lent.world.version == worlds.STEPS)
  # Of four slots, the one that is being taken included.
  assert max(len(names) + 1 for _, names in lent.log) == 3


def test_leases_that_wait_too_long_go_to_others_with_their_turns(lent):
  scripted.wait_for(
    lambda: any(
      len(turns) > 1
      for kept in [*lent.leases._kept.values()]
      for turns in kept.turns().turns.values()
    )
  )
  # Without patience: all that is begun is given back at once.
  sock = service_test._begin(lent.server, {'max_tokens': 1900})
  world = lent.world
  scripted.wait_for(lambda: world.ledger().lost.get('left', 0) > 0)
  entries = world.ledger().entries.values()
  parts = [p for e in entries for p in e.parts if not p.upload]
  assert any(p.saved for p in parts)
  assert {p.saved[2] for p in parts if p.saved} == {VERSION}
  assert not [p for p in parts if p.is_leased and p.worker == 'lender-0']
  sock.close()
  # And it takes leases again.
  scripted.wait_for(lambda: world.version == worlds.STEPS)
  assert world.trained == worlds.expected()


def test_a_server_leaves_a_run_that_is_over(lent):
  scripted.wait_for(lambda: lent.world.version == worlds.STEPS)
  take = lent.worker.before_step

  def ended():
    take()
    lent.leases.is_over = True

  lent.worker.before_step = ended
  scripted.wait_for(lambda: lent.server.served.problem)
  assert lent.server.served.problem == 'The run is over.'
  # An episode that asked nevertheless would wait without end.
  refused = []

  def ask():
    try:
      lent.worker.policy.complete(request('late', 0))
    except RuntimeError as error:
      refused.append(error)

  threading.Thread(target=ask, daemon=True).start()
  scripted.wait_for(lambda: refused)


def test_a_server_joins_a_run_again_that_was_rewound(lent, client):
  world = lent.world
  scripted.wait_for(
    lambda: any(k.turns().turns for k in [*lent.leases._kept.values()])
  )
  # The last comes first: equal weights of a version that it served change
  # nothing, an older version is of a run that was rewound.
  sock = service_test._begin(lent.server, {'max_tokens': 150})
  scripted.wait_for(lambda: any(map(is_clients, [*lent.server.engine.works])))
  lent.server.engine.go.clear()
  lent.news += [policy(VERSION, 'b'), policy(0, 'b'), policy(VERSION)]
  scripted.wait_for(lambda: not lent.news[1:])
  # Whom it serves goes on with the weights it began with.
  assert lent.server.engine.swaps == [VERSION] * 2
  lent.server.engine.go.set()
  service_test._read(sock)
  sock.close()
  scripted.wait_for(lambda: world.version == worlds.STEPS)
  assert lent.server.served.problem == ''
  assert world.trained == worlds.expected()
  assert lent.server.engine.swaps == [VERSION, VERSION, 0, VERSION]
  # What was begun, if anything, came back at once: no lease of the first name
  # fell silent.
  ledger = world.ledger()
  assert set(ledger.lost) <= {'left'}
  workers = {p.worker for e in ledger.entries.values() for p in e.parts}
  assert lent.worker.leases.name == 'lender-1' in workers
  answer = client(lent.server).chat.completions.create(
    **service_test.CHAT | {'max_tokens': 5}
  )
  assert answer.usage.completion_tokens == 5


def test_clients_are_served_on_when_the_run_ends_or_fails(lent, client):
  scripted.wait_for(lambda: len(lent.log) > 4)
  assert lent.world.ledger().epochs_of('lender-0')

  def fail():
    raise ValueError('The run goes on with another setup.')

  lent.worker.before_step = fail
  scripted.wait_for(lambda: lent.server.served.problem)
  assert 'another setup' in lent.server.served.problem
  # Others get its leases, though nothing stalled and no clock went on.
  world = lent.world
  is_told = lambda: (world.turn([], seconds=0.0), world.ledger())[1]
  scripted.wait_for(lambda: not is_told().epochs_of('lender-0'))
  assert set(world.ledger().lost) <= {'left'}
  answer = client(lent.server).chat.completions.create(
    **service_test.CHAT | {'max_tokens': 5}
  )
  assert answer.usage.completion_tokens == 5
  lent.server.settle()


def test_an_answer_under_way_when_lending_ends_is_whole(lent):
  """Episodes end between two steps; the client's session is not theirs."""
  engine, worker = lent.server.engine, lent.worker
  scripted.wait_for(lambda: len(lent.log) > 4)
  body = {'max_tokens': 150, 'stream_options': {'include_usage': True}}
  sock = service_test._begin(lent.server, body)
  scripted.wait_for(lambda: any(map(is_clients, [*engine.works])))

  def fail():
    raise ValueError('The run goes on with another setup.')

  worker.before_step = fail
  text = service_test._read(sock)
  sock.close()
  assert 'another setup' in lent.server.served.problem
  assert '"completion_tokens":150' in text.replace(' ', '')
  scripted.wait_for(lambda: not engine.works)
  assert not [name for name in engine.held if not is_clients(name)]
