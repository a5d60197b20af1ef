"""Leases move as they must, whoever dies, hangs, lies or comes late."""

import itertools
import json

import pytest

from composer_jax.core import group_bytes
from composer_jax.fleet.leases import holder, reconciler
from composer_jax.fleet.leases import ledger as ledgers
from composer_jax.pipeline import consumption
from tests.fleet import groups, worlds

SEEDS = [
  *(0, 1),
  *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 20)),
]


@pytest.fixture
def world(tmp_path):
  return worlds.World(tmp_path)


def assert_done(world):
  assert world.trained == worlds.expected()
  world.trainer.close(is_over=True)
  last = worlds.check_ledgers(world.store)
  number = worlds.STEPS * worlds.PROMPTS
  assert last.totals() == {'trained': {'family': number}}
  return last


@pytest.mark.parametrize('count', [1, 2, 3, 7])
def test_any_number_of_workers_gives_the_same_groups(world, count):
  workers = [world.worker(f'w{i}') for i in range(count)]
  world.run(workers)
  assert assert_done(world).lost == {}
  for worker in workers:
    worker.turn()
    assert worker.door.is_over


def test_leases_go_to_who_has_least_and_never_above_what_is_wanted(world):
  workers = [world.worker('big', 6), world.worker('small', 2)]
  for _ in range(3):
    world.time += 1
    for worker in workers:
      worker.take()
    world.trainer.tick()
  for worker in workers:
    worker.take()
  members = [sum(h.stop - h.first for h in w.holds) for w in workers]
  assert members == [6, 2]
  starts = [[(h.order.group, h.first) for h in w.holds] for w in workers]
  # In the order of groups: what is trained first is sampled first.
  assert sorted(starts[0] + starts[1]) == [(0, 0), (0, 2), (1, 0), (1, 2)]


def test_who_had_something_refused_comes_after_all_others(world):
  workers = [world.worker('junk', 4), world.worker('sound', 4)]
  part = ledgers.GroupPart(first=0, stop=2, worker='junk')
  world.trainer._reconciler.distrust(9, part)
  for _ in range(3):
    world.time += 1
    for worker in workers:
      worker.take()
    world.trainer.tick()
  for worker in workers:
    worker.take()
  first = [min((h.order.group, h.first) for h in w.holds) for w in workers]
  assert first == [(1, 0), (0, 0)]
  assert [len(w.holds) for w in workers] == [1, 2]
  part = world.ledger().entries[0].parts[0]
  world.trainer._refuse(0, part, 'It is junk.')
  assert part.worker in world.trainer._reconciler._distrusted


def test_who_has_everything_refused_at_once_gives_no_group_up(tmp_path):
  world = worlds.World(tmp_path, max_lost=1)
  bad = world.worker('bad')
  good = [world.worker(f'good{i}', 2) for i in range(2)]
  bad.make = lambda lease, version: groups.changed(
    groups.make_group(lease.order.group, 0, range(lease.first, lease.stop)),
    temperature=2.0,
  )
  for turn in range(200):
    # The others need ten turns for what it has done in one.
    world.turn([bad, *good] if turn % 10 == 0 else [bad])
    if world.version == worlds.STEPS:
      break
  last = assert_done(world)
  assert last.lost['refused'] <= 12


def test_a_worker_that_stops_loses_its_leases_and_what_it_says_then(world):
  slow, other = world.worker('slow'), world.worker('other')
  world.turn([slow])
  world.turn([])
  slow.take()
  held = slow.holds
  assert len(held) == 4
  world.run([other])
  assert any('slow is silent' in line for line in world.said)
  assert_done(world)
  # It goes on where it was: too late, and nothing moves.
  before = world.store.files['fleet/policy/ledger']
  slow.door._leases |= {lease.epoch: lease for lease in held}
  for lease in held:
    slow.door.deliver(lease, slow.make(lease, 0))
  slow.door.sync()
  world.trainer.tick()
  assert world.store.files['fleet/policy/ledger'] == before


@pytest.mark.parametrize('restarts', [False, True])
def test_who_is_missing_from_listings_has_the_time_of_the_silent(
  world, monkeypatch, restarts
):
  worker = world.worker('w')
  world.turn([worker])
  world.turn([])
  find, is_behind = world.store._backend.find, False
  monkeypatch.setattr(
    world.store._backend,
    'find',
    lambda top: {
      key: age
      for key, age in find(top).items()
      if not (is_behind and key.endswith('workers/w'))
    },
  )
  for is_behind in (True, False) * 6:
    if restarts and is_behind:
      world.start()
    world.time += 0.1
    world.trainer.tick()
    worker.door.sync()
  assert not world.ledger().lost and world.ledger().holders() == ['w']
  is_behind = True
  for _ in range(6):
    world.time += 5
    world.trainer.tick()
    worker.door.sync()
  assert world.ledger().lost.keys() == {'silent'}


def test_a_late_result_is_no_ones_and_is_counted(world):
  slow, other = world.worker('slow'), world.worker('other')
  world.turn([slow])
  world.turn([])
  slow.take()
  held, slow.is_stopped = slow.holds, True
  while not any('silent' in line for line in world.said):
    world.turn([])
  # Before it reads orders again, it uploads all the same.
  for lease in held:
    slow.door.deliver(lease, groups.make_group(lease.order.group, 0, range(2)))
  report = slow.door._report
  assert len(report.results) == len(held)
  slow.door._docs.write(
    world.docs().place('workers', 'slow'),
    worlds.dataclasses.asdict(worlds.dataclasses.replace(report, beat=99)),
  )
  world.turn([other])
  assert world.trainer._reconciler.late == len(held)
  # Told once more, and with epochs that it never had.
  results = [
    (e, 'f' * 64, 9) for e in (*range(99), *(r[0] for r in report.results))
  ]
  later = worlds.dataclasses.replace(report, beat=100, results=tuple(results))
  place = world.docs().place('workers', 'slow')
  slow.door._docs.write(place, worlds.dataclasses.asdict(later))
  world.turn([other])
  assert world.trainer._reconciler.late == len(held)
  world.run([other])
  assert_done(world)


def test_what_is_leased_to_one_is_taken_from_no_other(world):
  owner, thief = world.worker('owner'), world.worker('thief', 0)
  world.turn([owner, thief])
  world.turn([])
  owner.take()
  thief.take()
  for lease in owner.holds:
    thief.door._leases[lease.epoch] = lease
    thief.door.deliver(lease, thief.make(lease, 0))
  report = worlds.dataclasses.asdict(thief.door._report) | {'beat': 99}
  docs = world.docs()
  docs.write(docs.place('workers', 'thief'), report)
  world.trainer.tick()
  assert len(report['results']) == 4
  assert world.ledger().epochs_of('owner') == {h.epoch for h in owner.holds}
  thief.is_stopped = True
  world.run([owner])
  assert_done(world)


def test_orders_of_a_reconciler_that_is_behind_are_not_obeyed(world):
  worker = world.worker('w')
  world.turn([worker])
  world.turn([])
  worker.take()
  docs, held = world.docs(), set(worker.door._leases)
  orders = docs.read(docs.place('orders', 'w'))
  old = orders | {'sequence': orders['sequence'] - 1, 'leases': []}
  docs.write(docs.place('orders', 'w'), old)
  worker.door.sync()
  assert held and set(worker.door._leases) == held
  world.run([worker])
  assert_done(world)


def test_orders_that_were_overwritten_unread_are_written_again(world):
  worker = world.worker('w')
  world.turn([worker])
  docs = world.docs()
  place = docs.place('orders', 'w')
  world.turn([])
  orders = docs.read(place)
  assert orders['leases']
  # By one that is behind, just before the worker reads.
  docs.write(place, orders | {'sequence': orders['sequence'] - 1, 'leases': []})
  worker.door.sync()
  assert not worker.door._leases
  world.trainer.tick()
  worker.door.sync()
  assert len(worker.door._leases) == len(orders['leases'])
  world.run([worker])
  assert_done(world)


def test_a_worker_that_only_waits_for_a_policy_is_not_stalled(tmp_path):
  world = worlds.World(tmp_path, stall_s=10.0)
  worker = world.worker('w')
  for _ in range(4):
    world.turn([worker])
  assert world.version == worlds.STEPS or not world.said


def test_a_worker_whose_engine_hangs_loses_its_leases(tmp_path):
  world = worlds.World(tmp_path, stall_s=30.0, lease_s=20.0)
  stuck, other = world.worker('stuck'), world.worker('other')
  world.turn([stuck])
  world.turn([])
  stuck.take()
  assert stuck.holds
  for _ in range(40):
    world.time += 1.0
    stuck.door.sync()  # It reports, and its loop stands still.
    world.trainer.tick()
  assert any('stuck makes no progress' in line for line in world.said)
  assert world.trainer.is_given_up('stuck')
  world.run([other])
  assert assert_done(world).lost.keys() == {'stalled'}


def test_no_lease_lasts_for_ever(tmp_path):
  world = worlds.World(tmp_path, stall_s=30.0, lease_s=20.0, longest_s=100.0)
  busy, other = world.worker('busy'), world.worker('other')
  world.turn([busy])
  world.turn([])
  busy.take()
  assert busy.holds
  for _ in range(150):
    world.time += 1.0
    busy.door.take(0)  # It works, and never delivers.
    busy.door.sync()
    world.trainer.tick()
  assert any('busy takes too long' in line for line in world.said)
  world.run([other])
  assert_done(world)


def test_who_comes_when_the_run_is_over_ends(world, monkeypatch):
  world.run([world.worker('a')])
  late = world.worker('late')
  monkeypatch.setattr(holder, '_UNHEARD_S', 0.0)
  late.door.sync()
  # It might go on, and may only be slow.
  assert not late.door.is_over
  world.trainer.close(is_over=True)
  late.door.sync()
  assert late.door.is_over


@pytest.mark.parametrize('knows', [True, False])
def test_what_a_worker_gives_back_is_leased_at_once(world, knows):
  """Even a lease of orders that it reads when it leaves."""
  leaver, other = world.worker('leaver'), world.worker('other')
  world.turn([leaver])
  world.turn([])
  if knows:
    leaver.take()
  leaver.door.close()
  began = world.time
  world.run([other])
  assert world.time - began < 20
  assert assert_done(world).lost == {'left': 4}


def test_a_notice_drains(world):
  """What is begun ends here; what is not, and what follows, is others'."""
  leaver, other = world.worker('leaver', 16), world.worker('other')
  leaver.pace(drain_s=1e9)
  world.turn([leaver])
  world.turn([])
  leaver.door.sync()
  leaver.take()
  begun = leaver.holds
  later = [
    lease for lease in leaver.door._leases.values() if lease not in begun
  ]
  assert len(begun) == 8 and not later
  leaver.door.leave()
  leaver.take()
  assert not leaver.door.is_over
  world.turn([leaver, other])
  leaver.take()
  assert leaver.door.is_over and leaver.holds == []
  leaver.door.close()
  world.run([other])
  assert assert_done(world).lost == {}


def test_a_drain_that_takes_too_long_gives_back_what_is_begun(world):
  leaver, other = world.worker('leaver'), world.worker('other')
  world.turn([leaver])
  world.turn([])
  leaver.take()
  leaver.door.leave()
  new, ended = leaver.door.take(0)
  assert not new and len(ended) == 4 and leaver.door.is_over
  leaver.door.close()
  world.run([other])
  assert assert_done(world).lost == {'left': 4}


def test_leases_of_a_process_that_ended_go_on_at_once(world):
  dead, other = world.worker('dead'), world.worker('other')
  world.turn([dead])
  world.turn([])
  world.trainer.blame('dead')
  began = world.time
  world.run([other])
  assert world.time - began < 20 and assert_done(world)


@pytest.mark.parametrize('jump', [-1e9, 1e9])
def test_a_clock_that_jumps_takes_no_lease(world, jump):
  workers = [world.worker('a'), world.worker('b')]
  world.turn(workers)
  world.turn([])
  for worker in workers:
    worker.take()
  assert all(worker.holds for worker in workers)
  world.turn([])
  world.time += jump  # Before they report again.
  world.turn([])
  world.turn(workers)
  world.time -= jump / 2
  world.run(workers)
  assert assert_done(world).lost == {} and not world.said


def test_reports_of_an_earlier_start_get_no_lease(world):
  """Until they change: their workers may be long gone."""
  ghost = world.worker('ghost')
  world.turn([ghost])
  world.start()
  other = world.worker('other')
  world.turn([])
  ghosts = world.ledger().leases_of('ghost')
  assert not ghosts
  world.run([other])
  assert_done(world)


# Trouble with the store and the reconciler.


def kills(after):
  return 'kill after' if after else 'kill'


def run_with_a_kill(tmp_path, number, after):
  """Kills the trainer at its request of a number; returns False if none."""
  world = worlds.World(tmp_path)
  workers = [world.worker('a'), world.worker('b', 4)]
  asked = itertools.count()
  world.store.trouble = lambda name, key: (
    kills(after) if is_trainer[0] and next(asked) == number else ''
  )
  is_trainer = [False]
  for _ in range(200):
    if world.version == worlds.STEPS:
      break
    world.time += 1
    is_trainer[0] = True
    try:
      world.trainer.tick()
      world.train()
      # As often as a checkpoint is durable.
      if world.version >= 2:
        world.trainer.collect(worlds.PROMPTS)
    except worlds.Killed:
      # Goes on from the last checkpoint: some version before.
      saved = max(world.version - number % 2, min(world.version, 1), 0)
      world.start(saved)
    is_trainer[0] = False
    for worker in workers:
      worker.turn()
  assert next(asked) > 10
  assert_done(world)
  return next(asked) > number + 2


@pytest.mark.parametrize(
  'after, start, step',
  [
    (False, 0, 7),
    (True, 3, 7),
    pytest.param(*(False, 0, 1), marks=pytest.mark.slow),
    pytest.param(*(True, 0, 1), marks=pytest.mark.slow),
  ],
)
def test_a_reconciler_killed_at_any_request_loses_and_repeats_nothing(
  tmp_path, after, start, step
):
  number = start
  while run_with_a_kill(tmp_path, number, after):
    number += step
  assert number > 30


@pytest.mark.parametrize('seed', SEEDS)
def test_two_reconcilers_at_once_do_no_harm(world, seed):
  rng = worlds.rng_of(seed)
  rival = reconciler.Reconciler(
    world.docs(),
    world.trainer._options,
    setup=world.trainer._digest,
    clock=lambda: world.time,
  )
  workers = [world.worker('a'), world.worker('b'), world.worker('c', 2)]
  for _ in range(300):
    if world.version == worlds.STEPS:
      break
    world.time += 1
    actors = [world.trainer.tick, rival.tick, world.train]
    actors += [worker.turn for worker in workers]
    for actor in rng.permutation(len(actors)):
      if rng.random() < 0.7:
        actors[actor]()
  assert_done(world)


@pytest.mark.parametrize('seed', SEEDS)
@pytest.mark.parametrize('trouble', ['fail', 'lose'])
def test_answers_that_are_lost_lose_and_repeat_nothing(world, seed, trouble):
  rng = worlds.rng_of(seed)
  workers = [world.worker('a'), world.worker('b'), world.worker('c', 2)]
  world.store.trouble = lambda name, key: trouble * (rng.random() < 0.15)
  world.run(workers, rounds=2000)
  world.store.trouble = lambda name, key: ''
  assert_done(world)


def test_a_ledger_that_is_damaged_is_begun_anew(world):
  workers = [world.worker('a'), world.worker('b')]
  for _ in range(3):
    world.turn(workers)
  ledger = world.store.files['fleet/policy/ledger']
  world.store.files['fleet/policy/ledger'] = ledger[:-9]
  world.store.tags['fleet/policy/ledger'] += 1
  world.run(workers)
  assert any('damaged' in line for line in world.said)
  assert world.trained == worlds.expected()


# What workers upload.


def test_the_same_members_with_other_bytes_change_nothing(world):
  first = world.worker('first')
  world.turn([first])
  world.turn([])
  first.take()
  lease = first.holds[0]
  members = range(lease.first, lease.stop)
  first.door.deliver(lease, first.make(lease, 0))
  first.door.sync()
  world.trainer.tick()
  accepted = world.ledger().entries[0].parts[0].upload
  other = groups.changed(groups.make_group(0, 0, members))
  other = groups.changed(
    other, logprobs_T=other.rollouts[0].trajectories[0].logprobs_T * 2
  )
  first.door._leases[lease.epoch] = lease
  first.door.deliver(lease, other)
  docs = world.docs()
  report = worlds.dataclasses.asdict(first.door._report) | {'beat': 99}
  docs.write(docs.place('workers', 'first'), report)
  world.trainer.tick()
  assert world.ledger().entries[0].parts[0].upload == accepted
  first.door._leases.clear()
  world.run([first])
  assert_done(world)


def damaged(upload):
  return lambda data: upload


LIES = {
  'hostile bytes': lambda group: b'\x93NUMPY' * 50,
  'nothing': lambda group: b'',
  'another group': lambda group: group_bytes.to_bytes(
    groups.make_group(group.group + 1, 0, range(2))
  ),
  'other members': lambda group: group_bytes.to_bytes(
    groups.make_group(group.group, 0, range(4))
  ),
}


@pytest.mark.parametrize('lie', LIES)
def test_an_upload_that_is_refused_is_sampled_by_another(
  world, lie, monkeypatch
):
  liar, honest = world.worker('liar'), world.worker('honest')
  docs, upload = liar.door._docs, liar.door._docs.upload
  monkeypatch.setattr(
    docs,
    'upload',
    lambda lease, data: upload(lease, LIES[lie](group_bytes.from_bytes(data))),
  )
  # Alone at first, so that it gets a lease.
  world.turn([liar])
  world.turn([liar])
  liar.capacity = 0
  world.run([honest])
  assert any('is refused' in line for line in world.said)
  last = assert_done(world)
  assert last.lost['refused'] > 0


def test_an_upload_that_is_gone_is_sampled_anew(world):
  worker = world.worker('w')
  world.turn([worker])
  world.turn([worker])
  world.trainer.tick()
  for key in [k for k in world.store.files if '/groups/' in k][:1]:
    del world.store.files[key]
  world.run([worker])
  assert any('is gone' in line for line in world.said)
  assert_done(world)


def test_a_group_that_nobody_can_sample_has_a_fate_and_ends_no_run(tmp_path):
  world = worlds.World(tmp_path, max_lost=2)
  workers = [world.worker('a'), world.worker('b')]

  for worker in workers:
    make = worker.make
    worker.make = lambda lease, version, make=make: (
      groups.make_group(9, 0, range(2))
      if (lease.order.group, lease.first) == (1, 0)
      else make(lease, version)
    )
  world.run(workers)
  given = worlds.expected()
  assert world.trained == [given[0][:1], *given[1:]]
  world.trainer.close(is_over=True)
  last = worlds.check_ledgers(world.store)
  assert last.totals() == {
    'infrastructure': {'family': 1},
    'trained': {'family': 5},
  }
  assert last.lost == {'refused': 3}


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'beat': -1}, 'counts'),
    ({'beat': True}, 'counts'),
    ({'capacity': 2**40}, 'counts'),
    ({'results': [[1, 'x', 3]]}, 'by their hash'),
    ({'results': [[1, 'a' * 64]]}, 'no report'),
    ({'results': [[1, 'a' * 64, 3]] * 10_001}, '10000 results'),
    ({'rows': [[0, {'stage': 'received'}]]}, 'another type'),
    ({'is_leaving': 1}, 'another type'),
    ({'more': 1}, 'no report'),
  ],
)
def test_a_report_is_believed_in_nothing(world, fields, message, caplog):
  world.worker('w').door.sync()
  docs = world.docs()
  report = docs.read(docs.place('workers', 'w'))
  docs.write(docs.place('workers', 'w'), report | fields)
  worker = world.worker('honest')
  world.run([worker])
  assert message in caplog.text
  assert_done(world)


def test_a_document_of_another_place_or_key_is_not_believed(world, caplog):
  world.worker('w').door.sync()
  place = 'fleet/policy/workers/'
  world.store.files[place + 'v'] = world.store.files[place + 'w']
  data = bytearray(world.store.files[place + 'w'])
  data[10] ^= 1
  world.store.files[place + 'w'] = bytes(data)
  world.trainer.tick()
  world.trainer.tick()
  assert caplog.text.count('cannot be trusted') >= 2
  assert not world.ledger().holders()


def test_fates_are_counted_by_family_and_uploads_deleted_for_good(world):
  worker = world.worker('w')
  world.run([worker])
  world.trainer.collect(4)
  world.trainer.tick()
  kept = [k for k in world.store.files if '/groups/' in k]
  assert sorted({int(k.split('/')[-1].split('.')[0]) for k in kept}) == [4, 5]
  ledger = world.ledger()
  assert sorted(ledger.folded) == [0, 1, 2, 3] and ledger.floor == 4
  assert ledger.totals() == {'trained': {'family': 6}}


def test_what_others_left_in_a_store_is_passed_over(world):
  odd = [
    f'fleet/policy/{kind}/{name}'
    for kind in ('groups', 'turns', 'workers')
    for name in ('00000000.0-4.a b', '..', 'é', '0.\udce9')
  ]
  world.store.files |= dict.fromkeys(odd, b'x')
  world.run([world.worker('w')])
  world.trainer.collect(4)
  world.trainer.tick()
  assert world.ledger().floor == 4 and world.store.files.keys() >= {*odd}
  assert_done(world)


def test_lines_of_metrics_reach_the_workdir_once(world, tmp_path):
  worker = world.worker('w')
  for step in range(3):
    worker.door.note({'stage': 'received', 'step': step, 'time': 0.0})
  world.run([worker])
  world.trainer.close(is_over=True)
  lines = (tmp_path / 'received.jsonl').read_text().splitlines()
  rows = [worlds.json.loads(line) for line in lines]
  assert [(r['step'], r['worker']) for r in rows] == [
    (i, 'w') for i in range(3)
  ]


@pytest.mark.parametrize(
  'fields',
  [
    {'wait_s': 10**400},
    {'wait_s': -1e300},
    {'route': ['key 0', 2**53]},
    {'stage': 'rl'},
    {'stage': ['received']},
    {'step': 10**400},
    {'time': 'x'},
    {'time': None},
    {'more': [[1]]},
    {'more': {'x': 1}},
    {'more': 'x' * 8192},
  ],
)
def test_a_line_that_no_worker_writes_is_left_out(world, tmp_path, fields):
  worker = world.worker('w')
  world.turn([worker])
  good = {'stage': 'received', 'step': 1, 'time': 0.5, 'route': ['key 0']}
  good |= {'wait_s': 1.0, 'sample_s': 1}
  worker.door.note(good | fields)
  worker.door.note(good)
  world.turn([worker])
  world.turn([worker])
  world.trainer.close(is_over=True)
  lines = (tmp_path / 'received.jsonl').read_text().splitlines()
  assert list(map(worlds.json.loads, lines)) == [good | {'worker': 'w'}]


def test_names_of_workers_are_plain():
  for name in ('', '../x', 'a/b', 'x' * 101, '.hidden'):
    with pytest.raises(ValueError, match='the name of a worker must be'):
      reconciler.documents.check_name(name)


def test_the_family_is_what_a_task_begins_with():
  assert ledgers.family_of('list_functions/train/0/3') == 'list_functions'


class Trainer:
  """Takes what is ready, dies and goes back, with a ledger alone.

  Attributes:
    taken: groups of each step that stands.
    fates: what became of every group that a step took, as it was then.
  """

  window = consumption.GroupWindow(
    prompts=3, max_staleness=2, overtake=4, steps=12
  )

  def __init__(self, rng):
    self._rng, self.taken, self.fates = rng, [], {}
    self.ledger = ledgers.LeaseLedger(max_lost=0)
    self.queue = consumption.GroupQueue(self.window)

  def counts(self, groups):
    counts = {}
    for group in groups:
      families = counts.setdefault(self.fates[group], {})
      family = 'ab'[group % 2]
      families[family] = families.get(family, 0) + 1
    return counts

  def go_back(self, version):
    """Dies; another goes on from a checkpoint."""
    del self.taken[version:]
    plain = json.loads(json.dumps(self.ledger.to_json()))
    self.ledger = ledgers.from_json(plain, max_lost=0)
    taken = sum(self.taken, [])
    self.queue = consumption.GroupQueue(self.window, taken)
    first, ahead = self.queue.first, self.queue.ahead
    self.ledger.rewind(version, first, lambda *_: False, ahead)
    assert self.ledger.totals() == self.counts(taken)

  def turn(self):
    """Has some parts sampled, and trains if it can."""
    version = len(self.taken)
    # Those that are known are left as they are, be they trained ahead.
    for group in range(self.queue.first, self.window.admitted(version)):
      fields = dict(task_id=f'{"ab"[group % 2]}/{group}', min_version=0)
      order = worlds.seams.GroupOrder(group=group, rewards={}, **fields)
      self.ledger.admit(order, 2, 1)
    for group, part in [*self.ledger.waiting()]:
      if self._rng.random() < 0.5:
        self.ledger.put_back(group, part)
        continue
      self.ledger.lease(group, part, 'w')
      if self._rng.random() < 0.1:
        self.ledger.lose(part.epoch, ledgers.STALLED)
      else:
        self.ledger.accept('w', part.epoch, ('f' * 64, 1))
    entries = self.ledger.entries
    is_ready = lambda e: e.is_finished or e.fate
    ready = lambda groups: [g for g in groups if is_ready(entries[g])]
    picked = self.queue.pick(version, ready)
    if len(picked) < self.window.prompts:
      return
    self.fates |= {g: entries[g].fate or ledgers.TRAINED for g in picked}
    self.taken.append(picked)
    self.queue.take(picked)
    if self._rng.random() < 0.7:  # Else it may die before the ledger knows.
      for group in sum(self.taken, []):
        self.ledger.settle(group, ledgers.TRAINED)
      saved = int(self._rng.integers(0, version + 1))
      self.ledger.fold(self.window.due(saved))


@pytest.mark.parametrize('seed', SEEDS)
def test_fates_add_up_to_the_groups_whatever_is_gone_back_to(seed):
  """Also below groups that are counted, and beside those trained ahead."""
  rng = worlds.rng_of(seed)
  trainer, jumps = Trainer(rng), 30
  while (version := len(trainer.taken)) < trainer.window.steps or jumps:
    if jumps and rng.random() < 0.2:
      jumps -= 1
      trainer.go_back(int(rng.integers(0, version + 1)))
    elif version < trainer.window.steps:
      trainer.turn()
  trainer.go_back(trainer.window.steps)
  groups = [g for step in trainer.taken for g in step]
  assert sorted(groups) == list(range(36))
  trainer.ledger.end()
  assert trainer.ledger.totals() == trainer.counts(groups)


def test_groups_above_a_bound_are_remembered_and_the_others_counted(
  monkeypatch,
):
  monkeypatch.setattr(ledgers, '_FOLDED', 4)
  trainer = Trainer(worlds.rng_of(0))
  while len(trainer.taken) < 12:
    trainer.turn()
  trainer.go_back(12)
  ledger, whole = trainer.ledger, trainer.ledger.totals()
  assert sorted(ledger.folded) == [32, 33, 34, 35]
  ledger.rewind(11, 34, lambda *_: False)
  assert ledger.totals() == trainer.counts(range(34)) != whole
  # What is counted alone cannot be taken back group by group.
  ledger.rewind(10, 30, lambda *_: False)
  assert ledger.totals() == {} and ledger.floor == 30


def test_what_was_trained_ahead_stays_trained(tmp_path):
  """A version may have trained on groups above one that it has not."""
  ledger = ledgers.LeaseLedger()
  for group in range(4):
    fields = dict(task_id='a/0', min_version=0, rewards={})
    ledger.admit(worlds.seams.GroupOrder(group=group, **fields), 2, 2)
  for _ in range(3):
    group, part = next(ledger.waiting())
    ledger.lease(group, part, 'w')
    ledger.accept('w', part.epoch, ('f' * 64, 1))
  for group in (1, 2):
    ledger.settle(group, 'trained')
  # The checkpoint has 1; that 2 was trained, too, never was.
  kept = ledger.rewind(1, 0, lambda group, part: False, ahead={1})
  fates = {g: e.fate for g, e in ledger.entries.items()}
  assert fates == {0: '', 1: 'trained', 2: '', 3: ''}
  assert kept == (2, 0) and [g for g, _ in ledger.waiting()] == [3]


def test_a_plan_is_read_again_once_the_store_answers(world):
  """Another process of the trainer waits for its store, as the first does."""
  worker = world.worker('w')
  while not (ids := world.trainer.finished(range(4))):
    world.time += 1
    worker.turn()
    world.trainer.tick()
  assert world.trainer.finished([*ids, 99]) == ids
  plan = json.loads(json.dumps(world.trainer.plan(ids)))
  failing = {'/groups/': 'fail'}
  world.store.trouble = lambda name, key: next(
    (trouble for part, trouble in failing.items() if part in key), ''
  )
  world.said.clear()
  assert [world.trainer.read(plan) for _ in range(3)] == [None] * 3
  assert world.said == ['the trainer waits for its store: no answer']
  failing.clear()
  again = world.trainer.read(plan)
  # What was read while the trainer trained needs no store.
  world.trainer.ready([0], lambda group: '')
  world.trainer._whole_groups.clear()
  world.trainer._read_ahead()
  failing['/groups/'] = 'fail'
  assert world.trainer.ready(ids[:1], lambda group: '') is not None
  failing.clear()
  ready = world.trainer.ready(ids, lambda group: '')
  assert list(map(group_bytes.to_bytes, again)) == list(
    map(group_bytes.to_bytes, ready)
  )
