"""Drives one stage (pretraining or fine-tuning) from start or resume to export.

A stage that was killed and is started again with the same arguments continues
from its last checkpoint; on CPU it writes the same losses bit for bit.
"""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import batches, checks
from composer_jax.models import config as model_config
from composer_jax.models import decoder, flops
from composer_jax.optim import groups
from composer_jax.optim.muon import plan
from composer_jax.telemetry import progress
from composer_jax.telemetry import writer as writers
from composer_jax.train import compiler_options, lm_loss, reporting
from composer_jax.train import heads as train_heads
from composer_jax.train import placement as train_placement
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step
from composer_jax.train.checkpoints import export, manager


class BatchStream(Protocol):
  """Resumable iterator over numpy batches (grain's protocol)."""

  def __next__(self) -> batches.LMBatch: ...

  def get_state(self) -> Any: ...

  def set_state(self, state: Any) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
  """Options of a stage's loop that the config shows.

  Attributes:
    steps: optimizer steps; cpt of an imported model may have 0, sft may not.
    batch_size: rows of a step, summed over all devices.
    accumulate: microbatches of a step, run in sequence to save memory.
    seq_len: tokens of a row.
    checkpoint_every: steps between checkpoints; the last step always has one.
    eval_every: steps between held-out losses, which the first and the last
      step have in any case.
    log_every: steps between lines of metrics.
  """

  steps: int
  batch_size: int
  seq_len: int
  accumulate: int = 1
  checkpoint_every: int = 100
  eval_every: int = 100
  log_every: int = 10

  def __post_init__(self):
    names = {f.name for f in dataclasses.fields(TrainingOptions)} - {'steps'}
    checks.at_least(self, 1, *sorted(names))
    checks.at_least(self, 0, 'steps')


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOptions(TrainingOptions):
  """All options of one stage.

  Attributes:
    stage: name in metrics and folders ('cpt', 'sft').
    bias_rate: step of the sigmoid router's selection bias; 0 freezes it.
    seed: seed of initial weights that are not given.
    heads: training of heads for multi-token prediction; None trains none.
  """

  stage: str
  optimizer: groups.OptimizerOptions
  bias_rate: float
  seed: int
  heads: train_heads.HeadTraining | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Programs:
  """Compiled functions of a stage; `like` has the shapes of its state."""

  first_state: Callable[[decoder.Variables | None], train_state.TrainState]
  step: Any
  evaluate: lm_loss.SumFunction
  like: train_state.TrainState
  muon: plan.MuonPlan | None


def run(
  options: LoopOptions,
  *,
  workdir: str | os.PathLike,
  model: model_config.ModelConfig,
  placement: train_placement.Placement,
  stream: BatchStream,
  heldout: Sequence[batches.LMBatch],
  writer: writers.Writer,
  initial: decoder.Variables | None = None,
) -> decoder.Variables:
  """Trains a stage to its end and returns its variables, frozen ones excepted.

  Checkpoints, which include the stream's state, are in `checkpoints/<stage>` of
  the workdir and the result in `exports/<stage>`; a stage that has an export is
  not run again.

  Args:
    initial: variables to start from; None draws them from the seed.

  Raises:
    FloatingPointError: a loss or gradient was not finite.
    ValueError: the stream ends early, or has batches of another shape.
    manager.DamagedCheckpoint: the last checkpoint is damaged.
    OSError: the disk is full; earlier checkpoints are intact.
  """
  stage = options.stage
  programs = make_programs(options, model, placement)
  if export.finished_step(workdir, stage) is not None:
    like = decoder.without_base(programs.like.variables())
    wide = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.float32), like)
    return export.load(workdir, stage, wide)
  # Placed once; small beside the model.
  heldout = [placement.put(batch, options.batch_size) for batch in heldout]

  def heldout_loss(state):
    return lm_loss.mean_loss(programs.evaluate, state.variables(), heldout)

  checkpoints = manager.Checkpoints(
    pathlib.Path(workdir) / 'checkpoints' / stage,
    keep=2,  # The last may be damaged.
  )
  with contextlib.closing(checkpoints):
    start, state = checkpoints.latest_step() or 0, None
    if start:
      state, data = checkpoints.restore(start, programs.like.own())
      if programs.like.base:
        base = programs.first_state(initial).base
        state = state.replace(base=base)
      stream.set_state(data['stream'])
    # The line of step 0 is written again by a run that has no checkpoint.
    writer.truncate(stage, -1 if state is None else start)
    with progress.Progress(stage, options.steps, start=start) as bar:
      report = _reporter(options, model, placement, writer, bar)
      for line in placement.lines:
        bar.message(line)
      bar.message('compiling, then step by step')
      if state is None:
        state = programs.first_state(initial)
        report.heldout(
          0,
          heldout_loss(state),
          **reporting.placed(placement),
          **reporting.muon_metrics(programs.muon),
        )

      for step in range(start + 1, options.steps + 1):
        batch = _next_batch(stream, options, placement, step)
        batch = placement.put(batch, options.batch_size)
        state, metrics = programs.step(state, batch)
        report.push(step, metrics)
        is_last = step == options.steps
        is_evaluated = is_last or step % options.eval_every == 0
        is_saved = is_last or step % options.checkpoint_every == 0
        if is_evaluated or is_saved:
          # First: a checkpoint promises that the step was finite, and that its
          # line is in the metrics.
          report.flush()
        if is_evaluated:
          report.heldout(step, heldout_loss(state))
        if is_saved:
          data = {'stream': stream.get_state()}
          checkpoints.save(step, state.own(), data)
  trained = state.trained()
  export.save(workdir, stage, options.steps, trained)
  return trained


@functools.lru_cache(maxsize=4)
def make_programs(
  options: LoopOptions,
  model: model_config.ModelConfig,
  placement: train_placement.Placement,
) -> _Programs:
  """Jits the functions of a stage from shapes; cached, so compiled once."""
  abstract, axes = decoder.abstract(model)
  trained = decoder.trained(abstract)
  described = dict(
    params=abstract[trained],
    axes=axes[trained],
    shardings=placement.variables[trained],
  )
  optimizer = groups.optimizer(
    options.optimizer, total_steps=options.steps, **described
  )

  heads = train_heads.program(
    options.heads, model, options.steps, placement.variables
  )

  def create(variables):
    dtype = options.optimizer.masters
    return train_state.create(
      variables,
      optimizer,
      dtype=dtype,
      heads=heads.optimizer if heads else None,
    )

  shapes = jax.eval_shape(create, abstract)
  variable_places, mesh = placement.variables, placement.mesh
  places = train_state.shardings(
    shapes, variable_places, mesh, options.optimizer.offload
  )
  device = placement.mesh.devices.flat[0]

  @functools.partial(jax.jit, out_shardings=places)
  def init(key):
    return create(decoder.init(model, key))

  def first_state(initial):
    if initial is None:
      return init(jax.random.key(options.seed))
    placed = jax.device_put(initial, variable_places)
    return train_state.place(create, placed, places)

  step = train_step.make(
    model,
    optimizer,
    plan=placement.plan,
    bias_rate=options.bias_rate,
    clips_logits=options.optimizer.clips_logits,
    accumulate=options.accumulate,
    places=variable_places[trained],
    heads=heads,
  )
  return _Programs(
    first_state=first_state,
    step=jax.jit(
      step,
      donate_argnums=0,
      in_shardings=(places, placement.batch),
      out_shardings=(places, placement.replicated),
      compiler_options=compiler_options.of(device.platform, device.device_kind),
    ),
    evaluate=jax.jit(
      lm_loss.heldout_sums(model, plan=placement.plan),
      in_shardings=(places.variables(), placement.batch),
      out_shardings=placement.replicated,
    ),
    like=jax.tree.map(
      lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
      shapes,
      places,
    ),
    muon=groups.plan(options.optimizer, **described),
  )


def _reporter(
  options: LoopOptions,
  model: model_config.ModelConfig,
  placement: train_placement.Placement,
  writer: writers.Writer,
  bar: progress.Progress,
) -> reporting.Reporter:
  schedule = groups.schedule(
    options.optimizer, options.steps, options.optimizer.learning_rate
  )
  return reporting.Reporter(
    options.stage,
    writer=writer,
    bar=bar,
    speed=reporting.Speed(_flops(options, model)),
    learning_rates=np.asarray(schedule(jnp.arange(options.steps))),
    log_every=options.log_every,
    expert_shards=placement.expert_shards,
  )


def _flops(options: LoopOptions, model: model_config.ModelConfig) -> float:
  """Counts the operations of a step per token."""
  heads, seq_len = options.heads, options.seq_len
  policy = flops.train_per_token(model, seq_len)
  if heads is None:
    return policy
  if heads.is_alone:
    policy = flops.forward_per_token(model, seq_len)
  return policy + flops.heads_per_token(model, seq_len)


def _next_batch(
  stream: BatchStream,
  options: LoopOptions,
  placement: train_placement.Placement,
  step: int,
) -> batches.LMBatch:
  batch = next(stream, None)
  if batch is None:
    raise ValueError(
      f'The stream of stage {options.stage!r} ended before step {step} of '
      f'{options.steps}; give it more data or fewer steps.'
    )
  # Each process feeds its own rows of the global batch.
  rows = placement.rows_here(options.batch_size)
  wanted = (len(rows), options.seq_len)
  if batch.tokens_BT.shape != wanted:
    raise ValueError(
      f'The stream of stage {options.stage!r} gives batches of '
      f'{batch.tokens_BT.shape}; its options ask for {wanted} '
      '(the rows of batch_size on devices of this process, seq_len).'
    )
  return batch
