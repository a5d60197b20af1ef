"""Compares gradients of replayed routes with those of fresh ones."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from composer_jax import wiring
from composer_jax.core import files, records
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.rl import advantage, batching, comparison
from composer_jax.rl import step as steps
from composer_jax.serve import lifetime
from composer_jax.train import workdir as workdirs

# Groups whose gradient is taken, of the last that a run kept.
_GROUPS = 8


def gradient(
  functions: steps.Functions, values: Any, microbatches: list[Any]
) -> np.ndarray:
  """Returns the flat gradient of microbatches, before its scale."""
  sums = None
  for batch in microbatches:
    sums, _ = functions.add_microbatch(values, sums, batch)
  assert sums is not None
  leaves = jax.device_get(jax.tree.leaves(sums.grads))
  return np.concatenate([leaf.ravel() for leaf in leaves])


def errors(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
  """The relative error of a gradient to another one, and their cosine."""
  sizes = np.linalg.norm(one), np.linalg.norm(other)
  return {
    'gradient_error': float(np.linalg.norm(one - other) / sizes[1]),
    'gradient_cosine': float(one @ other / (sizes[0] * sizes[1])),
  }


def packed(
  groups: list[records.Group], shape: batching.BatchShape
) -> batching.PackedTrajectories:
  """Packs all trajectories with the advantages of their groups."""
  windows = [
    (t, float(a))
    for g in groups
    for r, a in zip(g.rollouts, advantage_of(g), strict=True)
    for t in r.trajectories
  ]
  return batching.pack([t for t, _ in windows], [a for _, a in windows], shape)


def advantage_of(group: records.Group) -> np.ndarray:
  rewards = np.array([r.reward for r in group.rollouts])
  return advantage.group_advantages(group, rewards)


def gradient_error(workdir: pathlib.Path) -> dict[str, Any]:
  """Errors of replay's gradient to that of fresh routes, at the last policy.

  On the last groups that the run kept; {} if it kept none.
  """
  groups = wiring.kept_groups(workdir)[-_GROUPS:]
  if not groups:
    return {}
  config = files.read_json(workdir / workdirs.CONFIG)
  model = model_config.ModelConfig.from_dict(config['model'])
  rl = config['rl']
  shape = batching.shape_of(model, rows=rl['rows'], seq_len=rl['seq_len'])
  functions = steps.build(decoder.Decoder(model), optax.sgd(1.0))
  served = lifetime.load(workdir, stage='rl')
  values = jax.tree.map(lambda x: x.astype(jnp.float32), served.variables)
  batches = packed(groups, shape).microbatches
  replayed = gradient(functions, values, batches)
  afresh = gradient(functions, values, list(map(comparison.fresh, batches)))
  return {'gradient_groups': len(groups), **errors(replayed, afresh)}
