"""Bands of a step's measures, and records that contradict themselves."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from composer_jax.core import records
from composer_jax.gate import parts
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
) -> dict[str, str]:
  """Describes each measure outside of its band, by name, with likely causes.

  A measure that the step does not have (no stale token was scored, no route
  recorded) is in its band; NaN is not.
  """
  messages = {}
  for name, (option, causes) in _BANDS.items():
    if options.action == 'off' or name not in metrics:
      continue
    value, bound = metrics[name], getattr(options, option)
    is_low = option.startswith('min')
    if value >= bound if is_low else value <= bound:
      continue
    side = 'at least' if is_low else 'at most'
    messages[name] = (
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
  groups: Sequence[records.Group],
  *,
  temperature: float | None,
  is_valid: Callable[[int], bool],
) -> list[str]:
  """Names records that contradict themselves, without any forward pass.

  `temperature` is the one that the run samples at, None if it is not known;
  `is_valid` tells the versions that a record of this step may name.
  """
  messages = []
  for g in groups:
    for r in g.rollouts:
      for i, t in enumerate(r.trajectories):
        turns = [turn for turn in r.turns if turn.trajectory == i]
        messages += [
          f'group {g.group}, member {r.member}: window {i} {reason}'
          for reason in (
            *_of_temperature(t, temperature),
            *_of_mask(t, turns),
            *_of_versions(t, is_valid),
          )
        ]
  return messages


def _of_temperature(t, temperature):
  if temperature and not np.isclose(t.temperature, temperature, rtol=1e-6):
    yield (
      f'was sampled at temperature {t.temperature:g}, this run at '
      f'{temperature:g} (--config.episode.temperature)'
    )


def _of_mask(t, turns):
  told_T = np.zeros(len(t), bool)
  for turn in turns:
    told_T[turn.start : turn.stop] = True
  if differs := int((told_T != t.loss_mask_T).sum()):
    yield f'has a loss mask that differs from its turns at {differs} tokens'
  if not t.loss_mask_T.any():
    yield 'has no sampled token'


def _of_versions(t, is_valid):
  named = {
    int(version)
    for name in records.VERSIONS
    for version in np.unique(getattr(t, name))
  }
  if wrong := sorted(v for v in named if not is_valid(v)):
    yield (
      f'names versions {wrong}, newer than the trained one or older than '
      '--config.rl.max_staleness allows'
    )
  if count := parts.uncovered(t):
    yield (
      f'has {count} sampled tokens whose versions (of their sampling, their '
      'context, and its last computation) no engine can have had together'
    )
