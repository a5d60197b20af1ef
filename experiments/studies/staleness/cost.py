"""Times what records cost a training step, on the last groups of a run.

  XLA_FLAGS=--xla_cpu_multi_thread_eigen=false taskset -c 0 \\
      python -m experiments.studies.staleness.cost --workdir=RUN/15_1_replay \\
      --config=configs/composer/tiny.py

Steps without a gate take turns with steps that route afresh and with steps
under a gate of each share; each takes all groups of a step that the run kept,
and another one begins each time. A gate goes on over all turns, since its lists
take turns, too, and passes above its share are paid back. Reading groups, which
checks their tapes, and packing them are timed alone. The clock is that of CPU
seconds. With --relabel each window has tokens
of `rl.max_staleness` versions and the newest, which is as dear as it gets. What
recording costs a decode step is case 'routes' of benchmarks/rollout.py, and
replay its case 'replay'.
"""

import dataclasses
import statistics
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from composer_jax.core import group_bytes, records
from experiments import launch

_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Turns over all steps kept.')
_RELABEL = flags.DEFINE_bool('relabel', False, 'Whether to change versions.')
_SHARES = flags.DEFINE_list('shares', ['0', '0.1'], 'Values of rl.gate.share.')


def _timed(function):
  start = time.process_time()
  result = function()
  return time.process_time() - start, result


def _told(name, seconds, base):
  """Prints the median of the ratios of seconds to those of `base`."""
  ratios = [s / b for s, b in zip(seconds, base, strict=True)]
  low, _, high = statistics.quantiles(ratios, n=4)
  print(
    f'{name}: {statistics.median(seconds):.3f} s, '
    f'{sum(seconds) / sum(base):.3f} of a step (median '
    f'{statistics.median(ratios):.3f}, quartiles {low:.3f} and {high:.3f})',
    flush=True,
  )


def relabelled(
  group: records.Group, newest: int, staleness: int
) -> records.Group:
  """The group as if its caches had entries of all of these versions."""

  def changed(t):
    clock_T = np.cumsum(t.loss_mask_T) * (staleness + 1)
    consumed_T = newest - staleness + clock_T // (1 + t.loss_mask_T.sum())
    sampled_by_T = np.insert(consumed_T[:-1], 0, consumed_T[0])
    context_T = np.full_like(consumed_T, consumed_T[0])
    versions = (sampled_by_T, context_T, consumed_T)
    fields = zip(
      records.VERSIONS, (v.astype(np.int32) for v in versions), strict=True
    )
    return dataclasses.replace(t, **dict(fields))

  rollouts = (
    dataclasses.replace(r, trajectories=tuple(map(changed, r.trajectories)))
    for r in group.rollouts
  )
  return dataclasses.replace(group, rollouts=tuple(rollouts), policies=None)


def run(spec, systems, workdir, *, command):
  from composer_jax import wiring
  from composer_jax.gate import health
  from composer_jax.pipeline import job as jobs
  from composer_jax.pipeline import reinforce
  from composer_jax.rl import batching, update
  from composer_jax.train.checkpoints import manager

  rl, shape = spec.rl, spec.batch_shape()
  groups = wiring.kept_groups(workdir)
  kept = {group.group: group_bytes.to_bytes(group) for group in groups}
  from_bytes = group_bytes.from_bytes
  first = [g for g in kept if g % rl.prompts == 0]
  options = dataclasses.replace(spec.update_options(), mismatch_every=0)
  with jobs.open_run(spec, systems, workdir, command) as job:
    checkpoints = manager.Checkpoints(workdir / 'checkpoints' / 'rl', keep=2)
    start = reinforce.prepare(job, checkpoints)
    checkpoints.close()

  def take(state, groups, gate=None, replay=True):
    return update.update(
      state,
      groups,
      start.functions,
      dataclasses.replace(options, replay=replay),
      shape,
      reference=start.reference,
      teacher=start.teacher,
      gate=gate,
    )

  gates = {
    f'gate, share {share}': health.HealthGate(
      start.functions,
      shape,
      dataclasses.replace(rl.gate, share=float(share), action='flag'),
      max_staleness=rl.max_staleness,
    )
    for share in _SHARES.value
  }
  kinds: dict[str, dict[str, Any]] = {
    'no gate': {},
    **{name: {'gate': gate} for name, gate in gates.items()},
  }
  if not _RELABEL.value:
    kinds['no gate, routed afresh'] = {'replay': False}
  order = list(kinds)
  seconds = {}
  for turn in range(_ROUNDS.value + 1):
    for group in first:
      step = group // rl.prompts
      ids = range(group, group + rl.prompts)
      read = _timed(lambda ids=ids: [from_bytes(kept[g]) for g in ids])
      groups = read[1]
      if _RELABEL.value:
        groups = [relabelled(g, step, rl.max_staleness) for g in groups]
      windows = [t for g in groups for r in g.rollouts for t in r.trajectories]
      zeros = [0.0] * len(windows)
      packed = _timed(lambda w=windows, z=zeros: batching.pack(w, z, shape))
      spent = {'reading': read[0], 'packing all trajectories': packed[0]}
      for gate in gates.values():
        # The newest policy stands for those that sampled: values cost nothing.
        for version in range(step - rl.max_staleness, step):
          gate.keep(version, start.functions.policy(start.state))
      order = [*order[1:], order[0]]
      for name in order:
        choice = kinds[name]
        # Copied, since a step donates its state.
        state = jax.tree.map(lambda x: x.copy(), start.state)
        state = jax.block_until_ready(state.replace(step=state.step * 0 + step))
        spent[name], _ = _timed(
          lambda s=state, g=groups, c=choice: jax.block_until_ready(
            take(s, g, **c)[0]
          )
        )
      if turn:  # The first compiles.
        for name, value in spent.items():
          seconds.setdefault(name, []).append(value)
  print(f'{len(first)} steps of {rl.prompts} groups, {_ROUNDS.value} turns')
  for name, values in seconds.items():
    _told(name, values, seconds['no gate'])


if __name__ == '__main__':
  launch.main(run)
