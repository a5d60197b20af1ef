"""Training of the study's cases, which keeps the policies of each step."""

import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks import delta_recordings
from benchmarks import delta_visibility as visibility
from composer_jax import wiring
from composer_jax.core import trees
from composer_jax.models import decoder
from composer_jax.optim import groups
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import spec as specs
from composer_jax.pipeline import stages
from composer_jax.rl import collect, policy_loss, update
from composer_jax.rl import step as rl_step
from composer_jax.rl.hints import distill
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step
from configs.composer import tiny

KEPT = 10  # policies of a case: a catch-up over eight deltas, and one more
# Learning rate of Adam's parameters over Muon's, as in
# configs/composer/tiny.py.
REST_SHARE = 0.4

State = train_state.TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One stretch of training.

  Attributes:
    stage: stage to continue: 'cpt' or 'rl'.
    optimizer: 'muon' or 'adam'.
    learning_rate: constant learning rate; the moments start at zero.
    steps: number of steps. Adam's first steps are sign steps, three times as
      large as those after a few dozen; Muon's momentum settles in some twenty.
    is_cold: true if the masters start on the grid of bfloat16, as those of a
      checkpoint in bfloat16 do.
  """

  stage: str
  optimizer: str
  learning_rate: float
  steps: int
  is_cold: bool = False

  @property
  def name(self) -> str:
    """Name of the case's folder."""
    rate = f'{self.learning_rate:g}'.replace('e-0', 'e-')
    cold = '_cold' if self.is_cold else ''
    return f'{self.stage}_{self.optimizer}_{rate}{cold}'


CASES = (
  Case(stage='cpt', optimizer='muon', learning_rate=2e-5, steps=25),
  Case(stage='cpt', optimizer='muon', learning_rate=1e-4, steps=25),
  Case(stage='rl', optimizer='adam', learning_rate=1e-6, steps=28),
  Case(stage='rl', optimizer='adam', learning_rate=3e-6, steps=28),
  Case(stage='rl', optimizer='adam', learning_rate=1e-5, steps=28),
  # No other publication has these two.
  Case(stage='rl', optimizer='muon', learning_rate=5e-6, steps=28),
  Case(
    stage='rl', optimizer='adam', learning_rate=1e-6, steps=28, is_cold=True
  ),
)


def spec(*, quick: bool) -> specs.Spec:
  """tiny.py with a larger model, fewer steps, and groups that differ."""
  c = tiny.get_config('smoke' if quick else '')
  c.mesh = dict(replica=1, fsdp=1, context=1)
  c.telemetry.tensorboard = False
  c.rl.max_staleness = 0
  c.rl.mismatch_every = 0
  # The gate only flags, since any step of a policy may be recorded.
  c.rl.gate.action = 'flag'
  c.rl.warmup_steps = c.rl.decay_steps = 0
  if not quick:
    c.model.embed_dim = 256
    c.model.attention.head_dim = 64
    c.model.dense_ffw_dim = 768
    c.model.moe.num_experts = 16
    c.model.moe.ffw_dim = 256
    c.cpt.steps, c.cpt.decay_steps = 160, 50
    c.sft.steps, c.sft.decay_steps = 160, 50
    c.sft.batch_size = 12
    c.rl.prompts = 4
    c.rollout.num_slots = 32
  return wiring.spec_of(c.to_dict())


def record(
  job: jobs.Job, case: Case, folder: pathlib.Path, *, quick: bool
) -> None:
  """Trains a case and keeps its last policies and its last two masters.

  about.json has for every step the share of bfloat16 weights that changed, and
  the share that the law of `delta.visibility` predicts from the masters.
  """
  steps = 12 if quick else case.steps
  states = (_reinforced if case.stage == 'rl' else _pretrained)(
    job, case, steps
  )
  start = time.process_time()
  recorded_metrics: list[dict[str, Any]] = []
  dtypes: dict[str, str] = {}
  before: np.ndarray | None = None
  for step, (state, metrics) in enumerate(states):
    masters = {
      f'params/{name}': np.asarray(array)
      for name, array in trees.flatten_names(state.params).items()
    }
    after = np.concatenate([array.reshape(-1) for array in masters.values()])
    if before is not None:
      recorded_metrics.append(metrics | _changes(before, after))
      print(
        f'{case.name} step {step} of {steps}: {recorded_metrics[-1]}',
        flush=True,
      )
    before = after
    if step > steps - KEPT:
      policy = trees.flatten_names(decoder.policy(state.variables()))
      arrays = {name: np.asarray(array) for name, array in policy.items()}
      dtypes = {name: str(a.dtype) for name, a in arrays.items()}
      delta_recordings.save(folder, 'policy', step, arrays)
    if step >= steps - 1:
      delta_recordings.save(folder, 'masters', step, masters)
  about = dataclasses.asdict(case) | {
    'steps': steps,
    'kept': KEPT,
    'dtypes': dtypes,
    'parameters': 0 if before is None else before.size,
    'cpu_s': round(time.process_time() - start, 1),
    'metrics': recorded_metrics,
  }
  delta_recordings.finish(folder, about)


def _changes(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
  update = after - before
  codes = [
    m.astype(ml_dtypes.bfloat16).view(np.uint16) for m in (before, after)
  ]
  rms = math.sqrt(np.mean(np.square(update, dtype=np.float64)))
  expected = visibility.expected_share(before, update, ml_dtypes.bfloat16)
  return {
    'changed': float((codes[0] != codes[1]).mean()),
    'expected': expected,
    'update_rms': rms,
  }


def _options(job: jobs.Job, case: Case) -> groups.OptimizerOptions:
  stage = job.spec.rl if case.stage == 'rl' else job.spec.cpt
  return dataclasses.replace(
    stage.optimizer_options(),
    name=case.optimizer,
    learning_rate=case.learning_rate,
    adam_learning_rate=REST_SHARE
    * case.learning_rate,  # beside Muon's own state
    warmup_steps=0,
    decay_steps=0,
  )


def _start(job: jobs.Job, case: Case, steps: int, exported: str):
  """Returns a case's optimizer, and its state from a finished stage."""
  shapes, axes = decoder.abstract(job.spec.model)
  optimizer = groups.optimizer(
    _options(job, case),
    params=shapes['params'],
    axes=axes['params'],
    total_steps=steps,
  )
  variables = stages.load_variables(job, exported, job.single)
  if case.is_cold:
    params = jax.tree.map(_on_grid, variables['params'])
    variables = {**variables, 'params': params}
  state = jax.jit(lambda v: train_state.create(v, optimizer))(variables)
  return optimizer, state


def _on_grid(array: jax.Array) -> jax.Array:
  return array.astype(jnp.bfloat16).astype(array.dtype)


def _pretrained(
  job: jobs.Job, case: Case, steps: int
) -> Iterator[tuple[State, dict[str, Any]]]:
  """Yields states of pretraining; the next step donates the state before."""
  optimizer, state = _start(job, case, steps, 'cpt')
  step = jax.jit(
    train_step.make(
      job.spec.lm_model,
      optimizer,
      plan=None,
      bias_rate=job.spec.cpt.bias_update_rate,
    ),
    donate_argnums=0,
  )
  stream = stages.pretraining_stream(job)
  for _ in range(job.spec.cpt.steps):
    next(stream)  # batches that pretraining has seen
  yield state, {}
  for _ in range(steps):
    state, metrics = step(state, next(stream))
    yield state, {'loss': round(float(metrics.loss.loss), 4)}


def _reinforced(
  job: jobs.Job, case: Case, steps: int
) -> Iterator[tuple[State, dict[str, Any]]]:
  """Yields states of `rl.sync_loop` without hints; a step donates the last."""
  optimizer, state = _start(job, case, steps, 'sft')
  rl = job.spec.rl
  functions = rl_step.build(
    decoder.Decoder(job.spec.model),
    optimizer,
    loss=functools.partial(policy_loss.loss, options=rl.loss),
  )
  with job.runner() as runner:
    collector = stages.collector_of(
      job.spec, job.systems, job.tokenizer, runner, split='train'
    )
    engine = stages.make_engine(job.spec, functions.policy(state), 0)
    options = dataclasses.replace(job.spec.update_options(), hints=distill.OFF)
    yield state, {}
    for step in range(steps):
      first_group = step * rl.prompts
      played = collect.groups(
        collector, engine, range(first_group, first_group + rl.prompts)
      )
      state, metrics = update.update(
        state, played, functions, options, _shape(job)
      )
      engine.swap(functions.policy(state), step + 1)
      names = ('reward', 'pass_rate', 'informative_groups', 'grad_norm')
      yield state, {name: round(metrics[name], 5) for name in names}


def _shape(job: jobs.Job):
  return job.spec.batch_shape()
