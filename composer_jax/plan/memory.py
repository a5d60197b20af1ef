"""Bytes that the stages of a run need on one device, before anything is built.

Counted from shapes, layouts and dtypes: state and weights exactly; activations
as what the traced backward pass keeps of a microbatch, plus the largest of its
two ends: the logits, or a layer computed again. No array is allocated and
nothing is compiled.
`tests/plan/memory_test.py` compares the sums with the compiler's.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from composer_jax.core import batches, trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head, placement
from composer_jax.optim import groups
from composer_jax.parallel import layouts, topology
from composer_jax.pipeline import spec as specs
from composer_jax.rollout import forward
from composer_jax.train import lm_loss
from composer_jax.train import state as train_state

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
  """What one part of a run needs.

  Attributes:
    name: 'cpt', 'sft', 'rl', 'engine' or 'evaluation'.
    devices: devices among which it is divided.
    terms: bytes of one device, by what takes them.
  """

  name: str
  devices: int
  terms: dict[str, int]

  @property
  def total(self) -> int:
    return sum(self.terms.values())

  def __str__(self) -> str:
    parts = sorted(self.terms.items(), key=lambda term: -term[1])
    listed = ', '.join(f'{n} {size(b)}' for n, b in parts if b)
    where = f' on each of {self.devices} devices' if self.devices > 1 else ''
    return f'{self.name}: {size(self.total)}{where} ({listed})'


def size(num_bytes: float) -> str:
  if num_bytes >= _GIB / 10:
    return f'{num_bytes / _GIB:.1f} GiB'
  return f'{num_bytes / (1 << 20):.1f} MiB'


def needs(spec: specs.Spec) -> Iterator[Need]:
  """Yields what each stage of a run needs, in their order."""
  layout = layouts.BY_NAME[spec.layout]
  for name, stage in (('cpt', spec.cpt), ('sft', spec.sft)):
    if stage.steps:
      rows = stage.batch_size // stage.accumulate
      shape = rows, stage.seq_len, stage.accumulate > 1
      options = stage.optimizer_options()
      yield training(name, spec.lm_model, options, spec.mesh, layout, shape)
  engine = serving(spec)
  if spec.rl.steps:
    shape = spec.rl.rows, spec.rl.seq_len, True
    options = spec.rl.optimizer_options()
    mesh = spec.rl.mesh
    trainer = training('rl', spec.model, options, mesh, layout, shape)
    if spec.rl.placement == 'colocated':
      both = trainer.terms | {
        f'{name} of the engine': count for name, count in engine.terms.items()
      }
      yield dataclasses.replace(trainer, terms=both)
    else:
      yield trainer
      yield engine
  masters = _bytes(*_described(spec.model, specs.Mesh(), layouts.REPLICATED))
  terms = {'masters': masters} | engine.terms
  yield Need(name='evaluation', devices=1, terms=terms)


def training(
  name: str,
  model: model_config.ModelConfig,
  optimizer: groups.OptimizerOptions,
  mesh: specs.Mesh,
  layout: layouts.Layout,
  shape: tuple[int, int, bool],
) -> Need:
  """Counts a train step; `shape` has rows and tokens of a microbatch of all
  devices, and whether gradients of several add up.
  """
  variables, places = _described(model, mesh, layout)
  trained = decoder.trained(variables)
  transform = groups.optimizer(
    optimizer,
    params=variables[trained],
    axes=decoder.abstract(model)[1][trained],
    total_steps=1 << 30,
  )
  create = functools.partial(
    train_state.create, optimizer=transform, dtype=optimizer.state
  )
  state = jax.eval_shape(create, variables)
  at = train_state.shardings(state, places, _mesh(mesh))
  masters = _bytes(state.params, at.params)
  rows, seq_len, adds_up = shape
  local = rows // (mesh.replica * mesh.fsdp), seq_len // mesh.context
  terms = {
    'frozen weights': _bytes(state.base, at.base),
    'masters': masters,
    'moments': _bytes(state.opt_state, at.opt_state),
    'policy values': masters,
    'gradients': masters * (1 + adds_up),
    'gathered weights': _gathered(variables, places, model),
    **activations(model, *local),
  }
  return Need(name=name, devices=mesh.size, terms=terms)


def serving(spec: specs.Spec) -> Need:
  """Counts an engine: weights before and after a swap, and the KV cache."""
  model, options = spec.model, spec.engine_options()
  if options.compute_dtype:
    dtype = options.compute_dtype
    model = dataclasses.replace(model, compute_dtype=dtype)
  mesh = specs.Mesh(fsdp=options.devices)
  variables, places = _described(model, mesh, layouts.DECODE)
  dtype = jnp.dtype(model.compute_dtype)
  served = jax.tree.map(lambda leaf: leaf.update(dtype=dtype), variables)
  swapped = decoder.without_base(served)
  cache = jax.eval_shape(
    lambda: forward.empty_cache(model, options.pages, options.page_size)
  )
  divided = options.devices if model.attention.kind == 'gqa' else 1
  if divided > 1:
    divided = math.gcd(divided, model.attention.num_kv_heads)
  terms = {
    'served weights': _bytes(served, places),
    'weights of a swap': _bytes(swapped, {n: places[n] for n in swapped}),
    'KV cache': sum(x.nbytes for x in jax.tree.leaves(cache)) // divided,
    'logits': 4 * 4 * options.num_slots * model.vocab_size // options.devices,
  }
  return Need(name='engine', devices=options.devices, terms=terms)


def _mesh(mesh: specs.Mesh) -> AbstractMesh:
  return AbstractMesh((mesh.replica, mesh.fsdp, mesh.context), topology.AXES)


def _described(
  model: model_config.ModelConfig, mesh: specs.Mesh, layout: layouts.Layout
) -> tuple[Any, Any]:
  """Returns shapes and shardings of the variables."""
  where: Any = dict(layout=layout, mesh=_mesh(mesh))
  variables, _ = decoder.abstract(model)
  return variables, placement.variable_shardings(model, **where)


def _bytes(tree: Any, places: Any) -> int:
  """Returns the bytes of one device's shards."""
  shards = jax.tree.map(
    lambda leaf, place: (
      math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    ),
    tree,
    places,
  )
  return sum(jax.tree.leaves(shards))


def _gathered(variables: Any, places: Any, model: Any) -> int:
  """Returns bytes of the largest layer's whole weights, and their gradients.

  They are gathered in the compute dtype, and gradients scattered in float32;
  experts stay where they are.
  """
  axes = trees.flatten_names(decoder.abstract(model)[1])
  width = jnp.dtype(model.compute_dtype).itemsize
  layers = dict.fromkeys(model.stacks, 0)
  at = trees.flatten_names(places)
  for name, leaf in trees.flatten_names(variables).items():
    kind, stack, *_ = name.split('/')
    is_moved = not at[name].is_fully_replicated and 'expert' not in axes[name]
    if stack in layers and is_moved:
      is_trained = kind == decoder.trained(variables)
      layers[stack] += leaf.size // leaf.shape[0] * (width + 4 * is_trained)
  return max(layers.values())


@functools.lru_cache(maxsize=64)
def activations(
  model: model_config.ModelConfig, rows: int, seq_len: int
) -> dict[str, int]:
  """Counts what a backward pass keeps of a device's tokens, and its peak."""
  variables, _ = decoder.abstract(model)
  name = decoder.trained(variables)
  integers = jax.ShapeDtypeStruct((rows, seq_len), jnp.int32)
  batch: Any = batches.LMBatch
  batch = batch(
    tokens_BT=integers,
    segment_ids_BT=integers,
    positions_BT=integers,
    loss_weights_BT=integers.update(dtype=jnp.float32),
  )

  def loss(trained, others, batch):
    total, _ = lm_loss.negative_logprob_sum(
      {**others, name: trained}, batch, model=model, plan=None
    )
    return total

  def kept(trained, others, batch):
    return jax.vjp(functools.partial(loss, others=others, batch=batch), trained)

  others = {k: tree for k, tree in variables.items() if k != name}
  traced = jax.make_jaxpr(kept)(variables[name], others, batch).jaxpr
  # Weights that it keeps are counted as weights.
  given = {id(v) for v in traced.invars}
  arrays = {id(v): v.aval for v in traced.outvars if id(v) not in given}
  sizes = {tree.shape for tree in jax.tree.leaves(variables)}
  residuals = sum(
    a.size * a.dtype.itemsize
    for a in arrays.values()
    if hasattr(a, 'shape') and a.shape not in sizes
  )
  tokens = rows * seq_len
  words = min(model.vocab_size, head.words_at_once(tokens, model.vocab_size))
  return {'activations': residuals, 'logits': 4 * 2 * tokens * words}
