"""Experts of few bits: their bytes, those of exchanged tokens, and their speed.

  python -m benchmarks.few_bits [--gpu | --tiny]

Bytes of weights and of tokens are counted: of experts of Kimi K2's size, and of
what the compiled program of an exchange between 8 devices moves. Speed is that
of a layer of experts, forward and with gradients, beside the same layer in
bfloat16: formats are emulated, so it has no goal, but for the product of codes
where the device has it, which was never timed. `--gpu` takes sizes that fill a
card and counts no bytes; `--tiny` runs that at sizes whose figures mean
nothing, on any device.
"""

import argparse
import contextlib
import functools
import itertools
import os
from typing import Any

from benchmarks import interleaved

NAME = 'few_bits'
_DIM, _HIDDEN = 7168, 2048  # Kimi K2
_DEVICES = 8
# Experts, rows, width and hidden width.
_SIZES = {'cpu': (8, 512, 256, 128), 'gpu': (16, 32_768, 7168, 2048)}
_TINY = (4, 64, 32, 16)


def _bytes_of_weights() -> None:
  import jax
  import jax.numpy as jnp

  from composer_jax.numerics import formats

  shape = (_DIM, _HIDDEN)
  for name in formats.NAMES:
    axes = formats.Axes((0, 1) if name == 'fp8' else (0,), (0,))
    array = jax.eval_shape(
      functools.partial(formats.quantise, name=name, axes=axes),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    bits = sum(
      x.size * (4 if '4' in x.dtype.name[:6] else 8 * x.dtype.itemsize)
      for x in jax.tree.leaves(array)
    )
    interleaved.report(
      NAME,
      f'bits of a weight of an expert: {name}',
      ([bits / (_DIM * _HIDDEN)], []),
      limit=None,
      goal='<= 4.6 in nvfp4' if name == 'nvfp4' else 'none',
      met=lambda ours, _, name=name: name != 'nvfp4' or ours <= 4.6,
      unit='bits',
      note='codes, scales and outer scales; bfloat16 has 16',
    )


def _bytes_on_the_wire() -> None:
  """Reports bytes into a device for a forward pass, from compiled programs."""
  import jax
  import jax.numpy as jnp
  from jax.sharding import PartitionSpec as P

  from composer_jax.models import config as model_config
  from composer_jax.models import experts
  from composer_jax.parallel import exchange, rounds, topology
  from composer_jax.plan.hlo import overlap

  forms = experts.forms(model_config.PrecisionConfig(experts='fp8'))
  mesh = topology.make_mesh(1, _DEVICES, 1)
  tokens = P(('replica', 'fsdp'), 'context')
  array = jax.ShapeDtypeStruct
  # XLA:CPU would send bfloat16 as float32, so values are float32 here, of half
  # the width: as many bytes as bfloat16 of the whole.
  moved = {}
  for wire, dim in zip(rounds.WIRES, (_DIM // 2, _DIM), strict=True):
    plan = exchange.ExchangePlan(
      mesh=mesh,
      batch_axes=('replica', 'fsdp'),
      sequence_axes=('context',),
      weight_specs=(('gate_up', P('fsdp')), ('down', P('fsdp'))),
      wire=wire,
    )

    def shard(*arrays, plan=plan):
      return exchange.exchange(forms.sorted, *arrays, plan=plan)[0]

    run = jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=(dict(plan.weight_specs), *[tokens] * 4),
      out_specs=tokens,
      check_vma=False,
    )
    weights = {
      'gate_up': array((_DEVICES, dim, 2, 16), jnp.float32),
      'down': array((_DEVICES, 16, dim), jnp.float32),
    }
    shape = (_DEVICES, 64)
    arrays = [
      array((*shape, dim), jnp.float32),
      array((*shape, 2), jnp.int32),
      array((*shape, 2), jnp.float32),
      array(shape, jnp.bool_),
    ]
    text = jax.jit(run).lower(weights, *arrays).compile().as_text() or ''
    program = overlap.read(text, dynamic_trips=lambda _: 1.0)
    sent = [c for c in program.collectives if c.kind == 'all-to-all']
    moved[wire] = sum(c.bytes for c in sent if 'dispatch' in c.scope)
  interleaved.report(
    NAME,
    'bytes of tokens on their way to experts: codes over bfloat16',
    ([moved['codes'] / moved['values']], []),
    limit=0.5,
    goal='<= 0.51',
    met=lambda ours, _: ours <= 0.51,
    unit='of the bytes',
    note=f'{moved["codes"]:,} of {moved["values"]:,} bytes into a device',
  )


def _speed(size: tuple[int, int, int, int], rounds: int, dtype: str) -> None:
  import jax
  import jax.numpy as jnp

  from composer_jax.kernels.grouped import coded
  from composer_jax.models import config as model_config
  from composer_jax.models import experts
  from composer_jax.numerics import formats

  num_experts, num_rows, dim, hidden = size
  keys = jax.random.split(jax.random.key(0), 4)
  draw = lambda key, shape: (
    jax.random.normal(key, shape, dtype) / shape[1] ** 0.5
  )
  weights = {
    'gate_up': draw(keys[0], (num_experts, dim, 2, hidden)),
    'down': draw(keys[1], (num_experts, hidden, dim)),
  }
  rows_YD, d_out_YD = (
    jax.random.normal(key, (num_rows, dim), dtype) for key in keys[2:]
  )
  sizes_E = jnp.full(num_experts, num_rows // num_experts, jnp.int32)

  def runner(name: str, backward: str, product: str = 'values') -> Any:
    # Weights are rounded once a step, apart from all this.
    config = model_config.PrecisionConfig(
      experts=name, backward=backward, products=product
    )
    function = experts.forms(config).sorted

    def loss(weights, rows_YD, d_out_YD):
      out_YD = function.forward(weights, rows_YD, sizes_E)
      return (out_YD * d_out_YD).astype('float32').sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))

    def run() -> float:
      jax.block_until_ready(gradient(weights, rows_YD, d_out_YD))
      return float(num_rows)

    return run

  plain = runner('bf16', 'dequantised')
  pairs = itertools.product(formats.NAMES, ('dequantised', 'mxfp8'))
  cases = [(*pair, 'values') for pair in pairs]
  with contextlib.suppress(ValueError):
    coded.check()
    cases.append(('fp8', 'dequantised', 'codes'))
  for name, backward, product in cases:
    is_coded = ', products of codes' if product == 'codes' else ''
    interleaved.report(
      NAME,
      f'experts, forward and gradients: {name}, backward {backward}{is_coded}',
      interleaved.rates(runner(name, backward, product), plain, rounds),
      against='bfloat16',
      limit=None,
      goal='none',
      met=lambda *_: True,
      unit='rows/s',
      note=f'{num_experts} experts, {num_rows} rows, {dim} x {hidden}',
    )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--gpu', action='store_true')
  parser.add_argument('--tiny', action='store_true')
  parser.add_argument('--quick', action='store_true', help='fewer rounds')
  arguments = parser.parse_args()
  rounds = 2 if arguments.tiny or arguments.quick else 9
  if arguments.gpu:
    interleaved.need_accelerator(NAME, is_tiny=arguments.tiny)
    size = _TINY if arguments.tiny else _SIZES['gpu']
    _speed(size, rounds, 'bfloat16')
    return
  interleaved.set_allocator()
  interleaved.pin_to_one_core()
  flag = f'--xla_force_host_platform_device_count={_DEVICES}'
  os.environ['XLA_FLAGS'] = f'{os.environ["XLA_FLAGS"]} {flag}'
  _bytes_of_weights()
  _bytes_on_the_wire()
  _speed(_TINY if arguments.tiny else _SIZES['cpu'], rounds, 'float32')


if __name__ == '__main__':
  main()
