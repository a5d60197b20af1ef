"""Which lie in one window of a step does the gate score within five steps?

  python -m experiments.studies.staleness.selection --workdir=runs/windows_3

The steps are those that `windows` kept, with the size at which each lie changes
the step's gradient by a little more than 0.02. The gate's own code ranks the
parts of a step and chooses; passes are replaced by the honest records, so that
only the choice is simulated. A trial is five steps under one gate, in each of
which one window lies. What is printed: the sizes of each lie and the share of
trials that the exact band would have stopped; passes a step, and the rows of
which they took a share.
"""

import dataclasses
import pathlib
import pickle
import types
from typing import Any

import numpy as np
from absl import flags

from composer_jax.gate import audit
from composer_jax.rl import batching, mismatch
from experiments import start
from experiments.studies.staleness import one_window

_WORKDIR = flags.DEFINE_string('workdir', 'runs/windows', 'Run of `windows`.')
_TRIALS = flags.DEFINE_integer('trials', 40, 'Trials of each lie.')
_SHARES = flags.DEFINE_list(
  'shares', [str(mismatch.GateOptions().share)], 'Values of rl.gate.share.'
)
_STEPS = 5


class Trial:
  """One gate, over steps of which honest records are the truth."""

  def __init__(self, share: float, staleness: int, seed: int, seq_len: int):
    self.passes, self._seed = 0, seed
    self._true = np.zeros(0)
    layers = 1
    shape = batching.BatchShape(
      rows=1,
      seq_len=seq_len,
      num_moe_layers=layers,
      num_active=1,
      num_experts=1 << 15,
    )
    functions: Any = types.SimpleNamespace(
      parts=1, compact=lambda values: values, chain=self._chain
    )
    self._auditor = audit.Auditor(
      functions, shape, max_staleness=staleness, share=share, seed=seed
    )
    self._staleness = staleness

  def _chain(self, values, batch, entries):
    del values, entries
    self.passes += 1
    zeros_BT = np.zeros(batch.tokens_BT.shape, np.int32)
    return types.SimpleNamespace(
      logprobs_BT=self._true[batch.tokens_BT], differing_BT=zeros_BT
    ), None

  def scores(self, step, key, liar=None, name='', size=0.0):
    """Returns what the gate scores of a step in which a window may lie."""
    now = step['version']
    self._auditor.policies.clear()
    for version in range(now - self._staleness, now + 1):
      self._auditor.keep(version, version)
    # Tokens are numbers of their true values.
    windows = step['windows']
    starts = np.cumsum([0, *map(len, windows)])
    self._true = np.concatenate([t.logprobs_T for t in windows])
    packed = []
    for i, t in enumerate(windows):
      t = one_window.told(step, i, name, size) if i == liar else t
      tokens_T = np.arange(starts[i], starts[i + 1], dtype=np.int32)
      routes = t.expert_ids_TMA[:, :1, :1]
      packed.append(
        dataclasses.replace(t, tokens_T=tokens_T, expert_ids_TMA=routes)
      )
    own = [
      audit.Score(
        audit.parts_lib.Part(i, t, t.consumed_version_T, t.loss_mask_T, True),
        step['logprobs'][i],
        step['differing'][i],
      )
      for i, t in enumerate(packed)
    ]
    _, costly = audit.free_and_costly(own, now, replay=True)
    layers = windows[0].expert_ids_TMA.shape[1]
    suspicion = audit.Suspicion(own, now, layers)
    ranks = [
      suspicion.ranks(
        own[part.index]._replace(part=part), step['advantages'][part.index], 0.0
      )
      for part in costly
    ]
    return self._auditor.choose(costly, ranks, key, step['rows'])


def is_stopped(scores) -> bool:
  if not scores:
    return False
  kl = mismatch.k3(np.concatenate([s.log_ratios for s in scores])).mean()
  return kl > mismatch.GateOptions().max_kl_exact


def measure(steps, name, share, trials) -> np.ndarray:
  """Returns (stopped, steps until then, passes, windows scored) by trial."""
  able = [
    (step, i, size)
    for step in steps
    for i, (size, _) in step['sizes'][name].items()
    if step['windows'][i].consumed_version_T.min() < step['version']
  ]
  if not able:
    return np.zeros((0, 4))
  ages = [
    s['version'] - min(int(t.consumed_version_T.min()) for t in s['windows'])
    for s in steps
  ]
  found = []
  for trial in range(trials):
    rng = np.random.default_rng(trial)
    gate = Trial(share, max(ages), trial, steps[0]['seq_len'])
    # Steps without a lie first, so that no gate is fresh.
    for k in range(1 + trial % 4):
      gate.scores(steps[rng.integers(len(steps))], (1 << 20) + 8 * trial + k)
    gate.passes = 0
    tries, windows, stopped = 0, 0, False
    while tries < _STEPS and not stopped:
      step, *lie = able[rng.integers(len(able))]
      scores = gate.scores(step, _STEPS * trial + tries, lie[0], name, lie[1])
      stopped = is_stopped(scores)
      tries, windows = tries + 1, windows + len(scores)
    found.append((stopped, tries, gate.passes / tries, windows / tries))
  return np.array(found, float)


def load(workdir: str) -> list[dict[str, Any]]:
  folder = pathlib.Path(workdir) / 'windows'
  return [
    pickle.loads(path.read_bytes()) for path in sorted(folder.glob('*.pickle'))
  ]


def main() -> None:
  steps = load(_WORKDIR.value)
  print(
    f'{len(steps)} steps, on average of '
    f'{np.mean([s["rows"] for s in steps]):.0f} rows and '
    f'{np.mean([len(s["windows"]) for s in steps]):.0f} windows'
  )
  for share in map(float, _SHARES.value):
    rows = []
    for name in one_window.LIES:
      sizes = [z for s in steps for z, _ in s['sizes'][name].values()]
      found = measure(steps, name, share, _TRIALS.value)
      rows.append(found)
      if len(found):
        print(
          f'share {share:g}, {name}: {len(sizes)} windows, s of '
          f'{np.median(sizes):.3f} ({min(sizes):.3f} to {max(sizes):.3f}); '
          f'{found[:, 0].mean():.0%} stopped, after '
          f'{found[:, 1].mean():.1f} steps',
          flush=True,
        )
    stopped, _, passes, scored = np.concatenate(rows).mean(0)
    print(
      f'share {share:g}: {stopped:.1%} of {sum(map(len, rows))} stopped; '
      f'{passes:.2f} passes over a row and {scored:.1f} windows a step'
    )


if __name__ == '__main__':
  start.run(main)
