"""Judges each step: bands on what its records say against what weights say."""

import collections
import io
import pathlib
from typing import Any

import numpy as np

from composer_jax.core import files, records
from composer_jax.gate import audit, bands, explain, routes
from composer_jax.rl import batching, comparison, mismatch
from composer_jax.rl import step as steps

# Reasons that a message names.
_SHOWN = 8

# The worst trajectory of the step that was stopped last, in the workdir.
_STOPPED = 'stopped.npz'


def _hinted(
  groups: list[records.Group], trained: batching.PackedTrajectories
) -> list[tuple[records.Trajectory, int, int]]:
  """Windows with hints but no policy gradient: each, its group and hints."""
  known = {id(t) for t in trained.trajectories}
  hints = [
    (r.trajectories[h.trajectory], g.group)
    for g in groups
    for r in g.rollouts
    for h in r.hints
  ]
  counts = collections.Counter(id(t) for t, _ in hints)
  hinted = {id(t): (t, g, counts[id(t)]) for t, g in hints}
  return [found for key, found in hinted.items() if key not in known]


def _first(messages: list[str]) -> str:
  more = len(messages) - _SHOWN
  rest = [f'and {more} more'] if more > 0 else []
  return '; '.join([*messages[:_SHOWN], *rest])


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
    self._num_layers = shape.num_moe_layers
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
    # Hinted windows may be of the trained version, which is not always kept.
    policies = self._auditor.policies
    is_kept = step.version in policies
    policies.setdefault(step.version, step.values)
    try:
      return self._judge(step)
    finally:
      if not is_kept:
        del policies[step.version]

  def _judge(self, step: comparison.JudgedStep) -> dict[str, Any]:
    auditor = self._auditor
    hinted = _hinted(step.groups, step.trained) if step.hinted else []
    windows = [*step.trained.trajectories, *(t for t, *_ in hinted)]
    free, own, costly = audit.free_and_costly(
      step.trained,
      step.scores,
      windows[len(step.trained.trajectories) :],
      step.version,
      replay=self._replay,
    )

    draws = np.random.default_rng(step.version)

    def suspicion(part):
      if part.index >= len(own):
        # No pass of the policy gradient has seen these, so they take turns.
        _, _, count = hinted[part.index - len(own)]
        return 0.0, count * draws.random(), float(count)
      score = own[part.index]._replace(part=part)
      advantage = step.advantages[part.index]
      return audit.suspicion(score, advantage, self._num_layers)

    ranks = list(map(suspicion, costly))
    exact = free + auditor.choose(costly, ranks, step.version)
    lost = [p for p in costly if not auditor.knows(p) and auditor.lacks(p)]
    pair = (step.scores, step.others)
    metrics = {
      **routes.both_ways(step.trained, *(pair if self._replay else pair[::-1])),
      'tokens_unscorable': sum(int(p.compared_T.sum()) for p in lost),
      **audit.measure(exact, self._num_layers),
    }
    if self._replay:
      metrics['unrecorded'] = bands.unrecorded(step.groups)
    breaches = bands.breaches(step.metrics | metrics, self._options)
    messages = list(breaches.values())
    messages += bands.contradictions(
      step.groups,
      temperature=self._temperature,
      is_valid=lambda version: auditor.is_valid(version, step.version),
    )
    metrics |= {'gate_breaches': len(messages), 'gate': messages}
    if not messages and self._folder is not None:
      (self._folder / _STOPPED).unlink(missing_ok=True)
    if messages and self.stops:
      groups = [*step.group_ids, *(g for _, g, _ in hinted)]
      worst = explain.worst(breaches, exact, own)
      raise mismatch.OutOfBand(
        f'rl step {step.version + 1}: {_first(messages)}. '
        f'{self._explained(worst, groups)}Its gradient was not applied, and '
        'the last checkpoint is intact. To sample its groups anew delete their '
        'files in groups/ and run the same command again; to go on with them '
        f'as they are add --config.rl.gate.action=flag.{self._kept(worst)}',
        step.metrics | metrics,
      )
    return metrics

  def _explained(self, worst: audit.Score | None, groups: list[int]) -> str:
    if worst is None:
      return ''
    reason = explain.explain(self._auditor, worst)
    return f'Of its groups, {groups[worst.part.index]} is the worst: {reason}. '

  def _kept(self, worst: audit.Score | None) -> str:
    """Writes the arrays of the worst trajectory, and tells how to see them."""
    if self._folder is None or worst is None:
      return ''
    path, content = self._folder / _STOPPED, io.BytesIO()
    np.savez(content, allow_pickle=False, **explain.evidence(worst))
    files.write_atomic(path, content.getvalue())
    return f' Its worst trajectory: ./run.sh mismatch --group={path}'
