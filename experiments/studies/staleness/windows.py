"""Runs RL and keeps what its gate saw of each step, for `selection`.

  python -m experiments.studies.staleness.windows --workdir=runs/windows_3 \\
      --config.rl.max_staleness=3 --config.hints.loss.weight=0

A run without SFT begins with it. After RL some windows of each step lie in
turn, in each way of `one_window.LIES`: by as much as changes the step's
gradient by a little more than the gate must stop. They are every other one of
those from which most of the gradient comes, so that small lies do.
"""

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments import launch
from experiments.studies.staleness import one_window

_FIRST = flags.DEFINE_integer('first', 3, 'First step that is kept.')
_MOST = flags.DEFINE_integer('most', 10, 'Windows of a step that lie in turn.')
FOLDER = 'windows'
_TRIES = 4


def recorder(make_gate, folder):
  """Returns a factory of gates that also write what they judge."""

  def make(functions, shape, **options):
    gate = make_gate(functions, shape, **options)
    judge = gate.judge

    def judge_and_keep(step):
      if step.version >= _FIRST.value:
        _keep(step, functions, folder)
      return judge(step)

    gate.judge = judge_and_keep
    return gate

  return make


def _keep(step, functions, folder):
  from composer_jax.rl import comparison

  content = {
    'version': step.version,
    'values': jax.device_get(functions.compact(step.values)),
    'windows': step.trained.trajectories,
    'advantages': step.advantages,
    'logprobs': comparison.logprobs(step.trained, step.scores),
    'differing': comparison.per_token(
      step.trained.places, [s.differing_BT for s in step.scores]
    ),
    'rows': sum(s.logprobs_BT.shape[0] for s in step.scores),
    'seq_len': step.scores[0].logprobs_BT.shape[1],
  }
  path = folder / f'{step.version:06d}.pickle'
  path.write_bytes(pickle.dumps(content))


def _gradient(functions, values, window, advantage, shape) -> np.ndarray:
  from composer_jax.rl import batching

  (batch,) = batching.pack([window], [advantage], shape).microbatches
  sums, _ = functions.add_microbatch(values, None, batch)
  leaves = jax.device_get(jax.tree.leaves(sums.grads))
  return np.concatenate([leaf.ravel() for leaf in leaves])


def measured(step: dict[str, Any], functions, shape) -> dict[str, Any]:
  """Returns shares of the windows in the step's gradient, and sizes of lies.

  Shares are of norms. Of each lie and window: the size of the lie, and by which
  share it changes the step's gradient; none if no size changes it enough.
  """
  shape = dataclasses.replace(shape, rows=functions.parts)
  values = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), step['values'])
  of_window = [
    _gradient(functions, values, t, a, shape)
    for t, a in zip(step['windows'], step['advantages'], strict=True)
  ]
  norm = float(np.linalg.norm(sum(of_window)))
  shares = np.array([np.linalg.norm(g) for g in of_window]) / norm
  sizes: dict[str, dict[int, tuple[float, float]]] = {}
  for name, (_, size, largest) in one_window.LIES.items():
    sizes[name] = {}
    for i in np.argsort(-shares)[: 2 * _MOST.value : 2].tolist():
      # Changes are about proportional to the size.
      for _ in range(_TRIES):
        size = min(size, largest)
        told = one_window.told(step, i, name, size)
        wrong = _gradient(functions, values, told, step['advantages'][i], shape)
        change = float(np.linalg.norm(wrong - of_window[i]) / norm)
        if one_window.LEAST < change < 1.2 * one_window.LEAST:
          sizes[name][i] = (size, change)
          break
        if size == largest and change < one_window.LEAST:
          break
        size *= 1.1 * one_window.LEAST / max(change, 1e-6)
      size = min(size, largest)
  return {'shares': shares, 'sizes': sizes}


def run(spec, systems, workdir, *, command):
  from composer_jax.pipeline import job as jobs
  from composer_jax.pipeline import reinforce, stages
  from composer_jax.train.checkpoints import manager

  folder = workdir / FOLDER
  gate = recorder(systems.gate, folder)
  systems = dataclasses.replace(systems, gate=gate)
  with jobs.open_run(spec, systems, workdir, command) as job:
    folder.mkdir(exist_ok=True)
    stages.pretrain(job)
    stages.finetune(job)
    reinforce.reinforce(job)
    checkpoints = manager.Checkpoints(workdir / 'checkpoints' / 'rl', keep=2)
    functions = reinforce.prepare(job, checkpoints).functions
    checkpoints.close()
  for path in sorted(folder.glob('*.pickle')):
    step = pickle.loads(path.read_bytes())
    if 'sizes' not in step:
      step |= measured(step, functions, spec.batch_shape())
      path.write_bytes(pickle.dumps(step))
      print(f'step {step["version"]} measured', flush=True)


if __name__ == '__main__':
  launch.main(run)
