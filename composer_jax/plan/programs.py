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

from composer_jax.core import checks, platforms, trees
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

_BIAS_RATE, _STEPS = 0.001, 1000


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
    ragged_dots: calls of `jax.lax.ragged_dot`, which many platforms expand to
      products by every expert.
  """

  program: str
  terms: dict[str, int]
  beside: dict[str, int]
  seconds: float
  num_tokens: int
  forwards: int
  lines: tuple[str, ...]
  shards: rounds.Shards | None
  micro_tokens: int
  ragged_dots: int = 0

  @property
  def arguments(self) -> int:
    return sum(self.terms.values())


class _RunProgram(NamedTuple):
  """A jitted function and its arguments; trees of shapes by what they are."""

  jitted: Any
  arguments: tuple[Any, ...]
  terms: dict[str, Any]
  beside: dict[str, Any]
  num_tokens: int
  forwards: int = 0


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
  platform, run = topologies.MACHINES[case.machine].platform, None
  start = time.perf_counter()
  with (
    contextlib.nullcontext()
    if platform == jax.default_backend()
    else platforms.targeting(platform, case.machine)
  ):
    if name in _ENGINE:
      program = _engine(case, name, options, devices)
    else:
      run = _Trainer(case, options, devices)
      program = getattr(run, name)()
    called = program.jitted.trace(*program.arguments)
    lowered = called.lower()
  tokens = program.num_tokens
  tokens //= options.accumulate if name == 'train' else 1
  exchanges = run is not None and program.forwards > 0
  return Traced(
    program=name,
    terms={key: _bytes(tree) for key, tree in program.terms.items()},
    beside={key: _bytes(tree) for key, tree in program.beside.items()},
    seconds=time.perf_counter() - start,
    num_tokens=program.num_tokens,
    forwards=program.forwards,
    lines=run.placement.lines if run else (),
    shards=run.placement.shards_of(tokens) if exchanges else None,
    micro_tokens=tokens // len(devices),
    ragged_dots=str(called.jaxpr).count('ragged_dot_general['),
  ), lowered


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


def _places(tree: Any) -> Any:
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


class _Trainer:
  """The trainer of a run; its methods of NAMES return programs."""

  def __init__(self, case: cases.Case, o: StepOptions, devices: list[Any]):
    model, device = case.model, devices[0]
    if o.remat_saves is not None:
      model = dataclasses.replace(model, remat_saves=o.remat_saves)
    mesh = topology.make_mesh(*case.mesh.shape.values(), devices=devices)
    rows = shardings.product(case.layout.batch, mesh)
    self.batch_size = o.batch_size or rows * o.accumulate
    self.rows = max(1, self.batch_size // o.accumulate)  # Of a microbatch.
    self.case, self.options, self.model = case, o, model
    self.num_tokens = self.batch_size * o.seq_len
    self.placement = train_placement.build(
      model,
      mesh=mesh,
      layout=case.layout,
      options=o.parallel,
      num_tokens=self.rows * o.seq_len,
    )
    self.jit: Callable[..., Any] = functools.partial(
      jax.jit,
      compiler_options=compiler_options.of(device.platform, device.device_kind),
    )

  def _adam_or_muon(self, name: str) -> groups.OptimizerOptions:
    # Learning rates and their schedule do not change a program's shape.
    return groups.OptimizerOptions(
      name=name,
      state=self.options.state,
      offload=self.options.offload,
      learning_rate=1e-3,
      adam_learning_rate=1e-3,
      warmup_steps=100,
      decay_steps=100,
      muon=self.case.muon or groups.MuonChoices(),
    )

  def _optimizer(self, options: groups.OptimizerOptions) -> Any:
    shapes, axes = decoder.abstract(self.model)
    trained = decoder.trained(shapes)
    return groups.optimizer(
      options,
      total_steps=_STEPS,
      params=shapes[trained],
      axes=axes[trained],
      shardings=self.placement.variables[trained],
    )

  def _batch(self, kind: str, rows: int) -> Any:
    """Returns shapes of a batch; a row of it is made as the job makes it."""
    shape = batching.shape_of(self.model, rows=1, seq_len=self.options.seq_len)
    # Batches hold shapes where their types declare arrays.
    batch: Any = hint_batching.microbatch([], shape, 0)
    if kind != 'hint':
      batch = batch.student if kind == 'rl' else batch.teacher
    routes = shardings.routes(self.case.layout, self.placement.mesh)

    def like(path, array):
      is_routes = path[-1].name == 'expert_ids_MBTA'
      axis, place = (1, routes) if is_routes else (0, self.placement.batch)
      sizes = (*array.shape[:axis], rows, *array.shape[axis + 1 :])
      return jax.ShapeDtypeStruct(sizes, array.dtype, sharding=place)

    return jax.tree_util.tree_map_with_path(like, batch)

  # Pretraining and fine-tuning.

  def _loop(self) -> tuple[Any, Any, Any]:
    """Returns the stage's programs, its state and a batch."""
    o, optimizer = self.options, self._adam_or_muon(self.options.optimizer)
    options = loop.LoopOptions(
      stage='plan',
      steps=_STEPS,
      batch_size=self.batch_size,
      seq_len=o.seq_len,
      accumulate=o.accumulate,
      optimizer=optimizer,
      heads=heads.HeadSection().training('cpt', self.model, optimizer),
      bias_rate=_BIAS_RATE,
      seed=0,
    )
    made = loop.make_programs(options, self.model, self.placement)
    return made, made.like, self._batch('lm', options.batch_size)

  def train(self) -> _RunProgram:
    made, state, batch = self._loop()
    terms = _parts(state) | {'batch': batch}
    return _RunProgram(made.step, (state, batch), terms, {}, self.num_tokens, 3)

  def evaluate(self) -> _RunProgram:
    made, state, batch = self._loop()
    terms, variables = _parts(state), state.variables()
    given = {'masters': terms.pop('masters'), 'batch': batch}
    return _RunProgram(
      made.evaluate, (variables, batch), given, terms, self.num_tokens, 1
    )

  def muon(self) -> _RunProgram:
    _, state, _ = self._loop()
    options, c = self._adam_or_muon('muon'), self.model
    update = functools.partial(
      train_step.apply_gradients,
      optimizer=self._optimizer(options),
      bias_rate=_BIAS_RATE,
    )
    whole = self.placement.replicated
    gradients = _like(state.params, _places(state.params), jnp.float32)
    load = jnp.zeros((c.num_moe_layers, c.moe.num_experts), jnp.int32)
    logits = jnp.zeros((c.num_layers, c.attention.num_heads))
    jitted = self.jit(
      lambda state, gradients, load_ME, logits_LN: update(
        state, gradients, load_ME, max_logits_LN=logits_LN
      ),
      donate_argnums=0,
      out_shardings=(_places(state), whole),
    )
    return _RunProgram(
      jitted,
      (state, gradients, _like(load, whole), _like(logits, whole)),
      _parts(state) | {'gradients': gradients},
      {},
      self.num_tokens,
    )

  # Reinforcement learning.

  @functools.cached_property
  def _rl(self) -> tuple[rl_step.Functions, Any, Any, dict[str, Any]]:
    """Returns functions, state, policy values, and what is published."""
    options, placement = self._adam_or_muon('adam'), self.placement
    optimizer = self._optimizer(options)
    training = heads.HeadSection().training('rl', self.model, options)
    own = heads.program(training, self.model, _STEPS, placement.variables)
    names = [field.name for field in dataclasses.fields(placement)]
    functions = rl_step.build(
      decoder.Decoder(self.model, placement.plan),
      optimizer,
      hints=distill.HintLossOptions(),
      placement=_Shapes(**{name: getattr(placement, name) for name in names}),
      # Compiler options are those of the whole program, which calls these.
      heads=own,
    )
    create = functools.partial(
      train_state.create,
      optimizer=optimizer,
      dtype=options.masters,
      heads=own.optimizer if own else None,
    )
    shapes = jax.eval_shape(create, decoder.abstract(self.model)[0])
    places = train_state.shardings(
      shapes, placement.variables, placement.mesh, options.offload
    )
    state = _like(shapes, places)
    values = jax.eval_shape(functions.policy, state)
    values = _like(values, placement.variables)
    # On its way to the store, in bfloat16.
    published = _like(values, _places(values), jnp.bfloat16)
    beside = {'published policy': published}
    return functions, state, values, beside

  def _sums(self) -> Any:
    """Returns the sums of a microbatch's gradients and statistics."""
    functions, _, values, _ = self._rl
    batch, placement = self._batch('rl', self.rows), self.placement
    sums, _ = jax.eval_shape(functions.add_microbatch, values, None, batch)
    trained = decoder.trained(values)
    places = {'grads': placement.variables[trained]}
    if sums.head_grads is not None:
      places['head_grads'] = placement.variables['mtp']['params']
    at = jax.tree.map(lambda _: placement.replicated, sums)
    return _like(sums, at.replace(**places))

  def rl(self) -> _RunProgram:
    functions, state, values, beside = self._rl
    batch = self._batch('rl', self.rows)
    return _RunProgram(
      self.jit(lambda v, b: functions.add_microbatch(v, None, b)),
      (values, batch),
      {'policy values': values, 'batch': batch},
      {**_parts(state), 'sums of gradients': self._sums(), **beside},
      self.rows * self.options.seq_len,
      3,
    )

  def hint(self) -> _RunProgram:
    functions, state, values, beside = self._rl
    given = values, values, self._sums(), self._batch('hint', self.rows)
    names = 'policy values', 'teacher', 'sums of gradients', 'batch'
    return _RunProgram(
      self.jit(functions.add_hints, donate_argnums=2),
      given,
      dict(zip(names, given, strict=True)),
      {**_parts(state), **beside},
      self.rows * self.options.seq_len,
      4,
    )

  def rl_update(self) -> _RunProgram:
    functions, state, values, beside = self._rl
    sums = self._sums()
    scale = _like(jnp.float32(0), self.placement.replicated)
    return _RunProgram(
      self.jit(functions.apply, donate_argnums=0),
      (state, sums, scale),
      {**_parts(state), 'sums of gradients': sums},
      {'policy values': values, **beside},
      self.num_tokens,
    )

  def policy(self) -> _RunProgram:
    return self._cast(self._rl[0].policy)

  def publish(self) -> _RunProgram:
    cast = functools.partial(decoder.policy, config=self.model)
    return self._cast(lambda state: cast(state.variables()))

  def _cast(self, cast: Callable[[Any], Any]) -> _RunProgram:
    _, state, *_ = self._rl
    beside = _parts(state)
    given, read = (
      {'masters': beside.pop('masters')},
      state.replace(opt_state={}),
    )
    return _RunProgram(self.jit(cast), (read,), given, beside, self.num_tokens)


def _parts(state: train_state.TrainState) -> dict[str, Any]:
  return {
    'masters': (state.params, state.selection_bias, state.base),
    'moments': state.opt_state,
    'other state': (state.step, state.teacher, state.heads),
  }


def _engine(
  case: cases.Case, name: str, options: StepOptions, devices: list[Any]
) -> _RunProgram:
  """Returns a program of an engine over all devices of the case."""
  o = rollout_options.EngineOptions(
    devices=len(devices), num_slots=options.slots, max_len=options.seq_len
  )
  model = rollout_options.served(case.model, o)
  mesh = topology.make_mesh(fsdp=len(devices), devices=devices)
  place = placing.on_mesh(model, mesh)
  weights = _weights(model, mesh, place)
  empty = functools.partial(forward.empty_cache, model, o.pages, o.page_size)
  cache = _like(jax.eval_shape(empty), place.pools)

  def whole(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place.whole)

  built, rows = steps.build(model, o, place), o.num_slots
  if name == 'prefill':
    jitted, rows = built.extend, o.extend_rows[-1]
    inputs: tuple[Any, ...] = (whole(rows, sum(steps.extend_widths(o))),)
  else:
    jitted, state = built.decode, steps.State(*[whole(rows)] * 3)
    words = whole(rows, sum(steps.decode_widths(o)))
    inputs = words, state, None, None, False, 0
  return _RunProgram(
    jitted,
    (weights, cache, *inputs),
    {'served weights': weights, 'KV cache': cache},
    {'weights of a swap': weights},
    rows * (o.prefill_chunk if name == 'prefill' else 1),
    1,
  )


def _weights(model: Any, mesh: Mesh, place: placing.EnginePlace) -> Any:
  """Returns shapes of served weights, which lie as `placing.put` lays them."""
  cast = functools.partial(decoder.policy, config=model)
  policy = jax.eval_shape(cast, decoder.abstract(model)[0])
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
      spec = at['/'.join(filter(None, (kind, stack, rest)))].spec
      return _like(leaf, NamedSharding(mesh, P(*spec[bool(stack) :])))

    return trees.map_names(like, tree)

  stacks = [name for name, n in model.stacks.items() for _ in range(n)]
  return weights.replace(
    outer=placed('', weights.outer),
    layers=tuple(map(placed, stacks, weights.layers)),
  )


_ENGINE = ('prefill', 'decode')
NAMES = (
  *('train', 'evaluate', 'muon', 'rl', 'hint', 'rl_update', 'policy'),
  *('publish', *_ENGINE),
)
