"""Trains one tiny model in each format of its experts, on the same batches.

  python -m experiments.studies.low_precision.run --workdir=runs/low_precision

Resumes after a kill: a finished run is a line of results/.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from composer_jax.core import batches
from composer_jax.models import config as model_config
from composer_jax.models import decoder, head
from composer_jax.optim import groups
from composer_jax.train import state as train_state
from experiments import start
from experiments.studies import results
from experiments.studies.muon import training

_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/low_precision', 'Folder of the corpus.'
)
_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Seeds of the runs.')
_STEPS = flags.DEFINE_integer('steps', 300, 'Optimizer steps of a run.')
_ROOT = pathlib.Path(__file__).parent
_BYTES = 3_000_000  # of the corpus
_ROWS = 8

# Formats of the forward pass and of the backward pass.
ARMS = (
  ('bf16', 'dequantised'),
  ('mxfp8', 'dequantised'),
  ('mxfp8', 'mxfp8'),
  ('nvfp4', 'dequantised'),
  ('nvfp4', 'mxfp8'),
  ('int4', 'dequantised'),
)


def model(forward: str, backward: str) -> model_config.ModelConfig:
  config = training.model()
  moe = dataclasses.replace(config.moe, ffw_dim=64)
  return dataclasses.replace(
    config,
    embed_dim=64,
    num_layers=3,
    moe=moe,
    precision=model_config.PrecisionConfig(experts=forward, backward=backward),
  )


def _fixed_routes(config, tokens_BT):
  """Returns experts that depend on layer and token alone."""
  e = config.moe.num_experts
  first_MBT = tokens_BT + jnp.arange(config.num_moe_layers)[:, None, None]
  other_MBT = first_MBT + 1 + tokens_BT // e % (e - 1)
  return (jnp.stack([first_MBT, other_MBT], -1) % e).astype(jnp.uint16)


def nats(
  variables: Any,
  batch: batches.LMBatch,
  config: model_config.ModelConfig,
  is_fixed: bool,
) -> jax.Array:
  """Returns the sum of weighted tokens' losses in nats."""
  routes = _fixed_routes(config, batch.tokens_BT) if is_fixed else None
  places = batch.tokens_BT, batch.segment_ids_BT, batch.positions_BT
  output = decoder.Decoder(config).apply(
    variables, *places, expert_ids_MBTA=routes
  )
  logprobs_BT, _ = head.target_logprobs(
    variables, output.hidden_BTD, *places[:2], None, config, None
  )
  return -(batch.loss_weights_BT * logprobs_BT).sum()


def begin(
  config: model_config.ModelConfig,
  options: groups.OptimizerOptions,
  steps: int,
  seed: int,
  is_fixed: bool,
) -> tuple[train_state.TrainState, Callable[..., train_state.TrainState]]:
  """Returns a first state, and (state, batch) -> the state after a step.

  The selection bias stays at 0.
  """
  shapes, axes = decoder.abstract(config)
  transform = groups.optimizer(
    options, params=shapes['params'], axes=axes['params'], total_steps=steps
  )
  variables = decoder.init(config, jax.random.key(seed))
  first = train_state.create(variables, transform)
  bias = {'selection_bias': jax.tree.map(jnp.zeros_like, first.selection_bias)}

  def step(state, batch):
    def loss(values):
      total = nats({'params': values, **bias}, batch, config, is_fixed)
      return total / batch.loss_weights_BT.sum()

    values = train_state.policy_values(state.params, config)
    gradients = jax.grad(loss)(values)
    updates, kept = transform.update(gradients, state.opt_state, state.params)
    params = groups.apply_updates(state.params, updates, state.step)
    return state.replace(step=state.step + 1, params=params, opt_state=kept)

  return first, step


def train(
  arm: tuple[str, str], seed: int, is_fixed: bool, data: training.Data
) -> dict[str, Any]:
  """Trains once, the selection bias left at 0; returns a row of results."""
  config, steps = model(*arm), _STEPS.value
  options = training.Arm(
    optimizer='adam', learning_rate=4e-3, seed=seed, steps=steps
  ).options()
  state, step = begin(config, options, steps, seed, is_fixed)
  step = jax.jit(step, donate_argnums=0)
  bias = {'selection_bias': jax.tree.map(jnp.zeros_like, state.selection_bias)}

  @jax.jit
  def held_out(params, batch):
    values = train_state.policy_values(params, config)
    return nats({'params': values, **bias}, batch, config, is_fixed)

  for batch in itertools.islice(stream(data, seed), steps):
    state = step(state, batch)
  weight = sum(float(b.loss_weights_BT.sum()) for b in data.heldout)
  total = sum(float(held_out(state.params, b)) for b in data.heldout)
  return {
    'stage': 'fixed' if is_fixed else 'free',
    'forward': arm[0],
    'backward': arm[1],
    'seed': seed,
    'step': steps,
    'heldout_loss': round(total / weight, 5),
    'finite': bool(np.isfinite(total)),
  }


def stream(data: training.Data, seed: int) -> Iterator[batches.LMBatch]:
  """Yields the batches of a run."""
  for batch in data.stream(seed):
    yield jax.tree.map(lambda x: x[:_ROWS], batch)


def corpus() -> training.Data:
  return training.data(_WORKDIR.value, ('pinned',), _BYTES)


def main() -> None:
  data = corpus()
  known = results.read(_ROOT / 'results')
  fields = ('stage', 'forward', 'backward', 'seed', 'step')
  done = {tuple(row.get(f) for f in fields) for row in known}
  # Seed by seed, so that a part of them compares all formats.
  for seed, is_fixed, arm in itertools.product(
    map(int, _SEEDS.value), (True, False), ARMS
  ):
    stage = 'fixed' if is_fixed else 'free'
    if (stage, *arm, seed, _STEPS.value) in done:
      continue
    row = train(arm, seed, is_fixed, data)
    results.add(_ROOT / 'results', [row], by=fields)
    print(row, flush=True)


if __name__ == '__main__':
  start.run(main)
