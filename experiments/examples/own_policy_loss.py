"""Trains with a policy loss of your own, in the real training step.

  python -m experiments.examples.own_policy_loss --steps=20

A loss is a function of three arguments, which `rl.step.build` takes. This one
is a squared error, as that of Kimi k1.5 (arXiv 2501.12599, section 2.3.2), here
token by token: with the ratio p_train / p_rollout,

  (A - strength log ratio)^2 / (2 strength)

pulls log ratio towards A / strength and needs no clipping. At ratio 1 its
gradient is -A grad log p, that of every loss of `rl.policy_loss`. The model and
the game are those of `own_environment`.
"""

import functools

from absl import flags

from experiments import start
from experiments.examples import own_environment

_STRENGTH = flags.DEFINE_float(
  'strength', 0.1, 'Weight of the pull towards the policy that sampled.'
)


def squared_error(train_logprobs_BT, entropy_BT, batch, strength):
  """Returns the loss of a microbatch and its statistics, as sums over tokens.

  The trainer divides by the number of rollouts. `loss_weights_BT` is 1 where
  the policy sampled the token, and 0 on context and padding.
  """
  from composer_jax.rl import policy_loss

  weights_BT = batch.loss_weights_BT
  log_ratio_BT = train_logprobs_BT - batch.rollout_logprobs_BT
  error_BT = batch.advantages_BT - strength * log_ratio_BT
  stats = policy_loss.PolicyStats(
    num_tokens=weights_BT.sum(), entropy=(entropy_BT * weights_BT).sum()
  )
  return (error_BT**2 * weights_BT).sum() / (2 * strength), stats


def main():
  loss = functools.partial(squared_error, strength=_STRENGTH.value)
  own_environment.report(
    own_environment.train(own_environment.STEPS.value, loss)
  )


if __name__ == '__main__':
  start.run(main)
