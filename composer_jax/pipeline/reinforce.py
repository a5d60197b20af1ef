"""The RL stage: trainer and rollouts together, from a state to a state."""

import contextlib
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from composer_jax.checkpoint import manager, weights
from composer_jax.core import files, records
from composer_jax.delta import publish, subscribe
from composer_jax.delta import store as stores
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups as optim_groups
from composer_jax.pipeline import buffer as buffers
from composer_jax.pipeline import (
  controller,
  rollout_worker,
  stages,
  trainer_worker,
)
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import spec as specs
from composer_jax.rl import step as steps
from composer_jax.telemetry import progress
from composer_jax.text import hf_tokenizer
from composer_jax.train import export
from composer_jax.train import state as train_state

_RUN_ID = 'policy'
_WORKER_LOG = 'rollout_worker.log'
# Seconds a worker waits for the first policy before it says that none comes.
_FIRST_POLICY_S = 300.0


@dataclasses.dataclass(frozen=True)
class Start:
  """Where the stage begins, or goes on."""

  state: train_state.TrainState
  functions: steps.Functions
  reference: Any


def prepare(job: jobs.Job, checkpoints: manager.Checkpoints) -> Start:
  """Builds the step functions and the state: restored, or made from SFT."""
  spec = job.spec
  model = decoder.Decoder(spec.model)
  shapes, axes = decoder.abstract(spec.model)
  optimizer = optim_groups.optimizer(
    spec.rl.optimizer_options(),
    params=shapes['params'],
    axes=axes['params'],
    total_steps=max(spec.rl.steps, 1),
  )
  functions = steps.build(model, optimizer, ratio_cap=spec.rl.ratio_cap)
  variables = stages.load_variables(job, 'sft', job.single)
  state = jax.jit(lambda v: train_state.create(v, optimizer))(variables)
  reference = functions.policy(state) if spec.rl.kl_coefficient else None
  latest = checkpoints.latest_step()
  if latest is not None:
    like = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
      state,
    )
    state, _ = checkpoints.restore(latest, like)
  return Start(state, functions, reference)


def reinforce(job: jobs.Job) -> None:
  """Trains the SFT policy by RL; does nothing when it is finished.

  A run that was killed goes on from its last checkpoint: bundles after it are
  void, groups that later policies had a part in are dropped and counted, the
  others are trained on exactly once.
  """
  if export.finished_step(job.workdir, 'rl') is not None:
    return
  with job.times.stage('rl'):
    _reinforce(job)


def _reinforce(job: jobs.Job) -> None:
  spec, rl = job.spec, job.spec.rl
  say = jobs.tell('rl')
  checkpoints = manager.Checkpoints(job.workdir / 'checkpoints' / 'rl', keep=2)
  with contextlib.closing(checkpoints):
    start = prepare(job, checkpoints)
    first = int(start.state.step)
    publisher = publish.Publisher(
      stores.Store(job.workdir / 'store'),
      _RUN_ID,
      keyframe_every=rl.keyframe_every,
    )
    publisher.rewind(first)
    buffer = buffers.GroupBuffer(job.workdir / 'groups')
    dropped = buffer.discard_newer(first)
    if first or dropped:
      say(
        f'going on from step {first}; {len(buffer.ids())} finished groups '
        f'kept, {len(dropped)} damaged or of void policies dropped'
      )
    job.writer.truncate('rl', first)
    with (
      _placed(job, buffer) as wait,
      progress.Progress('rl', rl.steps, start=first) as bar,
    ):
      ports = _ports(job, buffer, checkpoints, publisher, wait, bar)
      state = trainer_worker.run(
        start.state,
        start.functions,
        ports,
        spec.update_options(),
        spec.batch_shape(),
        num_steps=rl.steps,
        max_staleness=rl.max_staleness,
        reference=start.reference,
      )
  export.save(job.workdir, 'rl', rl.steps, state.variables())


def _ports(
  job: jobs.Job,
  buffer: buffers.GroupBuffer,
  checkpoints: manager.Checkpoints,
  publisher: publish.Publisher,
  wait: Callable[[list[int]], list[records.Group]],
  bar: progress.Progress,
) -> trainer_worker.Ports:
  rl = job.spec.rl

  def send(state, version):
    policy = decoder.policy(state.variables())
    info = publisher.publish(weights.blocks(policy), version)
    return {'bundle_bytes': info.bytes, 'full_bytes': info.full_bytes}

  def save(step, state, is_last):
    if step % rl.checkpoint_every == 0 or is_last:
      checkpoints.save(step, state)
      # Receivers and a resumed trainer need no more than the checkpoints span.
      collect_garbage(publisher, 2 * rl.checkpoint_every + 1, bar.message)

  def log(step, metrics, groups):
    job.writer.write('rl', step, **metrics)
    for said in metrics.get('gate', []):
      bar.message(f'step {step}: out of its band: {said}')
    bar.update(
      step,
      reward=metrics['reward'],
      passed=metrics['pass_rate'],
      invalid=metrics['invalid_rate'],
      entropy=metrics['entropy'],
      staleness=metrics['staleness'],
    )
    # For audits: what the policy wrote in all groups of the step, those without
    # an advantage included.
    edits = [
      edit
      for g in groups
      for r in g.rollouts
      for edit in stages.edits_of(job, r)
    ]
    files.write_atomic(
      job.workdir / 'rl_edits' / f'{step:06d}.txt', '\n'.join(edits).encode()
    )
    if step % rl.episodes_every == 0 or step == 1:
      job.log_episodes('rl', step, list(groups[0].rollouts[:2]))

  return trainer_worker.Ports(
    buffer=buffer,
    wait=wait,
    publish=send,
    save=save,
    saved_step=lambda: max(checkpoints.steps()[:-1], default=0),
    log=log,
  )


def collect_garbage(
  publisher: publish.Publisher, keep: int, say: Callable[[str], None]
) -> None:
  """Frees what no receiver needs any more, or says why it cannot.

  Old versions whose bundles are damaged cost room and nothing else: they end
  no run.
  """
  try:
    publisher.gc(keep=keep)
  except (ValueError, FileNotFoundError) as error:
    say(f'old bundles are not deleted, the run goes on: {error}')


@contextlib.contextmanager
def _placed(
  job: jobs.Job, buffer: buffers.GroupBuffer
) -> Iterator[Callable[[list[int]], list[records.Group]]]:
  """Yields what the trainer calls to get groups, per placement."""
  if job.spec.rl.placement == 'colocated':
    with _colocated(job, buffer) as wait:
      yield wait
  else:
    with _processes(job, buffer) as wait:
      yield wait


@contextlib.contextmanager
def _processes(job: jobs.Job, buffer: buffers.GroupBuffer):
  rl = job.spec.rl
  own, others = controller.divide_cores()
  say = jobs.tell('rl')
  say(f'judging in {job.spec.sandbox.level}')
  # The worker takes its share by itself, once its sandboxes may use all.
  worker = controller.RolloutProcess(
    [*job.command, '--role=rollout'],
    log=job.workdir / _WORKER_LOG,
    cores=[*own, *others],
    max_restarts=rl.max_restarts,
    report=say,
  )
  controller.pin(own)
  try:
    yield lambda ids: buffer.wait(
      ids, timeout_s=rl.wait_timeout_s, while_waiting=worker.check
    )
  finally:
    worker.close()
    controller.pin([*own, *others])


@contextlib.contextmanager
def _colocated(job: jobs.Job, buffer: buffers.GroupBuffer):
  """Trainer and engine take turns; policies still pass through the store."""
  spec = job.spec
  receiver = Receiver(job.workdir, spec.model)
  engine = None
  with job.runner() as runner:
    collector = stages.collector_of(spec, job.tokenizer, runner, split='train')

    def wait(ids: list[int]) -> list[records.Group]:
      nonlocal engine
      update = receiver.poll()
      if receiver.problem is not None:
        # Published a moment ago by this process: waiting would not mend it, and
        # the policy before it may not sample what is due.
        raise ValueError(receiver.problem)
      if update is not None:
        version, values = update
        if engine is None:
          engine = stages.make_engine(spec, values, version)
        else:
          engine.swap(values, version)
      if engine is None:
        raise ValueError(f'No policy in {job.workdir / "store"} to roll out.')
      rollout_worker.run(
        collector,
        engine,
        buffer,
        receiver.poll,
        prompts=spec.rl.prompts,
        max_staleness=spec.rl.max_staleness,
        num_steps=spec.rl.steps,
        until_version=engine.version,
      )
      return [buffer.get(g) for g in ids]

    yield wait


class Receiver:
  """Follows the store of a run and rebuilds its policies as device arrays."""

  def __init__(self, workdir: pathlib.Path, model: model_config.ModelConfig):
    self._subscriber = subscribe.Subscriber(
      stores.Store(workdir / 'store'), _RUN_ID
    )
    self._like = jax.eval_shape(decoder.policy, decoder.abstract(model)[0])

  @property
  def problem(self) -> str | None:
    return self._subscriber.problem

  def poll(self) -> tuple[int, Any] | None:
    """(version, variables) when there is a policy newer than the last."""
    update = self._subscriber.poll()
    if update is None:
      return None
    return update.version, weights.to_tree(update.weights, self._like)


def serve_rollouts(spec: specs.Spec, workdir: pathlib.Path) -> None:
  """The whole life of a rollout worker process."""
  say = jobs.tell('rollout')
  level = files.read_json(workdir / 'sandbox.json')['level']
  tokenizer = hf_tokenizer.load_any(workdir / 'tokenizer.json')
  options = dataclasses.replace(spec.sandbox, level=level)
  with jobs.open_runner(options) as runner:
    # Before the engine's threads exist: they inherit cores and priority.
    _yield_to_sandboxes()
    receiver = Receiver(workdir, spec.model)
    version, values = _first_policy(receiver, workdir)
    say(f'serving version {version}, judging in {level}')
    version = rollout_worker.run(
      stages.collector_of(spec, tokenizer, runner, split='train'),
      stages.make_engine(spec, values, version),
      buffers.GroupBuffer(workdir / 'groups'),
      receiver.poll,
      prompts=spec.rl.prompts,
      max_staleness=spec.rl.max_staleness,
      num_steps=spec.rl.steps,
      until_version=spec.rl.steps,
    )
  say(f'done at version {version}')


def _first_policy(receiver: Receiver, workdir: pathlib.Path) -> tuple[int, Any]:
  """Waits for a trainer to publish."""
  deadline = time.monotonic() + _FIRST_POLICY_S
  while (update := receiver.poll()) is None:
    if time.monotonic() > deadline:
      raise TimeoutError(
        f'No usable policy in {workdir / "store"} within '
        f'{_FIRST_POLICY_S:.0f} s ({receiver.problem or "nothing there"}).'
      )
    time.sleep(0.05)
  return update


def _yield_to_sandboxes() -> None:
  """Lets the short answers go before the long computation.

  A tool call is a chain of short turns of an episode's thread and a sandbox;
  behind a decode step that holds the core, each turn would wait for a whole
  time slice. The sandboxes are already running: they keep their priority and
  may use every core, the rest of this process its share at a lower one.
  """
  sys.setswitchinterval(5e-4)
  controller.pin(controller.divide_cores()[1])
  if hasattr(os, 'nice'):
    os.nice(5)
