"""The optimizer of a stage: clipping, then Muon and AdamW.

Adam and clipping equal optax's up to rounding and have the same state, but
multiply by reciprocals: XLA writes one more array of the model's size for each
of optax's divisions, on a CPU core a fifth of their time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from composer_jax.core import checks, rounding, trees
from composer_jax.optim import eight_bits, layerwise, qk_clip, roles
from composer_jax.optim.muon import plan as muon_plan
from composer_jax.optim.muon import planner
from composer_jax.optim.muon import transform as muon

MuonChoices = muon.MuonChoices


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
  """Options of Muon and AdamW, their schedule and clipping.

  Attributes:
    name: 'muon' (matrices on Muon, the rest on AdamW) or 'adam' (all AdamW).
    learning_rate: peak for Muon's matrices, and for all when name is 'adam'.
    adam_learning_rate: peak for AdamW's parameters; unused by 'adam'.
    warmup_steps: number of optimizer steps of linear warm-up.
    decay_steps: number of optimizer steps of linear decay at the end.
    final_ratio: share of the peak that remains at the end.
    weight_decay: decoupled weight decay of all but vectors, times the learning
      rate.
    grad_clip: largest global norm of gradients.
    muon: choices of Muon; unused by 'adam'.
    state: dtype of masters and Adam's moments: 'float32', or with stochastic
      rounding 'bfloat16', 6 bytes a parameter instead of 12, or 'int8', 4 bytes
      (masters stay bfloat16, see `optim.eight_bits`). Both need 'adam'.
    offload: true: masters and moments are in the host's memory; needs 'adam'.
    b1: decay of Adam's first moment.
    b2: decay of Adam's second moment.
    eps: number added to the root of Adam's second moment.
  """

  name: str = 'muon'
  learning_rate: float = 5e-3
  adam_learning_rate: float = 2e-3
  warmup_steps: int = 20
  decay_steps: int = 100
  final_ratio: float = 0.1
  weight_decay: float = 0.1
  grad_clip: float = 1.0
  muon: MuonChoices = MuonChoices()
  state: str = 'float32'
  offload: bool = False
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8

  def __post_init__(self):
    checks.one_of(self, 'name', ('muon', 'adam'))
    checks.one_of(self, 'state', ('float32', 'bfloat16', 'int8'))
    rule = "be 'float32' with Muon, whose momentum is not rounded"
    is_wide = self.state == 'float32'
    checks.require(self, 'state', is_wide or self.name == 'adam', rule)
    is_here = self.name == 'adam' or not self.offload
    rule = "be False with Muon, or the optimizer 'adam'"
    checks.require(self, 'offload', is_here, rule)
    checks.boolean(self, 'offload')
    checks.positive(self, 'learning_rate', 'adam_learning_rate', 'grad_clip')
    checks.number(self, 0, 'weight_decay')
    checks.at_least(self, 0, 'warmup_steps', 'decay_steps')
    for name in ('b1', 'b2'):
      value = getattr(self, name)
      checks.require(self, name, 0 <= value < 1, 'be at least 0 and below 1')
    checks.number(self, 0, 'final_ratio', highest=1)

  @property
  def masters(self) -> str:
    """Dtype of the masters."""
    return 'float32' if self.state == 'float32' else 'bfloat16'

  @property
  def clips_logits(self) -> bool:
    """True if `update` needs `max_logits`."""
    return self.name == 'muon' and self.muon.qk_clip > 0


def check_schedule(options: Any, total_steps: int) -> None:
  """Raises a ValueError if warm-up and decay do not fit."""
  warmup_steps, decay_steps = options.warmup_steps, options.decay_steps
  if warmup_steps + decay_steps > total_steps:
    raise ValueError(
      f'warmup_steps ({warmup_steps}) plus decay_steps ({decay_steps}) must '
      f'not exceed the steps of the stage ({total_steps}).'
    )


def schedule(
  options: OptimizerOptions, total_steps: int, peak: float
) -> Callable[[jax.typing.ArrayLike], jax.Array]:
  """Linear warm-up, constant, linear decay (WSD, arXiv 2404.06395).

  Step t < warmup_steps uses peak * (t + 1) / warmup_steps, so that the first
  step already moves. The decay ends at `total_steps`, where the value stays.
  """
  warmup_steps, decay_steps = options.warmup_steps, options.decay_steps
  final_ratio = options.final_ratio
  check_schedule(options, total_steps)

  def value(step):
    step = jnp.asarray(step, jnp.float32)
    warmup = (step + 1) / max(warmup_steps, 1)
    remaining = (total_steps - step) / max(decay_steps, 1)
    decay = final_ratio + (1 - final_ratio) * jnp.clip(remaining, 0, 1)
    return peak * jnp.minimum(jnp.minimum(warmup, 1.0), decay)

  return value


def clip_by_global_norm(limit: float) -> optax.GradientTransformation:
  """Scales gradients down to a global norm, like optax's of this name."""

  def update(updates: Any, state: Any, params: Any = None):
    del params
    norm = optax.tree.norm(updates)
    # A norm that is not finite is reported and stops the run.
    scale = jnp.where(norm < limit, 1.0, limit / norm)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def apply_updates(params: Any, updates: Any, step: Any, place: Any = 0) -> Any:
  """Adds updates to the masters; bfloat16 ones are rounded stochastically."""
  values = jax.tree.map(jnp.add, params, updates)
  return _kept(values, params, _key(0, step, place))


def _key(kind: int, step: Any, place: Any) -> jax.Array:
  """Returns the key of a kind of arrays, of those of one place, in a step."""
  return jax.random.fold_in(
    jax.random.fold_in(jax.random.key(kind), step), place
  )


def _kept(values: Any, like: Any, key: jax.Array) -> Any:
  """Returns values in the dtypes of `like`."""

  def keep(place, value, old):
    if old.dtype != jnp.bfloat16:
      return value.astype(old.dtype)
    return rounding.stochastic(jax.random.fold_in(key, place), value)

  leaves, tree = jax.tree.flatten(values)
  olds = jax.tree.leaves(like)
  return tree.unflatten(map(keep, range(len(leaves)), leaves, olds))


def scale_by_adam(
  b1: float, b2: float, eps: float, dtype: str = 'float32'
) -> optax.GradientTransformation:
  """Divides the mean gradient by its root mean square (Kingma & Ba 2015)."""

  def update(updates, state, params=None, *, place=0, **unused):
    del params, unused
    count = optax.safe_increment(state.count)
    # Bias corrections: the moments begin at zero.
    first, second = (1 / (1 - decay**count) for decay in (b1, b2))
    mu, nu = map(wide, (state.mu, state.nu))
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mu, updates)
    nu = jax.tree.map(
      lambda v, g: b2 * v + (1 - b2) * jnp.square(g), nu, updates
    )
    steps = jax.tree.map(
      lambda m, v: first * m / (jnp.sqrt(second * v) + eps), mu, nu
    )
    keys = [_key(kind, count, place) for kind in (1, 2)]
    mu, nu = map(kept, (mu, nu), (state.mu, state.nu), keys, ('int8', 'uint8'))
    return steps, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

  def wide(moments):
    if dtype == 'int8':
      return eight_bits.decode(moments)
    return optax.tree.cast(moments, jnp.float32)

  def kept(values, like, key, codes):
    if dtype != 'int8':
      return _kept(values, like, key)
    return eight_bits.encode(key, values, codes)

  def init(params):
    count = jnp.zeros([], jnp.int32)
    narrow = 'float32' if dtype == 'int8' else dtype
    zeros = [optax.tree.zeros_like(params, dtype=narrow) for _ in range(2)]
    keys = [_key(kind, count, 0) for kind in (1, 2)]
    mu, nu = map(kept, zeros, zeros, keys, ('int8', 'uint8'))
    return optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

  return optax.GradientTransformationExtraArgs(init, update)


def optimizer(
  options: OptimizerOptions,
  *,
  params: Any,
  axes: Any,
  total_steps: int,
  shardings: Any = None,
) -> optax.GradientTransformation:
  """Builds the transform of a stage.

  If the options clip logits, `update` takes `max_logits` too.

  Args:
    params: tree of arrays or shapes, without boxes.
    axes: tree of PartitionSpecs of logical axis names.
    shardings: tree of the parameters' NamedShardings, over whose mesh
      Newton-Schulz is distributed; None on one device.
  """
  is_muon = options.name == 'muon'
  overrides = options.muon.roles if is_muon else ()
  role_tree = roles.tree(params, axes, overrides)
  named = trees.flatten_names(axes)

  def is_decayed(name, role):
    if is_muon and role != roles.ADAM:
      return optax.MaskedNode()
    # Vectors (norms, biases) stacked over layers are not decayed.
    return sum(a not in roles.BATCH_AXES for a in named.get(name, ())) >= 2

  adam_peak = options.adam_learning_rate if is_muon else options.learning_rate
  clip = clip_by_global_norm(options.grad_clip)
  adam_rate = schedule(options, total_steps, adam_peak)

  def adamw(decayed):
    return optax.chain(
      scale_by_adam(options.b1, options.b2, options.eps, options.state),
      optax.add_decayed_weights(options.weight_decay, decayed),
      optax.scale_by_learning_rate(adam_rate),
    )

  decayed = trees.map_names(is_decayed, role_tree)
  if options.offload or options.state != 'float32':
    make = lambda name: adamw({name: decayed[name]})
    return optax.chain(clip, layerwise.by_layer(make, axes, apply_updates))
  if not is_muon:
    return optax.chain(clip, adamw(decayed))

  rate = schedule(options, total_steps, options.learning_rate)
  matrix = optax.chain(
    muon.scale_by_muon(
      roles.matrices(params, axes, role_tree),
      shardings=shardings,
      options=options.muon,
    ),
    optax.add_decayed_weights(options.weight_decay),
    optax.scale_by_learning_rate(rate),
  )
  update = optax.partition(
    {'muon': matrix, roles.ADAM: adamw(decayed)},
    jax.tree.map(lambda r: r if r == roles.ADAM else 'muon', role_tree),
  )
  if not options.clips_logits:
    return optax.chain(clip, update)
  return optax.chain(clip, update, qk_clip.qk_clip(options.muon.qk_clip))


def plan(
  options: OptimizerOptions, *, params: Any, axes: Any, shardings: Any = None
) -> muon_plan.MuonPlan | None:
  """Returns Muon's plan; None for 'adam'."""
  if options.name != 'muon':
    return None
  role_tree = roles.tree(params, axes, options.muon.roles)
  return planner.make(
    params,
    roles.matrices(params, axes, role_tree),
    shardings=shardings,
    newton_schulz=options.muon,
  )
