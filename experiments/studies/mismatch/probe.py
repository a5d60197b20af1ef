"""Measures how far a finished policy's sampler and trainer differ.

Both sides have the same weights, so a difference is rounding or a fault.
Nothing is trained and no generated code is executed.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.agent import episode
from composer_jax.core import checks, files, records
from composer_jax.gate import routes
from composer_jax.models import decoder
from composer_jax.rl import batching, collect, comparison, mismatch
from composer_jax.rl import step as steps
from composer_jax.rollout import engine as engines
from composer_jax.serve import lifetime
from composer_jax.tasks.list_functions import environment, family, runners
from composer_jax.train import workdir as workdirs

# Added to a run's seed: no stage of it samples with these numbers.
SEED = 4_000_037


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions:
  """Size of a probe.

  Attributes:
    tokens: least number of tokens that the policy samples.
    rollouts: number of rollouts of each task; they share its prompt.
    num_slots: slots of the engine.
    rows: rows of a microbatch.
    seed: seed of tasks and sampling.
  """

  tokens: int
  rollouts: int = 8
  num_slots: int = 64
  rows: int = 8
  seed: int = 0

  def __post_init__(self):
    checks.at_least(self, 0, 'seed')
    checks.at_least(self, 1, 'tokens', 'rollouts', 'num_slots', 'rows')


def of_run(
  workdir: pathlib.Path,
  options: ProbeOptions,
  *,
  stage: str,
  overrides: dict[str, Any],
) -> dict[str, Any]:
  """Probes a finished stage of a run on its held-out tasks.

  Args:
    workdir: workdir of the run.
    options: size of the probe.
    stage: stage whose export is probed.
    overrides: compute_dtype and numerics of the model.

  Returns:
    The stage and its numerics, and the metrics of `compare`.

  Raises:
    ValueError: the stage is not finished, or the overrides do not fit.
  """
  policy = lifetime.load(workdir, stage=stage, overrides=overrides)
  model = policy.model
  config = files.read_json(workdir / workdirs.CONFIG)
  limits = episode.EpisodeOptions(**config['episode'])
  trajectories = sample(policy, limits, options)
  # As `rl.step` has them: the values of the policy, in float32.
  values = jax.tree.map(lambda a: a.astype(jnp.float32), policy.variables)
  align = batching.shape_of(model, rows=1, seq_len=2**20).align
  shape = batching.shape_of(
    model,
    rows=options.rows,
    seq_len=-(-limits.max_tokens // align) * align,
  )
  score = steps.scorer(decoder.Decoder(model))
  return {
    'name': stage,
    'compute_dtype': model.compute_dtype,
    'numerics': model.numerics,
    'backend': jax.default_backend(),
    'trajectories': len(trajectories),
    **compare(score, values, trajectories, shape),
  }


def compare(
  score: Callable[..., steps.Scores],
  values: Any,
  trajectories: list[records.Trajectory],
  shape: batching.BatchShape,
) -> dict[str, Any]:
  """Compares trajectories with the weights that sampled them.

  Args:
    score: function that `rl.step.scorer` made.
    values: weights of the policy that sampled.
    trajectories: trajectories with their routes.
    shape: shape of the microbatches.

  Returns:
    The metrics of `routes.both_ways`, and for scale those of a replay of
    `shifted` routes.
  """

  def scored(batches_of):
    return [score(values, batch) for batch in batches_of]

  zeros = [0.0] * len(trajectories)
  packed = batching.pack(trajectories, zeros, shape)
  afresh = scored(map(comparison.fresh, packed.microbatches))
  wrong = batching.pack([shifted(t) for t in trajectories], zeros, shape)
  ratios = comparison.ratios(wrong, scored(wrong.microbatches))
  agreement = routes.both_ways(wrong, [], afresh).get('route_agreement')
  return {
    'sampled_tokens': int(sum(t.loss_mask_T.sum() for t in trajectories)),
    **routes.both_ways(packed, scored(packed.microbatches), afresh),
    **mismatch.gap(np.concatenate(ratios), '_shifted'),
    'route_agreement_shifted': agreement,
  }


def shifted(trajectory: records.Trajectory) -> records.Trajectory:
  """Puts every route under the next token, a fault that a gate must catch."""
  ids_TMA = trajectory.expert_ids_TMA.copy()
  ids_TMA[1:-1] = trajectory.expert_ids_TMA[:-2]
  return dataclasses.replace(trajectory, expert_ids_TMA=ids_TMA)


def sample(
  policy: lifetime.ServedPolicy,
  limits: episode.EpisodeOptions,
  options: ProbeOptions,
) -> list[records.Trajectory]:
  seed = options.seed + SEED
  collector = collect.Collector(
    task_of_group=lambda g: family.generate(g, 'unseen_all', seed),
    play=collect.episode_player(
      policy.tokenizer,
      lambda task: environment.FunctionEnvironment(
        task, runners.StaticRunner()
      ),
      limits,
    ),
    rollouts_per_group=options.rollouts,
    seed=seed,
  )
  engine = engines.Engine(
    policy.model,
    policy.variables,
    0,
    engines.EngineOptions(
      num_slots=options.num_slots, max_len=limits.max_tokens, prefill_chunk=32
    ),
  )
  trajectories: list[records.Trajectory] = []
  at_once = max(options.num_slots // options.rollouts, 1)
  first = 0
  while sum(t.loss_mask_T.sum() for t in trajectories) < options.tokens:
    groups = collect.groups(collector, engine, range(first, first + at_once))
    trajectories += [
      t for g in groups for r in g.rollouts for t in r.trajectories
    ]
    first += at_once
  return trajectories
