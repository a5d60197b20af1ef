"""Turns of a worker that leaves or dies reach the next one, or nobody."""

import dataclasses

import numpy as np
import pytest

from composer_jax.core import group_bytes, played, records, seams
from composer_jax.fleet.leases import documents, holder, turn_bytes, uploads
from composer_jax.fleet.leases import ledger as ledgers
from tests.fleet import groups, worlds

PLACE = 'fleet/policy/turns/'


def make_turn(start=0, version=0, size=3):
  rng = np.random.default_rng((start, version))
  ids_TMA = np.argsort(rng.random((size, 1, 4)), axis=-1)[..., :2]
  versions_T = np.full(2, version, np.int32)
  return played.turn_of(
    np.arange(size - 1, dtype=np.int32),
    records.Completion(
      session='x',
      tokens_T=np.array([1, 2], np.int32),
      logprobs_T=-rng.random(2).astype(np.float32),
      policy_version_T=versions_T,
      context_version_T=versions_T,
      consumed_expert_ids_TMA=ids_TMA.astype(np.uint16),
      consumed_version_T=np.full(size, version, np.int32),
      routes_start=start,
      stopped=True,
    ),
  )


def make_saved(lease, count=2, version=0, **fields):
  turns = tuple(make_turn(3 * i, version) for i in range(count))
  values = dict(
    group=lease.order.group,
    task_id=lease.order.task_id,
    turns={lease.first: turns} if turns else {},
    policies={version: f'{version:064x}'} if turns else {},
  )
  return played.SavedTurns(**values | fields)


def lease_of(**fields):
  order = seams.GroupOrder(
    group=3,
    task_id=groups.TASK.format(3),
    min_version=0,
    rewards=groups.REWARDS,
  )
  values = dict(epoch=1, order=order, first=1, stop=3, saved=('a' * 64, 9, 1))
  return seams.Lease(**values | fields)


def with_answer(**fields):
  turn = make_turn()
  completion = dataclasses.replace(turn.completion, **fields)
  return {1: (dataclasses.replace(turn, completion=completion),)}


def test_honest_turns_are_read_as_they_were_saved():
  lease = lease_of()
  data = turn_bytes.to_bytes(make_saved(lease, 3))
  assert (
    turn_bytes.to_bytes(uploads.read_saved(data, lease, groups.RULES)) == data
  )


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'group': 4}, 'of group 4'),
    ({'task_id': 'other'}, "task 'other'"),
    ({'turns': {0: (make_turn(),)}}, r'members \[0\], not of 1 to 2'),
    ({'turns': with_answer(tokens_T=np.array([1, 50], np.int32))}, r'0\.\.49'),
    ({'turns': with_answer(tokens_T=np.array([-1, 5], np.int32))}, r'0\.\.49'),
    (
      {'turns': with_answer(logprobs_T=np.array([0.5, -1], np.float32))},
      'must be <= 0',
    ),
    (
      {'turns': with_answer(logprobs_T=np.array([-np.inf, 0], np.float32))},
      'all finite',
    ),
    (
      {
        'turns': with_answer(
          consumed_expert_ids_TMA=np.tile(np.uint16([5, 7]), (3, 1, 1))
        )
      },
      r'experts \[5, 7\]',
    ),
    ({'policies': {0: 'x' * 64}}, 'is no hash of weights'),
    ({'turns': {1: (make_turn(),) * 5}}, '20 tokens of at most 16'),
    (
      {'turns': {1: (make_turn(0, 2),)}, 'policies': {2: 'b' * 64}},
      r'versions \[2\], of which all must lie in 0\.\.1',
    ),
  ],
)
def test_turns_that_no_episode_has_are_refused(fields, message):
  lease = lease_of()
  data = turn_bytes.to_bytes(make_saved(lease, **fields))
  with pytest.raises(ValueError, match=message):
    uploads.read_saved(data, lease, groups.RULES)


def test_turns_below_the_version_of_their_order_are_refused():
  order = dataclasses.replace(lease_of().order, min_version=1)
  lease = lease_of(order=order)
  data = turn_bytes.to_bytes(make_saved(lease))
  with pytest.raises(ValueError, match=r'versions \[0\].* lie in 1\.\.1'):
    uploads.read_saved(data, lease, groups.RULES)


def test_an_episode_of_more_windows_may_have_more_tokens():
  lease, rules = lease_of(), dataclasses.replace(groups.RULES, max_windows=2)
  data = turn_bytes.to_bytes(make_saved(lease, turns={1: (make_turn(),) * 5}))
  assert len(uploads.read_saved(data, lease, rules).turns[1]) == 5


@pytest.mark.parametrize(
  'lie, message',
  [
    (lambda turns: turns.append(turns[0]), r'\[1, 1\], not ascending'),
    (lambda turns: turns[0].__setitem__(0, True), 'not ascending'),
    (lambda turns: turns[0][1].clear(), 'no lengths'),
    (lambda turns: turns[0][1][0].__setitem__(0, -1), 'no lengths'),
    (lambda turns: turns[0][1][0].__setitem__(4, 1), 'no lengths'),
  ],
)
def test_a_header_that_lies_is_refused(lie, message):
  data = turn_bytes.to_bytes(make_saved(lease_of()))
  parts = lambda header, arrays, _: (header, arrays)
  header, arrays = group_bytes.guarded(parts, data, 1 << 20)
  lie(header['turns'])
  with pytest.raises(ValueError, match=message):
    turn_bytes.from_bytes(group_bytes.pack(header, arrays), 1 << 20)


def test_routes_of_all_members_share_one_bound():
  ids_TMA = np.tile(np.arange(8, dtype=np.uint16), (3, 1000, 1))
  (turn,) = with_answer(consumed_expert_ids_TMA=ids_TMA)[1]
  one, two = (
    turn_bytes.to_bytes(make_saved(lease_of(), turns=turns))
    for turns in ({1: (turn,)}, {1: (turn,), 2: (turn,)})
  )
  most = ids_TMA.nbytes * 3 // 2
  assert len(turn_bytes.from_bytes(one, most).turns) == 1
  with pytest.raises(ValueError, match='48000 .* the reader takes 24000'):
    turn_bytes.from_bytes(two, most)


def test_lengths_that_wrap_around_an_int64_are_refused():
  arrays = {
    name: np.zeros(0, np.int32)
    for name in ('tokens_T', 'consumed_version_T', 'consumed_expert_ids_TMA')
  }
  arrays['context_T'] = np.zeros(7, np.int32)
  rows = [[2**63 - 1, 0, 0, None, True]] * 2 + [[9, 0, 0, None, True]]
  assert np.cumsum([r[0] for r in rows], dtype=np.uint64)[-1] == 7
  with pytest.raises(ValueError, match='do not have the lengths of context_T'):
    turn_bytes._turns(rows, arrays)


def test_any_flipped_bit_or_cut_is_turns_or_a_value_error():
  lease = lease_of()
  data = turn_bytes.to_bytes(make_saved(lease, 3))
  rng, refused = np.random.default_rng(0), 0
  for at in rng.integers(len(data), size=300):
    damaged = bytearray(data)
    damaged[at] ^= 1 << int(rng.integers(8))
    for bad in (bytes(damaged), data[:at]):
      try:
        uploads.read_saved(bad, lease, groups.RULES)
      except ValueError:
        refused += 1
  assert refused > 500


@pytest.fixture
def world(tmp_path):
  return worlds.World(tmp_path)


def begin(world, name, count=2, version=0):
  """Returns a worker that has leases, and what it has played of them."""
  worker = world.worker(name)
  worker.door._rules = groups.RULES
  worker.pace(save_s=0.0)
  world.turn([worker])
  world.turn([])
  worker.take()
  for lease in worker.holds:
    saved = make_saved(lease, count, version)
    worker.door.keep(lease, lambda saved=saved: saved)
  worker.door.sync()
  return worker, list(worker.holds)


def play_on(worker, leases, count):
  """Has a worker finish turns of its leases, up to a number of each."""
  for lease in leases:
    more = make_saved(lease, count)
    worker.door._kept[lease.epoch].turns = lambda more=more: more


def successor(world):
  worker = world.worker('next', 99)
  worker.door._rules = groups.RULES
  for _ in range(60):
    world.turn([])
    worker.take()
    if len(worker.holds) == 8:  # Of four groups.
      return worker
    worker.door.sync()
  raise AssertionError('no lease came')


def resumed(worker):
  turns = {}
  for lease in worker.holds:
    saved = worker.door.saved(lease)
    span = (lease.order.group, lease.first)
    turns[span] = sum(map(len, saved.turns.values())) if saved else 0
  return turns


@pytest.mark.parametrize('ending', ['killed', 'blamed', 'leaves', 'closes'])
def test_who_comes_next_goes_on_from_the_last_turn(world, ending):
  worker, leases = begin(world, 'first')
  # One turn more, and no time to save it but in a notice.
  play_on(worker, leases, 3)
  worker.door._saves_at = np.inf
  if ending == 'blamed':
    world.trainer.blame('first')
  elif ending == 'leaves':
    worker.door.leave()
    worker.take()
    worker.door.sync()
  elif ending == 'closes':
    worker.door.close()
  after = successor(world)
  turns = 3 if ending in ('leaves', 'closes') else 2
  spans = [(lease.order.group, lease.first) for lease in leases]
  on = {span: count for span, count in resumed(after).items() if count}
  assert on == dict.fromkeys(spans, turns)
  world.run([after])
  assert world.trained == worlds.expected()
  # Nothing of it is left once its group has its fate for good.
  assert [k for k in world.store.files if k.startswith(PLACE)]
  world.trainer.collect(worlds.STEPS * worlds.PROMPTS)
  world.turn([])
  assert not [k for k in world.store.files if k.startswith(PLACE)]


def test_nothing_is_given_back_before_its_turns_are_saved(world):
  worker, leases = begin(world, 'first')
  play_on(worker, leases, 3)
  worker.door._saves_at = np.inf
  worker.door.leave()
  worker.take()
  world.store.trouble = lambda name, key: (
    'fail' if name == 'put' and key.startswith(PLACE) else ''
  )
  docs = world.docs()
  told = lambda: docs.read(docs.place('workers', 'first'))['returned']
  with pytest.raises(ConnectionError):
    worker.door.sync()
  assert not told()
  world.store.trouble = lambda name, key: ''
  worker.door.sync()
  assert len(told()) == len(leases)
  assert 3 in resumed(successor(world)).values()


def test_at_most_two_savings_of_a_lease_are_kept(world):
  worker, leases = begin(world, 'first')
  for count in range(3, 9):
    play_on(worker, leases, count)
    worker.door.sync()
  saved = [k for k in world.store.files if k.startswith(PLACE)]
  assert len(saved) == 2 * len(leases)
  # Turns that were saved are not written again.
  puts = []
  world.store.trouble = lambda name, key: puts.append(key) or ''
  worker.door.sync()
  assert not [key for key in puts if key.startswith(PLACE)]


def test_turns_are_saved_as_often_as_asked_and_not_of_what_is_delivered(world):
  worker, leases = begin(world, 'first')
  puts = []
  world.store.trouble = lambda name, key: (
    puts.append(key) if name == 'put' and PLACE in key else ''
  )
  worker.door.deliver(leases[0], worker.make(leases[0], 0))
  worker.pace(save_s=np.inf)
  for count in (3, 4):
    play_on(worker, leases, count)
    worker.door.sync()
  assert len(puts) == len(leases) - 1


@pytest.mark.parametrize('reason', ['', 'no resuming', 'too long'])
def test_turns_that_nobody_would_read_are_not_saved(world, monkeypatch, reason):
  rules = dataclasses.replace(groups.RULES, resumes=reason != 'no resuming')
  if reason == 'too long':
    monkeypatch.setattr(uploads, 'max_saved_bytes', lambda *_: 10)
  door = holder.StoredLeases(
    world.docs(),
    'w',
    holder.HolderTimes(beat_s=0.0, poll_s=0.0),
    capacity=8,
    setup=world.trainer._digest,
    rules=rules,
    while_waiting=lambda: world.turn([]),
  )
  while not (leases := door.take(0)[0]):
    pass
  door.keep(leases[0], lambda: make_saved(leases[0]))
  door._saves_at = 0.0
  door.sync()
  assert any(PLACE in key for key in world.store.files) == (not reason)


def test_turns_that_a_lease_names_are_not_deleted_by_whoever_has_it(world):
  begin(world, 'first')
  world.trainer.blame('first')
  after = successor(world)
  after.pace(save_s=0.0)
  after.door._saves_at = 0.0
  (lease, *_) = [h for h in after.holds if h.saved]
  # Saved again as they were, and more.
  for count in range(2, 9):
    if count == 2:
      after.door.keep(lease, lambda: make_saved(lease, 2))
    play_on(after, [lease], count)
    after.door.sync()
  assert [key for key in world.store.files if lease.saved[0] in key]


@pytest.mark.parametrize('error', [MemoryError, ValueError, None])
def test_a_record_that_breaks_its_reader_costs_the_turns_alone(
  world, monkeypatch, error
):
  begin(world, 'first')
  worker = world.worker('next', 99)
  worker.door._rules = groups.RULES
  asked = []
  if error:
    monkeypatch.setattr(uploads, 'read_saved', raising(error))
  else:
    # It is not even read if it is longer than any.
    monkeypatch.setattr(uploads, 'max_saved_bytes', lambda *_: 10)
    world.store.trouble = lambda name, key: asked.append((name, key)) or ''
  for _ in range(60):
    world.turn([])
    worker.take()
    worker.door.sync()
    if len(worker.holds) == 8:
      break
  assert not any(resumed(worker).values())
  assert not [key for name, key in asked if name != 'put' and PLACE in key]
  world.run([worker])
  assert world.trained == worlds.expected()


def raising(error):
  def fail(*_):
    raise error('broken')

  return fail


@pytest.mark.parametrize('trouble', ['gone', 'damaged'])
def test_turns_that_cannot_be_used_cost_the_turns_alone(world, trouble):
  begin(world, 'first')
  for key in [k for k in world.store.files if k.startswith(PLACE)]:
    if trouble == 'gone':
      del world.store.files[key]
    else:
      world.store.files[key] = world.store.files[key][:-1] + b'x'
  after = successor(world)
  assert set(resumed(after).values()) == {0}
  world.run([after])
  assert world.trained == worlds.expected()


def test_turns_of_a_policy_that_nobody_announced_are_no_ones(world):
  begin(world, 'liar', version=7)
  after = successor(world)
  assert {lease.saved for lease in after.holds} == {None}


def test_turns_wait_for_a_worker_with_their_policy(world):
  world.version = 1
  world._admit()
  begin(world, 'first', version=1)
  world.version = 0  # What the next worker serves.
  after = world.worker('next', 99)
  after.door._rules = groups.RULES
  for _ in range(40):
    world.time += 1.0
    world.trainer.tick()
    after.take()
    after.door.sync()
  assert after.holds and not any(lease.saved for lease in after.holds)
  world.version = 1
  after.take()
  assert 2 in resumed(after).values()


@pytest.mark.parametrize('reason', ledgers.REASONS)
def test_turns_that_a_silent_lease_began_from_are_given_to_no_other(reason):
  ledger = ledgers.LeaseLedger(max_lost=9)
  ledger.admit(lease_of().order, 2, 2)
  (part,) = ledger.entries[3].parts
  for epoch, saved in ((1, ('a' * 64, 9, 0)), (2, None)):
    ledger.lease(3, part, 'w')
    ledger.lose(epoch, reason, saved)
  is_kept = reason not in (ledgers.SILENT, ledgers.STALLED)
  assert (part.saved is not None) == is_kept


def test_a_refused_group_takes_its_turns_with_it(world):
  begin(world, 'first')
  after = successor(world)
  wrong = groups.make_group(9, 0, range(2))
  lease = next(h for h in after.holds if h.saved)
  after.door.deliver(lease, wrong)
  after.door.sync()
  world.turn([])
  part = next(
    p
    for p in world.ledger().entries[lease.order.group].parts
    if p.first == lease.first
  )
  assert part.saved is None


def test_a_trainer_that_goes_back_voids_turns_of_later_policies(world):
  world.version = 1
  world._admit()
  begin(world, 'first', version=1)
  world.trainer.blame('first')
  world.trainer.tick()
  world.trainer.close(is_over=False)
  saved = lambda: [
    p.saved for e in world.ledger().entries.values() for p in e.parts
  ]
  assert any(saved())
  world.start(version=0)
  assert not any(saved())


@pytest.mark.parametrize('version', range(5))
def test_who_goes_back_has_the_newest_turns_that_are_not_void(version):
  ledger = ledgers.LeaseLedger()
  ledger.admit(lease_of().order, 2, 2)
  ledger.announce(4)
  (part,) = ledger.entries[3].parts
  savings = [(f'{n:064x}', 9, v) for n, v in enumerate((1, 1, 2, 4))]
  for epoch, saved in enumerate(savings, 1):
    ledger.lease(3, part, 'w')
    ledger.lose(epoch, ledgers.LEFT, saved)
  ledger.lease(3, part, 'w')
  ledger = ledgers.from_json(ledger.to_json())
  ledger.rewind(version, 0, lambda *_: False)
  (part,) = ledger.entries[3].parts
  expected = [None, *savings[1:3], savings[2], savings[3]]
  assert part.saved == expected[version]


def test_many_savings_of_one_version_push_out_none_of_a_lower():
  ledger = ledgers.LeaseLedger()
  ledger.admit(lease_of().order, 2, 2)
  ledger.announce(1)
  (part,) = ledger.entries[3].parts
  for epoch, version in enumerate((0, *[1] * 9), 1):
    ledger.lease(3, part, 'w')
    ledger.lose(epoch, ledgers.LEFT, (f'{epoch:064x}', 9, version))
  ledger.rewind(0, 0, lambda *_: False)
  assert part.saved == (f'{1:064x}', 9, 0)


@pytest.mark.parametrize(
  'saved',
  [[[1, 'x', 3, 0]], [[1, 'a' * 64, 3]], [[1, 'a' * 64, 3, -1]], [1]],
)
def test_a_report_of_turns_is_believed_in_nothing(world, saved):
  world.worker('w').door.sync()
  docs = world.docs()
  value = docs.read(docs.place('workers', 'w')) | {'saved': saved}
  with pytest.raises(ValueError, match=r'report'):
    documents.to_report(value)


def test_a_ledger_without_saved_turns_is_read(world):
  begin(world, 'first')
  value = world.ledger().to_json()
  before = ledgers.from_json(value).to_json()
  for _, parts, _ in value['entries']:
    for part in parts:
      assert part.pop() == [] and part.pop() is None
  assert ledgers.from_json(value | {'format': 1}).to_json() == before
