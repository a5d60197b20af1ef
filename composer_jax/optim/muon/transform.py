"""Muon as an optax transform with distributed Newton-Schulz.

The momentum is orthogonalised (K. Jordan 2024) per layer, expert and head, and
scaled as in Moonlight (arXiv 2502.16982). On any mesh the result equals that of
`optax.contrib.muon`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from composer_jax.core import checks, trees
from composer_jax.optim.muon import exchange, newton_schulz, places, planner

_CURE = (
  'Bring it there once: gradients by the out_shardings of jit, a restored '
  'state by jax.device_put with the shardings of the state that init returns.'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonChoices(newton_schulz.NewtonSchulz):
  """Options of Muon, those of the orthogonalisation included.

  Attributes:
    beta: decay of the momentum.
    rms: root mean square of an update at learning rate 1; AdamW's is 0.2 to
      0.4. None scales by sqrt(max(1, fan_out / fan_in)).
    qk_clip: attention logit above which a head's query and key are scaled down
      (Kimi K2 has 100); 0 neither clips nor measures.
    roles: (regex of a parameter's name, role) pairs that replace roles by axes:
      ('router', 'embed->route') puts routers on Muon, ('attention/out$',
      'heads,head_dim->embed') makes all heads one matrix.
  """

  beta: float = 0.95
  rms: float | None = 0.2
  qk_clip: float = 0.0
  roles: tuple[tuple[str, str], ...] = ()

  def __post_init__(self):
    super().__post_init__()
    if self.rms is not None:
      checks.positive(self, 'rms')
    checks.number(self, 0, 'beta', 'qk_clip')
    rule = 'be less than 1: with 1 gradients would not change the momentum'
    checks.require(self, 'beta', self.beta < 1, rule)
    pairs: Any = self.roles if isinstance(self.roles, list | tuple) else [None]
    are_pairs = all(
      isinstance(pair, list | tuple) and list(map(type, pair)) == [str, str]
      for pair in pairs
    )
    rule = "be pairs (regex, role), such as (('router', 'embed->route'),)"
    checks.require(self, 'roles', are_pairs, rule)
    # JSON and the command line give lists, which cannot be hashed.
    object.__setattr__(self, 'roles', tuple(map(tuple, self.roles)))


class MuonState(NamedTuple):
  """Number of steps and the momentum; coefficients and plan are no state."""

  count: jax.Array
  momentum: Any


def scale_by_muon(
  matrices: Any,
  *,
  shardings: Any = None,
  options: MuonChoices = MuonChoices(),
  fixed: planner.PlanOptions = planner.NOTHING_FIXED,
) -> optax.GradientTransformation:
  """Replaces gradients by scaled, orthogonalised Nesterov momentum.

  Args:
    matrices: tree of `roles.Matrix`, from `roles.matrices`, or by name.
    shardings: NamedShardings of parameters, gradients and momentum, likewise;
      None on one device.
    options: choices of Muon, of which roles and qk_clip are not used here.
    fixed: choices of the plan that are not left to modelled times.
  """
  beta = options.beta

  def scale(rows, columns):
    if options.rms is None:
      return math.sqrt(max(1, columns / rows))
    # An orthogonal matrix has an RMS of 1 / sqrt(max(rows, columns)).
    return options.rms * math.sqrt(max(rows, columns))

  def init(params):
    momentum = jax.tree.map(jnp.zeros_like, params)
    return MuonState(count=jnp.zeros([], jnp.int32), momentum=momentum)

  def update(updates, state, params=None):
    del params
    told = trees.flatten_names(shardings)
    gradients = trees.flatten_names(updates)
    momenta = trees.flatten_names(state.momentum)
    places.check('Gradient', gradients, told, _CURE)
    places.check('Momentum', momenta, told, _CURE)
    count = jnp.asarray(optax.safe_increment(state.count))

    # Bias corrections change only the ratio of momentum to gradient in the
    # look-ahead, since Newton-Schulz drops any common factor. The steps are
    # float32, as the largest integer count has no successor.
    steps = count.astype(jnp.float32)
    ahead = beta / (1 - beta ** (steps + 1))
    here = (1 - beta) / (1 - beta**steps)
    # With beta 0 the momentum is the gradient.
    weight = here / ahead if beta else jnp.zeros([])

    with jax.named_scope('muon'):
      plan = planner.make(
        updates,
        matrices,
        shardings=shardings,
        newton_schulz=options,
        fixed=fixed,
      )
      directions, momentum = exchange.orthogonalize(
        plan,
        momenta,
        gradients,
        weight,
        beta=beta,
        shardings=told,
      )

    factors = {
      m.name: scale(*((group.q, group.p)[:: 1 if m.is_transposed else -1]))
      for group in plan.groups
      for m in group.members
    }

    def scaled(name, g):
      direction = directions[name].astype(jnp.float32)
      return (factors[name] * direction).astype(g.dtype)

    momentum = trees.map_names(lambda name, _: momentum[name], updates)
    updates = trees.map_names(scaled, updates)
    return updates, MuonState(count=count, momentum=momentum)

  return optax.GradientTransformation(init, update)
