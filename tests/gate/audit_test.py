"""Chains of passes are what the engine computed, on any mesh, in a share."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.agent import window as windows
from composer_jax.core import records
from composer_jax.gate import audit, explain
from composer_jax.gate import parts as parts_lib
from composer_jax.kernels.attention import grouped_query
from composer_jax.models import decoder
from composer_jax.parallel import layouts, topology
from composer_jax.rl import batching, mismatch
from composer_jax.rl import step as steps
from composer_jax.rollout import engine as engines
from composer_jax.train import placement, state
from tests.rl import mismatch_test, replayed
from tests.rollout import serving


def labelled(sampled_by, read, consumed):
  trajectory = mismatch_test.make_trajectory(
    [-1.0] * len(sampled_by), mask=[False] + [True] * (len(sampled_by) - 1)
  )
  arrays = (sampled_by, read, consumed)
  fields = {
    name: np.array(array, np.int32)
    for name, array in zip(records.VERSIONS, arrays, strict=True)
  }
  return dataclasses.replace(trajectory, **fields)


@pytest.mark.parametrize(
  'versions, want',
  [
    # A kept cache: one chain for all tokens.
    (
      ([1, 1, 1, 2, 2], [1] * 5, [1, 1, 2, 2, 2]),
      [([1, 1, 2, 2, 2], [0, 1, 1, 1, 1], True)],
    ),
    # Version 2 consumed all anew; the routes of before are lost.
    (
      ([1, 1, 1, 2, 2], [1, 1, 1, 2, 2], [2] * 5),
      [
        ([2] * 5, [0, 0, 0, 1, 1], True),
        ([1] * 5, [0, 1, 1, 0, 0], False),
      ],
    ),
    # A cache of two versions, consumed anew by a third.
    (
      ([1, 1, 2, 3, 3], [1, 1, 1, 3, 3], [3] * 5),
      [
        ([3] * 5, [0, 0, 0, 1, 1], True),
        ([1, 2, 2, 2, 2], [0, 1, 1, 0, 0], False),
      ],
    ),
    # Consumed anew twice; context of version 3 in between.
    (
      ([1, 1, 2, 3, 4], [1, 1, 2, 2, 4], [4] * 5),
      [
        ([4] * 5, [0, 0, 0, 0, 1], True),
        ([1] * 5, [0, 1, 0, 0, 0], False),
        ([2, 2, 3, 3, 3], [0, 0, 1, 1, 0], False),
      ],
    ),
    # What no engine can have done: its context is of an older version.
    (([3] * 5, [2] * 5, [3] * 5), []),
  ],
)
def test_parts_are_the_caches_that_the_versions_name(versions, want):
  parts = list(parts_lib.parts_of(7, labelled(*versions), replay=True))
  assert len(parts) == len(want)
  for part, (consumed, compared, is_recorded) in zip(parts, want, strict=True):
    assert part.index == 7 and part.is_recorded == is_recorded
    assert part.consumed_T.tolist() == consumed
    assert part.compared_T.tolist() == [bool(c) for c in compared]
    ids_TMA = part.trajectory.expert_ids_TMA
    assert (ids_TMA == records.NO_ROUTE).all() != is_recorded


SHAPE = batching.BatchShape(
  rows=8, seq_len=8, num_moe_layers=1, num_active=1, num_experts=4
)


def counting():
  """Returns functions that score nothing, and the policies they were given."""
  passes = []

  def chain(values, batch, entries):
    del entries
    passes.append(values)
    zeros_BT = np.zeros(batch.tokens_BT.shape, np.float32)
    scores = steps.Scores(
      logprobs_BT=zeros_BT, expert_ids_MBTA=None, differing_BT=zeros_BT
    )
    return scores, None

  functions = types.SimpleNamespace(parts=1, compact=lambda v: v, chain=chain)
  return functions, passes


def test_a_share_of_the_tokens_is_scored_the_suspects_first():
  functions, passes = counting()
  auditor = audit.Auditor(functions, SHAPE, max_staleness=2, share=0.15)
  for version in range(4):
    auditor.keep(version, f'policy {version}')
  assert set(auditor.policies) == {1, 2, 3}
  # Each fills a row: of two versions, of one, and of one that is forgotten.
  kinds = [[1] * 4 + [2] * 4, [2] * 8, [0] * 8]
  parts = []
  for i in range(30):
    consumed = kinds[i % 3]
    sampled_by = [consumed[0], *consumed[:-1]]
    window = labelled(sampled_by, consumed[:1] * 8, consumed)
    parts += parts_lib.parts_of(i, window, replay=True)
  assert len(parts) == 30
  # Of part 16 comes most of the gradient, of part 28 none.
  sizes = {16: 40.0, 28: 0.0}
  suspicion = [
    (float(i == 13), float(i == 19), sizes.get(i, 1.0)) for i in range(30)
  ]

  def chosen(step):
    scores = auditor.choose(parts, suspicion, step, rows)
    return [s.part.index for s in scores]

  rows = 60
  seen = [chosen(step) for step in range(40)]
  # Tokens of three of the 20 that are known: 7 of each, or 4 of a beginning.
  assert {len(found) for found in seen} == {3, 4}
  assert sum(16 in found for found in seen) > 20
  assert not any(28 in found for found in seen)
  # Each list comes first in turns.
  assert all(13 in a + b and 19 in a + b for a, b in zip(seen, seen[1:]))
  scored = {i for found in seen for i in found}
  assert len(scored) > 10 and not any(i % 3 == 2 for i in scored)
  # Passes are bounded by the share of a step's rows: 3 a step of 20.
  passes.clear()
  rows = 20
  seen = [chosen(step) for step in range(40)]
  assert all(seen) and 110 < len(passes) <= 3 * 40 + 1
  # A share of 1 is everything, though a chain of two versions takes two passes.
  auditor = audit.Auditor(functions, SHAPE, max_staleness=2, share=1.0)
  for version in range(4):
    auditor.keep(version, f'policy {version}')
  passes.clear()
  assert sorted(chosen(0)) == [i for i in range(30) if i % 3 != 2]
  assert len(passes) == 10 * 2 + 10


def test_a_beginning_takes_the_passes_of_its_first_sampler():
  window = labelled([1, 1, 1, 2, 2, 3], [1] * 6, [1, 1, 2, 2, 3, 3])
  (part,) = parts_lib.parts_of(0, window, replay=True)
  begun = part.beginning()
  assert (part.stop, part.versions) == (6, [1, 2, 3])
  assert (begun.stop, begun.versions) == (3, [1])
  assert begun.compared_T.tolist() == [False, True, True] + [False] * 3
  assert begun.whole is part and part.whole is None


def test_lists_in_turn_score_beginnings_that_share_a_pass():
  functions, passes = counting()
  auditor = audit.Auditor(functions, SHAPE, max_staleness=2, share=0.1)
  for version in range(3):
    auditor.keep(version, version)
  window = labelled([0] * 4 + [1] * 4, [0] * 8, [0] * 3 + [1] * 5)
  parts = [
    p for i in range(9) for p in parts_lib.parts_of(i, window, replay=True)
  ]
  seen = []
  for step in range(12):
    scores = auditor.choose(parts, [(0.0, 0.0, 1.0)] * 9, step, 1)
    seen.append((passes.copy(), [int(s.part.compared_T.sum()) for s in scores]))
    passes.clear()
  # A row of 8 holds a whole part, of two versions, or two beginnings of one.
  whole, begun = ([0, 1], [7]), ([0], [3, 3])
  # The first list's chains are whole, and one of four of the others'.
  assert [found == whole for found in seen] == [
    i % 3 == 0 or i % 4 == 3 for i in range(12)
  ]
  assert all(found in (whole, begun) for found in seen)


def test_a_step_of_few_rows_affords_a_chain():
  functions = types.SimpleNamespace(
    parts=1,
    compact=lambda v: v,
    chain=lambda values, batch, entries: (
      steps.Scores(
        logprobs_BT=np.zeros(batch.tokens_BT.shape, np.float32),
        expert_ids_MBTA=None,
        differing_BT=np.zeros(batch.tokens_BT.shape, np.float32),
      ),
      None,
    ),
  )
  for share, count in ((0.01, 1), (0.0, 0)):
    auditor = audit.Auditor(functions, SHAPE, max_staleness=2, share=share)
    auditor.keep(1, 'policy')
    window = labelled([1] * 8, [1] * 8, [1] * 8)
    parts = [
      p for i in range(3) for p in parts_lib.parts_of(i, window, replay=True)
    ]
    for step in range(4):
      scores = auditor.choose(parts, [(0.0,) * 3] * 3, step, 3)
      assert len(scores) == count


def moved(count, length=40):
  """Returns scores of windows one version old after the policy moved."""
  rng = np.random.default_rng(3)
  scores = []
  for i in range(count):
    logprobs_T = -rng.exponential(0.5, length).astype(np.float32)
    move_T = 0.02 * rng.normal(size=length) * -np.expm1(logprobs_T)
    labels = np.zeros(length, np.int32)
    window = labelled(labels, labels, labels)
    window = dataclasses.replace(
      window, logprobs_T=(logprobs_T + move_T).astype(np.float32)
    )
    (part,) = parts_lib.parts_of(i, window, replay=True)
    scores.append(audit.Score(part, logprobs_T, np.zeros(length, np.int32)))
  return scores


def ranked(scores, advantages, hints):
  """Numbers of the windows that lead each of the lists."""
  suspicion = audit.Suspicion(scores, 1, layers=2)
  ranks = [
    suspicion.ranks(*each)
    for each in zip(scores, advantages, hints, strict=True)
  ]
  return [int(np.argmax(column)) for column in zip(*ranks, strict=True)]


@pytest.mark.parametrize('noise', [0.0, 3e-5, 3e-4, 3e-3])
def test_a_record_too_near_to_the_trained_weights_is_suspected(noise):
  """In any precision: rounding may be as large as the noise."""
  scores = moved(40)
  part, trained_T, differing_T = scores[17]
  noise_T = noise * np.random.default_rng(0).normal(size=len(trained_T))
  copy = dataclasses.replace(
    part.trajectory, logprobs_T=(trained_T + noise_T).astype(np.float32)
  )
  scores[17] = audit.Score(
    part._replace(trajectory=copy), trained_T, differing_T
  )
  assert ranked(scores, [0.5] * 40, [0.0] * 40)[1] == 17
  # Not if no gradient comes from it.
  assert ranked(scores, [0.5] * 17 + [0.0] * 23, [0.0] * 40)[1] != 17


def test_hints_count_whatever_the_advantage():
  scores = moved(20)
  differing_T = np.full(40, 1, np.int32)
  scores[7] = scores[7]._replace(differing_T=differing_T)
  some = [float(i == 7) for i in range(20)]
  # Of all hinted windows, without any advantage, and of a single one.
  assert ranked(scores, [0.0] * 20, [1.0] * 20)[0] == 7
  assert ranked(scores, [0.0] * 20, some) == [7, 7, 7]
  others = [0.1 * (i != 7) for i in range(20)]
  assert ranked(scores, others, some)[0] == 7
  # A trained window weighs both.
  assert ranked(moved(20), [0.1] * 20, [20 * x for x in some])[2] == 7


def policies_of(config, count=3):
  """Returns policies a small step apart."""
  rng = np.random.default_rng(0)
  made = [replayed.variables(config)]
  for _ in range(count - 1):
    made.append(
      jax.tree.map(
        lambda x: (x + 0.03 * rng.normal(size=x.shape)).astype(np.float32),
        made[-1],
      )
    )
  return [decoder.policy(jax.tree.map(jnp.asarray, v)) for v in made]


def sample(config, policies, on_swap):
  """Returns trajectories of sessions whose weights were swapped meanwhile."""
  options = engines.EngineOptions(
    num_slots=4,
    max_len=serving.LENGTH,
    prefill_chunk=5,
    decode_steps=2,
    page_size=4 if config.numerics == 'fast' else grouped_query.KEY_BLOCK,
    on_swap=on_swap,
  )
  engine = engines.Engine(config, policies[0], 0, options)
  contexts = [
    np.random.default_rng(i).integers(0, replayed.V, 4 + 5 * i)
    for i in range(4)
  ]
  for i, context in enumerate(contexts):
    engine.submit(serving.request(i, context, new=12))
  outcomes, version = {}, 0
  while engine.num_unfinished:
    outcomes |= {c.session: c for c in engine.step()}
    if engine.stats().dispatches % 4 == 0 and not engine.is_refreshing:
      version = min(version + 1, len(policies) - 1)
      if version > engine.version:
        engine.swap(policies[version], version)
  made = []
  for i, context in enumerate(contexts):
    window = windows.Window()
    window.append(context.astype(np.int32), outcomes[f'session {i}'])
    made.append(window.trajectory(1.3))
  return made


_TURNS_LEN = 64


def sample_turns(config, policies, on_swap, period):
  """Returns trajectories of three turns each, of an engine with few pages.

  Idle sessions lose their pages and consume their tokens anew, while weights
  are swapped at any time.
  """
  page = 4 if config.numerics == 'fast' else grouped_query.KEY_BLOCK
  options = engines.EngineOptions(
    num_slots=2,
    max_len=_TURNS_LEN,
    prefill_chunk=3,
    prefill_rows=1,
    decode_steps=2,
    page_size=page,
    num_pages=2 * -(-_TURNS_LEN // page),
    on_swap=on_swap,
  )
  engine = engines.Engine(config, policies[0], 0, options)
  rng = np.random.default_rng(7)
  made = [windows.Window() for _ in range(5)]
  dispatches, anew = 0, 0
  for turn in range(3):
    contexts = {}
    for i in range(len(made)):
      contexts[i] = rng.integers(0, replayed.V, 9 + i).astype(np.int32)
      engine.submit(serving.request(i, contexts[i], new=3 + (i + turn) % 3))
    while engine.num_unfinished:
      for completion in engine.step():
        i = int(completion.session.split()[1])
        anew += bool(turn) and completion.routes_start == 0
        made[i].append(contexts[i], completion)
      dispatches += 1
      version = min(dispatches // period, len(policies) - 1)
      if version > engine.version and not engine.is_refreshing:
        engine.swap(policies[version], version)
  assert engine.version == len(policies) - 1
  return [window.trajectory(1.3) for window in made], anew


@pytest.mark.parametrize(
  'on_swap, period',
  [
    pytest.param('keep', 3, marks=pytest.mark.slow),
    ('keep', 7),
    ('refresh', 5),
  ],
)
def test_sessions_that_lost_their_pages_are_what_chains_compute(
  on_swap, period
):
  """The versions of a record tell every cache that its tokens read."""
  config = replayed.CONFIGS['gqa_softmax']
  policies = policies_of(config, count=12)
  made, anew = sample_turns(config, policies, on_swap, period)
  assert anew > 2
  parts = [
    part
    for i, t in enumerate(made)
    for part in parts_lib.parts_of(i, t, replay=True)
  ]
  assert not any(map(parts_lib.uncovered, made))
  assert sum(not part.is_recorded for part in parts) > 2
  if on_swap == 'keep':
    lost = [part for part in parts if not part.is_recorded]
    assert any(len(set(part.consumed_T.tolist())) > 1 for part in lost)
  shape = batching.shape_of(config, rows=2, seq_len=2 * _TURNS_LEN)
  parts += [part.beginning() for part in parts]
  for score in auditor_of(config, policies, shape).score(parts):
    assert mismatch.k3(score.log_ratios).mean() < 1e-11, score
    if score.part.is_recorded:
      assert not score.differing_T[: score.part.stop - 1].any()


def auditor_of(config, policies, shape, where=None):
  model = decoder.Decoder(config, where.plan if where else None)
  functions = steps.build(
    model,
    optax.sgd(0.1),
    placement=where,
    compiler_options=replayed.OPTIONS if config.numerics == 'fast' else None,
  )
  auditor = audit.Auditor(functions, shape, max_staleness=len(policies))
  for version, policy in enumerate(policies):
    values = {**policy, 'params': state.policy_values(policy['params'], config)}
    if where:
      values = jax.device_put(values, where.variables)
    auditor.keep(version, values)
  return auditor


@pytest.mark.parametrize(
  'name, numerics, on_swap',
  [
    pytest.param('mla_sigmoid', 'fast', 'keep', marks=pytest.mark.slow),
    pytest.param('mla_sigmoid', 'fast', 'refresh', marks=pytest.mark.slow),
    pytest.param(
      'gqa_softmax', 'batch_invariant', 'keep', marks=pytest.mark.slow
    ),
    pytest.param(
      'gqa_softmax', 'batch_invariant', 'refresh', marks=pytest.mark.slow
    ),
    pytest.param(
      'mla_sigmoid', 'batch_invariant', 'keep', marks=pytest.mark.slow
    ),
  ],
)
def test_swapped_sessions_are_what_a_chain_of_passes_computes(
  name, numerics, on_swap
):
  config = dataclasses.replace(replayed.CONFIGS[name], numerics=numerics)
  policies = policies_of(config)
  made = sample(config, policies, on_swap)
  shape = batching.shape_of(config, rows=2, seq_len=4 * grouped_query.KEY_BLOCK)
  auditor = auditor_of(config, policies, shape)
  parts = [
    part
    for i, t in enumerate(made)
    for part in parts_lib.parts_of(i, t, replay=True)
  ]
  assert len({v for p in parts for v in p.consumed_T.tolist()}) > 1
  scores = auditor.score(parts)
  compared = sum(part.compared_T.sum() for part in parts)
  assert compared == sum(t.loss_mask_T.sum() for t in made)
  for score in scores:
    assert not score.differing_T.any()
    if numerics == 'batch_invariant':
      np.testing.assert_array_equal(score.log_ratios, 0)
    assert mismatch.k3(score.log_ratios).mean() < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, axes', [('gqa_softmax', (2, 2, 2)), ('mla_sigmoid', (1, 4, 2))]
)
def test_a_chain_on_a_mesh_is_that_of_one_device(name, axes):
  """Tokens in zigzag order over two context shards; padding rows."""
  config = replayed.CONFIGS[name]
  policies = policies_of(config)
  trajectories = replayed.trajectories(config)
  parts = [
    parts_lib.Part(
      i, t, np.arange(len(t)) * 3 // len(t), t.loss_mask_T, is_recorded=True
    )
    for i, t in enumerate(trajectories)
  ]
  for part in parts:  # What the version before consumed samples a token.
    before_T = np.insert(part.consumed_T[:-1], 0, 0).astype(np.int32)
    part.trajectory.policy_version_T[:] = before_T
  where = placement.build(
    config, mesh=topology.make_mesh(*axes), layout=layouts.TRAIN
  )
  shape = replayed.shape(config, rows=8, seq_len=16)
  alone = auditor_of(config, policies, shape).score(parts)
  sharded = auditor_of(config, policies, shape, where).score(parts)
  for have, want in zip(sharded, alone, strict=True):
    np.testing.assert_array_equal(have.differing_T, want.differing_T)
    # Values of up to 9 nats, whose sums run in another order.
    np.testing.assert_allclose(
      have.logprobs_T, want.logprobs_T, rtol=0, atol=6e-6
    )
  single = auditor_of(config, policies[2:], shape)
  whole = [
    p._replace(consumed_T=np.zeros(len(p.consumed_T), int)) for p in parts
  ]
  others = single.score(whole)
  assert any(
    np.abs(a.log_ratios - b.log_ratios).max() > 1e-2
    for a, b in zip(alone, others, strict=True)
  )


@pytest.mark.parametrize('length, words', [(3, 'no single lie'), (12, 'times')])
def test_a_fit_needs_more_tokens_than_numbers(length, words):
  auditor = audit.Auditor(types.SimpleNamespace(parts=1), SHAPE)
  labels = [0] * length
  (part,) = parts_lib.parts_of(0, labelled(*[labels] * 3), replay=True)
  # Recorded are -1; a scale of 0.5 explains them.
  logprobs_T = np.full(length, -2.0, np.float32)
  score = audit.Score(part, logprobs_T, np.zeros(length, np.int32))
  text = explain.explain(auditor, score)
  assert words in text, text
  # A scale of 0.01 does not.
  far = score._replace(logprobs_T=-100 - np.arange(length, dtype=np.float32))
  assert 'no single lie' in explain.explain(auditor, far)
