"""Trains a policy by RL with experts in bfloat16, in NVFP4, and in both.

  python -m experiments.studies.low_precision.reinforced --arms=bf16 \\
      --start=runs/nvfp4 --workdir=runs/low_precision_rl

  bf16   trainer and rollouts in bfloat16
  nvfp4  both in NVFP4, the backward pass in MXFP8
  mixed  a trainer in bfloat16 beside rollouts in NVFP4; the gate marks steps
         and stops none

All arms begin with one SFT policy and run the synchronous loop of the library,
which the pipeline equals at staleness 0. Every few steps the next groups are
sampled once more, and the arm's gradient is compared with that of a trainer in
bfloat16 at the same masters, on the same batch, with the same routes.
"""

import pathlib
import shutil
from typing import Any

import numpy as np
import optax
from absl import flags

from configs.composer import tiny
from experiments import start
from experiments.studies import results

_START = flags.DEFINE_string(
  'start', 'runs/nvfp4', 'Workdir of a run whose SFT is finished.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/low_precision_rl', 'Folder of the arms.'
)
_STEPS = flags.DEFINE_integer('steps', 300, 'Optimizer steps of an arm.')
_PROBE_EVERY = flags.DEFINE_integer(
  'probe_every', 25, 'Steps between two comparisons of gradients.'
)
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder that gets the rows of each arm.',
)
ARMS = {
  'bf16': {},
  'nvfp4': {
    'model.precision.experts': 'nvfp4',
    'model.precision.backward': 'mxfp8',
  },
  'mixed': {'rollout.experts': 'nvfp4'},
}
_ARMS = results.define_arms(ARMS)

# What an arm needs of the start.
_SHARED = ('tokenizer.json', 'sandbox.json', 'exports/sft')
# Metrics of a step that the study keeps.
_KEPT = (
  *('pass_rate', 'reward', 'invalid_rate', 'unfinished', 'tokens', 'entropy'),
  *('grad_norm', 'truncated', 'sampled_tokens', 'gate_breaches'),
  *('mismatch_kl', 'mismatch_p99', 'mismatch_max', 'mismatch_large'),
  *('replay_agreement', 'route_agreement', 'mismatch_kl_no_replay'),
)


def config_of(arm: str) -> dict[str, Any]:
  """Returns the fields of an arm's run: small steps, many of them."""
  config = tiny.get_config()
  config.seed = 14
  config.mesh.replica = 1  # SFT's, which is over
  # In all about the main job's rollouts, at half its rate.
  config.rl.update(
    steps=_STEPS.value,
    decay_steps=_STEPS.value // 2,
    prompts=3,
    rollouts_per_prompt=4,
    learning_rate=1e-4,
    rows=4,
    max_staleness=0,
    placement='colocated',
    mismatch_every=25,
  )
  config.rl.gate.action = 'flag'
  config.rollout.num_slots = 12
  config.hints.loss.weight = 0.0
  config.update_from_flattened_dict(ARMS[arm])
  return config.to_dict()


def _compared(state, functions, reference, groups, shape) -> results.Row:
  """Compares an arm's gradient and log-probabilities with references.

  'of_weights' is the error to the gradient of a trainer in bfloat16 whose
  record of the sampled log-probabilities is its own.
  """
  from composer_jax.rl import comparison, mismatch
  from experiments.studies.staleness import probe

  packed = probe.packed(groups, shape)
  batches = packed.microbatches
  values = functions.policy(state)
  own = probe.gradient(
    functions, values | functions.for_backward(state), batches
  )
  scores = [functions.score(values, batch) for batch in batches]
  log_ratios = np.concatenate(comparison.ratios(packed, scores))
  plain = reference.policy(state)
  scores = [reference.score(plain, batch) for batch in batches]
  exact = [
    batch.replace(rollout_logprobs_BT=np.asarray(score.logprobs_BT))
    for batch, score in zip(batches, scores, strict=True)
  ]
  of_weights = probe.errors(own, probe.gradient(reference, plain, exact))
  return {
    'k1': float(-log_ratios.mean()),
    'k1_error': float(log_ratios.std() / len(log_ratios) ** 0.5),
    'k3': float(mismatch.k3(log_ratios).mean()),
    'probed_tokens': len(log_ratios),
    **probe.errors(own, probe.gradient(reference, plain, batches)),
    **{f'{name}_of_weights': value for name, value in of_weights.items()},
  }


def _train(arm: str, workdir: pathlib.Path) -> None:
  from composer_jax import wiring
  from composer_jax.models import decoder
  from composer_jax.pipeline import job as jobs
  from composer_jax.pipeline import reinforce, stages
  from composer_jax.rl import collect, sync_loop
  from composer_jax.rl import step as steps
  from composer_jax.train.checkpoints import manager

  spec = wiring.spec_of(config_of(arm))
  systems, shape = wiring.systems_of(spec), spec.batch_shape()
  with (
    jobs.open_run(spec, systems, workdir, ['', __name__, arm]) as job,
    job.runner() as runner,
  ):
    checkpoints = manager.Checkpoints(workdir / 'checkpoints' / 'rl', keep=1)
    begun = reinforce.prepare(job, checkpoints)
    checkpoints.close()
    state, functions = begun.state, begun.functions
    collector = stages.collector_of(
      spec, systems, job.tokenizer, runner, split='train'
    )
    # Its gradient alone is used; the loss is that of the arms.
    reference = steps.build(
      decoder.Decoder(spec.model.precise()), optax.sgd(1.0)
    )
    engine = stages.make_engine(spec, functions.policy(state), 0)
    gate = systems.gate(functions, shape, folder=None)
    for first in range(0, _STEPS.value, _PROBE_EVERY.value):
      of_step = range(first * spec.rl.prompts, (first + 1) * spec.rl.prompts)
      groups = collect.groups(collector, engine, of_step)
      rows: list[results.Row] = [
        {
          'stage': 'probe',
          'arm': arm,
          'step': first,
          **_compared(state, functions, reference, groups, shape),
        }
      ]
      state, history = sync_loop.run(
        state,
        functions,
        collector,
        lambda values, version: engine,  # It has these values already.
        spec.update_options(),
        shape,
        num_steps=min(first + _PROBE_EVERY.value, _STEPS.value),
        gate=gate,
      )
      for step, metrics in enumerate(history, first + 1):
        kept = {k: float(metrics[k]) for k in _KEPT if k in metrics}
        rows.append({'stage': 'rl', 'arm': arm, 'step': step, **kept})
      results.add(_RESULTS.value, rows, by=('stage', 'arm'))
      print(arm, rows[0], rows[-1], flush=True)


def main() -> None:
  known = {row.get('arm') for row in results.read(_RESULTS.value)}
  if again := [arm for arm in _ARMS.value if arm in known]:
    raise ValueError(
      f'{_RESULTS.value} has rows of {again} already. Remove their lines to '
      'run them anew, or name other --arms.'
    )
  start.emulate_run(config_of(_ARMS.value[0]))
  for arm in _ARMS.value:
    workdir = pathlib.Path(_WORKDIR.value) / arm
    for name in _SHARED:
      source, target = pathlib.Path(_START.value) / name, workdir / name
      target.parent.mkdir(parents=True, exist_ok=True)
      if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
      else:
        shutil.copyfile(source, target)
    _train(arm, workdir)


if __name__ == '__main__':
  start.run(main)
