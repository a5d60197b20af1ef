"""Stages of a decoder layer, for training and serving alike.

`models.decoder` scans layers over a packed batch, `rollout.forward` unrolls
them over a cache. Most stages work on each token by itself, through
`kernels.rows`; attention and the experts' grouped products do not.
"""

import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from composer_jax.core import rounding
from composer_jax.kernels import expert_rows, norm, rows
from composer_jax.kernels.attention import grouped_query as attention_kernel
from composer_jax.kernels.attention import tiled
from composer_jax.models import (
  adapters,
  attention,
  experts,
  mla,
  rope,
  router,
)
from composer_jax.models import config as model_config
from composer_jax.numerics import formats
from composer_jax.parallel import dispatch, exchange, shards

# Parameters of a mixture with an expert axis.
EXPERT_ARRAYS = ('gate_up', 'down')

# Functions of each kind of attention.
ATTENTIONS: dict[str, types.ModuleType] = {'gqa': attention, 'mla': mla}


class MixtureStats(NamedTuple):
  """Statistics of a layer of experts."""

  router: router.LayerSums
  rounds: jax.Array | None  # int32; None where no token travels


def prepare(variables: Any, config: model_config.ModelConfig) -> Any:
  """Returns a layer's parameters in the dtypes of its computation.

  Those of norms and the router are float32. The stages' programs then do not
  depend on the dtype of stored weights. Adapters stand beside their weights.
  """

  def cast(_, path, x):
    is_part = _names(path)[-1] in formats.PARTS
    return x if is_part else x.astype(_dtype(path, config))

  return _joined(cast, (variables,), config)


def _joined(ready, trees, config):
  """Maps (is policy, path, array of each tree) over parameters and adapters."""

  def mapped(name):
    parts = (tree[name] for tree in trees)
    function = functools.partial(ready, name == 'params')
    return jax.tree_util.tree_map_with_path(function, *parts)

  params = mapped('params')
  if trees[0].get('backward', {}).get('moe'):
    moe = {**params['moe'], 'exact': mapped('backward')['moe']}
    params = {**params, 'moe': moe}
  if 'adapters' not in trees[0]:
    return params
  return adapters.join(params, mapped('adapters'), config)


def _names(path):
  # Experts may lie in a tuple, whose keys have no names.
  return [getattr(key, 'key', '') for key in path]


def _dtype(path, config):
  names = _names(path)
  is_wide = 'router' in names or any(n.endswith('_norm') for n in names)
  return jnp.dtype(jnp.float32 if is_wide else config.compute_dtype)


def whole(
  variables: Any,
  specs: Any,
  config: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None,
) -> Any:
  """Gathers and prepares a layer's parameters inside of a shard.

  Arrays of experts are not gathered along the expert axis. The gathers depend
  on no activations, so that they can overlap with matrix products.
  """
  if plan is None:
    return prepare(variables, config)

  def gather(is_coded, path, shard, spec):
    names, coding = _names(path), None
    if names[0] == 'moe' and names[1] in EXPERT_ARRAYS:
      spec = P(None, *spec[1:])
      if is_coded:
        coding = experts.coding(config.precision, names[1], shard, spec)
    dtype = _dtype(path, config)
    return shards.gather(shard, spec, dtype=dtype, coding=coding)

  return _joined(gather, (variables, specs), config)


def angles(
  positions_BT: jax.Array, config: model_config.ModelConfig
) -> tuple[jax.Array, jax.Array]:
  """Returns cos and sin of every layer's rotation."""

  def stage(_, positions_BT):
    return rope.angles(positions_BT, config.attention.rotary_dim, config.rope)

  return rows.map_rows(stage, (), positions_BT, numerics=config.numerics)


def attention_inputs(
  params: Any,
  x_BTD: jax.Array,
  cos_sin: tuple[jax.Array, jax.Array],
  config: model_config.ModelConfig,
  *,
  is_paged: bool = False,
) -> tuple[Any, tuple[jax.Array, jax.Array]]:
  """Returns the query, for attention over pages if so, and the cache entry."""
  is_paged = is_paged or config.numerics == 'batch_invariant'
  kind = ATTENTIONS[config.attention.kind]

  def stage(params, rows_BT):
    x_BTD, cos_sin = rows_BT
    scale_D = params['attention_norm']['scale']
    h_BTD = norm.rms_norm(x_BTD, scale_D, config.norm_eps)
    query, kept = kind.project(params['attention'], h_BTD, cos_sin, config)
    if is_paged:
      query = kind.for_pages(params['attention'], query, config)
    return query, kept

  with jax.named_scope('attention'):
    return rows.map_rows(
      stage, params, (x_BTD, cos_sin), numerics=config.numerics
    )


def attend(
  params: Any,
  query: Any,
  kept: tuple[jax.Array, jax.Array],
  documents: tuple[attention_kernel.Visible, jax.Array],
  config: model_config.ModelConfig,
  plan: exchange.ExchangePlan | None,
  *,
  is_measured: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the attention's outputs over a packed batch, and max_logits_N.

  The latter are each head's largest scaled logits over all tokens but padding,
  in float32 and without a gradient; None unless `is_measured`. `documents` are
  the visible keys of each token, and segment_ids_BT.
  """
  visible, segment_ids_BT = documents
  with jax.named_scope('attention'):
    if config.numerics == 'fast':
      out_BTN, tops_BTN = ATTENTIONS[config.attention.kind].attend(
        params['attention'], query, kept, visible, config, plan=plan
      )
    else:
      out_BTN, tops_BTN = tiled.attend_packed(query, kept, visible, is_measured)
    if tops_BTN is None or not is_measured:
      return out_BTN, None
    is_token_BT1 = segment_ids_BT[..., None] != 0
    max_logits_N = jnp.where(is_token_BT1, tops_BTN, -jnp.inf).max((0, 1))
    return out_BTN, max_logits_N


def dense(
  params: Any,
  x_BTD: jax.Array,
  out_BTN: jax.Array,
  config: model_config.ModelConfig,
  *,
  is_paged: bool = False,
) -> jax.Array:
  """Returns x_BTD after a dense layer's attention and feed-forward."""

  def stage(params, rows_BT):
    x_BTD, out_BTN = rows_BT
    x_BTD = _add_attention(params, x_BTD, out_BTN, config, is_paged)
    h_BTD = norm.rms_norm(x_BTD, params['ffw_norm']['scale'], config.norm_eps)
    return rounding.rounded(x_BTD + experts.dense_mlp(params['ffw'], h_BTD))

  return rows.map_rows(
    stage, params, (x_BTD, out_BTN), numerics=config.numerics
  )


def _add_attention(params, x_BTD, out_BTN, config, is_paged):
  params = params['attention']
  is_paged = is_paged or config.numerics == 'batch_invariant'
  with jax.named_scope('attention'):
    if is_paged:
      kind = ATTENTIONS[config.attention.kind]
      out_BTN = kind.from_pages(params, out_BTN)
    return rounding.rounded(x_BTD + attention.project_out(params, out_BTN))


def mixture(
  params: Any,
  bias_E: jax.Array | None,
  tokens_BT: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None],
  config: model_config.ModelConfig,
  *,
  is_paged: bool = False,
  plan: exchange.ExchangePlan | None = None,
  draws_BT: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array], MixtureStats]:
  """Returns x_BTD after a layer of experts, its routes, and statistics.

  Routes are the ids_BTA used, and agrees_BT of `router.agrees`. `tokens_BT` are
  x_BTD, the attention's out_BTN (from attention over pages if `is_paged`),
  valid_BT, and replay_BTA or None; `draws_BT` those of `exchange.exchange`.
  """
  x_BTD, out_BTN, valid_BT, replay_BTA = tokens_BT
  small = dict(params['moe'])
  weights = {name: small.pop(name) for name in EXPERT_ARRAYS}
  exact = small.pop('exact', None)
  if exact and config.precision.backward == 'bf16':
    weights['exact'] = exact
  if not config.precision.draws:
    draws_BT = None
  shared = small.get('shared')

  def before(params, rows_BT):
    bias_E, params = params
    x_BTD, out_BTN, replay_BTA = rows_BT
    x_BTD = _add_attention(params, x_BTD, out_BTN, config, is_paged)
    h_BTD = norm.rms_norm(x_BTD, params['ffw_norm']['scale'], config.norm_eps)
    with jax.named_scope('route'):
      choice = router.choose(
        router.logits(params['moe']['router'], h_BTD),
        config=config.moe,
        bias_E=bias_E,
        replay_BTA=replay_BTA,
      )
    return x_BTD, h_BTD, choice

  x_BTD, h_BTD, choice = rows.map_rows(
    before,
    (bias_E, params | {'moe': small}),
    (x_BTD, out_BTN, replay_BTA),
    numerics=config.numerics,
  )
  sums = router.layer_sums(choice, valid_BT=valid_BT, replay_BTA=replay_BTA)
  routes = choice.ids_BTA, router.agrees(choice, replay_BTA)
  if config.numerics == 'batch_invariant':
    tokens_BT = x_BTD, h_BTD, valid_BT, draws_BT
    x_BTD = _in_tiles(weights, shared, tokens_BT, choice, config)
    return x_BTD, routes, MixtureStats(sums, None)
  routed_BT = (h_BTD, choice.ids_BTA, choice.weights_BTA, valid_BT)
  forms = experts.forms_of(config.precision, weights)
  with jax.named_scope('experts'):
    if isinstance(weights['down'], tuple):
      y_BTD, count = _one_by_one(forms.single, weights, *routed_BT), None
    else:
      y_BTD, count = exchange.exchange(
        forms.sorted,
        weights,
        *routed_BT,
        plan=plan,
        keeps=not config.remat,
        draws_BT=draws_BT,
      )
  x_BTD = _add_experts(shared, x_BTD, h_BTD, y_BTD)
  return x_BTD, routes, MixtureStats(sums, count)


def _add_experts(shared, x_BTD, h_BTD, y_BTD):
  if shared is not None:
    y_BTD = rounding.rounded(y_BTD + experts.dense_mlp(shared, h_BTD))
  return rounding.rounded(x_BTD + y_BTD)


def _one_by_one(mlp, weights, h_BTD, ids_BTA, gates_BTA, valid_BT):
  """Applies experts that are separate arrays, for serving on a CPU."""
  num_active = ids_BTA.shape[-1]
  each = zip(weights['gate_up'], weights['down'], strict=True)
  y_ZD = expert_rows.expert_rows(
    mlp,
    [{'gate_up': gate_up, 'down': down} for gate_up, down in each],
    h_BTD.reshape(-1, h_BTD.shape[-1]),
    ids_BTA.reshape(-1, num_active),
    gates_BTA.reshape(-1, num_active),
    valid_BT.reshape(-1),
  )
  return y_ZD.reshape(h_BTD.shape)


def _in_tiles(weights, shared, tokens_BT, choice, config):
  """Adds the experts' outputs, with the gated sum of each row by itself."""
  x_BTD, h_BTD, valid_BT, draws_BT = tokens_BT
  tiled = experts.forms_of(config.precision, weights).tiled
  with jax.named_scope('experts'):
    copies_BTAD, mine_BTA = dispatch.copies(
      tiled, weights, h_BTD, choice.ids_BTA, valid_BT, draws_BT
    )

  def after(shared, rows_BT):
    x_BTD, h_BTD, copies_BTAD, mine_BTA, scores_BTE, ids_BTA = rows_BT
    # Computed from scores and ids, so that the gradient belongs to the experts
    # that were used even if rounding changes a recomputed choice.
    gates_BTA = router.gates(scores_BTE, ids_BTA, config=config.moe)
    y_BTD = dispatch.gated_sum(copies_BTAD, gates_BTA, mine_BTA)
    return _add_experts(shared, x_BTD, h_BTD, y_BTD)

  return rows.map_rows(
    after,
    shared,
    (x_BTD, h_BTD, copies_BTAD, mine_BTA, choice.scores_BTE, choice.ids_BTA),
    numerics=config.numerics,
  )


def final_norm(
  scale_D: jax.Array, x_BTD: jax.Array, config: model_config.ModelConfig
) -> jax.Array:
  """Returns hidden_BTD, which `models.head` turns into logits."""

  def stage(scale_D, x_BTD):
    return norm.rms_norm(x_BTD, scale_D, config.norm_eps)

  scale_D = scale_D.astype(jnp.float32)
  return rows.map_rows(stage, scale_D, x_BTD, numerics=config.numerics)
