"""Bytes that the stages of a run need on one device, before anything is built.

Counted from shapes, layouts and dtypes: state and weights exactly; activations
as what the traced forward pass keeps of a microbatch for the backward pass, and
what this works on. No array is allocated and nothing is compiled.
`tests/plan/memory_test.py` compares the sums with the compiler's.
"""

import collections
import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from composer_jax.core import batches, platforms, trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder, experts, head, placement
from composer_jax.models import layer as decoder_layer
from composer_jax.numerics import formats
from composer_jax.optim import groups
from composer_jax.parallel import layouts, topology
from composer_jax.pipeline import spec as specs
from composer_jax.rollout import forward
from composer_jax.rollout import options as rollout_options
from composer_jax.train import heads as train_heads
from composer_jax.train import lm_loss
from composer_jax.train import state as train_state

_GIB = 1 << 30
_Choices = list[tuple[str, specs.Spec]]  # words, and a changed run
# Tokens of a traced row; what attention keeps grows with them, not faster.
_TRACED = 256
# The experts' weights, by the ends of their names.
_EXPERTS = tuple(
  f'moe_layers/moe/{name}' for name in decoder_layer.EXPERT_ARRAYS
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
  """What one part of a run needs.

  Attributes:
    name: 'cpt', 'sft', 'rl', 'engine' or 'evaluation'.
    devices: devices among which it is divided.
    terms: bytes of one device, by what takes them.
    host: bytes of the host's memory that belong to one device.
  """

  name: str
  devices: int
  terms: dict[str, int]
  host: int = 0

  @property
  def total(self) -> int:
    return sum(self.terms.values())

  def __str__(self) -> str:
    parts = sorted(self.terms.items(), key=lambda term: -term[1])
    listed = ', '.join(f'{n} {size(b)}' for n, b in parts if b)
    where = f' on each of {self.devices} devices' if self.devices > 1 else ''
    beside = f'; {size(self.host)} of the host' if self.host else ''
    return f'{self.name}: {size(self.total)}{where} ({listed}){beside}'


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
      heads = spec.mtp.training(name, spec.lm_model, options)
      yield training(
        name, spec.lm_model, options, spec.mesh, layout, shape, heads
      )
  engine = serving(spec.model, spec.engine_options())
  if spec.rl.steps:
    shape = spec.rl.rows, spec.rl.seq_len, True
    options = spec.rl.optimizer_options()
    mesh = spec.rl.mesh
    heads = spec.mtp.training('rl', spec.model, options)
    trainer = training('rl', spec.model, options, mesh, layout, shape, heads)
    # One is published; the gate keeps those that may have sampled.
    kept = 1 + (spec.rl.max_staleness + 1) * (spec.rl.gate.action != 'off')
    # A policy has two bytes for the gradients' four and those of a master.
    both = 4 + jnp.dtype(options.masters).itemsize
    kept_bytes = kept * trainer.terms['gradients'] * 2 // both
    trainer.terms['kept policies'] = kept_bytes
    if spec.rl.placement == 'colocated':
      both = trainer.terms | {
        f'{name} of the engine': count for name, count in engine.terms.items()
      }
      if spec.shares_base:
        both['served weights of the engine'] -= both['frozen weights']
      yield dataclasses.replace(trainer, terms=both)
    else:
      yield trainer
      yield engine
  masters = _bytes(*_described(spec.model, specs.Mesh(), layouts.REPLICATED))
  terms = {'masters': masters} | engine.terms
  if spec.shares_base:
    frozen, _ = decoder.abstract(spec.model)
    terms['served weights'] -= _whole(frozen['params'])
  yield Need(name='evaluation', devices=1, terms=terms)


def check(spec: specs.Spec, limit: int | None = None) -> Iterator[str]:
  """Yields a line for each need; a ValueError names what does not fit.

  `limit` is the memory of one device; None asks the devices that are here.
  """
  limit, refused = limit or device_limit(), []
  for need in needs(spec):
    yield str(need)
    refused += [need] * (need.total > limit)
  if not refused:
    return
  need = max(refused, key=lambda need: need.total)
  largest = max(need.terms, key=lambda term: need.terms[term])
  names = [need.name for need in refused]
  also = f', and too little for {", ".join(names)}' * (len(names) > 1)
  fitting = _fitting(spec, names, limit)
  cure = (
    f'What fits: {"; or ".join(fitting)}.'
    if fitting
    else 'No two of these fit: fewer rows, narrow state, adapters, shorter '
    'windows, up to 64 times as many devices.'
  )
  raise ValueError(
    f'{need.name} needs {size(need.total)} on a device that has '
    f'{size(limit)}{also}; the largest part is {largest}, '
    f'{size(need.terms[largest])}. {cure}'
  )


def _fitting(spec: specs.Spec, parts: list[str], limit: int) -> list[str]:
  """Returns changes with which the whole run fits, each the least of its kind.

  Up to three pairs where no single one does.
  """

  def least(choices: _Choices) -> list[str]:
    for words, other in choices:
      if all(need.total <= limit for need in needs(other)):
        return [words]
    return []

  options = _choices(spec, parts)
  found = [words for choices in options.values() for words in least(choices)]
  if found:
    return found
  for first, second in itertools.combinations(options, 2):
    for words, other in options[first]:
      more = _choices(other, parts).get(second, [])
      # The most of the second kind says whether this of the first can do.
      if least(more[-1:]):
        found.append(f'{words} with {least(more)[0]}')
        break
    if len(found) == 3:
      break
  return found


def device_limit() -> int:
  """Returns the bytes of a device; emulated ones share the machine's."""
  device = jax.devices()[0]
  if limit := (device.memory_stats() or {}).get('bytes_limit'):
    return limit
  memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  return memory // len(jax.devices())


def _choices(spec: specs.Spec, parts: list[str]) -> dict[str, _Choices]:
  """Returns changes by kind that may help parts of a run, the least first."""
  length, rl = spec.episode.max_tokens, spec.rl
  stages = {name: getattr(spec, name) for name in ('cpt', 'sft', 'rl')}
  trained = [name for name in stages if name in parts]
  whole = [name for name in trained if name != 'rl']  # on the run's mesh
  is_rl = 'rl' in parts
  is_served = 'engine' in parts or (is_rl and rl.placement == 'colocated')

  def fewer(n: int) -> dict[str, Any]:
    rows = {f'{k}.accumulate': stages[k].accumulate * n for k in whole}
    return rows | ({'rl.rows': max(1, rl.rows // n)} if is_rl else {})

  def more(n: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if whole:
      made['mesh.fsdp'] = spec.mesh.fsdp * n
      for k in ('cpt', 'sft'):
        made[f'{k}.batch_size'] = stages[k].batch_size * n
    if is_rl:
      made |= {'rl.mesh.fsdp': rl.mesh.fsdp * n, 'rl.rows': rl.rows * n}
    if is_served:
      made['rollout.devices'] = spec.rollout.devices * n
    return {**made, 'layout': 'hsdp'} if made else made

  def each(field: str, value: Any) -> tuple[str, Callable[[int], Any]]:
    fields = {f'{name}.{field}': value for name in trained}
    return ', '.join(f'{f}={value}' for f in fields), lambda n: fields

  kinds: tuple[tuple[str, Callable[[int], dict[str, Any]]], ...] = (
    ('rows of a microbatch divided by {}', fewer),
    *(each('state', state) for state in ('bfloat16', 'int8')),
    each('offload', True),
    (
      'model.adapters.attention=16',
      lambda n: {'model.adapters': model_config.AdapterConfig(attention=16)},
    ),
    (
      'windows divided by {}',
      lambda n: {
        'episode.max_tokens': length // n,
        'summary.trigger': length // n,
        **{f'{k}.seq_len': v.seq_len // n for k, v in stages.items()},
      },
    ),
    ('{} times as many devices in layout hsdp', more),
  )
  options: dict[str, _Choices] = {}
  for words, fields in kinds:
    for n in (2, 4, 8, 16, 32, 64) if '{}' in words else (1,):
      try:
        other = _changed(spec, fields(n))
      except ValueError:  # A rule of configs refuses it.
        break
      if other != spec:
        options.setdefault(words, []).append((words.format(n), other))
  return options


def _changed(section: Any, fields: dict[str, Any]) -> Any:
  """Returns a section with other values of dotted fields, set at once."""
  own: dict[str, Any] = {}
  for name, value in fields.items():
    first, _, rest = name.partition('.')
    if rest:
      own.setdefault(first, {})[rest] = value
    else:
      own[first] = value
  made = {
    name: _changed(getattr(section, name), value)
    if isinstance(value, dict)
    else value
    for name, value in own.items()
  }
  return dataclasses.replace(section, **made)


def training(
  name: str,
  model: model_config.ModelConfig,
  optimizer: groups.OptimizerOptions,
  mesh: specs.Mesh,
  layout: layouts.Layout,
  shape: tuple[int, int, bool],
  heads: train_heads.HeadTraining | None = None,
) -> Need:
  """Counts a train step; `shape` has rows and tokens of a microbatch of all
  devices, and whether gradients of several add up. `heads` are trained beside.
  """
  variables, places = _described(model, mesh, layout)
  trained = decoder.trained(variables)
  transform = groups.optimizer(
    optimizer,
    params=variables[trained],
    axes=decoder.abstract(model)[1][trained],
    total_steps=1 << 30,
  )
  beside = train_heads.program(heads, model, 1 << 30)
  create = functools.partial(
    train_state.create,
    optimizer=transform,
    dtype=optimizer.masters,
    heads=beside.optimizer if beside else None,
  )
  state = jax.eval_shape(create, variables)
  at = train_state.shardings(state, places, _mesh(mesh))
  masters = _bytes(state.params, at.params)
  moments = _bytes(state.opt_state, at.opt_state)
  # A CPU's memory is the host's.
  is_apart = optimizer.offload and platforms.current() != 'cpu'
  host = is_apart * (masters + moments)
  rows, seq_len, adds_up = shape
  local = rows // (mesh.replica * mesh.fsdp), seq_len // mesh.context
  terms = {
    'frozen weights': _bytes(state.base, at.base),
    'masters': (not is_apart) * masters,
    'moments': (not is_apart) * moments,
    'a layer of both': is_apart * _moved(state.params, at.params, model.stacks),
    'policy values': _values(masters, model, optimizer, is_apart),
    'experts before rounding': _exact(state.params, at.params, model),
    # Of a microbatch in the dtype of the masters; sums are in float32.
    'gradients': masters + adds_up * _bytes(state.params, at.params, 4),
    'copies of weights': _copies(variables, places, model),
    **activations(model, *local),
  }
  if state.heads:
    # Masters and moments, and where trained their values and gradients.
    values = _bytes(state.heads.params, at.heads.params)
    terms['heads'] = _bytes(state.heads, at.heads)
    terms['heads'] += (2 + adds_up) * values if heads else values
  return Need(name=name, devices=mesh.size, terms=terms, host=host)


def _is_exact(name: str, model: model_config.ModelConfig) -> bool:
  """Returns whether a backward pass reads a weight from before its rounding."""
  return model.precision.backward == 'bf16' and name.endswith(_EXPERTS)


def _exact(params: Any, places: Any, model: model_config.ModelConfig) -> int:
  """Returns bytes of the second copy of experts that `for_backward` makes."""
  at = trees.flatten_names(places)
  named = trees.flatten_names(params).items()
  # Masters on the policy's grid are read as they are.
  return sum(
    _bytes(leaf, at[name])
    for name, leaf in named
    if _is_exact(name, model) and leaf.dtype == jnp.float32
  )


def _values(masters, model, optimizer, is_apart: bool) -> int:
  """Returns bytes of a policy's values beside so many bytes of masters."""
  if optimizer.masters != 'float32':
    return 0  # Masters on the policy's grid are its values.
  # By the compiler of TPUs, what comes from the host is cast at once.
  width = jnp.dtype(model.compute_dtype).itemsize if is_apart else 4
  return masters * width // 4


def _moved(params: Any, places: Any, stacks: dict[str, int]) -> int:
  """Returns bytes that `optim.offload` moves at once, before and after."""
  parts = collections.Counter[int]()
  for name, tree in params.items():
    count = stacks.get(name, 0)
    parts[count] += _bytes(tree, places[name]) // max(count, 1)
  return 2 * 3 * max(parts.values())


def serving(
  model: model_config.ModelConfig, options: rollout_options.EngineOptions
) -> Need:
  """Counts an engine: weights before and after a swap, and the KV cache."""
  model = rollout_options.served(model, options)
  if not options.heads_of(model):
    model = dataclasses.replace(model, mtp=None)  # An engine drops its heads.
  mesh = specs.Mesh(fsdp=options.devices)
  variables, places = _described(model, mesh, layouts.DECODE)
  if options.experts:
    variables = experts.abstract_codes(variables, model)
    places = jax.tree.broadcast(places, variables)
  dtype = jnp.dtype(model.compute_dtype)
  is_part = lambda name: name.rpartition('/')[2] in formats.PARTS
  served = trees.map_names(
    lambda name, x: x if is_part(name) else x.update(dtype=dtype), variables
  )
  swapped = decoder.without_base(served)
  cache = jax.eval_shape(
    lambda: forward.empty_cache(
      model,
      options.pages,
      options.page_size,
      options.cache_dtype,
      options.heads_of(model),
    )
  )
  # Latents are whole, and so are key heads that do not divide.
  is_cut = getattr(model.attention, 'num_kv_heads', 1) % options.devices == 0
  # On a TPU decode has these of all layers in the form of its products at once.
  is_reshaped = platforms.current() == 'tpu' and not options.experts
  gate_up, gate_up_places = (
    tree['params']['moe_layers']['moe']['gate_up'] for tree in (served, places)
  )
  is_turned = model.tie_embeddings and options.devices == 1
  is_turned &= model.numerics == 'fast' and jax.default_backend() == 'cpu'
  # A pass draws a token behind each draft, too.
  num_drawn = options.num_slots * (options.speculation.depths[-1] + 1)
  terms = {
    'served weights': _bytes(served, places),
    # As `forward.unstack` says.
    'turned table': is_turned * _whole(served['params']['embedding']),
    'reshaped experts': is_reshaped * _bytes(gate_up, gate_up_places),
    'weights of a swap': _bytes(swapped, {n: places[n] for n in swapped}),
    'KV cache': _whole(cache) // (options.devices if is_cut else 1),
    'logits': 4 * 4 * num_drawn * model.vocab_size // options.devices,
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


def _whole(tree: Any) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _bytes(tree: Any, places: Any, width: int = 0) -> int:
  """Returns the bytes of one device's shards, `width` each unless 0."""
  shards = jax.tree.map(
    lambda leaf, place: (
      math.prod(place.shard_shape(leaf.shape)) * (width or leaf.dtype.itemsize)
    ),
    tree,
    places,
  )
  return sum(jax.tree.leaves(shards))


def _copies(variables: Any, places: Any, model: Any) -> int:
  """Returns bytes of layers' weights as the layers compute with them.

  Weights are gathered, except along the expert axis, and cast to the compute
  dtype. One layer's copies exist at once with recomputation, all without; of
  their float32 gradients one layer's.
  """
  axes = trees.flatten_names(decoder.abstract(model)[1])
  at, dtype = trees.flatten_names(places), jnp.dtype(model.compute_dtype)
  layers: dict[str, tuple[int, int]] = dict.fromkeys(model.stacks, (0, 0))
  for name, leaf in trees.flatten_names(variables).items():
    kind, stack, *_ = name.split('/')
    is_copied = model.remat or leaf.dtype != dtype
    is_copied |= not at[name].is_fully_replicated
    if stack not in layers or not is_copied:
      continue
    is_local = 'expert' in axes[name]
    shape = at[name].shard_shape(leaf.shape) if is_local else leaf.shape
    count = math.prod(shape[1:])
    copied, moved = layers[stack]
    moved += 4 * count * (kind == decoder.trained(variables))
    times = 1 + _is_exact(name, model)
    layers[stack] = copied + times * count * dtype.itemsize, moved
  number = {name: 1 if model.remat else n for name, n in model.stacks.items()}
  copies = [number[name] * copied for name, (copied, _) in layers.items()]
  return (max if model.remat else sum)(copies) + max(
    moved for _, moved in layers.values()
  )


def activations(
  model: model_config.ModelConfig, rows: int, seq_len: int
) -> dict[str, int]:
  """Counts what a backward pass keeps of a device's tokens, and its work.

  At its fullest it works on the logits and their gradient, or on a layer: on
  about as much as the layer's forward pass could keep, once more if this is
  computed again, and once more for the products of adapters.
  """
  tokens = rows * seq_len
  plain = _kept(dataclasses.replace(model, remat=False))
  times = 1 + model.remat + model.adapters.enabled
  layer = tokens * plain / model.num_layers * times
  words = min(model.vocab_size, head.words_at_once(tokens, model.vocab_size))
  return {
    'activations': int(tokens * _kept(model)),
    "the backward pass's work": int(max(2 * 4 * tokens * words, layer)),
  }


@functools.lru_cache(maxsize=64)
def _kept(model: model_config.ModelConfig) -> float:
  """Returns bytes a token between forward and backward pass, without logits."""
  # Of weights that are kept, cut or cast, a difference has nothing.
  more = _residuals(model, 2 * _TRACED) - _residuals(model, _TRACED)
  return more / _TRACED


def _residuals(model: model_config.ModelConfig, num_tokens: int) -> int:
  """Returns bytes that the forward pass keeps of a row, without logits."""
  variables, _ = decoder.abstract(model)
  name = decoder.trained(variables)
  integers = jax.ShapeDtypeStruct((1, num_tokens), jnp.int32)
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

  def passed(trained, others, batch):
    return jax.vjp(functools.partial(loss, others=others, batch=batch), trained)

  others = {k: tree for k, tree in variables.items() if k != name}
  traced = jax.make_jaxpr(passed)(variables[name], others, batch).jaxpr
  given = {id(v) for v in traced.invars}
  arrays = {id(v): v.aval for v in traced.outvars if id(v) not in given}
  return sum(
    math.prod(a.shape) * a.dtype.itemsize
    for a in arrays.values()
    if math.prod(a.shape) != num_tokens * model.vocab_size
  )
