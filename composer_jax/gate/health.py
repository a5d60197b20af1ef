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
from composer_jax.rl.hints import batching as hint_batching

# Reasons that a message names.
_SHOWN = 8

# The worst trajectory of the step that was stopped last, in the workdir.
_STOPPED = 'stopped.npz'


def _hinted_only(step: comparison.JudgedStep) -> list[hint_batching.Student]:
  """Windows with hints but no policy gradient, each once.

  Two hints on a turn need two copies of the window: the longest is kept.
  """
  known = {id(t) for t in step.trained.trajectories}
  students = sorted(step.hinted.students, key=lambda s: s.hints[-1].stop)
  only = {id(s.window): s for s in students if id(s.window) not in known}
  return list(only.values())


def _hint_weights(
  step: comparison.JudgedStep, windows: list[records.Trajectory]
) -> list[float]:
  """About the size of the gradient that hints give to each window.

  With logits l, the norm of the gradient of KL(p || q) by l is at most about
  sqrt(2 KL); a token of advantage 1 has about 1 - p.
  """
  counts = collections.Counter(
    id(s.window) for s in step.hinted.students for _ in s.hints
  )
  unit = step.hint_weight * (2 * step.metrics.get('hint_divergence', 0)) ** 0.5
  return [unit * counts[id(window)] for window in windows]


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
    # An explanation may need the trained version, which is not always kept.
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
    own = audit.scores_of(
      step.trained.trajectories,
      step.trained.places,
      step.scores,
      replay=self._replay,
    )
    students = _hinted_only(step)
    # Nothing after a window's last hint is trained on.
    own += audit.scores_of(
      [hint_batching.until(s.window, s.hints[-1].stop) for s in students],
      [s.place for s in students],
      step.hinted.scores,
      first=len(own),
      replay=self._replay,
    )
    windows = [*step.trained.trajectories, *(s.window for s in students)]
    advantages = step.advantages + [0.0] * len(students)
    weights = _hint_weights(step, windows)
    free, costly = audit.free_and_costly(own, step.version, replay=self._replay)
    suspicion = audit.Suspicion(own, step.version, self._num_layers)
    ranks = [
      suspicion.ranks(
        own[part.index]._replace(part=part),
        advantages[part.index],
        weights[part.index],
      )
      for part in costly
    ]
    passes = [*step.scores, *step.hinted.scores]
    rows = sum(scores.logprobs_BT.shape[0] for scores in passes)
    exact = free + auditor.choose(costly, ranks, step.version, rows)
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
      worst = explain.worst(breaches, exact, own)
      if worst is not None and worst.part.whole is not None:
        (worst,) = auditor.score([worst.part.whole])
      raise mismatch.OutOfBand(
        f'rl step {step.version + 1}: {_first(messages)}. '
        f'{self._explained(worst, step, windows)}Its gradient was not applied, '
        'and the last checkpoint is intact. To sample its groups anew delete '
        'their uploads (fleet/policy/groups/ in the store) and run the same '
        'command again; to go on with them as they are add '
        '--config.rl.gate.action=flag.'
        f'{self._kept(worst)}',
        step.metrics | metrics,
      )
    return metrics

  def _explained(
    self,
    worst: audit.Score | None,
    step: comparison.JudgedStep,
    windows: list[records.Trajectory],
  ) -> str:
    if worst is None:
      return ''
    window = windows[worst.part.index]
    (group,) = (
      g.group
      for g in step.groups
      if any(t is window for r in g.rollouts for t in r.trajectories)
    )
    reason = explain.explain(self._auditor, worst, self._temperature)
    return f'Of its groups, {group} is the worst: {reason}. '

  def _kept(self, worst: audit.Score | None) -> str:
    """Writes the arrays of the worst trajectory, and tells how to see them."""
    if self._folder is None or worst is None:
      return ''
    path, content = self._folder / _STOPPED, io.BytesIO()
    np.savez(content, allow_pickle=False, **explain.evidence(worst))
    files.write_atomic(path, content.getvalue())
    return f' Its worst trajectory: ./run.sh mismatch --group={path}'
