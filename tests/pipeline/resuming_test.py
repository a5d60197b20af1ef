"""Episodes go on, on an engine that never saw them, without changing a bit."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.core import group_bytes, played
from composer_jax.fleet.leases import turn_bytes
from composer_jax.pipeline import stages
from composer_jax.rl import collect
from composer_jax.rollout import server
from tests.pipeline import runs, sync_equality_test

tokenizer = sync_equality_test.tokenizer
spec_of_run = sync_equality_test.spec


@pytest.fixture(scope='module')
def spec(spec_of_run):
  model = dataclasses.replace(
    spec_of_run.model,
    numerics='batch_invariant',
    num_layers=1,
    num_dense_layers=0,
  )
  episode = dataclasses.replace(spec_of_run.episode, max_call_tokens=24)
  return dataclasses.replace(spec_of_run, model=model, episode=episode)


@pytest.fixture(scope='module')
def play(spec, tokenizer):
  """play(resumed) plays group 1 on a new engine; returns it and its turns."""
  values = sync_equality_test.random_policy(spec.model)

  def play(resumed, **fields):
    engine = stages.make_engine(spec, values, 0)
    policy = server.EnginePolicy(engine)
    with contextlib.ExitStack() as stack:
      systems = wiring.systems_of(spec)
      runner = stack.enter_context(systems.open_runner('static'))
      collector = runs.collector(spec, tokenizer, runner, split='train')
      collector = dataclasses.replace(collector, **fields)
      stream = collect.GroupStream(collector, policy, 4)
      stack.callback(stream.close)
      groups = []
      share = stream.admit(1, groups.append, resumed=resumed)
      policy.serve(lambda: stream.open_episodes == 0)
      assert stream.open_episodes == 0
    (group,) = groups
    rollouts = [
      dataclasses.replace(r, sandbox_seconds=0.0) for r in group.rollouts
    ]
    group = dataclasses.replace(group, rollouts=tuple(rollouts))
    return group_bytes.to_bytes(group), share, engine.stats().sampled_tokens

  return play


@pytest.fixture(scope='module')
def undisturbed(play):
  data, share, sampled = play({})
  turns = share.turns()
  assert min(map(len, turns.values())) > 3 and share.num_anew == 0
  return data, turns, sampled


def through_bytes(turns):
  saved = played.SavedTurns(
    group=1, task_id='', turns=turns, policies={0: 'a' * 64}
  )
  return turn_bytes.from_bytes(turn_bytes.to_bytes(saved), 1 << 30).turns


@pytest.mark.parametrize(
  'seed', [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 8))]
)
def test_a_group_whose_members_go_on_from_any_turn_is_the_same(
  play, undisturbed, seed
):
  data, turns, sampled = undisturbed
  rng = np.random.default_rng(seed)
  # One whole episode, one hardly begun, and others anywhere.
  counts = [len(turns[0]), 1]
  counts += [int(rng.integers(1, len(turns[m]))) for m in sorted(turns)[2:]]
  cut = {m: turns[m][:n] for m, n in zip(sorted(turns), counts, strict=True)}
  again, share, sampled_again = play(through_bytes(cut))
  assert again == data and share.num_anew == 0
  saved = sum(len(t.completion.tokens_T) for c in cut.values() for t in c)
  assert sampled_again == sampled - saved


def test_a_member_whose_box_answers_otherwise_begins_anew(play, undisturbed):
  data, turns, sampled = undisturbed
  other = {m: list(played) for m, played in turns.items()}
  context_T = other[1][2].context_T.copy()
  context_T[-2] += 1  # What a tool said.
  other[1][2] = dataclasses.replace(other[1][2], context_T=context_T)
  resumed = {m: tuple(played[:4]) for m, played in other.items()}
  again, share, _ = play(resumed)
  assert again == data and share.num_anew == 1


def test_a_record_that_breaks_an_episode_begins_anew(play, undisturbed):
  data, turns, _ = undisturbed
  routeless = dataclasses.replace(turns[2][1].completion, routes_start=10**6)
  turn = dataclasses.replace(turns[2][1], completion=routeless)
  again, share, _ = play({2: (turns[2][0], turn, *turns[2][2:])})
  assert again == data and share.num_anew == 1


def test_what_a_share_tells_can_be_read_while_it_plays(play, undisturbed):
  """As the thread does that saves: never fewer turns, and the last are all."""
  data, turns, _ = undisturbed
  seen, watching, ending = [], [], threading.Event()
  admit = collect.GroupStream.admit

  def watch(share):
    while not ending.is_set():
      seen.append(sum(map(len, share.turns().values())))

  def watched(stream, *arguments, **options):
    share = admit(stream, *arguments, **options)
    watching.append(threading.Thread(target=watch, args=(share,), daemon=True))
    watching[0].start()
    return share

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(collect.GroupStream, 'admit', watched)
    again, share, _ = play({0: turns[0][:2]})
  ending.set()
  watching[0].join()
  assert again == data and seen == sorted(seen) and seen[0] >= 2
  assert share.turns().keys() == turns.keys()
