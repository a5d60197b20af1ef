"""Owners, shared matrices, repeated work, chunks and their order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.optim.muon import cost, exchange, newton_schulz
from composer_jax.plan import muon_model
from tests.optim.muon import plans


@pytest.fixture(scope='module')
def kimi():
  return plans.kimi_plan((2, 128, 2))


def _check_cover(group):
  """Every local matrix has one slot; padding is less than one per owner."""
  position = 0
  for chunk in group.chunks:
    assert chunk.start == position and chunk.count > 0
    position += chunk.count
    assert chunk.count <= chunk.owned * group.owners
    if chunk is not group.chunks[-1]:
      assert chunk.count == chunk.owned * group.owners
  assert position == group.count == sum(m.count for m in group.members)
  assert group.owned == -(-group.count // group.owners)
  assert 0 <= group.owned * group.owners - group.count < group.owners


@pytest.mark.parametrize('chunks', [None, 1, 7, 1000])
def test_chunks_cover_every_local_matrix_once(chunks, kimi):
  made_plans = [
    plans.decoder_plan(name, rates=plans.CPU, chunks=chunks, repeats=repeats)
    for name in plans.MESHES
    for repeats in (False, True)
  ]
  for made in [*made_plans, kimi]:
    for group in made.groups:
      _check_cover(group)
    every = [
      (g, c)
      for g, group in enumerate(made.groups)
      for c in range(len(group.chunks))
    ]
    assert sorted(made.sequence) == every


def test_chunks_add_no_padding_and_no_bytes():
  whole, cut = (
    plans.decoder_plan('HSDP', rates=plans.CPU, chunks=n) for n in (1, 12)
  )
  assert len(cut.sequence) == 11 and len(whole.sequence) == 3
  assert cut.flops == whole.flops and cut.wire_bytes == whole.wire_bytes


def test_chunks_end_with_whole_layers(kimi):
  experts = max(kimi.groups, key=lambda group: group.flops)
  inner = {
    member.name.split('/')[-1]: member.inner for member in experts.members
  }
  assert inner == {'gate_up': 6, 'down': 3}
  assert len(experts.chunks) == 23
  assert all(chunk.start % 6 == 0 for chunk in experts.chunks)


def test_work_is_cut_until_latency_counts():
  tiny, large = (
    plans.kimi_plan((2, 128, 2), rates=rates).groups
    for rates in (
      dataclasses.replace(cost.BY_NAME['v5p'], latency=1.0),
      cost.BY_NAME['v5p'],
    )
  )
  assert {len(group.chunks) for group in tiny} == {1}
  assert max(len(group.chunks) for group in large) == 23


@pytest.mark.parametrize(
  'fsdp, owner, shared',
  [(64, 1.12, 1.01), (128, 1.25, 1.02), (256, 1.51, 1.04)],
)
def test_sharing_giants_shortens_the_critical_path_of_kimi_k2(
  fsdp, owner, shared
):
  # The three 18432 x 7168 matrices of its one dense layer are 0.14 % of the
  # work, and all devices wait for their owners.
  alone = plans.kimi_plan((2, fsdp, 2), split=1)
  assert plans.critical_path(alone) == pytest.approx(owner, abs=0.005)
  made = plans.kimi_plan((2, fsdp, 2))
  assert plans.critical_path(made) < shared
  modes = {(g.p, g.q): g.mode for g in made.groups if g.split > 1}
  assert modes == {(7168, 18432): 'gram_sharded'}


def test_a_shared_matrix_costs_what_the_split_iteration_says():
  sizes = dict(x=16)
  group = plans.one_matrix((3, 64, 90), P(None, None, 'x'), dict(x=2), split=1)
  assert group.split == 1
  ns = newton_schulz.NewtonSchulz(dtype='float32')
  group = plans.one_matrix(
    (1, 64, 96), P(None, None, 'x'), sizes, ns=ns, split=4
  )
  assert (group.mode, group.split, group.owners) == ('gram_sharded', 4, 4)
  # 6 columns of a shard go to 4 devices as 2 each, two of them zeros.
  assert group.matrix_flops == newton_schulz.split_flops(64, 128, 4, ns)
  inner = newton_schulz.split_collectives(64, 4, ns)
  assert group.split_collectives(group.chunks[0]) == inner
  kinds = {kind: (n, size) for kind, n, size in muon_model.collectives(group)}
  assert kinds['all-to-all'] == (2, 2 * 15 * 64 * 2 * 4)
  assert kinds['reduce-scatter'] == (5, 5 * 3 * 64 * 16 * 4)
  # Repeated in each of two replicas, an owner has two at once: as many
  # collectives, and no gathering of results.
  group = plans.one_matrix(
    (2, 64, 96),
    P(None, None, 'x'),
    dict(r=2, x=4),
    ns=ns,
    split=4,
    repeats=True,
  )
  assert (group.mode, group.owners, group.owned) == ('gram_sharded', 1, 2)
  kinds = {kind: (n, size) for kind, n, size in muon_model.collectives(group)}
  assert kinds['all-reduce'] == (2, 2 * (2 * 2 * 4 * 3 // 4))
  assert kinds['all-gather'] == (10, 10 * 2 * 3 * 64 * 16 * 4)


def test_giants_stay_whole_where_that_is_as_fast_or_bits_matter():
  shape, spec, sizes = (1, 4096, 8192), P(None, None, 'x'), dict(x=16)
  auto = plans.one_matrix(shape, spec, sizes, rates=cost.BY_NAME['v5p'])
  assert auto.split > 1
  ns = dataclasses.replace(plans.STANDARD, deterministic=True)
  rates = cost.BY_NAME['v5p']
  assert plans.one_matrix(shape, spec, sizes, ns=ns, rates=rates).split == 1
  slow = dataclasses.replace(cost.BY_NAME['v5p'], within=1e9)
  assert plans.one_matrix(shape, spec, sizes, rates=slow).split == 1
  # 12 matrices for 8 owners are not shared, though it would save a quarter.
  many = plans.one_matrix(
    (12, *shape[1:]), spec, dict(x=8), rates=cost.BY_NAME['v5p']
  )
  assert (many.split, many.owned) == (1, 2)


def test_a_giant_of_less_than_a_hundredth_of_the_step_stays_whole():
  def split_of(layers):
    made = plans.plan_of(
      {'giant': ('embed', 'ffw'), 'w': ('layer', 'embed', 'head_dim')},
      {'giant': P(None, 'x'), 'w': P(None, 'x', None)},
      plans.mesh_of(dict(x=8)),
      dict(embed=4096, ffw=8192, head_dim=2048, layer=layers),
      rates=cost.BY_NAME['v5p'],
    )
    return max(made.groups, key=lambda group: group.p).split

  assert split_of(64) > 1
  assert split_of(128 * 64) == 1


def test_a_split_stays_within_a_node():
  shape, spec = (1, 7168, 18432), P(None, None, 'x')
  h200 = cost.BY_NAME['h200']
  group = plans.one_matrix(shape, spec, dict(x=256), rates=h200)
  assert 1 < group.split <= h200.node


def test_replicas_repeat_work_that_costs_nothing_or_less_than_the_wire():
  # 3 matrices for 4 owners in a replica: no device would do less.
  free = plans.one_matrix(
    (3, 64, 128), P(None, 'f', None), dict(r=2, f=4), rates=plans.CPU
  )
  assert (free.mode, free.sharers, free.owners) == ('redundant', 1, 4)
  assert [kind for kind, *_ in muon_model.collectives(free)] == ['all-to-all']
  # 64 of them would take twice as long.
  shape, sizes = (64, 64, 128), dict(r=2, f=4)
  dealt = plans.one_matrix(shape, P(None, 'f', None), sizes, rates=plans.CPU)
  assert (dealt.mode, dealt.sharers, dealt.owners) == ('owner', 2, 8)
  # Not if replicas are on other nodes, with a slow network.
  far = dataclasses.replace(plans.CPU, across=1e5, node=4)
  repeated = plans.one_matrix(shape, P(None, 'f', None), sizes, rates=far)
  assert (repeated.mode, repeated.owned) == ('redundant', 16)
  # Matrices that every device has whole need no exchange.
  whole = plans.one_matrix((1, 64, 128), P(), dict(r=8), rates=plans.CPU)
  assert whole.mode == 'redundant' and not muon_model.collectives(whole)


def test_replicas_can_be_told():
  for repeats, mode in ((False, 'owner'), (True, 'redundant')):
    made = plans.decoder_plan('HSDP', repeats=repeats, rates=plans.CPU)
    assert {group.mode for group in made.groups} == {mode}
  kinds = {c[0] for g in made.groups for c in muon_model.collectives(g)}
  assert kinds == {'all-to-all'} and made.flops > 1.9 * made.ideal_flops


def test_the_first_and_last_chunk_exchange_least(kimi):
  times = muon_model.chunk_times(kimi, cost.BY_NAME['v5p'])
  exchanged = [each.bring + each.give for each in times]
  assert exchanged[0] == min(exchanged)
  assert exchanged[-1] == sorted(exchanged)[1]
  # The others of one chunk lie apart, between those of the experts.
  groups = [g for g, _ in kimi.sequence]
  experts = max(set(groups), key=groups.count)
  small = [i for i, g in enumerate(groups) if g != experts]
  assert min(np.diff(small)) > 1


def test_matrices_are_dealt_to_no_more_replicas_than_own_some():
  # Two shards in each of eight replicas: two replicas own three matrices, and
  # four five, on as many slots as all of them.
  rates = dataclasses.replace(plans.CPU, latency=1e-9, within=1e15, memory=1e15)
  shape, spec, sizes = (64, 128), P(None, 'f', None), dict(r=8, f=2)
  message = dict(rates=rates, split=1)
  for layers, sharers in ((2, 1), (3, 2), (5, 4), (9, 8), (17, 8), (20, 8)):
    group = plans.one_matrix((layers, *shape), spec, sizes, **message)
    assert group.sharers == sharers
    assert group.owned == -(-layers // 16)
  group = plans.one_matrix((5, *shape), spec, sizes, **message)
  assert (group.mode, group.owners, group.owned) == ('owner', 8, 1)
  gathered = {kind: n for kind, _, n in muon_model.collectives(group)}[
    'all-gather'
  ]
  assert gathered == 3 * 2 * group.shard_bytes
  # Not if every matrix must have one owner.
  one = plans.one_matrix((5, *shape), spec, sizes, **message, repeats=False)
  assert (one.sharers, one.owners) == (8, 16)


def test_a_group_of_many_bytes_and_little_work_is_cut_by_bytes():
  sizes = dict(embed=1024, ffw=1024, layer=2, heads=128, head_dim=8)
  made = plans.plan_of(
    {'w': ('layer', 'embed', 'ffw'), 'h': ('heads', 'embed', 'head_dim')},
    {'w': P(None, 'x', None), 'h': P(None, 'x', None)},
    plans.mesh_of(dict(x=2)),
    sizes,
    rates=plans.CPU,
    split=1,
    chunks=9,
  )
  heads, wide = made.groups
  assert heads.flops < 0.02 * wide.flops
  # A third of all bytes.
  assert (len(wide.chunks), len(heads.chunks)) == (1, 3)


@pytest.mark.parametrize('mesh', ['HSDP', 'DUAL'])
def test_names_of_parameters_change_no_plan_and_no_program(mesh):
  sizes, expert, dense, _ = plans.MESHES[mesh]
  axes_of = lambda axes: expert if 'expert' in axes else dense
  leaves = list(plans.LEAVES.values())
  shapes = [[plans.SIZES[axis] for axis in axes] for axes in leaves]

  def traced(names):
    specs = [P(*(axes_of(axes).get(a) for a in axes)) for axes in leaves]
    named = lambda values: dict(zip(names, values, strict=True))
    placed = plans.mesh_of(sizes)
    made = plans.plan_of(named(leaves), named(specs), placed, rates=plans.CPU)
    shardings = named([NamedSharding(placed, spec) for spec in specs])

    def run(arrays):
      results = exchange.orthogonalize(
        made,
        named(arrays),
        named(arrays),
        jnp.float32(1),
        beta=0.9,
        shardings=shardings,
      )
      return [[tree[name] for name in names] for tree in results]

    arrays = [
      jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[name])
      for name, shape in zip(names, shapes, strict=True)
    ]
    return made.sequence, str(jax.make_jaxpr(run)(arrays))

  numbers = [f'{i:02}' for i in range(len(leaves))]
  sequence, program = traced(numbers)
  assert len(sequence) > 3
  # Parameters of one form keep their order, as nothing else tells them apart.
  order = sorted(numbers, key=lambda n: leaves[int(n)])
  others = dict(zip(order, numbers, strict=True))
  assert traced([others[n] for n in numbers]) == (sequence, program)
