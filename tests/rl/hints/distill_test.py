"""Laws of hints: which tokens they train, and by how much."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.core import batches, records, turns
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head
from composer_jax.parallel import layouts, shardings, topology
from composer_jax.rl import batching as rl_batching
from composer_jax.rl import comparison, policy_loss, update
from composer_jax.rl import step as steps
from composer_jax.rl.hints import batching, distill
from composer_jax.train import placement
from composer_jax.train import state as train_state
from tests import compiling
from tests.rl import replayed

CONFIG = replayed.CONFIGS['gqa_softmax']
MODEL = decoder.Decoder(CONFIG)
V = CONFIG.vocab_size
SHAPE = replayed.shape(CONFIG, rows=4, seq_len=32)
OPTIONS = distill.HintLossOptions(weight=0.5)
VALUES = replayed.variables(CONFIG)


def window(length, seed):
  """Returns a window with random routes, sampled but for its first token."""
  trajectory = replayed.trajectory(length, seed, CONFIG.moe.num_experts)
  mask_T = np.arange(length) > 0
  return dataclasses.replace(trajectory, loss_mask_T=mask_T)


def hint(start, stop, length, *, at=None, trajectory=0):
  rng = np.random.default_rng(start + 7 * length)
  return turns.Hint(
    trajectory=trajectory,
    start=start,
    stop=stop,
    at=max(start - 1, 0) if at is None else at,
    kind='bad_arguments',
    tokens_T=rng.integers(0, V, length).astype(np.int32),
  )


def group(number, *rollouts):
  """Returns a group of (windows, hints) pairs; only the first is rewarded."""
  verdict = records.Verdict(
    passed=False,
    num_passed=0,
    num_tests=1,
    status=records.GRADED,
    sandbox_level='static',
  )
  return records.Group(
    group=number,
    task_id='task',
    rollouts=tuple(
      records.Rollout(
        task_id='task',
        group=number,
        member=i,
        trajectories=tuple(windows),
        verdict=verdict,
        reward=float(i == 0),
        num_turns=1,
        num_invalid=0,
        hints=tuple(hints),
      )
      for i, (windows, hints) in enumerate(rollouts)
    ),
  )


# Turns and hints of several lengths; two hints on one turn, a rollout with two
# windows, and a window without a hint.
GROUPS = [
  group(
    0,
    ([window(14, 0)], [hint(3, 6, 4), hint(8, 13, 2)]),
    ([window(9, 1), window(17, 2)], [hint(5, 9, 6, at=2, trajectory=1)]),
  ),
  group(
    1,
    ([window(7, 3)], []),
    ([window(12, 4)], [hint(2, 4, 9), hint(2, 4, 3), hint(11, 12, 5)]),
  ),
]


def hinted(groups=GROUPS):
  return [
    (r.trajectories[h.trajectory], h)
    for g in groups
    for r in g.rollouts
    for h in r.hints
  ]


def packed(groups=GROUPS, shape=SHAPE, **kwargs):
  return batching.pack(groups, shape, **kwargs)


def only(packing):
  (batch,), *_ = packing
  return batch


@functools.cache
def compiled(options):
  """Returns a function that computes gradients, sums, teacher's gradients."""

  def run(values, teacher, batch):
    def loss(teacher):
      stats, _ = distill.loss(MODEL, values, teacher, batch, options)
      return stats.loss

    grads, stats, _ = distill.gradients(MODEL, values, teacher, batch, options)
    return grads, stats, jax.grad(loss)(teacher)

  return jax.jit(run, compiler_options=compiling.QUICKLY)


def gradients(batch, options=OPTIONS, *, teacher=VALUES):
  grads, stats, of_teacher = jax.device_get(
    compiled(options)(VALUES, teacher, batch)
  )
  for grad in jax.tree.leaves(of_teacher):
    np.testing.assert_array_equal(grad, 0)
  return grads, stats


@functools.cache
def _logits():
  def run(values, tokens_BT, ids_MBTA):
    length = tokens_BT.shape[1]
    output = MODEL.apply(
      values,
      tokens_BT,
      jnp.ones_like(tokens_BT),
      jnp.arange(length)[None],
      expert_ids_MBTA=ids_MBTA,
    )
    logits_BTV = head.logits(values, output.hidden_BTD, CONFIG)
    return logits_BTV, output.expert_ids_MBTA

  return jax.jit(run, compiler_options=compiling.QUICKLY)


def logits(values, tokens_T, ids_TMA=None):
  """Returns float64 logits_TV of one window alone, and its routes."""
  missing = SHAPE.seq_len - len(tokens_T)
  ids_MBTA = np.full(
    (replayed.M, 1, SHAPE.seq_len, replayed.A), records.NO_ROUTE, np.uint16
  )
  if ids_TMA is not None:
    ids_MBTA[:, 0, : len(tokens_T)] = ids_TMA.transpose(1, 0, 2)
  found_BTV, own_MBTA = _logits()(
    values, np.pad(tokens_T, (0, missing))[None], ids_MBTA
  )
  own_TMA = np.asarray(own_MBTA)[:, 0, : len(tokens_T)].transpose(1, 0, 2)
  return np.asarray(found_BTV[0, : len(tokens_T)], np.float64), own_TMA


def log_softmax(logits_TV):
  top_T1 = logits_TV.max(-1, keepdims=True)
  return logits_TV - (
    top_T1 + np.log(np.exp(logits_TV - top_T1).sum(-1, keepdims=True))
  )


def kl(left_TV, right_TV):
  return (np.exp(left_TV) * (left_TV - right_TV)).sum(-1)


def reference_loss(values, teacher, *, weight=0.5, cap=2.0):
  """Returns the loss in float64, a hint at a time, from unpacked windows."""
  total = 0.0
  for t, h in hinted():
    routes_TMA = t.expert_ids_TMA.copy()
    routes_TMA[h.stop - 1] = records.NO_ROUTE
    student_TV = log_softmax(
      logits(values, t.tokens_T, routes_TMA)[0] / t.temperature
    )[h.start - 1 : h.stop - 1]
    read_T = np.concatenate(
      [t.tokens_T[: h.at], h.tokens_T, t.tokens_T[h.at : h.stop]]
    )
    first = h.start + len(h.tokens_T) - 1
    teacher_TV = log_softmax(logits(teacher, read_T)[0] / t.temperature)[
      first : first + h.stop - h.start
    ]
    turn = slice(h.start, h.stop)
    ours_T = student_TV[np.arange(h.stop - h.start), t.tokens_T[turn]]
    ratio_T = np.exp(ours_T - t.logprobs_T[turn])
    terms_T = np.minimum(ratio_T, cap) * kl(student_TV, teacher_TV)
    total += weight * terms_T.mean()
  return total


# Another policy than the student.
TEACHER = jax.tree.map(lambda a: a[..., ::-1].copy(), VALUES)


@pytest.fixture(scope='module')
def together():
  return gradients(only(packed()), teacher=TEACHER)


@pytest.fixture(scope='module')
def reference():
  return reference_loss(VALUES, TEACHER)


def test_the_loss_is_the_formula_on_windows_alone(together, reference):
  _, stats = together
  assert float(stats.loss) == pytest.approx(reference, rel=1e-5)
  assert int(stats.num_tokens) == sum(h.stop - h.start for _, h in hinted())
  # The student's routes are replayed; routed afresh the loss differs.
  batch = only(packed())
  afresh = batch.replace(student=comparison.fresh(batch.student))
  _, afresh_sums = gradients(afresh, teacher=TEACHER)
  assert abs(float(afresh_sums.loss) / reference - 1) > 0.02


def moved(batch, by):
  """Returns the batch with the teacher's map shifted by so many tokens."""
  slots_BT = np.roll(batch.teacher_slots_BT, by, axis=1)
  return batch.replace(teacher_slots_BT=slots_BT)


@pytest.mark.parametrize('by', [1, -1, -4])
def test_a_map_that_is_off_is_another_loss(by, reference):
  """So the equality above detects shifts by a token or by a hint's length."""
  _, stats = gradients(moved(only(packed()), by), teacher=TEACHER)
  assert abs(float(stats.loss) / reference - 1) > 0.02


def assert_close(actual, expected):
  """Compares up to the order of float32 sums whose terms cancel."""
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=1e-5 * np.abs(b).max() + 1e-9
    ),
    actual,
    expected,
  )


def test_packed_together_is_packed_alone(together):
  def alone(group, i, hints):
    r = dataclasses.replace(group.rollouts[i], hints=(hints,), member=0)
    return dataclasses.replace(group, rollouts=(r,))

  apart = [
    gradients(only(packed([alone(g, i, h)])), teacher=TEACHER)
    for g in GROUPS
    for i, r in enumerate(g.rollouts)
    for h in r.hints
  ]
  total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), apart)
  assert_close(together, total)


def test_an_empty_hint_is_exactly_nothing():
  """Even if the teacher is another policy."""
  windows = [window(14, 0)]
  empty_hint = hint(8, 13, 4)
  assert not packed([group(0, (windows, [hint(3, 6, 0)]))])[0]
  jax.tree.map(
    np.testing.assert_array_equal,
    only(packed([group(0, (windows, [hint(3, 6, 0), empty_hint]))])),
    only(packed([group(0, (windows, [empty_hint]))])),
  )


def mirrored(batch):
  """Returns the batch with a teacher that reads the same tokens, unhinted."""
  student = batch.student
  return batch.replace(
    teacher=batches.LMBatch(
      tokens_BT=student.tokens_BT,
      segment_ids_BT=student.segment_ids_BT,
      positions_BT=student.positions_BT,
      loss_weights_BT=student.loss_weights_BT,
    ),
    teacher_slots_BT=batch.student_slots_BT,
  )


def test_a_student_is_its_own_teacher_without_a_hint():
  alone = window(14, 0)
  own_TMA = logits(VALUES, alone.tokens_T)[1].copy()
  own_TMA[-1] = records.NO_ROUTE
  own_window = dataclasses.replace(alone, expert_ids_TMA=own_TMA)
  batch = only(packed([group(0, ([own_window], [hint(3, 9, 2)]))]))
  grads, stats = gradients(mirrored(batch))
  # Rounding of two programs: its square in the divergence, itself in gradients.
  assert abs(stats.divergence) < 1e-7
  assert max(np.abs(g).max() for g in jax.tree.leaves(grads)) < 1e-6
  # With other routes the student differs from the teacher.
  batch = only(packed([group(0, ([alone], [hint(3, 9, 2)]))]))
  grads, stats = gradients(mirrored(batch))
  assert stats.divergence > 1e-3
  assert max(np.abs(g).max() for g in jax.tree.leaves(grads)) > 1e-3


@pytest.mark.slow
def test_it_is_exactly_so_in_numerics_without_a_batch():
  """Batch-invariant numerics compute a token's bits alike in every program."""
  config = dataclasses.replace(CONFIG, numerics='batch_invariant')
  shape = rl_batching.shape_of(config, rows=2, seq_len=64)
  t = window(14, 0)
  t.expert_ids_TMA[:] = records.NO_ROUTE
  batch = mirrored(only(packed([group(0, ([t], [hint(3, 9, 2)]))], shape)))
  grads, stats = jax.jit(
    functools.partial(
      distill.gradients,
      decoder.Decoder(config),
      options=OPTIONS,
    ),
    compiler_options=compiling.QUICKLY,
  )(VALUES, VALUES, batch)
  assert stats.loss == stats.divergence == stats.gap == 0
  for grad in jax.tree.leaves(grads):
    np.testing.assert_array_equal(grad, 0)


WEIGHTS = (VALUES['params']['embedding'], TEACHER['params']['embedding'])


def of_states(batch, options=OPTIONS):
  """Returns (sums, gradients of weights and states) of random hidden states."""
  rng = np.random.default_rng(0)
  shape = (*batch.student.tokens_BT.shape, CONFIG.embed_dim)
  states = tuple(rng.normal(size=shape).astype(np.float32) for _ in range(2))

  def loss(weights, states):
    stats = distill.compare(MODEL, weights, states, batch, options)
    return stats.loss, stats

  run = jax.jit(
    jax.grad(loss, argnums=(0, 1), has_aux=True),
    compiler_options=compiling.QUICKLY,
  )
  grads, stats = jax.device_get(run(WEIGHTS, states))
  return stats, *grads


def test_the_gradient_is_of_the_turns_alone():
  """Other tokens and the teacher have none, hidden state by hidden state."""
  batch = only(packed())
  _, d_weights, d_states = of_states(batch)
  np.testing.assert_array_equal(d_weights[1], 0)
  np.testing.assert_array_equal(d_states[1], 0)
  assert np.abs(d_weights[0]).max() > 0
  # A token is predicted by the state before it.
  is_trained_BT = np.roll(batch.student_slots_BT, -1, axis=1) > 0
  has_gradient_BT = np.abs(d_states[0]).max(-1) > 0
  np.testing.assert_array_equal(has_gradient_BT, is_trained_BT)


@functools.cache
def compared(*mesh_shape):
  """Returns (loss, stats) and gradients of tables in place of the model."""
  num_devices = int(np.prod(mesh_shape))
  where = placement.build(
    CONFIG,
    mesh=topology.make_mesh(*mesh_shape, devices=jax.devices()[:num_devices]),
    layout=layouts.TRAIN,
  )
  parts = 1
  if where.plan is not None:
    parts = shardings.product(where.plan.batch_axes, where.mesh)
  shape = replayed.shape(CONFIG, rows=8, seq_len=SHAPE.seq_len)
  batch = where.put(only(packed(shape=shape, num_parts=parts)))
  rng = np.random.default_rng(0)
  names = ('student', 'teacher')
  tables = {
    name: [
      rng.normal(size=(size, CONFIG.embed_dim)).astype(np.float32)
      for size in (V, SHAPE.seq_len)
    ]
    for name in names
  }

  def loss(weight, tables):
    def states(name):
      side = getattr(batch, name)
      words_VD, places_TD = tables[name]
      return words_VD[side.tokens_BT] + places_TD[side.positions_BT]

    stats = distill.compare(
      decoder.Decoder(CONFIG, where.plan),
      (weight, WEIGHTS[1]),
      (states('student'), states('teacher')),
      batch,
      OPTIONS,
    )
    return stats.loss, stats

  run = jax.jit(
    jax.value_and_grad(loss, argnums=(0, 1), has_aux=True),
    compiler_options=compiling.QUICKLY,
  )
  weight = jax.device_put(
    VALUES['params']['embedding'], where.variables['params']['embedding']
  )
  return jax.device_get(run(weight, tables))


# Context 2 in zigzag order over four batch shards, and eight batch shards.
@pytest.mark.parametrize('shape', [(2, 2, 2), (1, 8, 1)])
def test_the_comparison_on_a_mesh_is_that_of_one_device(shape):
  assert_close(compared(*shape), compared(1, 1, 1))


def places_of(slots_BT):
  """Returns {slot: (row, column)}; checks that no slot occurs twice."""
  rows, columns = np.nonzero(slots_BT)
  slots = slots_BT[rows, columns].tolist()
  assert sorted(slots) == list(range(1, len(slots) + 1))
  return dict(zip(slots, zip(rows, columns, strict=True), strict=True))


def read_back(batch, num_parts):
  """Yields (context, turn, teacher's tokens) of each hint, by slots alone."""
  bare = batch.replace(student=batch.student.replace(expert_ids_MBTA=None))
  split = jax.tree.map(lambda x: np.split(x, num_parts), bare)
  for part in range(num_parts):
    part_batch = jax.tree.map(lambda _, x, i=part: x[i], bare, split)
    student, teacher, slots_BT = (
      part_batch.student,
      part_batch.teacher,
      part_batch.teacher_slots_BT,
    )
    where = places_of(part_batch.student_slots_BT)
    assert where.keys() == places_of(slots_BT).keys()
    for row, segments_T in enumerate(teacher.segment_ids_BT):
      for segment in range(1, segments_T.max() + 1):
        read = np.flatnonzero(segments_T == segment)
        slots = [s for s in slots_BT[row, read].tolist() if s]
        own_rows, columns = zip(*(where[s] for s in slots), strict=True)
        assert len(set(own_rows)) == 1
        np.testing.assert_array_equal(
          student.loss_weights_BT[own_rows, columns], np.float32(1 / len(slots))
        )
        segments = student.segment_ids_BT[own_rows[0]]
        first = np.flatnonzero(segments == segments[columns[0]])[0]
        tokens_T = student.tokens_BT[own_rows[0]]
        assert columns == tuple(range(columns[0], columns[-1] + 1))
        yield (
          tuple(tokens_T[first : columns[0]].tolist()),
          tuple(tokens_T[list(columns)].tolist()),
          tuple(teacher.tokens_BT[row, read].tolist()),
        )


@pytest.mark.parametrize('num_parts', [1, 2])
@pytest.mark.parametrize(
  ('sizes', 'num_batches'),
  [(dict(rows=4, seq_len=32), 1), (dict(rows=2, seq_len=24, align=4), 2)],
)
def test_a_slot_is_the_same_token_behind_the_same_context(
  sizes, num_batches, num_parts
):
  shape = replayed.shape(CONFIG, **sizes)
  microbatches, counts, students = packed(shape=shape, num_parts=num_parts)
  expected = [
    (
      tuple(t.tokens_T[: h.start].tolist()),
      tuple(t.tokens_T[h.start : h.stop].tolist()),
      (
        *t.tokens_T[: h.at].tolist(),
        *h.tokens_T.tolist(),
        *t.tokens_T[h.at : h.stop].tolist(),
      ),
    )
    for t, h in hinted()
  ]
  actual = [t for b in microbatches for t in read_back(b, num_parts)]
  assert sorted(actual) == sorted(expected)
  assert len(microbatches) >= num_batches
  assert counts == {
    'hints': len(hinted()),
    'hint_tokens': sum(h.stop - h.start for _, h in hinted()),
    'hints_dropped': 0,
  }
  for window, hints, (batch, row, _, span) in students:
    tokens_T = microbatches[batch].student.tokens_BT[row, span]
    np.testing.assert_array_equal(tokens_T, window.tokens_T[: hints[-1].stop])
  assert sum(len(s.hints) for s in students) == len(hinted())
  # Windows keep their recorded routes.
  student = microbatches[0].student
  assert (student.expert_ids_MBTA != records.NO_ROUTE).any()
  assert not student.advantages_BT.any()


def test_a_hint_longer_than_its_row_is_dropped_and_counted():
  windows, hints = [window(14, 0)], [hint(3, 6, 4), hint(8, 13, 20)]
  shape = replayed.shape(CONFIG, rows=4, seq_len=32)
  packing = packed([group(0, (windows, hints))], shape)
  assert (packing[1]['hints'], packing[1]['hints_dropped']) == (1, 1)
  less = packed([group(0, (windows, hints[:1]))], shape)
  jax.tree.map(np.testing.assert_array_equal, only(packing), only(less))
  none = packed([group(0, (windows, [hint(8, 13, 2000)]))], shape)
  assert (none[0], none[1]['hints_dropped']) == ([], 1)


def test_a_hint_that_is_not_on_a_turn_is_refused():
  t = window(14, 0)
  t.loss_mask_T[5] = False
  with pytest.raises(ValueError, match=r'tokens 3 to 6 of a window of 14'):
    packed([group(0, ([t], [hint(3, 6, 4)]))])
  with pytest.raises(ValueError, match=r'tokens 0 to 2 .* token of context'):
    packed([group(0, ([t], [hint(0, 2, 4)]))])
  with pytest.raises(ValueError, match=r'rows \(4\) must divide by .* \(3\)'):
    packed(num_parts=3)


def recorder(values=VALUES):
  """Returns a run's functions and the list of the hints that they get."""
  seen_hints = []

  def add_hints(values, teacher, sums, batch):
    seen_hints.append((teacher, batch))
    zero = jnp.float32(0)
    stats = distill.HintStats(
      loss=zero + 3,
      num_tokens=zero + 4,
      divergence=zero + 2,
      gap=zero - 8,
      truncated=zero + 1,
      k3=zero + 2,
    )
    return sums, stats, None

  def unused(*_):
    raise AssertionError

  functions = steps.Functions(
    policy=unused,
    for_backward=unused,
    compact=unused,
    add_microbatch=unused,
    apply=unused,
    score=unused,
    chain=unused,
    add_hints=add_hints,
    parts=1,
  )
  return functions, seen_hints


def test_a_step_without_hints_costs_nothing():
  functions, seen_hints = recorder()
  silent = [
    dataclasses.replace(
      g, rollouts=tuple(dataclasses.replace(r, hints=()) for r in g.rollouts)
    )
    for g in GROUPS
  ]
  sums = object()
  unchanged, counts, stats, hinted = update.add_hints(
    sums, silent, functions, SHAPE, None, None, replay=True
  )
  assert unchanged is sums and not seen_hints and stats is None
  assert hinted == ([], [])
  assert counts == {'hints': 0, 'hint_tokens': 0, 'hints_dropped': 0}


def test_a_step_adds_and_measures_its_hints():
  functions, seen_hints = recorder()
  _, counts, stats, _ = update.add_hints(
    None, GROUPS, functions, SHAPE, VALUES, TEACHER, replay=False
  )
  ((teacher, batch),) = seen_hints
  assert teacher is TEACHER
  # Without replay student and teacher are routed afresh.
  assert (batch.student.expert_ids_MBTA == records.NO_ROUTE).all()
  assert counts == {'hints': 6, 'hint_tokens': 17, 'hints_dropped': 0}
  assert distill.metrics(stats, 0.5) == {
    'hint_loss': 1.5,
    'hint_divergence': 0.5,
    'hint_gap': -2.0,
    'hint_truncated': 0.25,
    'mismatch_kl_hints': 0.5,
  }


def test_the_average_teacher_follows_and_the_frozen_does_not():
  optimizer = optax.sgd(1.0)
  variables = {'params': {'w': jnp.array([1.0, -2.0])}}
  for kind, expected in (('frozen', {}), ('ema', {'w': [1.0, -1.6]})):
    options = dataclasses.replace(OPTIONS, teacher=kind, ema_rate=0.2)
    functions = steps.build(MODEL, optimizer, hints=options)
    state = train_state.create(variables, optimizer, with_teacher=kind == 'ema')
    grads = {'w': jnp.array([0.0, -4.0])}
    state, _ = functions.apply(state, nothing_but(grads), jnp.float32(0.5))
    np.testing.assert_array_equal(state.params['w'], [1.0, 0.0])
    # A fifth of the way from -2 to 0.
    jax.tree.map(np.testing.assert_allclose, state.teacher, expected)
    variables = {'params': {'w': jnp.array([1.0, -2.0])}}


def test_an_average_that_has_not_moved_is_the_policy():
  precision = model_config.PrecisionConfig(experts='nvfp4')
  config = dataclasses.replace(CONFIG, precision=precision)
  options = dataclasses.replace(OPTIONS, teacher='ema')
  functions = steps.build(decoder.Decoder(config), optax.sgd(1.0))
  variables = jax.tree.map(jnp.asarray, replayed.variables(config))
  state = train_state.create(variables, optax.sgd(1.0), with_teacher=True)
  jax.tree.map(
    np.testing.assert_array_equal,
    update.teacher_of(state, options, functions, None),
    functions.policy(state),
  )


def test_the_average_lies_where_its_parameters_do():
  where = placement.build(
    CONFIG,
    mesh=topology.make_mesh(2, 2, 2, devices=jax.devices()),
    layout=layouts.TRAIN,
  )
  state = jax.eval_shape(
    functools.partial(
      train_state.create, optimizer=optax.sgd(1.0), with_teacher=True
    ),
    VALUES,
  )
  places = train_state.shardings(state, where.variables, where.mesh)
  assert places.teacher == places.params == where.variables['params']
  assert jax.tree.structure(places) == jax.tree.structure(state)


def test_options_say_what_they_may_be():
  for fields, message in (
    (dict(divergence='tv'), "divergence must be one of .*'tv'"),
    (dict(teacher='live'), "teacher must be one of .*'live'"),
    (dict(weight=-1.0), 'weight must be a number of at least 0'),
    (dict(ratio_cap=0.5), 'ratio_cap must be a number of at least 1'),
    (dict(ema_rate=1.0), r'ema_rate must lie in \(0, 1\).* got 1\.0'),
  ):
    with pytest.raises(ValueError, match=message):
      distill.HintLossOptions(**fields)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('mesh_shape', 'transport'),
  [((2, 2, 2), 'ragged_a2a'), ((1, 4, 2), 'a2a'), ((1, 1, 8), 'auto')],
)
@pytest.mark.parametrize('name', sorted(replayed.CONFIGS))
def test_the_gradient_on_a_mesh_is_that_of_one_device(
  name, mesh_shape, transport
):
  config = replayed.CONFIGS[name]
  values = replayed.variables(config)
  teacher = jax.tree.map(lambda a: a[..., ::-1].copy(), values)
  shape = replayed.shape(config, rows=8, seq_len=SHAPE.seq_len)
  where = placement.build(
    config,
    mesh=topology.make_mesh(*mesh_shape, devices=jax.devices()),
    layout=layouts.TRAIN,
    options=placement.ParallelOptions(transport=transport),
  )
  groups, totals, seen = few_experts(config), [], []
  for placed in (None, where):
    functions = steps.build(
      decoder.Decoder(config, placed and placed.plan),
      optax.sgd(1.0),
      hints=OPTIONS,
      placement=placed,
      compiler_options=compiling.QUICKLY,
    )
    put = (
      jax.device_put
      if placed is None
      else functools.partial(jax.device_put, device=where.variables)
    )
    zeros = jax.tree.map(jnp.zeros_like, put(values)['params'])
    sums, _, stats, (students, scores) = update.add_hints(
      nothing_but(zeros),
      groups,
      functions,
      shape,
      put(values),
      put(teacher),
      replay=True,
    )
    logprobs, differing = (
      comparison.per_token([s.place for s in students], arrays)
      for arrays in zip(*((s.logprobs_BT, s.differing_BT) for s in scores))
    )
    # Parts of a mesh hold windows in other rows, and other hints with each.
    places = {id(h): (i, h) for i, s in enumerate(students) for h in s.hints}
    ordered = [places[id(h)] for _, h in hinted(groups)]
    logprobs = [logprobs[i][: h.stop] for i, h in ordered]
    # A window's last token has no route.
    seen.append([differing[i][: h.stop - 1] for i, h in ordered])
    totals.append(jax.device_get((sums.grads, stats, logprobs)))
  assert_close(totals[1], totals[0])
  jax.tree.map(np.testing.assert_array_equal, *seen)
  assert any(differing_T.any() for differing_T in seen[0])


def few_experts(config):
  """Returns the groups with routes among fewer experts."""

  def kept(t):
    rng = np.random.default_rng(len(t))
    order = np.argsort(
      rng.random((*t.expert_ids_TMA.shape[:2], config.moe.num_experts)), -1
    )
    ids_TMA = order[..., : config.moe.num_active].astype(np.uint16)
    ids_TMA[-1] = records.NO_ROUTE
    return dataclasses.replace(t, expert_ids_TMA=ids_TMA)

  return [
    dataclasses.replace(
      g,
      rollouts=tuple(
        dataclasses.replace(r, trajectories=tuple(map(kept, r.trajectories)))
        for r in g.rollouts
      ),
    )
    for g in GROUPS
  ]


def nothing_but(grads):
  """Returns sums of a step that has only these gradients."""
  zero = np.float32(0)
  return steps.StepSums(
    grads=grads,
    loss=zero,
    stats=policy_loss.PolicyStats(
      num_tokens=zero, entropy=zero, truncated=zero, dropped=zero
    ),
    load_ME=np.ones((replayed.M, CONFIG.moe.num_experts), np.int32),
    num_routed=np.float32(1),
    replay_agreement_M=np.zeros(replayed.M, np.float32),
    replay_replaced_M=np.zeros(replayed.M, np.float32),
  )


def test_the_ratio_is_capped():
  batch = only(packed())
  student = batch.student
  _, stats = gradients(batch, teacher=TEACHER)
  # As if every token had been far less likely in the rollout.
  rare = student.replace(
    rollout_logprobs_BT=np.full_like(student.rollout_logprobs_BT, -90)
  )
  _, often = gradients(batch.replace(student=rare), teacher=TEACHER)
  assert often.truncated == often.num_tokens == stats.num_tokens
  # At ratio 0 no loss is left.
  sure = student.replace(
    rollout_logprobs_BT=np.full_like(student.rollout_logprobs_BT, 90)
  )
  _, never = gradients(batch.replace(student=sure), teacher=TEACHER)
  assert never.truncated == never.loss == 0
  assert never.divergence == often.divergence == stats.divergence


def numpy_divergence(student, teacher, kind):
  p, q = np.exp(log_softmax(student)), np.exp(log_softmax(teacher))
  m = (p + q) / 2

  def between(a, b):
    return (a * np.log(a / b)).sum(-1)

  return {
    'reverse': between(p, q),
    'forward': between(q, p),
    'jsd': (between(p, m) + between(q, m)) / 2,
  }[kind]


@pytest.mark.parametrize('kind', distill.DIVERGENCES)
def test_divergences_are_their_closed_forms(kind):
  rng = np.random.default_rng(0)
  student_ZV, teacher_ZV = 2 * rng.normal(size=(2, 40, 11))
  found_Z = distill.divergence(
    jnp.float32(student_ZV), jnp.float32(teacher_ZV), kind
  )
  expected_Z = numpy_divergence(student_ZV, teacher_ZV, kind)
  # Terms of up to 8 nats cancel.
  np.testing.assert_allclose(found_Z, expected_Z, rtol=1e-5, atol=3e-6)
  slope_ZV = jax.grad(
    lambda student_ZV: distill.divergence(
      student_ZV, jnp.float32(teacher_ZV), kind
    ).sum()
  )(jnp.float32(student_ZV))
  for word in range(3):
    step_V = np.where(np.arange(11) == word, 1e-5, 0.0)
    above_Z, below_Z = (
      numpy_divergence(student_ZV + by_V, teacher_ZV, kind)
      for by_V in (step_V, -step_V)
    )
    np.testing.assert_allclose(
      slope_ZV[:, word], (above_Z - below_Z) / 2e-5, rtol=1e-4, atol=1e-5
    )


def test_two_words_have_divergences_that_can_be_written_down():
  student_ZV = jnp.log(jnp.float32([[0.75, 0.25]]))
  teacher_ZV = jnp.log(jnp.float32([[0.5, 0.5]]))
  expected = {
    'reverse': 0.75 * np.log(1.5) + 0.25 * np.log(0.5),
    'forward': 0.5 * np.log(2 / 3) + 0.5 * np.log(2),
    # The mixture is (5/8, 3/8).
    'jsd': 0.5 * (0.75 * np.log(6 / 5) + 0.25 * np.log(2 / 3))
    + 0.5 * (0.5 * np.log(4 / 5) + 0.5 * np.log(4 / 3)),
  }
  for kind in distill.DIVERGENCES:
    (divergence,) = distill.divergence(student_ZV, teacher_ZV, kind)
    assert float(divergence) == pytest.approx(expected[kind], rel=1e-6)
