"""How far a finished policy's sampler and trainer differ, outside of any run.

Both sides have the same weights, so that what is found is arithmetic alone, or
a fault. Nothing is trained and no generated code is executed.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.agent import episode
from composer_jax.core import files, records
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.rl import batching, collect, comparison, mismatch
from composer_jax.rl import step as steps
from composer_jax.rollout import engine as engines
from composer_jax.serve import lifetime
from composer_jax.tasks.list_functions import environment, family, runners
from composer_jax.train import workdir as workdirs

# Added to a run's seed: no stage of it samples with these numbers.
_SEED = 4_000_037


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions:
  """What is sampled, and how.

  Attributes:
    tokens: that the policy samples, at least.
    rollouts: of each task; they share its prompt.
    num_slots: of the engine.
    rows: of a microbatch.
    seed: of tasks and sampling.
  """

  tokens: int
  rollouts: int = 8
  num_slots: int = 64
  rows: int = 8
  seed: int = 0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      lowest = 0 if field.name == 'seed' else 1
      if getattr(self, field.name) < lowest:
        raise ValueError(
          f'{field.name} must be at least {lowest}, not '
          f'{getattr(self, field.name)}.'
        )


def of_run(
  workdir: pathlib.Path,
  options: ProbeOptions,
  *,
  stage: str,
  overrides: dict[str, Any],
) -> dict[str, Any]:
  """Probes a finished stage of a run on its held-out tasks.

  Args:
    workdir: of the run.
    options: of the probe.
    stage: whose export.
    overrides: of the model's config: compute_dtype and numerics.

  Returns:
    What was probed, and the metrics of `compare`.

  Raises:
    ValueError: the stage is not finished, or the model cannot be so.
  """
  source = lifetime.load(workdir, stage=stage, overrides=overrides)
  config = files.read_json(workdir / workdirs.CONFIG)
  found = measure(
    source.model,
    source.variables,
    source.tokenizer,
    episode.EpisodeOptions(**config['episode']),
    options,
  )
  return {
    'name': stage,
    'compute_dtype': source.model.compute_dtype,
    'numerics': source.model.numerics,
    'backend': jax.default_backend(),
    **found,
  }


def measure(
  model: model_config.ModelConfig,
  variables: Any,
  tokenizer: hf_tokenizer.AnyTokenizer,
  limits: episode.EpisodeOptions,
  options: ProbeOptions,
) -> dict[str, Any]:
  """Samples episodes with the engine and scores them as the trainer does.

  Args:
    model: what runs on both sides.
    variables: of the policy, as bundles carry them.
    tokenizer: of the policy.
    limits: of the episodes.
    options: of the probe.
  """
  trajectories = _sample(model, variables, tokenizer, limits, options)
  # As `rl.step` has them: the values of the policy, in float32.
  values = jax.tree.map(lambda a: a.astype(jnp.float32), variables)
  align = batching.shape_of(model, rows=1, seq_len=2**20).align
  shape = batching.shape_of(
    model,
    rows=options.rows,
    seq_len=-(-limits.max_tokens // align) * align,
  )
  score = steps.scorer(decoder.Decoder(model))
  found = compare(score, values, trajectories, shape)
  return {'trajectories': len(trajectories), **found}


def compare(
  score: Callable[..., steps.Scores],
  values: Any,
  trajectories: list[records.Trajectory],
  shape: batching.BatchShape,
) -> dict[str, Any]:
  """Compares trajectories with the weights that sampled them.

  Args:
    score: of `rl.step.scorer`.
    values: of the policy that sampled.
    trajectories: with their routes.
    shape: of the microbatches.

  Returns:
    The metrics of `comparison.both_ways`, and for scale those of a replay of
    `shifted` routes.
  """

  def scored(batches_of):
    return [score(values, batch) for batch in batches_of]

  nothing = [0.0] * len(trajectories)
  packed = batching.pack(trajectories, nothing, shape)
  afresh = scored(map(comparison.fresh, packed.microbatches))
  lying = batching.pack([shifted(t) for t in trajectories], nothing, shape)
  ratios = comparison.ratios(lying, scored(lying.microbatches))
  agreement = comparison.both_ways(lying, [], afresh).get('route_agreement')
  return {
    'sampled_tokens': int(sum(t.loss_mask_T.sum() for t in trajectories)),
    **comparison.both_ways(packed, scored(packed.microbatches), afresh),
    **mismatch.gap(np.concatenate(ratios), '_shifted'),
    'route_agreement_shifted': agreement,
  }


def shifted(trajectory: records.Trajectory) -> records.Trajectory:
  """With every route under the token after its own: what a gate must catch."""
  ids_TMA = trajectory.expert_ids_TMA.copy()
  ids_TMA[1:-1] = trajectory.expert_ids_TMA[:-2]
  return dataclasses.replace(trajectory, expert_ids_TMA=ids_TMA)


def _sample(
  model: model_config.ModelConfig,
  variables: Any,
  tokenizer: hf_tokenizer.AnyTokenizer,
  limits: episode.EpisodeOptions,
  options: ProbeOptions,
) -> list[records.Trajectory]:
  seed = options.seed + _SEED
  collector = collect.Collector(
    task_of_group=lambda g: family.generate(g, 'held_out', seed),
    play=collect.episode_player(
      tokenizer,
      lambda task: environment.FunctionEnvironment(
        task, runners.StaticRunner()
      ),
      limits,
    ),
    rollouts_per_group=options.rollouts,
    seed=seed,
  )
  engine = engines.Engine(
    model,
    variables,
    0,
    engines.EngineOptions(
      num_slots=options.num_slots, max_len=limits.max_tokens, prefill_chunk=32
    ),
  )
  found: list[records.Trajectory] = []
  at_once = max(options.num_slots // options.rollouts, 1)
  first = 0
  while sum(t.loss_mask_T.sum() for t in found) < options.tokens:
    groups = collect.groups(collector, engine, range(first, first + at_once))
    found += [t for g in groups for r in g.rollouts for t in r.trajectories]
    first += at_once
  return found
