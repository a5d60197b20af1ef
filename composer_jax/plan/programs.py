"""Every program that a run needs, lowered for machines that need not exist.

Each is the function that the job itself runs, with the shapes and shardings
that the job gives it: `train.loop` (train, evaluate), `rl.step` (rl, hint,
rl_update, policy), the cast that is published (publish), `rollout.steps`
(prefill, decode), and Muon's update alone (muon). No array is allocated.
"""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from composer_jax.core import batches, checks, platforms, trees
from composer_jax.models import decoder
from composer_jax.models import placement as model_placement
from composer_jax.optim import groups
from composer_jax.parallel import layouts, rounds, shardings, topology
from composer_jax.plan import case as cases
from composer_jax.plan import topologies
from composer_jax.rl import batching
from composer_jax.rl import step as rl_step
from composer_jax.rl.hints import batching as hint_batching
from composer_jax.rl.hints import distill
from composer_jax.rollout import forward, placing, steps
from composer_jax.rollout import options as rollout_options
from composer_jax.train import compiler_options, heads, loop
from composer_jax.train import placement as train_placement
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step

_BIAS_RATE = 0.001


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
  """Batch, optimizer and parallelism of a run.

  Attributes:
    batch_size: rows of a step on all devices; 0 gives each device that shards
      the batch one row a microbatch.
    seq_len: tokens of a row, and of a session of the engine.
    accumulate: microbatches of a step.
    slots: sessions that the engine works on at once.
    optimizer: 'muon' or 'adam'; reinforcement learning has 'adam'.
    state: dtype of masters and moments.
    offload: true for masters and moments in the host's memory.
    parallel: exchange of tokens and order of the sequence.
    remat_saves: names of the arrays that recomputation keeps; None takes those
      of the model's config.
  """

  batch_size: int = 0
  seq_len: int = 4096
  accumulate: int = 1
  slots: int = 16
  optimizer: str = 'muon'
  state: str = 'float32'
  offload: bool = False
  parallel: train_placement.ParallelOptions = train_placement.ParallelOptions()
  remat_saves: tuple[str, ...] | None = None

  def __post_init__(self):
    checks.at_least(self, 1, 'seq_len', 'accumulate', 'slots')
    checks.at_least(self, 0, 'batch_size')


class Traced(NamedTuple):
  """Facts about a program that need no compiler.

  Attributes:
    program: one of NAMES.
    terms: bytes of its arguments on one device, by what they are.
    beside: bytes of a device that the run holds meanwhile, likewise.
    num_tokens: tokens of all devices.
    forwards: forward passes of the model to which its products amount.
    shards: exchange of a microbatch; None where no token travels.
    micro_tokens: tokens of a device that it exchanges at once.
  """

  program: str
  terms: dict[str, int]
  beside: dict[str, int]
  seconds: float
  num_tokens: int
  forwards: int = 0
  lines: tuple[str, ...] = ()
  shards: rounds.Shards | None = None
  micro_tokens: int = 0

  @property
  def arguments(self) -> int:
    return sum(self.terms.values())


class _Program(NamedTuple):
  """A jitted function, its arguments, and what they are.

  `terms` and `beside` are trees of shapes by name; see `Traced`.
  """

  jitted: Any
  arguments: tuple[Any, ...]
  terms: dict[str, Any]
  beside: dict[str, Any]
  num_tokens: int
  forwards: int = 0
  exchanges: bool = False


class _Shapes(train_placement.Placement):
  """A placement whose batches are shapes, which have their places already."""

  def put(self, batch: Any, batch_size: int | None = None) -> Any:
    del batch_size
    return batch


def lower(
  case: cases.Case, name: str, options: StepOptions, devices: list[Any]
) -> tuple[Traced, Any]:
  """Traces a program of NAMES for devices that need not exist.

  Raises:
    ValueError: there is no such program, or a dimension does not divide over
      the mesh.
  """
  if name not in NAMES:
    raise ValueError(f'program {name!r} is not one of {NAMES}.')
  platform = topologies.MACHINES[case.machine].platform
  start = time.perf_counter()
  with (
    contextlib.nullcontext()
    if platform == jax.default_backend()
    else platforms.targeting(platform, case.machine)
  ):
    if name in _ENGINE:
      program, placement = _engine(case, name, options, devices), None
    else:
      run = _Run(case, options, devices)
      program, placement = _TRAINER[name](run), run.placement
    lowered = program.jitted.lower(*program.arguments)
  traced = Traced(
    program=name,
    terms={key: _bytes(tree) for key, tree in program.terms.items()},
    beside={key: _bytes(tree) for key, tree in program.beside.items()},
    seconds=time.perf_counter() - start,
    num_tokens=program.num_tokens,
    forwards=program.forwards,
  )
  if placement is None:
    return traced, lowered
  traced = traced._replace(lines=placement.lines)
  if program.exchanges:
    tokens = program.num_tokens // (
      options.accumulate if name == 'train' else 1
    )
    traced = traced._replace(
      shards=placement.shards_of(tokens),
      micro_tokens=tokens // len(devices),
    )
  return traced, lowered


def _bytes(tree: Any) -> int:
  """Returns the bytes of one device's shards in its own memory."""
  return sum(
    leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
    for leaf in jax.tree.leaves(tree)
    if leaf.sharding.memory_kind != 'pinned_host'
  )


def _like(shapes: Any, places: Any, dtype: Any = None) -> Any:
  """Returns shapes with their shardings, in a dtype unless it is None."""
  if isinstance(places, Sharding):
    places = jax.tree.map(lambda _: places, shapes)
  return jax.tree.map(
    lambda leaf, place: jax.ShapeDtypeStruct(
      leaf.shape, dtype or leaf.dtype, sharding=place
    ),
    shapes,
    places,
  )


class _Run:
  """The trainer of a run: its state and functions, as shapes and traces."""

  def __init__(self, case: cases.Case, o: StepOptions, devices: list[Any]):
    model = case.model
    if o.remat_saves is not None:
      model = dataclasses.replace(model, remat_saves=o.remat_saves)
    mesh = topology.make_mesh(*case.mesh.shape.values(), devices=devices)
    rows = shardings.product(case.layout.batch, mesh)
    self.case, self.options, self.model, self.mesh = case, o, model, mesh
    self.batch_size = o.batch_size or rows * o.accumulate
    self.num_tokens = self.batch_size * o.seq_len
    self.placement = train_placement.build(
      model,
      mesh=mesh,
      layout=case.layout,
      options=o.parallel,
      num_tokens=self.num_tokens // o.accumulate,
    )
    device = devices[0]
    self.jit: Callable[..., Any] = functools.partial(
      jax.jit,
      compiler_options=compiler_options.of(device.platform, device.device_kind),
    )

  # Pretraining and fine-tuning.

  def optimizer_options(self, name: str = '') -> groups.OptimizerOptions:
    o = self.options
    # Learning rates and their schedule do not change a program's shape.
    return groups.OptimizerOptions(
      name=name or o.optimizer,
      state=o.state,
      offload=o.offload,
      learning_rate=1e-3,
      adam_learning_rate=1e-3,
      warmup_steps=100,
      decay_steps=100,
      final_ratio=0.1,
      muon=self.case.muon or groups.MuonChoices(),
    )

  @functools.cached_property
  def loop(self) -> Any:
    o, optimizer = self.options, self.optimizer_options()
    options = loop.LoopOptions(
      stage='plan',
      steps=1000,
      batch_size=self.batch_size,
      seq_len=o.seq_len,
      accumulate=o.accumulate,
      optimizer=optimizer,
      heads=heads.HeadSection().training('cpt', self.model, optimizer),
      bias_rate=_BIAS_RATE,
      checkpoint_every=1000,
      eval_every=1000,
      log_every=1,
      seed=0,
    )
    return loop.make_programs(options, self.model, self.placement)

  def lm_batch(self) -> batches.LMBatch:
    shape = self.batch_size, self.options.seq_len
    integers, floats = (
      jax.ShapeDtypeStruct(shape, dtype, sharding=self.placement.batch)
      for dtype in (jnp.int32, jnp.float32)
    )
    # The batch holds shapes where its type declares arrays.
    batch_type: Any = batches.LMBatch
    return batch_type(
      tokens_BT=integers,
      segment_ids_BT=integers,
      positions_BT=integers,
      loss_weights_BT=floats,
    )

  def train(self) -> _Program:
    state, batch = self.loop.like, self.lm_batch()
    return _Program(
      self.loop.step,
      (state, batch),
      {**_parts(state), 'batch': batch},
      {},
      self.num_tokens,
      forwards=3,
      exchanges=True,
    )

  def evaluate(self) -> _Program:
    state, batch = self.loop.like, self.lm_batch()
    terms = _parts(state)
    return _Program(
      self.loop.evaluate,
      (state.variables(), batch),
      {'masters': terms.pop('masters'), 'batch': batch},
      terms,
      self.num_tokens,
      forwards=1,
      exchanges=True,
    )

  def muon(self) -> _Program:
    if self.options.optimizer != 'muon':
      raise ValueError("program 'muon' needs --optimizer=muon.")
    state, options = self.loop.like, self.optimizer_options()
    update = functools.partial(
      train_step.apply_gradients,
      optimizer=self._optimizer(options),
      bias_rate=_BIAS_RATE,
    )
    gradients = _like(state.params, self._places(state.params), jnp.float32)
    c, whole = self.model, self.placement.replicated
    load = (c.num_moe_layers, c.moe.num_experts), jnp.int32
    extra = {}
    if options.clips_logits:
      logits = (c.num_layers, c.attention.num_heads), jnp.float32
      extra = {'max_logits_LN': jax.ShapeDtypeStruct(*logits, sharding=whole)}
    places = self._places(state)
    jitted = self.jit(
      lambda state, gradients, load_ME, extra: update(
        state, gradients, load_ME, **extra
      ),
      donate_argnums=0,
      out_shardings=(places, whole),
    )
    load_ME = jax.ShapeDtypeStruct(*load, sharding=whole)
    return _Program(
      jitted,
      (state, gradients, load_ME, extra),
      {**_parts(state), 'gradients': gradients},
      {},
      self.num_tokens,
    )

  def _optimizer(self, options: groups.OptimizerOptions) -> Any:
    shapes, axes = decoder.abstract(self.model)
    trained = decoder.trained(shapes)
    return groups.optimizer(
      options,
      total_steps=1000,
      params=shapes[trained],
      axes=axes[trained],
      shardings=self.placement.variables[trained],
    )

  @staticmethod
  def _places(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)

  # Reinforcement learning.

  @functools.cached_property
  def _rl(self) -> tuple[rl_step.Functions, Any, Any, Any]:
    """Returns functions, state, policy values, and sums of a microbatch."""
    options, placement = self.optimizer_options('adam'), self.placement
    optimizer = self._optimizer(options)
    training = heads.HeadSection().training('rl', self.model, options)
    own = heads.program(training, self.model, 1000, placement.variables)
    placed = {
      field.name: getattr(placement, field.name)
      for field in dataclasses.fields(placement)
    }
    functions = rl_step.build(
      decoder.Decoder(self.model, placement.plan),
      optimizer,
      hints=distill.HintLossOptions(),
      placement=_Shapes(**placed),
      # Those of the whole program, which calls these.
      compiler_options=None,
      heads=own,
    )
    variables, _ = decoder.abstract(self.model)
    create = functools.partial(
      train_state.create,
      optimizer=optimizer,
      dtype=options.masters,
      heads=own.optimizer if own else None,
    )
    shapes = jax.eval_shape(create, variables)
    state = _like(
      shapes,
      train_state.shardings(
        shapes, placement.variables, placement.mesh, options.offload
      ),
    )
    values = _like(jax.eval_shape(functions.policy, state), placement.variables)
    sums, _ = jax.eval_shape(
      functions.add_microbatch, values, None, self._rl_batch()
    )
    at = jax.tree.map(lambda _: placement.replicated, sums)
    at = at.replace(grads=self._places(values[decoder.trained(values)]))
    if own:
      at = at.replace(head_grads=own.places)
    return functions, state, values, _like(sums, at)

  def _rl_batch(self, hinted: bool = False) -> Any:
    """Returns shapes of a microbatch, with one row of each that is real."""
    shape = batching.shape_of(self.model, rows=1, seq_len=self.options.seq_len)
    batch: Any = batches.RLBatch(**batching.padding(shape))
    if hinted:
      batch = hint_batching.microbatch([], shape, 0)
    rows = self.batch_size // self.options.accumulate
    routes = shardings.routes(self.case.layout, self.mesh)

    def like(path, array):
      is_routes = path[-1].name == 'expert_ids_MBTA'
      axis, place = (1, routes) if is_routes else (0, self.placement.batch)
      sizes = list(array.shape)
      sizes[axis] = rows
      return jax.ShapeDtypeStruct(tuple(sizes), array.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(like, batch)

  def _published(self, values: Any) -> Any:
    """Returns the policy that is on its way to the store, in bfloat16."""
    return _like(values, self._places(values), jnp.bfloat16)

  def rl(self) -> _Program:
    functions, state, values, sums = self._rl
    batch = self._rl_batch()
    return _Program(
      self.jit(lambda v, b: functions.add_microbatch(v, None, b)),
      (values, batch),
      {'policy values': values, 'batch': batch},
      {
        **_parts(state),
        'sums of gradients': sums,
        'published policy': self._published(values),
      },
      math.prod(batch.tokens_BT.shape),
      forwards=3,
      exchanges=True,
    )

  def hint(self) -> _Program:
    functions, state, values, sums = self._rl
    batch = self._rl_batch(hinted=True)
    return _Program(
      self.jit(functions.add_hints, donate_argnums=2),
      (values, values, sums, batch),
      {
        'policy values': values,
        'teacher': values,
        'sums of gradients': sums,
        'batch': batch,
      },
      {**_parts(state), 'published policy': self._published(values)},
      math.prod(batch.student.tokens_BT.shape),
      forwards=4,
      exchanges=True,
    )

  def rl_update(self) -> _Program:
    functions, state, values, sums = self._rl
    scale = jax.ShapeDtypeStruct(
      (), jnp.float32, sharding=self.placement.replicated
    )
    return _Program(
      self.jit(functions.apply, donate_argnums=0),
      (state, sums, scale),
      {**_parts(state), 'sums of gradients': sums},
      {'policy values': values, 'published policy': self._published(values)},
      self.num_tokens,
    )

  def policy(self) -> _Program:
    return self._cast(lambda functions: functions.policy)

  def publish(self) -> _Program:
    cast = functools.partial(decoder.policy, config=self.model)
    return self._cast(lambda _: lambda state: cast(state.variables()))

  def _cast(self, of: Any) -> _Program:
    functions, state, _, _ = self._rl
    parts = _parts(state)
    masters = parts.pop('masters')
    return _Program(
      self.jit(of(functions)),
      (state.replace(opt_state={}),),
      {'masters': masters},
      parts,
      self.num_tokens,
    )


def _parts(state: train_state.TrainState) -> dict[str, Any]:
  return {
    'masters': (state.params, state.selection_bias, state.base),
    'moments': state.opt_state,
    'other state': (state.step, state.teacher, state.heads),
  }


def _engine(
  case: cases.Case, name: str, options: StepOptions, devices: list[Any]
) -> _Program:
  """Returns a program of an engine over all devices of the case."""
  o = rollout_options.EngineOptions(
    devices=len(devices), num_slots=options.slots, max_len=options.seq_len
  )
  model = rollout_options.served(case.model, o)
  mesh = topology.make_mesh(fsdp=len(devices), devices=devices)
  place = placing.on_mesh(model, mesh)
  weights = _weights(model, mesh, place)
  cache = _like(
    jax.eval_shape(
      lambda: forward.empty_cache(model, o.pages, o.page_size, o.cache_dtype)
    ),
    place.pools,
  )

  def whole(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place.whole)

  built = steps.build(model, o, place)
  if name == 'prefill':
    jitted, rows = built.extend, o.extend_rows[-1]
    inputs: tuple[Any, ...] = (whole(rows, sum(steps.extend_widths(o))),)
    num_tokens = rows * o.prefill_chunk
  else:
    jitted, num_tokens = built.decode, o.num_slots
    state = steps.State(*[whole(o.num_slots)] * 3)
    rows_BW = whole(o.num_slots, sum(steps.decode_widths(o)))
    inputs = rows_BW, state, None, False
  return _Program(
    jitted,
    (weights, cache, *inputs),
    {'served weights': weights, 'KV cache': cache},
    {'weights of a swap': weights},
    num_tokens,
    forwards=1,
  )


def _weights(model: Any, mesh: Mesh, place: placing.EnginePlace) -> Any:
  """Returns shapes of served weights, which lie as `placing.put` lays them."""
  variables, _ = decoder.abstract(model)
  policy = jax.eval_shape(
    functools.partial(decoder.policy, config=model), variables
  )
  is_sharded = mesh.size > 1 or platforms.current() != 'cpu'
  unstack = functools.partial(
    forward.unstack, config=model, is_sharded=is_sharded
  )
  weights = jax.eval_shape(unstack, policy)
  if place.plan is None:
    return _like(weights, place.whole)
  at = trees.flatten_names(
    model_placement.variable_shardings(model, layout=layouts.DECODE, mesh=mesh)
  )

  def placed(stack, tree):
    def like(name, leaf):
      kind, _, rest = name.partition('/')
      of_all = at['/'.join([kind, *([stack] if stack else []), rest])]
      spec = of_all.spec[1:] if stack else of_all.spec
      return _like(leaf, NamedSharding(mesh, P(*spec)))

    return trees.map_names(like, tree)

  stacks = [name for name, n in model.stacks.items() for _ in range(n)]
  return weights.replace(
    outer=placed('', weights.outer),
    layers=tuple(map(placed, stacks, weights.layers)),
  )


_ENGINE = ('prefill', 'decode')
_TRAINER: dict[str, Callable[[_Run], _Program]] = {
  name: getattr(_Run, name)
  for name in (
    *('train', 'evaluate', 'muon', 'rl', 'hint', 'rl_update', 'policy'),
    'publish',
  )
}
NAMES = (*_TRAINER, *_ENGINE)
