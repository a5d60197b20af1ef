"""QK-clip: scales down queries and keys of heads with too large logits.

Kimi K2 (arXiv 2507.20534, section 2.5). If a head's largest logit S of the step
exceeds tau, weights after the step are scaled so that the head's logits on the
same inputs are multiplied by gamma = tau / S:

- with as many key heads as query heads: query and key by sqrt(gamma) each;
- with a key head shared by several query heads: the query only, by gamma;
- in latent attention: query and key without positions by sqrt(gamma) each, the
  rotated query by gamma, and not the rotated key, which all heads share;
- with normalised queries and keys: the scales after the norm instead of the
  weights. Scales of each head (OLMoE) are clipped as above. A scale shared by
  all heads of a layer (Qwen3) is clipped for the head with the largest logit.

Biases are scaled with their weights. Other heads (with a shared scale, other
layers) keep their updates bit for bit. Updates that may be clipped are float32:
a strong clip removes nearly all of a weight, and bfloat16 would lose the rest.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

# Stacks of the decoder's parameters, in the order of layers.
STACKS = ('dense_layers', 'moe_layers')


def qk_clip(tau: float) -> optax.GradientTransformationExtraArgs:
  """Returns the transform, which must be the last of a chain.

  Its `update` takes the parameters of `models.decoder` and, as `max_logits`,
  the max_logits_LN of the forward pass of the gradients.
  """

  def update(updates, state, params=None, *, max_logits=None, **extra_args):
    del extra_args
    if params is None or max_logits is None:
      raise ValueError(
        'qk_clip needs params and max_logits: call update(updates, state, '
        'params, max_logits=output.max_logits_LN) with the output of '
        'Decoder.apply(..., with_max_logits=True).'
      )
    gamma_LN = jnp.where(max_logits > tau, tau / max_logits, 1.0)
    _check(gamma_LN, params)
    first = 0
    updates = dict(updates)
    for stack in STACKS:
      if stack not in params:
        continue
      attention = params[stack]['attention']
      length = jax.tree.leaves(attention)[0].shape[0]
      factors = _factors(attention, gamma_LN[first : first + length])
      first += length
      scaled = _scaled(updates[stack]['attention'], attention, factors)
      updates[stack] = {**updates[stack], 'attention': scaled}
    return updates, state

  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )


def _check(gamma_LN, params):
  present = [name for name in STACKS if name in params]
  layers = {n: params[n]['attention']['out'].shape[:2] for n in present}
  num_layers = sum(length for length, _ in layers.values())
  heads = {heads for _, heads in layers.values()}
  if not layers or gamma_LN.shape != (num_layers, *heads):
    raise ValueError(
      f'max_logits has shape {gamma_LN.shape}; the parameters have attention '
      f'in the stacks {layers} (layers, heads), of {STACKS}.'
    )


def _factors(attention: Mapping[str, Any], gamma_LN: jax.Array) -> Any:
  """Returns factors, a subtree of a stack's attention."""
  root_LN = jnp.sqrt(gamma_LN)
  if 'key_up' in attention:
    query = 'query_up' if 'query_up' in attention else 'query'
    nope_dim = attention['key_up'].shape[-1]
    is_rotated_X = jnp.arange(attention[query].shape[-1]) >= nope_dim
    return {
      query: jnp.where(
        is_rotated_X, gamma_LN[:, None, :, None], root_LN[:, None, :, None]
      ),
      'key_up': root_LN[:, None, :, None],
    }
  has_own_keys = attention['key'].shape[-2] == attention['query'].shape[-2]
  query_LN = root_LN if has_own_keys else gamma_LN
  factors = {'query': query_LN} | ({'key': root_LN} if has_own_keys else {})
  norm = attention.get('query_norm')
  if isinstance(norm, Mapping):
    root_L1 = root_LN.min(1, keepdims=True)
    return {f'{name}_norm': {'scale': root_L1} for name in ('query', 'key')}
  if norm is not None:
    return {f'{name}_norm': f[:, :, None] for name, f in factors.items()}
  return {name: f[:, None, :, None] for name, f in factors.items()} | {
    f'{name}_bias': f[:, :, None]
    for name, f in factors.items()
    if f'{name}_bias' in attention
  }


def _scaled(updates, params, factors):
  """Returns updates that lead to the scaled parameters."""
  if not isinstance(factors, Mapping):
    # Not an update times a factor: the parameters shrink too.
    wide, update = (x.astype(jnp.float32) for x in (params, updates))
    return jnp.where(factors == 1, update, (wide + update) * factors - wide)
  return updates | {
    name: _scaled(updates[name], params[name], factor)
    for name, factor in factors.items()
  }
