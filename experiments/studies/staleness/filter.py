"""Measures the plausibility filter on the last groups of a finished run.

  python -m experiments.studies.staleness.filter --workdir=RUN/0_4_replay

For each `replay_alpha` it prints what the filter replaces of honest records,
how far that moves the gradient, and, for some lies of the catalogue, the error
of their gradient without a filter and with it, relative to the honest one.
"""

import dataclasses
import pathlib

import jax
import numpy as np
import optax
from absl import flags

from experiments import start

_WORKDIR = flags.DEFINE_string('workdir', 'runs/tiny', 'Workdir of a run.')
_GROUPS = flags.DEFINE_integer('groups', 4, 'Groups to measure on.')
ALPHAS = (0.0, 0.05, 0.1, 0.2, 0.5, 0.8)
LIES = (
  'random routes on 5% of tokens',
  'random routes on 20% of tokens',
  'routes a token late in 20% of trajectories',
  'routes of other layers in 20% of trajectories',
  'routes of another trajectory in 20% of trajectories',
)


def measure(model, values, groups, shape, world):
  """Yields (alpha, share replaced, gradient error) and those of each lie."""
  from composer_jax.models import decoder
  from composer_jax.rl import step as steps
  from experiments.studies.staleness import lies, probe

  honest = None
  for alpha in ALPHAS:
    moe = dataclasses.replace(model.moe, replay_alpha=alpha)
    filtered = decoder.Decoder(dataclasses.replace(model, moe=moe))
    functions = steps.build(filtered, optax.sgd(1.0))
    batches = probe.packed(groups, shape).microbatches
    sums = [functions.add_microbatch(values, None, b)[0] for b in batches]
    replaced = sum(float(s.replay_replaced_M.max()) for s in sums)
    tokens = sum(float(s.num_routed) for s in sums)
    grads = probe.gradient(functions, values, batches)
    honest = grads if honest is None else honest
    errors = {'honest': probe.errors(grads, honest)['gradient_error']}
    for name in LIES:
      told = lies.tell(groups, name, world, seed=1)
      wrong = probe.gradient(
        functions, values, probe.packed(told, shape).microbatches
      )
      errors[name] = probe.errors(wrong, honest)['gradient_error']
    yield alpha, replaced / tokens, errors


def main() -> None:
  from composer_jax import wiring
  from composer_jax.core import files
  from composer_jax.models import config as model_config
  from composer_jax.rl import batching
  from composer_jax.serve import lifetime
  from composer_jax.train import workdir as workdirs
  from experiments.studies.staleness import lies

  workdir = pathlib.Path(_WORKDIR.value)
  config = files.read_json(workdir / workdirs.CONFIG)
  model = model_config.ModelConfig.from_dict(config['model'])
  rl = config['rl']
  shape = batching.shape_of(model, rows=rl['rows'], seq_len=rl['seq_len'])
  served = lifetime.load(workdir, stage='rl').variables
  values = jax.tree.map(lambda x: x.astype(np.float32), served)
  groups = wiring.kept_groups(workdir)[-_GROUPS.value :]
  world = lies.World([], [], [], model.moe.num_experts)
  for alpha, replaced, errors in measure(model, values, groups, shape, world):
    cells = ', '.join(f'{name}: {error:.3f}' for name, error in errors.items())
    print(f'alpha {alpha:g}: {replaced:.4f} replaced; {cells}', flush=True)


if __name__ == '__main__':
  start.run(main)
