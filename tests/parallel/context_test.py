"""Attention in a row shared by devices equals one device, with equal work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.kernels.attention import blocked, blocks
from composer_jax.kernels.attention import grouped_query as attention_kernel
from composer_jax.models import attention, mla
from composer_jax.parallel import exchange, sequence, topology
from tests.kernels.attention import reference
from tests.models import decoder_test
from tests.parallel import collectives, on_mesh

B, T = 4, 64
KINDS = {'gqa': attention, 'mla': mla}


def plan_of(context, sequence_order):
  """Returns a plan with rows on `context` devices of 8."""
  fsdp = min(8 // context, B)
  return exchange.ExchangePlan(
    mesh=topology.make_mesh(8 // context // fsdp, fsdp, context),
    batch_axes=('fsdp',),
    sequence_axes=('context',),
    weight_specs=(),
    sequence_order=sequence_order,
  )


# ---------------------------------------------------------------- the order


def test_zigzag_gives_each_device_an_early_and_a_late_chunk():
  np.testing.assert_array_equal(
    sequence.order(16, 4),
    [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9],
  )
  rows = np.arange(2 * 24 * 3).reshape(2, 24, 3)
  there = sequence.to_device(rows, 3)
  np.testing.assert_array_equal(there[:, :4], rows[:, :4])
  np.testing.assert_array_equal(there[:, 4:8], rows[:, 20:])
  np.testing.assert_array_equal(on_mesh.to_row(there, 3), rows)
  routes = sequence.to_device(rows[None], 3, axis=2)
  np.testing.assert_array_equal(routes[0], there)


def test_a_row_that_does_not_divide_is_refused():
  with pytest.raises(
    ValueError, match=r'\(36\) must divide by .*\(8\);.*is 32 or'
  ):
    sequence.order(36, 4)
  # Shards check it too, since a batch may not have been reordered.
  plan = plan_of(8, 'zigzag')
  rows = jax.ShapeDtypeStruct((B, 24), 'int32')
  gather = _sharded(
    lambda x_BT: sequence.gather_row(x_BT, plan), plan, 1, (P('fsdp'),)
  )
  with pytest.raises(
    ValueError, match=r'\(24\) must divide by .*\(16\);.*or 32'
  ):
    jax.eval_shape(gather, rows)


@pytest.mark.parametrize('context', [2, 8])
@pytest.mark.parametrize('sequence_order', ('contiguous', 'zigzag'))
def test_a_shard_finds_its_row_and_itself(context, sequence_order):
  plan = plan_of(context, sequence_order)
  row = np.arange(B * T).reshape(B, T)
  on_devices = row
  if sequence_order == 'zigzag':
    on_devices = sequence.to_device(row, context)

  def shard(x_BT):
    x_BS = sequence.gather_row(x_BT, plan)
    return x_BS, sequence.own_part(x_BS, plan)

  run = jax.jit(_sharded(shard, plan, 1, (P('fsdp'), None)))
  gathered, part = run(on_devices)
  np.testing.assert_array_equal(gathered, row)
  np.testing.assert_array_equal(part, on_devices)


def _sharded(fn, plan, num_arrays, out_specs=None):
  tokens = P('fsdp', 'context')
  if out_specs is not None:
    out_specs = tuple(spec or tokens for spec in out_specs)
  return jax.shard_map(
    fn,
    mesh=plan.mesh,
    in_specs=(tokens,) * num_arrays,
    out_specs=out_specs or tokens,
    check_vma=False,
  )


# ---------------------------------------------------------------- attention


def _config(kind):
  return decoder_test.CONFIGS[kind]


def _inputs(kind):
  """Returns query, kept, the projections' weights and segment ids."""
  a, random = _config(kind).attention, np.random.default_rng(0)

  def normal(*shape):
    return random.normal(size=shape).astype(np.float32)

  # Documents that cross pieces, one over all pieces, and padding.
  lengths = [[5, 30, 20, 9], [64, 0, 0, 0], [33, 3, 4, 24], [1, 62, 1, 0]]
  ids = np.stack([np.repeat([1, 2, 3, 0], row) for row in lengths])
  ids[3] = np.repeat([1, 2, 3], [1, 62, 1])
  if kind == 'gqa':
    query = normal(B, T, a.num_heads, a.head_dim)
    shape = (B, T, a.num_kv_heads, a.head_dim)
    return query, (normal(*shape), normal(*shape)), {}, ids.astype(np.int32)
  heads = (B, T, a.num_heads)
  query = normal(*heads, a.nope_dim), normal(*heads, a.rope_dim)
  kept = normal(B, T, a.kv_lora_dim), normal(B, T, a.rope_dim)
  weights = {
    name: 0.3 * normal(a.kv_lora_dim, a.num_heads, dim)
    for name, dim in (('key_up', a.nope_dim), ('value_up', a.value_dim))
  }
  return query, kept, weights, ids.astype(np.int32)


def _attend(kind, plan):
  """Returns attention (query, kept, weights, ids) -> (out, tops)."""

  def attend(query, kept, weights, ids_BT):
    if plan is None:
      visible = attention.visible_of(ids_BT)
    else:
      visible = attention.visible_in_shard(ids_BT, plan)
    return KINDS[kind].attend(
      weights, query, kept, visible, _config(kind), plan=plan
    )

  if plan is None:
    return attend
  tokens = P(plan.batch_axes, plan.sequence_axes)
  return jax.shard_map(
    attend,
    mesh=plan.mesh,
    in_specs=(tokens, tokens, P(), tokens),
    out_specs=tokens,
    check_vma=False,
  )


def _value_and_gradients(kind, plan):
  def run(query, kept, weights, ids_BT):
    def attend(*arrays):
      return _attend(kind, plan)(*arrays, ids_BT)

    (out, tops), pull = jax.vjp(attend, query, kept, weights)
    return (out, tops), pull((jnp.cos(out), jnp.ones_like(tops)))

  return jax.jit(run)


@functools.cache
def _on_one_device(kind):
  """Returns the results of the whole softmax on one device."""
  with attention_kernel.using(reference.whole):
    results = _value_and_gradients(kind, None)(*_inputs(kind))
  return jax.tree.map(np.asarray, results)


@pytest.mark.parametrize(
  'kind,context,sequence_order',
  [
    ('gqa', 2, 'zigzag'),
    ('mla', 4, 'zigzag'),
    ('gqa', 8, 'contiguous'),
    *(
      pytest.param(*case, marks=pytest.mark.slow)
      for case in (
        ('mla', 2, 'contiguous'),
        ('mla', 8, 'zigzag'),
        ('gqa', 4, 'zigzag'),
        ('gqa', 8, 'zigzag'),
      )
    ),
  ],
)
def test_equals_one_device_in_value_and_gradient(kind, context, sequence_order):
  plan = plan_of(context, sequence_order)
  query, kept, weights, ids = _inputs(kind)
  (out, tops), (d_query, d_kept, d_weights) = _on_one_device(kind)

  def move(tree):
    if sequence_order == 'contiguous':
      return tree
    return jax.tree.map(lambda x: sequence.to_device(x, context), tree)

  run = _value_and_gradients(kind, plan)
  have = run(*move((query, kept)), weights, move(ids))
  want = move((out, tops)), (*move((d_query, d_kept)), d_weights)
  jax.tree.map(
    # A few roundings of the largest term.
    lambda a, b: np.testing.assert_allclose(
      a, b, atol=1e-6 * np.abs(np.where(b < -1e29, 0, b)).max()
    ),
    have,
    want,
  )


# Two devices share a row; numbers are those that each receives.
@pytest.mark.parametrize(
  'kind,per_token', [('gqa', 2 * 2 * 4), ('mla', 6 + 2)], ids=KINDS
)
def test_only_what_is_kept_travels_and_only_once_each_way(kind, per_token):
  plan = plan_of(2, 'zigzag')
  compiled = _value_and_gradients(kind, plan).lower(*_inputs(kind)).compile()
  numbers = {'all-gather': 0, 'reduce-scatter': 0}
  for operation in collectives.read(compiled.as_text()):
    if operation.groups == collectives.blocks(8, 2):
      numbers[operation.kind] += sum(operation.sizes)
  tokens = B * T // 4
  # One more number is the segment of a token.
  assert numbers == {
    'all-gather': tokens * (per_token + 1),
    'reduce-scatter': tokens * per_token // 2,
  }


# ---------------------------------------------------------------- the work


def _work(kind, context, sequence_order, length):
  """Returns the key blocks that each device visits in a full causal row."""
  plan = plan_of(context, sequence_order)
  a = _config(kind).attention
  heads = a.num_kv_heads if kind == 'gqa' else a.num_heads

  def shard(ids_BT):
    visible = attention.visible_in_shard(ids_BT, plan)
    sizes = blocked.sizes(visible.start_BT.shape[1], length)
    work = heads * blocks.executed(visible, *sizes).sum()
    return work[None, None]

  return jax.jit(_sharded(shard, plan, 1))(np.ones((B, length), np.int32))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('context', [2, 4, 8])
def test_zigzag_visits_as_many_key_blocks_on_every_device(kind, context):
  length = 4096
  work = _work(kind, context, 'zigzag', length)
  assert work.shape == (min(8 // context, B), context)
  assert work.min() == work.max()
  # All devices together visit as many as one does.
  whole = _work(kind, context, 'contiguous', length)
  assert work.sum() == whole.sum()
  # In a causal row, tiles j and later visit block j.
  num_blocks = length // context // blocked.KEYS
  ratio = (2 * context * num_blocks - num_blocks + 1) / (num_blocks + 1)
  np.testing.assert_allclose(whole.max() / whole.min(), ratio)
