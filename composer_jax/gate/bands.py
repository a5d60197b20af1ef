"""Bands of a step's measures, and records that contradict themselves."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.core import records
from composer_jax.rl import mismatch

_RECORD = (
  'the records do not match the weights or tokens they name: check the routes '
  '(alignment, order of layers), the versions, and that rollout and trainer '
  'compute alike (--config.model.compute_dtype, numerics; without '
  '--config.rl.replay near ties are routed differently now and then)'
)
_POLICY = (
  'the policy moved too far from the rollouts, or the records are wrong: check '
  'mismatch_kl_exact, staleness and --config.rl.learning_rate'
)
_ROUTES = (
  'the recorded routes do not match these tokens and layers: check whether one '
  'layer of this measure stands out'
)
_MISSING = (
  'consumed tokens have no route: check --config.rollout.record_routes, and '
  'that nothing is lost between engine and trainer'
)
# metric -> (option, likely causes)
_BANDS = {
  'mismatch_kl_exact': ('max_kl_exact', _RECORD),
  'exact_agreement': ('min_exact_agreement', _ROUTES),
  'mismatch_kl_afresh': ('max_kl_afresh', _RECORD),
  'unrecorded': ('max_unrecorded', _MISSING),
  'mismatch_kl': ('max_kl', _POLICY),
  'mismatch_kl_hints': ('max_kl_hints', _POLICY),
  'mismatch_p99': ('max_p99', _POLICY),
  'mismatch_large': ('max_large_ratio_share', _POLICY),
  'replay_agreement': ('min_agreement', _ROUTES),
  'route_agreement': ('min_agreement', _ROUTES),
}


def breaches(
  metrics: dict[str, Any], options: mismatch.GateOptions
) -> list[str]:
  """Describes each measure outside of its band, with likely causes.

  A measure that the step does not have (no stale token was scored, no route
  recorded) is in its band; NaN is not.
  """
  messages = []
  for name, (option, causes) in _BANDS.items():
    if options.action == 'off' or name not in metrics:
      continue
    value, bound = metrics[name], getattr(options, option)
    is_low = option.startswith('min')
    if value >= bound if is_low else value <= bound:
      continue
    side = 'at least' if is_low else 'at most'
    messages.append(
      f'{name} is {value:.3g}, its band is {side} {bound:.3g} '
      f'(--config.rl.gate.{option}): {causes}'
    )
  return messages


def unrecorded(groups: Sequence[records.Group]) -> float:
  """Share of consumed tokens without a route; no pass consumes the last."""
  missing = [
    (t.expert_ids_TMA[:-1] == records.NO_ROUTE).any((-2, -1))
    for g in groups
    for r in g.rollouts
    for t in r.trajectories
  ]
  return float(np.concatenate(missing).mean())


def contradictions(
  groups: Sequence[records.Group], temperature: float | None = None
) -> list[str]:
  """Names records that contradict themselves, without any forward pass.

  `temperature` is the one that the run samples at; None if it is not known.
  """
  messages = []
  for g in groups:
    for r in g.rollouts:
      name = f'group {g.group}, member {r.member}'
      for i, t in enumerate(r.trajectories):
        if temperature and not np.isclose(
          t.temperature, temperature, rtol=1e-6
        ):
          messages.append(
            f'{name}: window {i} was sampled at temperature {t.temperature:g}, '
            f'this run at {temperature:g} (--config.episode.temperature)'
          )
        turns = [turn for turn in r.turns if turn.trajectory == i]
        told_T = np.zeros(len(t), bool)
        for turn in turns:
          told_T[turn.start : turn.stop] = True
        if r.turns and (differs := int((told_T != t.loss_mask_T).sum())):
          messages.append(
            f'{name}: the loss mask of window {i} differs from its turns at '
            f'{differs} tokens'
          )
        # The version that sampled a token consumed the one before, and perhaps
        # a later version once more.
        is_older_T = np.roll(t.consumed_version_T, 1) < t.policy_version_T
        if len(t) > 1 and (is_older_T & t.loss_mask_T)[1:].any():
          messages.append(
            f'{name}: tokens of window {i} follow tokens that only older '
            'versions consumed'
          )
  return messages
