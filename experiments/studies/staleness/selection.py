"""Simulates which lies in one stale window the gate scores within five steps.

  python -m experiments.studies.staleness.selection --staleness=3

Windows of the main job's lengths are recorded by policies whose log p moves
between versions by about as much as in its runs (k3 1e-4 a version). The gate's
own code ranks them and chooses; passes are replaced by the true values, so that
only the choice is simulated. One of the windows lies, another in each step.
What is printed: passes a step and the rows that they took a share of, and how
many of the trials the exact band would have stopped.
"""

import dataclasses
import types
from typing import Any

import numpy as np
from absl import flags

from composer_jax.core import records
from composer_jax.gate import audit
from composer_jax.gate import parts as parts_lib
from composer_jax.rl import batching, mismatch
from experiments import start

_STALENESS = flags.DEFINE_integer('staleness', 3, 'Versions before the newest.')
_WINDOWS = flags.DEFINE_integer('windows', 62, 'Windows of a step.')
_TRIALS = flags.DEFINE_integer('trials', 30, 'Trials of each lie.')
_SHARE = flags.DEFINE_float('share', mismatch.GateOptions().share, 'Its share.')
_STEPS = 5
_SHAPE = batching.BatchShape(
  rows=8, seq_len=384, num_moe_layers=1, num_active=1, num_experts=4
)
_NOW = 100  # Version of the trained policy.


def scaled(by):
  return lambda true_T, trained_T, rng: by * true_T


def moved(by):
  return lambda true_T, trained_T, rng: true_T + by


def towards(part, noise=0.0):
  """Log-probabilities moved towards the trained version's, with noise."""

  def lie(true_T, trained_T, rng):
    noise_T = noise * rng.normal(size=len(true_T))
    return true_T + part * (trained_T - true_T) + noise_T

  return lie


def late(lie):
  """A lie in the second half of the window."""

  def changed(true_T, trained_T, rng):
    is_late_T = np.arange(len(true_T)) > len(true_T) // 2
    return np.where(is_late_T, lie(true_T, trained_T, rng), true_T)

  return changed


LIES = {
  'times 0.98': scaled(0.98),
  'less 0.02': moved(-0.02),
  'half of the way to the trained version': towards(0.5),
  'a quarter of the way': towards(0.25),
  'the trained version with noise of 0.003': towards(1.0, 0.003),
  'times 0.98 in the second half': late(scaled(0.98)),
  'half of the way in the second half': late(towards(0.5)),
}


def drawn(rng: np.random.Generator) -> tuple[records.Trajectory, np.ndarray]:
  """Returns a true record of several turns, and log p by the trained policy."""
  mask = [False] * rng.integers(70, 120)
  for _ in range(rng.integers(2, 7)):
    mask += [False] * rng.integers(8, 30) + [True] * rng.integers(8, 25)
  mask_T = np.array(mask[: _SHAPE.seq_len])
  mask_T = mask_T[: np.flatnonzero(mask_T)[-1] + 1]
  length, count = len(mask_T), _STALENESS.value
  # Each version samples about as many of the tokens.
  cuts = (np.arange(count) + 1 + 0.2 * rng.normal(size=count)) / (count + 1)
  clock_T = np.cumsum(mask_T) / mask_T.sum()
  age_T = count - (clock_T[:, None] > np.sort(cuts)).sum(-1)
  consumed_T = (_NOW - age_T).astype(np.int32)
  sampled_by_T = np.insert(consumed_T[:-1], 0, consumed_T[0])
  trained_T = np.where(mask_T, -rng.exponential(0.35, length), -1.0)
  size = 0.02 * np.exp(0.5 * rng.normal()) * np.sqrt(_NOW - sampled_by_T)
  move_T = size * -np.expm1(trained_T) * rng.standard_t(4, length)
  true_T = np.where(mask_T, trained_T + move_T, 0)
  routes_TMA = np.zeros((length, 1, 1), np.uint16)
  routes_TMA[-1] = records.NO_ROUTE
  record = records.Trajectory(
    tokens_T=np.zeros(length, np.int32),
    loss_mask_T=mask_T,
    logprobs_T=true_T.astype(np.float32),
    expert_ids_TMA=routes_TMA,
    policy_version_T=sampled_by_T,
    context_version_T=np.full(length, consumed_T[0], np.int32),
    consumed_version_T=consumed_T,
    temperature=1.0,
  )
  return record, trained_T.astype(np.float32)


class _Step:
  """Windows of a step, in which one may lie, and passes that know the truth."""

  def __init__(self, rng: np.random.Generator):
    pairs = [drawn(rng) for _ in range(_WINDOWS.value)]
    # A token's number is its place among the true values.
    starts = np.cumsum([0, *(len(t) for t, _ in pairs)])
    self.true = np.concatenate([t.logprobs_T for t, _ in pairs])
    self.windows = [
      (
        dataclasses.replace(
          t, tokens_T=np.arange(i, i + len(t), dtype=np.int32)
        ),
        trained_T,
      )
      for i, (t, trained_T) in zip(starts, pairs, strict=False)
    ]
    self.advantages = rng.normal(size=len(pairs))
    places = batching.places([len(t) for t, _ in pairs], _SHAPE)
    self.rows = _SHAPE.rows * (1 + max(place.batch for place in places))
    self.passes = 0

  def chain(self, values, batch, entries):
    del values, entries
    self.passes += 1
    zeros_BT = np.zeros(batch.tokens_BT.shape, np.int32)
    true_BT = self.true[batch.tokens_BT]
    return types.SimpleNamespace(
      logprobs_BT=true_BT, differing_BT=zeros_BT
    ), None

  def scores(self, auditor, lie, liar, number, rng):
    """Returns what the gate scores if window `liar` lies."""
    own = []
    for i, (t, trained_T) in enumerate(self.windows):
      if i == liar:
        told_T = np.where(t.loss_mask_T, lie(t.logprobs_T, trained_T, rng), 0)
        t = dataclasses.replace(t, logprobs_T=told_T.astype(np.float32))
      part = parts_lib.Part(i, t, t.consumed_version_T, t.loss_mask_T, True)
      own.append(audit.Score(part, trained_T, np.zeros(len(t), np.int32)))
    _, costly = audit.free_and_costly(own, _NOW, replay=True)
    suspicion = audit.Suspicion(own, _NOW, 1)
    ranks = [
      suspicion.ranks(
        own[part.index]._replace(part=part), self.advantages[part.index], 0.0
      )
      for part in costly
    ]
    return auditor.choose(costly, ranks, number, self.rows)


def measure(lie, trials: int) -> np.ndarray:
  """Returns (stopped, passes, rows, windows scored) of each trial, a step."""
  found = []
  for trial in range(trials):
    rng = np.random.default_rng(trial)
    step = _Step(rng)
    functions: Any = types.SimpleNamespace(
      parts=1, compact=lambda values: values, chain=step.chain
    )
    auditor = audit.Auditor(
      functions,
      _SHAPE,
      max_staleness=_STALENESS.value,
      share=_SHARE.value,
      seed=trial,
    )
    for version in range(_NOW - _STALENESS.value, _NOW + 1):
      auditor.keep(version, version)
    # Small gradients cannot change a step's by much.
    order = np.argsort(-np.abs(step.advantages))[: _WINDOWS.value * 2 // 3]
    stopped, scored, tries = False, 0, 0
    # A step without a lie first, so that no gate is fresh.
    step.scores(auditor, lie, None, trial, rng)
    step.passes = 0
    for liar in rng.permutation(order)[:_STEPS]:
      tries += 1
      number = _STEPS * trial + tries
      scores = step.scores(auditor, lie, liar, number, rng)
      scored += len(scores)
      kl = mismatch.k3(np.concatenate([s.log_ratios for s in scores])).mean()
      if kl > mismatch.GateOptions().max_kl_exact:
        stopped = True
        break
    found.append((stopped, step.passes / tries, step.rows, scored / tries))
  return np.array(found, float)


def main() -> None:
  rows = []
  for name, lie in LIES.items():
    rows.append(measure(lie, _TRIALS.value))
    print(f'{name}: {int(rows[-1][:, 0].sum())} of {_TRIALS.value}', flush=True)
  stopped, passes, rows_, windows = np.concatenate(rows).mean(0)
  print(
    f'staleness {_STALENESS.value}, share {_SHARE.value:g}: {stopped:.0%} '
    f'stopped; {passes:.2f} passes over a row in a step of {rows_:.0f} rows, '
    f'{windows:.1f} of {_WINDOWS.value} windows scored'
  )


if __name__ == '__main__':
  start.run(main)
