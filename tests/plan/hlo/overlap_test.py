"""Counts of compiled programs against the programs as written."""

import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.plan.hlo import overlap
from composer_jax.plan.hlo import text as hlo_text

N = 8  # side of the square matrices below
PRODUCT = 2 * N**3


def _text(function, *arguments) -> str:
  return jax.jit(function).lower(*arguments).compile().as_text()


def _loops(x):
  def outer(x, _):
    x = jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ x), x)
    return x @ x, None

  x, _ = jax.lax.scan(outer, x, None, length=5)
  x = jax.lax.fori_loop(2, 6, lambda _, x: jnp.tanh(x @ x) @ x, x)
  return jax.lax.while_loop(  # 4 and 7
    lambda carry: carry[0] <= 7,
    lambda carry: (carry[0] + 3, x @ carry[1]),
    (4, x),
  )


def test_loops_count_their_trips():
  x = jnp.eye(N)
  want = (5 * (3 + 1) + 4 * 2 + 2) * PRODUCT
  assert overlap.read(_text(_loops, x)).flops == want
  # Here conditions state the trips, there XLA has found them.
  before_xla = jax.jit(_loops).lower(x).as_text(dialect='hlo')
  assert 'known_trip_count' not in before_xla
  assert overlap.read(before_xla).flops == want


def test_loop_that_data_end_is_an_error_unless_given_trips():
  def function(x, end):
    return jax.lax.while_loop(
      lambda carry: carry[0] < end,
      lambda carry: (carry[0] + 1, carry[1] @ carry[1]),
      (0, x),
    )

  text = _text(function, jnp.eye(N), 3)
  with pytest.raises(ValueError, match=r'while.* give dynamic_trips'):
    overlap.read(text)
  assert overlap.read(text, dynamic_trips=7).flops == 7 * PRODUCT


def test_conditional_counts_its_larger_branch():
  def function(is_full, x):
    return jax.lax.cond(is_full, lambda x: x @ x @ x, lambda x: x @ x, x) @ x

  text = _text(function, True, jnp.eye(N))
  assert overlap.read(text).flops == (2 + 1) * PRODUCT


def test_products_with_batch_and_transposed_sides():
  def function(x_bpq, y_bqr):
    return jnp.einsum('bpq,bqr->brp', x_bpq, y_bqr)

  text = _text(function, jnp.ones((3, 4, 5)), jnp.ones((3, 5, 7)))
  assert overlap.read(text).flops == 2 * 3 * 4 * 5 * 7
  few = overlap.read(text, of=lambda lhs, rhs, out: 11 in out)
  assert few.flops == 0


@pytest.mark.parametrize(
  'options',
  [
    dict(window_strides=(1,), padding='SAME'),
    dict(window_strides=(2,), padding='VALID', rhs_dilation=(2,)),
    # A batch of products, as the TPU compiler spells it.
    dict(window_strides=(11,), padding=[(0, 0)], lhs_dilation=(12,)),
  ],
)
def test_convolution_of_ones_adds_up_to_its_multiplications(options):
  x, kernel = jnp.ones((3, 2, 12)), jnp.ones((5, 2, 12))

  def function(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, **options)

  text = jax.jit(function).lower(x, kernel).as_text(dialect='hlo')
  assert overlap.read(text).flops == 2 * float(function(x, kernel).sum())


@pytest.fixture(scope='module')
def mesh():
  return jax.make_mesh(
    (2, 4), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )


def test_collectives_by_kind_bytes_and_loop(mesh):
  def body(x):  # [4, 8] float32 on each device, 128 bytes
    def step(x, _):
      return jax.lax.psum(x, 'b') * 0.1, None

    x, _ = jax.lax.scan(step, x, None, length=3)
    exchanged = jax.lax.all_to_all(x, 'b', 0, 1, tiled=True)
    gathered = jax.lax.all_gather(x, 'a', tiled=True)
    scattered = jax.lax.psum_scatter(x, 'b', tiled=True)
    moved = jax.lax.ppermute(x, 'b', [(0, 1), (1, 2)])
    return exchanged, gathered, scattered, moved

  x = jax.ShapeDtypeStruct(
    (32, 8), jnp.float32, sharding=jax.NamedSharding(mesh, P(('a', 'b')))
  )
  spec = P(('a', 'b'))
  mapped = jax.shard_map(
    body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
  )
  program = overlap.read(_text(mapped, x))
  by_kind = {c.kind: c for c in program.collectives}
  assert len(by_kind) == len(program.collectives) == 5
  bytes_in = {kind: c.bytes for kind, c in by_kind.items()}
  assert bytes_in == {
    'all-reduce': 2 * 128 * 3 // 4,
    'all-to-all': 128 * 3 // 4,
    'all-gather': 256 // 2,
    'reduce-scatter': 32 * 3,
    'collective-permute': 128,
  }
  assert by_kind['all-reduce'].count == 3
  assert len(by_kind['all-reduce'].loops) == 1
  assert by_kind['all-gather'].loops == ()
  rows = frozenset({frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})})
  assert by_kind['all-to-all'].groups == rows
  assert program.wire_bytes == sum(bytes_in.values()) + 2 * 192


_PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]
_ACROSS = [(0, 4), (1, 5), (2, 6), (3, 7)]
_HALVES = [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize(
  ('text', 'want'),
  [
    ('{{0,1},{2,3},{4,5},{6,7}}, dimensions={0}', _PAIRS),
    ('[4,2]<=[8], use_global_device_ids=true', _PAIRS),
    ('[2,4]<=[4,2]T(1,0)', [(0, 2, 4, 6), (1, 3, 5, 7)]),
    ("mesh['a'=2,'b'=4] {'b'}, dimensions={0}", _HALVES),
    ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}, x", [(0, 1, 4, 5), (2, 3, 6, 7)]),
    (
      "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, x",
      [(0, 2, 4, 6), (1, 3, 5, 7)],
    ),
    ("mesh['a'=2,'b'=4] {'a'}, x", _ACROSS),
    ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}, x", _ACROSS),
    ('[4,2]<=[2,4]T(1,0), x', _ACROSS),
    ('{}, to_apply=%add', []),
  ],
)
def test_replica_groups_in_every_spelling(text, want):
  assert hlo_text.groups(text) == frozenset(map(frozenset, want))


_HEADER = 'HloModule m, is_scheduled=true, num_partitions=8\n\n'


def _asynchronous(start: str, done: str, others: str = '') -> str:
  """A program that multiplies while a collective is in flight, then after."""
  return f"""{_HEADER}{others}
ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  {start}
  %inside = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  {done}
  ROOT %after = f32[8,8]{{1,0}} dot(%inside, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""  # noqa: E501


_WRAPPED = """
%wrapped (p: f32[8,8]) -> f32[64,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %g = f32[64,8]{1,0} all-gather(%p), replica_groups={}, dimensions={0}
}
"""


@pytest.mark.parametrize(
  ('start', 'done', 'others', 'kind', 'bytes_in'),
  [
    (
      '%s = (f32[8,8]{1,0}, f32[64,8]{1,0}) all-gather-start(%x), '
      'replica_groups=[1,8]<=[8], dimensions={0}',
      '%d = f32[64,8]{1,0} all-gather-done(%s)',
      '',
      'all-gather',
      64 * 8 * 4 * 7 // 8,
    ),
    (
      '%s = ((f32[8,8]{1,0}, bf16[8]{0}), (f32[64,8]{1,0}, bf16[64]{0})) '
      'all-gather-start(%x, %x), replica_groups=[1,8]<=[8], dimensions={0}',
      '%d = (f32[64,8]{1,0}, bf16[64]{0}) all-gather-done(%s)',
      '',
      'all-gather',
      (64 * 8 * 4 + 64 * 2) * 7 // 8,
    ),
    (  # The start of an all-reduce prints its result alone.
      '%s = f32[8,8]{1,0} all-reduce-start(%x), replica_groups={{0,1},{2,3}}, '
      'to_apply=%wrapped',
      '%d = f32[8,8]{1,0} all-reduce-done(%s)',
      '',
      'all-reduce',
      8 * 8 * 4,
    ),
    (
      '%s = ((f32[8,8]{1,0:T(8,128)}), f32[64,8]{1,0:T(8,128)(2,1)S(1)}, '
      'u32[]{:S(2)}) async-start(%x), calls=%wrapped',
      '%u = ((f32[8,8]), f32[64,8], u32[]) async-update(%s)\n'
      '  %d = f32[64,8]{1,0} async-done(%u)',
      _WRAPPED,
      'all-gather',
      64 * 8 * 4 * 7 // 8,
    ),
  ],
)
def test_start_and_done_enclose_what_hides_them(
  start, done, others, kind, bytes_in
):
  program = overlap.read(_asynchronous(start, done, others))
  (collective,) = program.collectives
  assert (collective.kind, collective.bytes) == (kind, bytes_in)
  assert collective.is_async
  assert collective.hidden == PRODUCT
  assert program.flops == 2 * PRODUCT
  assert program.overlap == 0.5


def test_copies_in_flight_hide_nothing():
  program = overlap.read(
    _asynchronous(
      '%s = (f32[8,8]{1,0}, f32[8,8]{1,0}, u32[]) copy-start(%x)',
      '%d = f32[8,8]{1,0} copy-done(%s)',
    )
  )
  assert program.collectives == ()
  assert program.overlap == 0


def test_schedule_of_the_tpu_compiler():
  """Two chunks of [8, 256, 512]: exchange, 3 steps of X X^T X, exchange.

  Compiled for v5p:2x2x1 by libtpu 0.0.42.1. The batch of two matrices became a
  dilated convolution, and the trip count is a constant in the condition.
  """
  text = (pathlib.Path(__file__).parent / 'tpu_overlap.hlo').read_text()
  assert 'convolution(' in text
  assert ' dot(' not in text
  assert 'known_trip_count' not in text
  program = overlap.read(text)
  chunk = 2 * 3 * 2 * (2 * 256 * 256 * 512)
  assert program.flops == 2 * chunk
  exchanges = program.of_kind('all-to-all')
  assert program.collectives == exchanges
  # The first on the way in and the last on the way back have nothing to hide
  # them; the others meet the chunk that is not theirs.
  assert [c.hidden for c in exchanges] == [0, chunk, chunk, 0]
  assert all(c.is_async and not c.loops for c in exchanges)
  assert {c.dtype for c in exchanges} == {'bf16'}
  assert {c.bytes for c in exchanges} == {8 * 256 * 128 * 2 * 3 // 4}
  assert program.overlap == 1


# As libtpu 0.0.42.1 prints it for v5p:2x2x2, shortened.
_SCATTER = """
%all-reduce-scatter (input: f32[4,512,2048]) -> f32[1032,8,128] {
  %input = f32[4,512,2048]{2,1,0:T(8,128)} parameter(0)
  %bitcast.4 = f32[4096,8,128]{2,1,0:T(8,128)} bitcast(%input)
  %constant.5 = f32[] constant(0)
  %pad = f32[4128,8,128]{2,1,0:T(8,128)} pad(%bitcast.4, %constant.5), padding=0_32x0_0x0_0
  %all-reduce.1 = f32[4128,8,128]{2,1,0:T(8,128)} all-reduce(%pad), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%region_0.0.clone
  %constant.shard_id_table = u32[8]{0:T(128)} constant({0, 1, 2, 3, 0, 1, 2, 3})
  %partition-id.3 = u32[] partition-id()
  %dynamic-slice.2 = u32[1]{0:T(128)} dynamic-slice(%constant.shard_id_table, %partition-id.3), dynamic_slice_sizes={1}
  %bitcast.5 = u32[]{:T(128)} bitcast(%dynamic-slice.2)
  %constant.6 = u32[] constant(1032)
  %multiply.2 = u32[]{:T(128)} multiply(%bitcast.5, %constant.6)
  %constant.7 = u32[] constant(0)
  ROOT %dynamic-slice.3 = f32[1032,8,128]{2,1,0:T(8,128)} dynamic-slice(%all-reduce.1, %multiply.2, %constant.7, %constant.7), dynamic_slice_sizes={1032,8,128}
}

%async (p: f32[4,512,2048]) -> f32[1032,8,128] {
  %p = f32[4,512,2048]{2,1,0:T(8,128)} parameter(0)
  ROOT %r = f32[1032,8,128]{2,1,0:T(8,128)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter
}
"""  # noqa: E501


@pytest.mark.parametrize('is_async', [False, True])
def test_an_all_reduce_of_which_a_part_is_kept_sends_that_part(is_async):
  start = (
    '%s = f32[1032,8,128]{2,1,0:T(8,128)} fusion(%x), kind=kCustom, '
    'calls=%all-reduce-scatter'
  )
  if is_async:
    start = (
      '%s = ((f32[4,512,2048]), f32[1032,8,128], u32[]) async-start(%x), '
      'calls=%async'
    )
  done = '%d = f32[1032,8,128] async-done(%s)' if is_async else ''
  program = overlap.read(_asynchronous(start, done, _SCATTER))
  (collective,) = program.collectives
  assert collective.kind == 'reduce-scatter'
  assert collective.bytes == 3 * 1032 * 8 * 128 * 4
  rows = frozenset({frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})})
  assert collective.groups == rows
  assert collective.is_async == is_async
  assert collective.hidden == (PRODUCT if is_async else 0)


# As libtpu 0.0.42.1 prints them for v5p:4x4x4, shortened.
_ON_SPARSE_CORES = """
%called (p: bf16[1,8,64], t: token[]) -> bf16[1,64,64] {
  %t = token[] parameter(1)
  %p = bf16[1,8,64]{2,1,0} parameter(0)
  ROOT %all-gather.19 = bf16[1,64,64]{2,1,0} all-gather(%p), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={1}, metadata={op_name="jit(step)/all_gather"}
}, execution_thread="sparsecore"
"""  # noqa: E501


def test_a_call_of_the_sparse_cores_is_asynchronous():
  start = (
    '%s = ((bf16[1,8,64]{2,1,0}, token[]), bf16[1,64,64]{2,1,0}) '
    'call-start(%x), async_execution_thread="sparsecore", to_apply=%called'
  )
  done = '%d = bf16[1,64,64]{2,1,0} call-done(%s)'
  program = overlap.read(_asynchronous(start, done, _ON_SPARSE_CORES))
  (gather,) = program.collectives
  assert (gather.kind, gather.is_async) == ('all-gather', True)
  assert gather.bytes == 64 * 64 * 2 * 7 // 8
  assert gather.hidden == PRODUCT
  assert gather.scope == 'jit(step)/all_gather'


_GROUPS = 'replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}'
_FUSED = f"""{_HEADER}
%begin (p: bf16[8,64]) -> (bf16[8,64], bf16[64,64], u32[]) {{
  %p = bf16[8,64]{{1,0}} parameter(0)
  %g.1 = bf16[64,64]{{1,0}} all-gather(%p), {_GROUPS}
  ROOT %c.1 = (bf16[8,64], bf16[64,64], u32[]) custom-call(%p, %g.1), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion (p: bf16[8,64], q: bf16[64,64], x: f32[8,8]) -> (f32[8,8], bf16[8,64], bf16[64,64]) {{
  %p = bf16[8,64]{{1,0}} parameter(0)
  %q = bf16[64,64]{{1,0}} parameter(1)
  %x = f32[8,8]{{1,0}} parameter(2)
  %dot = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %g.2 = bf16[64,64]{{1,0}} all-gather(%p), {_GROUPS}
  ROOT %t = (f32[8,8], bf16[8,64], bf16[64,64]) tuple(%dot, %p, %g.2)
}}

%end (p: bf16[8,64], q: bf16[64,64]) -> bf16[64,64] {{
  %p = bf16[8,64]{{1,0}} parameter(0)
  %q = bf16[64,64]{{1,0}} parameter(1)
  %g.3 = bf16[64,64]{{1,0}} all-gather(%p), {_GROUPS}
  ROOT %c.2 = bf16[64,64]{{1,0}} custom-call(%p, %q, %g.3), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (w: bf16[8,64], x: f32[8,8]) -> f32[8,8] {{
  %w = bf16[8,64]{{1,0}} parameter(0)
  %x = f32[8,8]{{1,0}} parameter(1)
  %start = (bf16[8,64], bf16[64,64], u32[]) fusion(%w), kind=kCustom, calls=%begin
  %p = bf16[8,64]{{1,0}} get-tuple-element(%start), index=0
  %q = bf16[64,64]{{1,0}} get-tuple-element(%start), index=1
  %both = (f32[8,8], bf16[8,64], bf16[64,64]) fusion(%p, %q, %x), kind=kCustom, calls=%async_collective_fusion
  %y = f32[8,8]{{1,0}} get-tuple-element(%both), index=0
  %p.2 = bf16[8,64]{{1,0}} get-tuple-element(%both), index=1
  %q.2 = bf16[64,64]{{1,0}} get-tuple-element(%both), index=2
  %done = bf16[64,64]{{1,0}} fusion(%p.2, %q.2), kind=kCustom, calls=%end
  ROOT %after = f32[8,8]{{1,0}} dot(%y, %y), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""  # noqa: E501


def test_a_collective_fused_with_products_counts_once():
  program = overlap.read(_FUSED)
  (gather,) = program.collectives
  assert gather.is_async
  assert gather.bytes == 64 * 64 * 2 * 7 // 8
  assert gather.hidden == PRODUCT
  assert program.flops == 2 * PRODUCT


def test_a_ragged_exchange_moves_what_its_smaller_buffer_holds():
  text = f"""{_HEADER}
ENTRY %main (x: bf16[64,4], o: bf16[96,4]) -> bf16[96,4] {{
  %x = bf16[64,4]{{1,0}} parameter(0)
  %o = bf16[96,4]{{1,0}} parameter(1)
  ROOT %r = bf16[96,4]{{1,0}} ragged-all-to-all(%x, %o, %a, %b, %c, %d), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}
}}
"""  # noqa: E501
  (exchange,) = overlap.read(text).of_kind('ragged-all-to-all')
  assert exchange.bytes == 64 * 4 * 2 * 3 // 4
  assert exchange.result_bytes == 96 * 4 * 2


def test_kernels_count_as_the_cost_they_state():
  text = f"""{_HEADER}
ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %k = f32[8,8]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call", metadata={{op_name="jit(f)/flash/pallas_call"}}, backend_config={{"custom_call_config":{{"body":"AAAA","cost_estimate":{{"flops":"12345","transcendentals":"0"}}}}}}
  %l = f32[8,8]{{1,0}} custom-call(%k), custom_call_target="tpu_custom_call", metadata={{op_name="jit(f)/other/pallas_call"}}
  ROOT %d = f32[8,8]{{1,0}} dot(%l, %l), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""  # noqa: E501
  program = overlap.read(text)
  assert program.flops == PRODUCT + 12345
  assert program.kernels == {'flash': 12345}
  assert program.unknown == {'other': 1}


def _kernel(name: str, shapes: list[str], out: str) -> str:
  """A program that calls a kernel that states no cost."""
  lines = [f'  %a{i} = {s} parameter({i})' for i, s in enumerate(shapes)]
  names = ', '.join(f'%a{i}' for i in range(len(shapes)))
  call = (
    f'  ROOT %k = {out} custom-call({names}), '
    'custom_call_target="__gpu$xla.gpu.triton", '
    f'metadata={{op_name="jit(f)/{name}/pallas_call"}}'
  )
  return '\n'.join([f'{_HEADER}ENTRY %main () -> {out} {{', *lines, call, '}'])


@pytest.mark.parametrize(
  ('name', 'shapes', 'out', 'want'),
  [
    (
      'grouped_multiply',
      ['s32[7]', 'bf16[48,4]', 'bf16[3,4,5]'],
      'bf16[48,5]',
      2 * 48 * 4 * 5,
    ),
    (
      'grouped_multiply_groups',
      ['s32[7]', 'bf16[48,4]', 'bf16[48,5]'],
      'f32[3,4,5]',
      2 * 48 * 4 * 5,
    ),
    (  # B 2, T 8, N 4, H 6; S 16, K 2, W 5: half of T x S, two a product.
      'forward_kernel',
      ['s32[2,1]', 'bf16[2,8,4,6]', 'bf16[2,16,2,6]', 'bf16[2,16,2,5]'],
      '(bf16[2,8,4,5], f32[2,8,4])',
      2 * 8 * 4 * 16 * (6 + 5),
    ),
    (
      'keys_kernel',
      ['s32[2,1]', 'bf16[2,8,4,6]', 'bf16[2,16,2,6]', 'bf16[2,16,2,5]'],
      '(bf16[2,16,2,6], bf16[2,16,2,5])',
      2 * 8 * 4 * 16 * (2 * 6 + 2 * 5),
    ),
  ],
)
def test_our_kernels_count_by_their_shapes(name, shapes, out, want):
  program = overlap.read(_kernel(name, shapes, out))
  assert program.kernels == {name: want}
  assert not program.unknown


def test_trips_may_be_told_by_scope():
  def function(x, end):
    with jax.named_scope('blocks'):
      x = jax.lax.while_loop(
        lambda carry: carry[0] < end,
        lambda carry: (carry[0] + 1, carry[1] @ carry[1]),
        (0, x),
      )[1]
    return jax.lax.fori_loop(0, 2, lambda _, x: x @ x, x)

  text = _text(function, jnp.eye(N), 3)
  seen = []

  def trips(scope):
    seen.append(scope)
    return 5

  assert overlap.read(text, dynamic_trips=trips).flops == (5 + 2) * PRODUCT
  (scope,) = seen
  assert 'blocks' in scope


def test_kernels_of_vendors_are_products():
  text = f"""{_HEADER}
ENTRY %main (x: bf16[16,32], y: bf16[32,8]) -> bf16[16,8] {{
  %x = bf16[16,32]{{1,0}} parameter(0)
  %y = bf16[32,8]{{1,0}} parameter(1)
  %g = (bf16[16,8]{{1,0}}, s8[1024]{{0}}) custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config={{"gemm_backend_config":{{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}}}}
  %s = bf16[16,8]{{1,0}} custom-call(%x), custom_call_target="Sharding"
  ROOT %r = bf16[16,8]{{1,0}} get-tuple-element(%g), index=0
}}
"""  # noqa: E501
  assert overlap.read(text).flops == 2 * 16 * 32 * 8


@pytest.mark.parametrize(
  ('shape', 'want'),
  [
    ('bf16[4,2]{1,0:T(8,128)(2,1)S(1)}', 16),
    ('(f32[3], pred[5], u32[]{:S(2)})', 12 + 5 + 4),
    ('s4[3]{0}', 2),
    ('f8e4m3fn[7]', 7),
    ('c64[2]', 16),
    ('token[]', 0),
  ],
)
def test_bytes_of_shapes(shape, want):
  assert sum(array.bytes for array in hlo_text.arrays(shape)) == want


def test_text_that_is_no_program():
  with pytest.raises(ValueError, match='no ENTRY'):
    overlap.read('module @jit_f {\n}')
  with pytest.raises(ValueError, match="kind 'a2a' is not one of"):
    overlap.Program(1.0, 0.0, ()).of_kind('a2a')
