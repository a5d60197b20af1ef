"""Compiles whole train steps of tiny decoders for 8 emulated devices.

And tells what they send, in the words of `plan.traffic`: where in the program,
when, by which kind of collective, along which mesh axes.
"""

import collections
import functools
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import batches
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups
from composer_jax.parallel import layouts, topology
from composer_jax.plan import case as cases
from composer_jax.plan import traffic
from composer_jax.plan.hlo import overlap as hlo
from composer_jax.train import placement, state, step
from tests import compiling
from tests.parallel import muon_meshes

# More layers of one kind than of the other: a loop of either is told by its
# trips, and a loop of one XLA would unroll.
NUM_DENSE, NUM_MOE = 3, 5
# Rows over replica x fsdp, tokens over context; enough of both for (1, 8, 1).
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
    text: its HLO.
    warnings: what XLA wrote while compiling it.
    state: shapes of the state.
    hlo: what one device runs.
    stated: what `plan.traffic` says it sends.
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
  bucket: float | None = None,
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
  update = step.make(
    model, optimizer, plan=placed.plan_of(bucket), bias_rate=1e-3
  )

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
    # Loops over the blocks of grouped matmuls end as the data decide.
    hlo=hlo.read(text, dynamic_trips=1),
    stated=traffic.lines(case(model, shape), asked(transport, bucket)),
  )


def case(model: model_config.ModelConfig, shape: tuple[int, ...]) -> cases.Case:
  """Returns what `plan.traffic` is asked about."""
  return cases.Case(
    model=model,
    machine='cpu',
    mesh=jax.sharding.AbstractMesh(shape, topology.AXES),
    layout=layouts.TRAIN,
    dtype='float32',
    muon=None,
  )


def asked(transport: str, bucket: float | None = None) -> traffic.Step:
  return traffic.Step(
    batch_size=B, seq_len=T, transport=transport, bucket=bucket
  )


class Key(NamedTuple):
  """Where, when, how and along which axes devices send."""

  where: str
  phase: str
  kind: str
  axes: str


class Sent(NamedTuple):
  """Operations and bytes into a device of one layer, or of the step."""

  count: int
  bytes: int


def measured(made: Program, shape: tuple[int, ...]) -> dict[Key, Sent]:
  """Sums up the collectives of a compiled step by where, when and how."""
  names = _names(shape)
  found = collections.defaultdict(lambda: Sent(0, 0))
  for c in made.hlo.collectives:
    if c.bytes:
      key = Key(_where(c), _phase(c), c.kind, names.get(c.groups, str(c)))
      found[key] = Sent(found[key].count + 1, found[key].bytes + c.bytes)
  return dict(found)


def stated(made: Program) -> dict[Key, Sent]:
  """Sums up what `plan.traffic` says alike."""
  found = collections.defaultdict(lambda: Sent(0, 0))
  for line in made.stated:
    key = Key(line.where, line.phase, line.kind, '+'.join(line.axes))
    before = found[key]
    found[key] = Sent(before.count + line.count, before.bytes + line.bytes)
  return dict(found)


def _where(c: hlo.Collective) -> str:
  """Tells the loop over layers by its trips."""
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
  """Returns the places of results that lie where an argument did."""
  header = text.split('\n', 1)[0]
  found = re.search(r'input_output_alias=\{(.*?)\}, entry', header)
  pairs = found.group(1) if found else ''
  return {int(n) for n in re.findall(r'\{(\d+)\}: \(', pairs)}
