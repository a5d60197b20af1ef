"""Logits and log-probabilities of tokens.

The only place of the shift by one: the hidden state at t - 1 predicts token t,
and everything this module returns is indexed by the token it is about.
"""

import jax
import jax.numpy as jnp

from composer_jax.kernels import rows
from composer_jax.models import config as model_config
from composer_jax.models import decoder


def logits(
  variables: decoder.Variables,
  hidden_BTD: jax.Array,
  config: model_config.ModelConfig,
) -> jax.Array:
  """Returns float32 logits_BTV of the token after each."""
  params = variables['params']
  if config.tie_embeddings:
    weight, spec = params['embedding'], 'BTD,VD->BTV'
  else:
    weight, spec = params['unembedding'], 'BTD,DV->BTV'

  def stage(weight, hidden_BTD):
    return jnp.einsum(
      spec, hidden_BTD, weight, preferred_element_type=jnp.float32
    )

  weight = weight.astype(hidden_BTD.dtype)
  return rows.map_rows(stage, weight, hidden_BTD, numerics=config.numerics)


def token_logprobs(
  logits_BTV: jax.Array,
  tokens_BT: jax.Array,
  temperatures_BT: jax.Array | None,
  *,
  numerics: str,
) -> tuple[jax.Array, jax.Array]:
  """Returns a token's log-probability and its distribution's entropy.

  The engine calls it for the token it sampled, the trainer for the token that
  came next: one function, so that in batch-invariant numerics they agree.

  Args:
    logits_BTV: float32.
    tokens_BT: int32, whose log-probability is asked.
    temperatures_BT: logits are divided by it; None means 1.
    numerics: of the model's config.

  Returns:
    logprobs_BT and entropy_BT, float32, in nats.
  """
  if temperatures_BT is None and numerics == 'batch_invariant':
    # One program, whoever asks: division by 1 is exact.
    temperatures_BT = jnp.ones(tokens_BT.shape, jnp.float32)

  def stage(_, rows_BT):
    logits_BTV, tokens_BT, temperatures_BT = rows_BT
    if temperatures_BT is not None:
      logits_BTV /= temperatures_BT[..., None].astype(jnp.float32)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    # A masked sum instead of a gather: its gradient is elementwise, where the
    # gradient of a gather is a scatter into [B, T, V].
    picked_BTV = jnp.arange(logits_BTV.shape[-1]) == tokens_BT[..., None]
    picked_BT = jnp.where(picked_BTV, logits_BTV, 0).sum(-1)
    probabilities_BTV = jnp.exp(logits_BTV - log_z_BT[..., None])
    entropy_BT = log_z_BT - (probabilities_BTV * logits_BTV).sum(-1)
    return picked_BT - log_z_BT, entropy_BT

  return rows.map_rows(
    stage, (), (logits_BTV, tokens_BT, temperatures_BT), numerics=numerics
  )


def target_logprobs(
  variables: decoder.Variables,
  hidden_BTD: jax.Array,
  tokens_BT: jax.Array,
  segment_ids_BT: jax.Array,
  temperatures_BT: jax.Array | None,
  config: model_config.ModelConfig,
) -> tuple[jax.Array, jax.Array]:
  """Returns the log-probability and entropy of each token's distribution.

  Args:
    variables: of the decoder.
    hidden_BTD: its output.
    tokens_BT: int32.
    segment_ids_BT: int32; 0 marks padding.
    temperatures_BT: what each token was sampled at; None means 1.
    config: of the decoder.

  Returns:
    logprobs_BT, entropy_BT in float32 nats, indexed by the token they are
    about; 0 at the first token of each segment and on padding.
  """
  logits_BTV = logits(variables, hidden_BTD, config)
  if temperatures_BT is not None:
    temperatures_BT = _next(temperatures_BT)
  logprobs_BT, entropy_BT = token_logprobs(
    logits_BTV, _next(tokens_BT), temperatures_BT, numerics=config.numerics
  )
  follows_BT = (
    (_next(segment_ids_BT) == segment_ids_BT)
    & (segment_ids_BT != 0)
    & (jnp.arange(tokens_BT.shape[1]) < tokens_BT.shape[1] - 1)
  )
  logprobs_BT = jnp.where(follows_BT, logprobs_BT, 0)
  entropy_BT = jnp.where(follows_BT, entropy_BT, 0)
  return jnp.roll(logprobs_BT, 1, axis=1), jnp.roll(entropy_BT, 1, axis=1)


def _next(array_BT: jax.Array) -> jax.Array:
  return jnp.roll(array_BT, -1, axis=1)
