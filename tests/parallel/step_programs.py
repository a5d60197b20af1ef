"""Compiles whole train steps of tiny decoders for 8 emulated devices.

Sums up their collectives by place in the program, phase, kind and mesh axes, in
the terms of `tests.parallel.traffic`.
"""

import collections
import functools
import itertools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import batches
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups
from composer_jax.parallel import layouts, rounds, topology
from composer_jax.plan import case as cases
from composer_jax.plan.hlo import overlap as hlo
from composer_jax.train import placement, state, step
from tests import compiling
from tests.parallel import muon_meshes, traffic

# Different numbers, so that trips identify the loop of a kind of layer; more
# than one, since XLA unrolls loops of one trip.
NUM_DENSE, NUM_MOE = 3, 5
# Enough rows and tokens for a mesh of (1, 8, 1).
B, T = 8, 16

GQA = dict(
  kind='gqa',
  num_heads=4,
  num_kv_heads=2,
  head_dim=10,
  qk_norm='head',
  qkv_bias=False,
  out_bias=False,
)
MLA = dict(
  kind='mla',
  num_heads=4,
  q_lora_dim=16,
  kv_lora_dim=24,
  nope_dim=10,
  rope_dim=6,
  value_dim=12,
  latent_norm_eps=1e-6,
)
MOE = dict(
  num_experts=8,
  num_active=2,
  ffw_dim=22,
  num_shared=5,
  router='softmax',
  num_groups=1,
  num_active_groups=1,
  renormalize=True,
  routed_scale=1.0,
  aux_loss_weight=0.01,
  z_loss_weight=0.001,
)


def config(moe: dict[str, Any] | None = None, **change):
  """Returns a config; in float32, since XLA:CPU sends bfloat16 as float32."""
  fields = dict(
    vocab_size=90,
    embed_dim=72,
    num_layers=NUM_DENSE + NUM_MOE,
    num_dense_layers=NUM_DENSE,
    dense_ffw_dim=56,
    norm_eps=1e-6,
    tie_embeddings=False,
    remat=True,
    compute_dtype='float32',
    attention=GQA,
    rope=dict(theta=1e4, interleaved=False, yarn=None),
    moe=MOE | (moe or {}),
  )
  return model_config.ModelConfig.from_dict(fields | change)


class Program(NamedTuple):
  """A compiled train step.

  Attributes:
    text: HLO of the program.
    warnings: text that XLA printed while compiling it.
    state: shapes of the state.
    hlo: counts of the program of one device.
    stated: traffic that `tests.parallel.traffic` states for it.
  """

  text: str
  warnings: str
  state: state.TrainState
  hlo: hlo.Program
  stated: list[traffic.Traffic]


@functools.cache
def program(
  model: model_config.ModelConfig,
  shape: tuple[int, ...],
  transport: str,
) -> Program:
  """Compiles the step of a model on a mesh (replica, fsdp, context)."""
  placed = placement.build(
    model,
    mesh=topology.make_mesh(*shape),
    options=placement.ParallelOptions(transport=transport),
  )
  abstract, axes = decoder.abstract(model)
  optimizer = groups.optimizer(
    groups.OptimizerOptions(
      name='adam',
      learning_rate=1e-3,
      adam_learning_rate=1e-3,
      warmup_steps=1,
      decay_steps=1,
      final_ratio=0.1,
    ),
    params=abstract['params'],
    axes=axes['params'],
    total_steps=10,
  )
  shapes = jax.eval_shape(lambda v: state.create(v, optimizer), abstract)
  places = state.shardings(shapes, placed.variables, placed.mesh)
  update = step.make(model, optimizer, plan=placed.plan, bias_rate=1e-3)

  def numbers(dtype):
    return jax.ShapeDtypeStruct((B, T), dtype, sharding=placed.batch)

  lowered = jax.jit(
    update,
    donate_argnums=0,
    in_shardings=(places, placed.batch),
    out_shardings=(places, placed.replicated),
  ).lower(
    shapes,
    batches.LMBatch(
      tokens_BT=numbers(jnp.int32),
      segment_ids_BT=numbers(jnp.int32),
      positions_BT=numbers(jnp.int32),
      loss_weights_BT=numbers(jnp.float32),
    ),
  )
  compiled, warnings = muon_meshes.watched(
    lambda: lowered.compile(compiler_options=compiling.QUICKLY)
  )
  text = compiled.as_text()
  return Program(
    text=text,
    warnings=warnings,
    state=shapes,
    # Rounds and blocks of grouped matmuls have data-dependent ends. The stated
    # bytes are those of one round, which may stand before the loop of others.
    hlo=hlo.read(text, dynamic_trips=lambda s: float(rounds.FURTHER not in s)),
    stated=traffic.lines(case(model, shape), asked(transport)),
  )


def case(model: model_config.ModelConfig, shape: tuple[int, ...]) -> cases.Case:
  """Returns the case for `tests.parallel.traffic`."""
  return cases.Case(
    model=model,
    topology=f'cpu:{math.prod(shape)}',
    mesh=jax.sharding.AbstractMesh(shape, topology.AXES),
    layout=layouts.TRAIN,
    dtype='float32',
    muon=None,
  )


def asked(transport: str) -> traffic.Step:
  return traffic.Step(batch_size=B, seq_len=T, transport=transport)


class Key(NamedTuple):
  """Place, phase, kind and mesh axes of collectives."""

  where: str
  phase: str
  kind: str
  axes: str


class Sent(NamedTuple):
  """Operations, and bytes into a device, of one layer or of the step."""

  count: int
  bytes: int


def measured(made: Program, shape: tuple[int, ...]) -> dict[Key, Sent]:
  """Sums up the collectives of a compiled step by key."""
  names = _names(shape)
  sums = collections.defaultdict(lambda: Sent(0, 0))
  for c in made.hlo.collectives:
    if c.bytes:
      key = Key(_where(c), _phase(c), c.kind, names.get(c.groups, str(c)))
      sums[key] = Sent(sums[key].count + 1, sums[key].bytes + c.bytes)
  return dict(sums)


def stated(made: Program) -> dict[Key, Sent]:
  """Sums up the lines of `tests.parallel.traffic` by key."""
  sums = collections.defaultdict(lambda: Sent(0, 0))
  for line in made.stated:
    key = Key(line.where, line.phase, line.kind, '+'.join(line.axes))
    before = sums[key]
    sums[key] = Sent(before.count + line.count, before.bytes + line.bytes)
  return dict(sums)


def _where(c: hlo.Collective) -> str:
  """Returns the place of a collective from the trips of its loop."""
  trips = {NUM_DENSE: 'dense layer', NUM_MOE: 'mixture layer', 1: 'step'}
  return trips[c.count]


def _phase(c: hlo.Collective) -> str:
  if 'rematted_computation' in c.scope:
    return 'recompute'
  if 'transpose(' in c.scope:
    return 'backward'
  return 'update' if '/update/' in c.scope else 'forward'


def groups_of(shape: tuple[int, ...], axes: tuple[str, ...]):
  """Returns the groups of device ids along mesh axes."""
  dims = [topology.AXES.index(axis) for axis in axes]
  devices = np.moveaxis(np.arange(8).reshape(shape), dims, range(-len(dims), 0))
  rows = devices.reshape(-1, np.prod([shape[dim] for dim in dims]))
  return frozenset(frozenset(map(int, row)) for row in rows)


def _names(shape):
  wide = [a for a, size in zip(topology.AXES, shape, strict=True) if size > 1]
  return {
    groups_of(shape, axes): '+'.join(axes)
    for count in range(1, len(wide) + 1)
    for axes in itertools.combinations(wide, count)
  }


def aliased_outputs(text: str) -> set[int]:
  """Returns the indices of results that reuse the memory of an argument."""
  header = text.split('\n', 1)[0]
  match = re.search(r'input_output_alias=\{(.*?)\}, entry', header)
  pairs = match.group(1) if match else ''
  return {int(n) for n in re.findall(r'\{(\d+)\}: \(', pairs)}
