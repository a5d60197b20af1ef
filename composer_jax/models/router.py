"""Chooses the experts of each token, and their weights.

Guided path, 10 of 10.

The discrete choice may be replayed from a record; weights are always computed
from the current scores, so that the router keeps its gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from composer_jax.core import batches, records
from composer_jax.kernels import linear
from composer_jax.models import config as model_config

# Least divisor of scores: sigmoids of very negative logits are zero, and 0 / 0
# would be NaN. The gradient squares it, which must not underflow.
_LOWEST_SUM = 1e-18


class ExpertChoice(NamedTuple):
  """Experts of each token; ids are int32, all else is float32."""

  weights_BTA: jax.Array
  ids_BTA: jax.Array  # experts used
  own_BTA: jax.Array  # experts that the router would choose without a record
  scores_BTE: jax.Array  # scores before bias and groups
  logits_BTE: jax.Array


def logits(router_DE: jax.Array, x_BTD: jax.Array) -> jax.Array:
  # In float32, as rounding may change a discrete choice. Accelerators compute
  # float32 products in bfloat16 or TF32 by default.
  return linear.linear(
    x_BTD.astype(jnp.float32),
    jax.tree.map(lambda w: w.astype(jnp.float32), router_DE),
    precision=jax.lax.Precision.HIGHEST,
  )


def choose(
  logits_BTE: jax.Array,
  *,
  config: model_config.MoEConfig,
  bias_E: jax.Array | None = None,
  replay_BTA: jax.Array | None = None,
) -> ExpertChoice:
  """Chooses the active experts of each token, replaying recorded ids.

  Tokens are independent, so that `kernels.rows` may compute it in tiles.

  Args:
    bias_E: bias added to the scores for selection only (sigmoid router).
    replay_BTA: recorded ids, used regardless of groups and bias if plausible
      (`_plausible`); a token with any `NO_ROUTE` is routed afresh, whole.
  """
  logits_BTE = logits_BTE.astype(jnp.float32)
  if config.router == 'sigmoid':
    scores_BTE = jax.nn.sigmoid(logits_BTE)
  else:
    scores_BTE = jax.nn.softmax(logits_BTE, axis=-1)
  select_BTE = jax.lax.stop_gradient(scores_BTE)
  if bias_E is not None:
    select_BTE += jax.lax.stop_gradient(bias_E.astype(jnp.float32))
  if config.num_active_groups < config.num_groups:
    # Not 0, which could exceed scores that a bias made negative.
    is_open_BTE = _open_groups(
      select_BTE, config.num_groups, config.num_active_groups
    )
    select_BTE = jnp.where(is_open_BTE, select_BTE, -jnp.inf)
  ids_BTA = own_BTA = top_k(select_BTE, config.num_active)
  if replay_BTA is not None and config.replay_alpha < 1:
    recorded_BT1 = _recorded(replay_BTA)[..., None]
    ids_BTA = jnp.where(recorded_BT1, replay_BTA.astype(jnp.int32), own_BTA)
    if config.replay_alpha > 0:
      keep_BTA = _plausible(
        ids_BTA, own_BTA, scores_BTE, select_BTE, bias_E, config.replay_alpha
      )
      ids_BTA = _refill(ids_BTA, keep_BTA, own_BTA)
  # Named to be kept, as recomputation may choose others by rounding.
  ids_BTA = ad_checkpoint.checkpoint_name(ids_BTA, 'routes')
  return ExpertChoice(
    weights_BTA=gates(scores_BTE, ids_BTA, config=config),
    ids_BTA=ids_BTA,
    own_BTA=own_BTA,
    scores_BTE=scores_BTE,
    logits_BTE=logits_BTE,
  )


def top_k(scores_BTE: jax.Array, num_active: int) -> jax.Array:
  """Returns int32 ids_BTA of the largest scores, largest first.

  Ties go to the smaller index on every backend, as engine and trainer must
  agree. On CPU a few argmaxes are cheaper than the sort of `jax.lax.top_k`.
  """
  ids = []
  experts_E = jnp.arange(scores_BTE.shape[-1])
  for _ in range(num_active):
    best_BT = jnp.argmax(scores_BTE, axis=-1).astype(jnp.int32)
    ids.append(best_BT)
    taken_BTE = best_BT[..., None] == experts_E
    scores_BTE = jnp.where(taken_BTE, -jnp.inf, scores_BTE)
  return jnp.stack(ids, axis=-1)


def gates(
  scores_BTE: jax.Array, ids_BTA: jax.Array, *, config: model_config.MoEConfig
) -> jax.Array:
  """Returns the float32 weights_BTA of chosen experts."""
  # A product with one-hot, as the gradient of a gather would be a scatter. It
  # is exact in float32, which accelerators use only if told to.
  weights_BTA = jnp.einsum(
    '...E,...AE->...A',
    scores_BTE,
    jax.nn.one_hot(ids_BTA, config.num_experts, dtype=jnp.float32),
    precision=jax.lax.Precision.HIGHEST,
  )
  if config.renormalize:
    weights_BTA = _normalize(weights_BTA)
  return weights_BTA * config.routed_scale


def _normalize(scores: jax.Array) -> jax.Array:
  """Makes the last axis sum to one, or leaves it zero."""
  return scores / jnp.maximum(scores.sum(-1, keepdims=True), _LOWEST_SUM)


def _open_groups(select_BTE, num_groups, num_active_groups):
  """Returns which experts lie in the best groups (DeepSeek-V3, 2.1.2).

  X is the group, ranked by the sum of its two best scores.
  """
  grouped_BTXE = select_BTE.reshape(*select_BTE.shape[:-1], num_groups, -1)
  group_size = grouped_BTXE.shape[-1]
  best_BTXE = _among(jnp.arange(group_size), top_k(grouped_BTXE, 2))
  worth_BTX = jnp.where(best_BTXE, grouped_BTXE, 0.0).sum(-1)
  open_BTX = _among(jnp.arange(num_groups), top_k(worth_BTX, num_active_groups))
  return jnp.repeat(open_BTX, group_size, axis=-1)


def _recorded(replay_BTA: jax.Array) -> jax.Array:
  # Whole tokens, since mixed slots could choose one expert twice.
  return (replay_BTA != records.NO_ROUTE).all(-1)


def _plausible(ids_BTA, own_BTA, scores_BTE, select_BTE, bias_E, alpha):
  """Returns which replayed experts are likely enough by the current router.

  If the router's last choice has score s and bias b, another expert of bias b_j
  needs the score s + b - b_j to be chosen instead; it is kept with at least
  `alpha` times that. The router's own choices are always kept.
  """
  chosen_BT1 = jnp.take_along_axis(select_BTE, own_BTA[..., -1:], axis=-1)
  needed_BTA = jnp.broadcast_to(chosen_BT1, ids_BTA.shape)
  if bias_E is not None:
    needed_BTA -= jax.lax.stop_gradient(bias_E.astype(jnp.float32))[ids_BTA]
  have_BTA = jnp.take_along_axis(
    jax.lax.stop_gradient(scores_BTE), ids_BTA, axis=-1
  )
  is_likely_BTA = have_BTA >= alpha * needed_BTA
  return is_likely_BTA | _among(ids_BTA, own_BTA)


def _among(ids_BTA: jax.Array, others_BTA: jax.Array) -> jax.Array:
  """Returns which ids of a token are among others of that token."""
  return (ids_BTA[..., None] == others_BTA[..., None, :]).any(-1)


def _refill(ids_BTA, keep_BTA, own_BTA):
  """Replaces experts that are not kept by the router's best unused ones.

  Kept experts stay in their slots, as the order decides the bits of the sum
  over experts. X is a slot of `own_BTA`.
  """
  kept_BTA = jnp.where(keep_BTA, ids_BTA, -1)
  is_free_BTX = ~_among(own_BTA, kept_BTA)
  # The n-th dropped slot takes the n-th free expert.
  turn_BTA, turn_BTX = jnp.cumsum(~keep_BTA, -1), jnp.cumsum(is_free_BTX, -1)
  takes_BTAX = is_free_BTX[..., None, :] & (
    turn_BTA[..., None] == turn_BTX[..., None, :]
  )
  fill_BTA = jnp.where(takes_BTAX, own_BTA[..., None, :], 0).sum(-1)
  return jnp.where(keep_BTA, ids_BTA, fill_BTA)


class LayerSums(NamedTuple):
  """Sums for `statistics`, additive over shards; counts are int32."""

  load_E: jax.Array  # tokens sent to each expert
  scores_E: jax.Array  # float32 sum of the normalised scores
  z_squares: jax.Array  # float32 sum of the squared log-sum-exp of the logits
  num_tokens: jax.Array
  num_replayed: jax.Array  # tokens with a record
  num_agreeing: jax.Array  # tokens whose record is the router's own choice
  num_replaced: jax.Array  # recorded ids that were not used


def agrees(choice: ExpertChoice, replay_BTA: jax.Array | None) -> jax.Array:
  """Returns false where a record is not what the router would choose."""
  if replay_BTA is None:
    return jnp.ones(choice.ids_BTA.shape[:-1], bool)
  same_BTA = jnp.sort(replay_BTA, -1) == jnp.sort(choice.own_BTA, -1)
  return same_BTA.all(-1) | ~_recorded(replay_BTA)


def layer_sums(
  choice: ExpertChoice,
  *,
  valid_BT: jax.Array,
  replay_BTA: jax.Array | None = None,
) -> LayerSums:
  """Returns sums over tokens, padding excluded."""
  num_experts = choice.scores_BTE.shape[-1]
  valid_BT1 = valid_BT[..., None].astype(jnp.float32)
  tokens = tuple(range(valid_BT.ndim))
  used_BTAE = jax.nn.one_hot(choice.ids_BTA, num_experts, dtype=jnp.float32)
  load_E = (used_BTAE.sum(-2) * valid_BT1).sum(tokens)
  squares_BT = jax.nn.logsumexp(choice.logits_BTE, axis=-1) ** 2
  return LayerSums(
    load_E=load_E.astype(jnp.int32),
    scores_E=(_normalize(choice.scores_BTE) * valid_BT1).sum(tokens),
    z_squares=squares_BT.sum(where=valid_BT),
    num_tokens=valid_BT.sum(dtype=jnp.int32),
    **_replay_counts(choice, replay_BTA, valid_BT),
  )


def _replay_counts(choice, replay_BTA, valid_BT):
  """Returns the fields of LayerSums about a replay."""
  if replay_BTA is None:
    zero = jnp.zeros((), jnp.int32)
    names = ('replayed', 'agreeing', 'replaced')
    return {f'num_{name}': zero for name in names}
  is_recorded_BT = _recorded(replay_BTA)
  same_BT = agrees(choice, replay_BTA)
  lost_BTA = ~_among(replay_BTA.astype(jnp.int32), choice.ids_BTA)
  replayed_BT = is_recorded_BT & valid_BT
  return {
    'num_replayed': replayed_BT.sum(dtype=jnp.int32),
    'num_agreeing': (same_BT & replayed_BT).sum(dtype=jnp.int32),
    'num_replaced': (lost_BTA & replayed_BT[..., None]).sum(dtype=jnp.int32),
  }


def statistics(
  sums_M: LayerSums, config: model_config.MoEConfig
) -> batches.RouteStats:
  """Returns statistics of each layer from sums over all tokens of a batch.

  The balancing loss is E sum_e f_e P_e (Switch, eq. 4), where f_e is the share
  of routed copies and P_e the mean normalised score; it is 1 if both are
  uniform. The z-loss is the mean of logsumexp(logits)^2 (ST-MoE, eq. 5).
  """
  num_tokens_M = jnp.maximum(sums_M.num_tokens, 1).astype(jnp.float32)
  fraction_ME = sums_M.load_E / (num_tokens_M * config.num_active)[:, None]
  mean_ME = sums_M.scores_E / num_tokens_M[:, None]
  num_ids_M = sums_M.num_replayed * config.num_active
  return batches.RouteStats(
    load_ME=sums_M.load_E,
    aux_loss_M=config.num_experts * (fraction_ME * mean_ME).sum(-1),
    z_loss_M=sums_M.z_squares / num_tokens_M,
    replay_agreement_M=_share(sums_M.num_agreeing, sums_M.num_replayed, 1.0),
    replay_replaced_M=_share(sums_M.num_replaced, num_ids_M, 0.0),
  )


def _share(count: jax.Array, among: jax.Array, empty: float) -> jax.Array:
  share = count / jnp.maximum(among, 1)
  return jnp.where(among > 0, share, empty).astype(jnp.float32)


def update_selection_bias(
  bias_ME: jax.Array, load_ME: jax.Array, rate: float
) -> jax.Array:
  """Moves each bias by `rate` towards balance (DeepSeek-V3, section 2.1.2).

  An expert above the layer's mean load loses `rate`, one below gains it. Call
  it once per optimizer step, with the load summed over the whole batch.
  """
  load_ME = load_ME.astype(jnp.float32)
  return bias_ME + rate * jnp.sign(load_ME.mean(-1, keepdims=True) - load_ME)
