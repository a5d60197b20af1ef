"""How far sampler and trainer of a finished run differ.

  python -m experiments.mismatch --workdir=runs/tiny --stage=rl --tokens=10000
  python -m experiments.mismatch --dtype=bfloat16 --numerics=batch_invariant \\
      --out=runs/mismatch
  python -m experiments.mismatch --group=runs/tiny/stopped.npz

Episodes on held-out tasks are sampled by the rollout engine and scored by the
trainer's forward pass, with the same weights: once with the recorded routes
replayed, once routed afresh, and once with the routes shifted by a token, as a
fault would. --out keeps the numbers, a line of metrics.jsonl for each call.
--group only shows what a run's gate stopped at, or an upload of a group.
"""

import os
import pathlib

from absl import flags, logging

from experiments import start

_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/tiny', 'Workdir of a finished run.'
)
_STAGE = flags.DEFINE_enum(
  'stage',
  'rl',
  ['cpt', 'sft', 'rl'],
  'Stage whose policy is measured; it must be finished.',
)
_TOKENS = flags.DEFINE_integer(
  'tokens', 10_000, 'Least number of tokens to sample.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of tasks and sampling.')
_DTYPE = flags.DEFINE_enum(
  'dtype',
  'float32',
  ['float32', 'bfloat16'],
  'Dtype of activations and products.',
)
_NUMERICS = flags.DEFINE_enum(
  'numerics',
  'fast',
  ['fast', 'batch_invariant'],
  'Numerics of sampler and trainer.',
)
_OUT = flags.DEFINE_string(
  'out',
  '',
  'Folder of the metrics.jsonl that gets the numbers; empty keeps none.',
)
_GROUP = flags.DEFINE_string(
  'group', '', 'File of a group to show token by token; empty measures.'
)


def _print(measures):
  print(f'{"routes":<12}{"mean k3":>12}{"p99":>12}{"max":>12}{"ratio > 2":>12}')
  for pass_name in ('replay', 'no_replay', 'shifted'):
    cells = [
      measures[f'mismatch_{n}_{pass_name}'] for n in ('kl', 'p99', 'max')
    ]
    share = measures[f'mismatch_large_{pass_name}']
    print(f'{pass_name:<12}' + ''.join(f'{v:>12.2e}' for v in (*cells, share)))
  layers = ' '.join(f'{v:.5f}' for v in measures['route_agreement_layers'])
  print(
    f'{measures["sampled_tokens"]} tokens. Routes that agree, by MoE layer: '
    f'{layers} (shifted {measures["route_agreement_shifted"]:.3f}); tokens '
    f'whose routes differ: {measures["routed_differently"]:.5f}.'
  )


def run() -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file.
  # One thread sums as the rollout worker of a run does.
  os.environ.setdefault('XLA_FLAGS', '--xla_cpu_multi_thread_eigen=false')
  from composer_jax.telemetry import machine, writer
  from experiments.studies.mismatch import probe, show

  if _GROUP.value:
    print('\n'.join(show.of_file(pathlib.Path(_GROUP.value))))
    return
  measures = probe.of_run(
    pathlib.Path(_WORKDIR.value),
    probe.ProbeOptions(tokens=_TOKENS.value, seed=_SEED.value),
    stage=_STAGE.value,
    overrides={'compute_dtype': _DTYPE.value, 'numerics': _NUMERICS.value},
  )
  _print(measures)
  if _OUT.value:
    with writer.Writer(_OUT.value, tensorboard=False) as out:
      step = len(writer.read(_OUT.value)) + 1
      out.write('mismatch', step, machine=machine.describe(), **measures)


if __name__ == '__main__':
  start.run(run, errors=(ValueError, OSError))
