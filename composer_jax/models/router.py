"""Which experts a token passes, and with what weight.

The discrete choice may be replayed from a record; the weights always come from
the live scores, so the router keeps its gradient. Routing is a pure function:
ids are an argument and a result, never hidden state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from composer_jax.core import records
from composer_jax.models import config as model_config

# No sum of scores is divided by less. Sigmoids of very negative logits are
# zero, and 0 / 0 would be NaN; transformers adds 1e-20 for the same end. The
# gradient of a quotient squares this, which must not underflow.
_LOWEST_SUM = 1e-18


class LayerStats(NamedTuple):
  """`core.batches.RouteStats` of one layer."""

  load_E: jax.Array
  aux_loss: jax.Array
  z_loss: jax.Array
  replay_agreement: jax.Array


def top_k(scores_BTE: jax.Array, num_active: int) -> jax.Array:
  """Returns int32 ids_BTA of the largest scores, largest first.

  Ties go to the smaller index, on every backend: the engine and the trainer
  must break them the same way. A short chain of argmax partitions over tokens
  and is cheaper than the sort behind `jax.lax.top_k` on CPU.
  """
  ids = []
  experts_E = jnp.arange(scores_BTE.shape[-1])
  for _ in range(num_active):
    best_BT = jnp.argmax(scores_BTE, axis=-1).astype(jnp.int32)
    ids.append(best_BT)
    taken_BTE = best_BT[..., None] == experts_E
    scores_BTE = jnp.where(taken_BTE, -jnp.inf, scores_BTE)
  return jnp.stack(ids, axis=-1)


def route(
  logits_BTE: jax.Array,
  *,
  config: model_config.MoEConfig,
  valid_BT: jax.Array,
  bias_E: jax.Array | None = None,
  replay_BTA: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, LayerStats]:
  """Picks the active experts of each token, replaying recorded picks.

  Any leading axes will do.

  Args:
    logits_BTE: router outputs; computed with in float32.
    config: of the layer.
    valid_BT: false on padding, which counts in no statistic.
    bias_E: added to the scores for selection only (sigmoid router).
    replay_BTA: recorded ids, honoured whatever the groups and the bias say; a
      token with any `NO_ROUTE` is routed afresh, whole.

  Returns:
    weights_BTA (float32), the int32 ids_BTA they belong to, and statistics.
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
    # Closed ones get -inf: 0 would beat the scores that a bias made negative.
    mask_BTE = _group_mask(
      select_BTE, config.num_groups, config.num_active_groups
    )
    select_BTE = jnp.where(mask_BTE, select_BTE, -jnp.inf)
  own_BTA = top_k(select_BTE, config.num_active)
  ids_BTA, agreement = _replay(own_BTA, replay_BTA, valid_BT)
  onehot_BTAE = jax.nn.one_hot(ids_BTA, config.num_experts, dtype=jnp.float32)
  # A product with one-hot instead of a gather: its gradient is a product too,
  # where the gradient of a gather is a scatter. Sums of one non-zero are exact
  # in float32, which accelerators take for such a product only if told to.
  weights_BTA = jnp.einsum(
    '...E,...AE->...A',
    scores_BTE,
    onehot_BTAE,
    precision=jax.lax.Precision.HIGHEST,
  )
  if config.renormalize:
    weights_BTA = _normalize(weights_BTA)
  load_E, aux_loss = _load(scores_BTE, onehot_BTAE, valid_BT)
  stats = LayerStats(load_E, aux_loss, _z_loss(logits_BTE, valid_BT), agreement)
  return weights_BTA * config.routed_scale, ids_BTA, stats


def _normalize(scores: jax.Array) -> jax.Array:
  """Makes the last axis sum to one, or leaves it zero."""
  return scores / jnp.maximum(scores.sum(-1, keepdims=True), _LOWEST_SUM)


def _group_mask(
  select_BTE: jax.Array, num_groups: int, num_active_groups: int
) -> jax.Array:
  """Returns which experts lie in the best groups (DeepSeek-V3, 2.1.2).

  X is the group, worth the sum of its two best scores. Ties go to the smaller
  index, as between experts.
  """
  grouped_BTXE = select_BTE.reshape(*select_BTE.shape[:-1], num_groups, -1)
  group_size = grouped_BTXE.shape[-1]
  best_BTXE = _contains(top_k(grouped_BTXE, 2), group_size)
  worth_BTX = jnp.where(best_BTXE, grouped_BTXE, 0.0).sum(-1)
  open_BTX = _contains(top_k(worth_BTX, num_active_groups), num_groups)
  return jnp.repeat(open_BTX, group_size, axis=-1)


def _contains(ids: jax.Array, num_classes: int) -> jax.Array:
  """Returns, for each class, whether the last axis of `ids` has it."""
  return (ids[..., None] == jnp.arange(num_classes)).any(-2)


def _replay(
  own_BTA: jax.Array, replay_BTA: jax.Array | None, valid_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Substitutes recorded ids; returns them and the share equal as sets."""
  if replay_BTA is None:
    return own_BTA, jnp.ones((), jnp.float32)
  # Token by token: mixing slots could pick one expert twice.
  recorded_BT = (replay_BTA != records.NO_ROUTE).all(-1)
  ids_BTA = jnp.where(
    recorded_BT[..., None], replay_BTA.astype(jnp.int32), own_BTA
  )
  same_BT = (jnp.sort(ids_BTA, -1) == jnp.sort(own_BTA, -1)).all(-1)
  replayed_BT = recorded_BT & valid_BT
  count = replayed_BT.sum()
  agreed = (same_BT & replayed_BT).sum()
  agreement = jnp.where(count > 0, agreed / jnp.maximum(count, 1), 1.0)
  return ids_BTA, agreement.astype(jnp.float32)


def _load(
  scores_BTE: jax.Array, onehot_BTAE: jax.Array, valid_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns load_E and the balancing loss E sum_e f_e P_e (Switch, eq. 4).

  f_e is the share of routed copies and P_e the mean normalised score; the loss
  is 1 when both are uniform.
  """
  num_experts, num_active = scores_BTE.shape[-1], onehot_BTAE.shape[-2]
  valid_BT1 = valid_BT[..., None].astype(jnp.float32)
  tokens = tuple(range(valid_BT.ndim))
  load_E = (onehot_BTAE.sum(-2) * valid_BT1).sum(tokens)
  num_valid = jnp.maximum(valid_BT1.sum(), 1.0)
  mean_E = (_normalize(scores_BTE) * valid_BT1).sum(tokens) / num_valid
  fraction_E = jax.lax.stop_gradient(load_E) / (num_valid * num_active)
  aux_loss = num_experts * (fraction_E * mean_E).sum()
  return load_E.astype(jnp.int32), aux_loss


def _z_loss(logits_BTE: jax.Array, valid_BT: jax.Array) -> jax.Array:
  """Returns the mean of logsumexp(logits)^2 over tokens (ST-MoE, eq. 5)."""
  squares_BT = jax.nn.logsumexp(logits_BTE, axis=-1) ** 2
  return squares_BT.sum(where=valid_BT) / jnp.maximum(valid_BT.sum(), 1)


def update_selection_bias(
  bias_ME: jax.Array, load_ME: jax.Array, rate: float
) -> jax.Array:
  """Moves each bias by `rate` towards balance (DeepSeek-V3, section 2.1.2).

  An expert above the layer's mean load loses `rate`, one below gains it. Call
  it once per optimizer step, with the load summed over the whole batch.
  """
  load_ME = load_ME.astype(jnp.float32)
  return bias_ME + rate * jnp.sign(load_ME.mean(-1, keepdims=True) - load_ME)
