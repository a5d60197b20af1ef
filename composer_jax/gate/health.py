"""Judges each step: bands on what its records say against what weights say."""

import io
import pathlib
from typing import Any

import numpy as np

from composer_jax.core import files, records
from composer_jax.gate import audit, bands, explain, routes
from composer_jax.rl import batching, comparison, mismatch
from composer_jax.rl import step as steps


def _hinted(
  groups: list[records.Group], trained: batching.PackedTrajectories
) -> list[tuple[records.Trajectory, int]]:
  """Windows with hints but no policy gradient, and their groups."""
  known = {id(t) for t in trained.trajectories}
  hinted = {
    id(t): (t, g.group)
    for g in groups
    for r in g.rollouts
    for t in [r.trajectories[h.trajectory] for h in r.hints]
    if id(t) not in known
  }
  return list(hinted.values())


class HealthGate:
  """Implements `rl.comparison.Gate`, with an `audit.Auditor`."""

  def __init__(
    self,
    functions: steps.Functions,
    shape: batching.BatchShape,
    options: mismatch.GateOptions,
    *,
    replay: bool = True,
    max_staleness: int = 0,
    temperature: float | None = None,
    seed: int = 0,
    folder: pathlib.Path | None = None,
  ):
    """Keeps no policy yet.

    Args:
      max_staleness: largest staleness of any record.
      temperature: the one that all records must have; None compares none.
      folder: workdir, in which what stopped a step is kept; None keeps nothing.
    """
    self._folder, self._temperature = folder, temperature
    self._options, self._replay = options, replay
    self._num_layers, self._rows = shape.num_moe_layers, shape.rows
    self._auditor = audit.Auditor(
      functions,
      shape,
      max_staleness=max_staleness,
      share=options.share,
      seed=seed,
    )
    self.stops = options.action == 'stop'
    self.keep = self._auditor.keep

  def judge(self, step: comparison.JudgedStep) -> dict[str, Any]:
    """Scores what this step can afford, and compares it with the bands."""
    hinted = _hinted(step.groups, step.trained) if step.hinted else []
    windows = [*step.trained.trajectories, *(t for t, _ in hinted)]
    free, own, costly = audit.free_and_costly(
      step.trained,
      step.scores,
      windows[len(step.trained.trajectories) :],
      step.version,
      replay=self._replay,
    )
    ranks = [
      audit.suspicion(score, advantage, self._num_layers)
      for score, advantage in zip(own, step.advantages, strict=True)
    ]
    ranks += [0.0] * len(hinted)
    rows = len(step.scores) * self._rows
    exact = free + self._auditor.choose(costly, ranks, rows, step.version)
    scorable = [*(s.part for s in free), *filter(self._auditor.knows, costly)]
    sampled = sum(int(t.loss_mask_T.sum()) for t in windows)
    pair = (step.scores, step.others)
    metrics = {
      **routes.both_ways(step.trained, *(pair if self._replay else pair[::-1])),
      'tokens_unscorable': sampled
      - sum(int(part.compared_T.sum()) for part in scorable),
      **audit.measure(exact, self._num_layers),
    }
    if self._replay:
      metrics['unrecorded'] = bands.unrecorded(step.groups)
    breaches = bands.breaches(step.metrics | metrics, self._options)
    breaches += bands.contradictions(step.groups, self._temperature)
    metrics |= {'gate_breaches': len(breaches), 'gate': breaches}
    if breaches and self.stops:
      self._auditor.policies.setdefault(step.version, step.values)
      worst = explain.worst(exact or own)
      group = [*step.group_ids, *(g for _, g in hinted)][worst.part.index]
      reason = explain.explain(self._auditor, worst)
      raise mismatch.OutOfBand(
        f'rl step {step.version + 1}: {"; ".join(breaches)}. Of its groups, '
        f'{group} is the worst: {reason}. Its gradient was not applied, and '
        'the last checkpoint is intact. To sample its groups anew delete their '
        'files in groups/ and run the same command again; to go on with them '
        f'as they are add --config.rl.gate.action=flag.{self._kept(worst)}',
        step.metrics | metrics,
      )
    return metrics

  def _kept(self, worst: audit.Score) -> str:
    """Writes the arrays of the worst trajectory, and tells how to see them."""
    if self._folder is None:
      return ''
    path, content = self._folder / 'stopped.npz', io.BytesIO()
    np.savez(content, allow_pickle=False, **explain.evidence(worst))
    files.write_atomic(path, content.getvalue())
    return f' Its worst trajectory: ./run.sh mismatch --group={path}'
