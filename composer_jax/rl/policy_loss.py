"""The policy-gradient loss and the statistics that it sums beside it.

How far rollout and trainer differ is measured on the host, in float64, by
`rl.mismatch`.
"""

import flax.struct
import jax
import jax.numpy as jnp


class PolicyStats(flax.struct.PyTreeNode, kw_only=True):
  """Sums over sampled tokens, so that microbatches add up.

  Attributes:
    num_tokens: sampled tokens.
    entropy: nats.
    truncated: tokens whose importance ratio met the cap.
  """

  num_tokens: jax.Array
  entropy: jax.Array
  truncated: jax.Array


def truncated_policy_gradient(
  train_logprobs_BT: jax.Array,
  rollout_logprobs_BT: jax.Array,
  advantages_BT: jax.Array,
  loss_weights_BT: jax.Array,
  *,
  ratio_cap: float,
) -> jax.Array:
  """Sums `-min(ratio, cap) * advantage * log p` over sampled tokens.

  The importance ratio p_train / p_rollout is truncated (TIS, C = 2 is usual)
  and detached: at ratio 1 this is REINFORCE with the group's baseline. The sum
  is divided by nothing; the caller divides by constants only, never by a
  length (Dr. GRPO).
  """
  log_ratio_BT = jax.lax.stop_gradient(train_logprobs_BT) - rollout_logprobs_BT
  ratio_BT = jnp.minimum(jnp.exp(log_ratio_BT), ratio_cap)
  terms_BT = ratio_BT * advantages_BT * train_logprobs_BT
  return -(terms_BT * loss_weights_BT).sum()


def policy_stats(
  train_logprobs_BT: jax.Array,
  rollout_logprobs_BT: jax.Array,
  entropy_BT: jax.Array,
  loss_weights_BT: jax.Array,
  *,
  ratio_cap: float,
) -> PolicyStats:
  """Sums the statistics over sampled tokens."""
  log_ratio_BT = train_logprobs_BT - rollout_logprobs_BT
  w_BT = loss_weights_BT
  return PolicyStats(
    num_tokens=w_BT.sum(),
    entropy=(entropy_BT * w_BT).sum(),
    truncated=((jnp.exp(log_ratio_BT) >= ratio_cap) * w_BT).sum(),
  )
