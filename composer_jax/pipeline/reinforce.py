"""The RL stage: connects trainer and rollouts, from SFT to trained policy."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

from composer_jax.core import files, processes, records, seams
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
from composer_jax.rl import policy_loss, update
from composer_jax.rl import step as steps
from composer_jax.rl.hints import distill
from composer_jax.telemetry import progress, waiting, writer
from composer_jax.train import compiler_options
from composer_jax.train import placement as placements
from composer_jax.train import state as train_state
from composer_jax.train.checkpoints import export, manager

_WORKER_LOG = 'rollout_worker.log'
# Seconds that a worker waits for the first policy before it gives up.
_FIRST_POLICY_S = 300.0

# Function from group ids to finished groups, which blocks.
Wait = Callable[[list[int]], list[records.Group]]


@dataclasses.dataclass(frozen=True)
class StartOfRL:
  """What the stage begins or resumes with: arguments of `rl.sync_loop.run`."""

  state: train_state.TrainState
  functions: steps.Functions
  reference: Any
  teacher: Any


@functools.lru_cache(maxsize=2)
def _programs(
  placement: placements.Placement,
  optimizer_options: optim_groups.OptimizerOptions,
  total_steps: int,
  loss: policy_loss.LossOptions,
  hints: distill.HintLossOptions,
) -> tuple[optax.GradientTransformation, steps.Functions]:
  """Jits the functions of a step; cached, so compiled once in a process."""
  shapes, axes = decoder.abstract(placement.model)
  trained = decoder.trained(shapes)
  optimizer = optim_groups.optimizer(
    optimizer_options,
    params=shapes[trained],
    axes=axes[trained],
    shardings=placement.variables[trained],
    total_steps=total_steps,
  )
  device = placement.mesh.devices.flat[0]
  functions = steps.build(
    decoder.Decoder(placement.model, placement.plan),
    optimizer,
    loss=functools.partial(policy_loss.loss, options=loss),
    hints=hints,
    placement=placement,
    compiler_options=compiler_options.of(device.platform, device.device_kind),
  )
  return optimizer, functions


def prepare(job: jobs.Job, checkpoints: manager.Checkpoints) -> StartOfRL:
  """Builds the step functions and the state: restored, or made from SFT."""
  spec, placement = job.spec, job.rl_placement
  for line in placement.lines:
    progress.teller('rl')(line)
  hints = spec.hints
  options = spec.rl.optimizer_options()
  optimizer, functions = _programs(
    placement,
    options,
    max(spec.rl.steps, 1),
    spec.rl.loss,
    hints,
  )
  follows = bool(hints.weight) and hints.teacher == 'ema'

  def create(variables):
    return train_state.create(
      variables, optimizer, with_teacher=follows, dtype=options.masters
    )

  variables = stages.load_variables(job, 'sft', placement)
  places = train_state.shardings(
    jax.eval_shape(create, variables),
    placement.variables,
    placement.mesh,
    options.offload,
  )
  state = train_state.place(create, variables, places)
  teaches = bool(hints.weight) and hints.teacher == 'frozen'
  # The policy of SFT, even if the state is restored from a later step.
  first = None
  if spec.rl.kl_coefficient or teaches:
    first = functions.policy(state)
  latest = checkpoints.latest_step()
  if latest is not None:
    restored, _ = checkpoints.restore(latest, state.own())
    state = restored.replace(base=state.base)
  return StartOfRL(
    state,
    functions,
    reference=first if spec.rl.kl_coefficient else None,
    teacher=first if teaches else None,
  )


def reinforce(job: jobs.Job) -> None:
  """Trains the SFT policy by RL; does nothing when it is finished.

  A run that was killed resumes from its last checkpoint: later bundles are
  void, groups with tokens of later policies are dropped and counted, and the
  others are trained on exactly once.
  """
  if export.finished_step(job.workdir, 'rl') is not None:
    return
  with job.times.stage('rl'):
    _reinforce(job)


def _reinforce(job: jobs.Job) -> None:
  spec, rl = job.spec, job.spec.rl
  say = progress.teller('rl')
  checkpoints = manager.Checkpoints(job.workdir / 'checkpoints' / 'rl', keep=2)
  with contextlib.ExitStack() as stack:
    stack.enter_context(contextlib.closing(checkpoints))
    start = prepare(job, checkpoints)
    first = int(start.state.step)
    transport = job.systems.transport(job.workdir)
    published = transport.publisher(job.writer, first)
    stack.enter_context(contextlib.closing(published))
    is_first = processes.is_first()
    # What process 0 alone writes: outcomes, and what stopped a step.
    plan = stages.training_curriculum(job) if is_first else None
    if plan is not None:
      plan.truncate(first)
    buffer = buffers.GroupBuffer(job.workdir / 'groups')
    dropped = processes.lead(lambda: buffer.discard_newer(first))
    if first or dropped:
      say(
        f'going on from step {first}; {len(buffer.ids())} finished groups '
        f'kept, {len(dropped)} damaged or of void policies dropped'
      )
    job.writer.truncate('rl', first)
    gate = None
    if rl.gate.action != 'off':
      shape = spec.batch_shape()
      folder = job.workdir if is_first else None
      gate = job.systems.gate(start.functions, shape, folder=folder)
    learn = functools.partial(
      update.update,
      gate=gate,
      functions=start.functions,
      options=spec.update_options(),
      shape=spec.batch_shape(),
      reference=start.reference,
      teacher=start.teacher,
    )
    if not is_first:
      rollouts = contextlib.nullcontext()  # Process 0 has them.
    elif rl.placement == 'colocated':
      base = start.state.base if spec.shares_base else None
      rollouts = _colocated(job, transport, buffer, published.wait, base)
    else:
      rollouts = _processes(job, buffer, published.check)
    with (
      rollouts as first_wait,
      progress.Progress('rl', rl.steps, start=first) as bar,
    ):
      wait: Any = first_wait
      if processes.count() > 1:
        wait = _in_lockstep(wait, buffer)
      ports = dataclasses.replace(
        _ports(job, buffer, checkpoints, published, wait, bar, plan),
        prepare=lambda state: update.compile_ahead(
          state, start.functions, spec.batch_shape(), start.teacher
        ),
      )
      state = trainer_worker.run(start.state, learn, ports, rl)
      published.wait()
  export.save(job.workdir, 'rl', rl.steps, state.trained())
  rows = writer.read(job.workdir) + writer.read(job.workdir / writer.RECEIVED)
  if waited := waiting.summary(rows):
    say(waited)


def _ports(
  job: jobs.Job,
  buffer: buffers.GroupBuffer,
  checkpoints: manager.Checkpoints,
  published: seams.WeightPublisher,
  wait: Wait,
  bar: progress.Progress,
  plan: seams.Curriculum | None,
) -> trainer_worker.Ports:
  rl = job.spec.rl

  def accept(groups):
    if processes.is_first():
      published.check_identities(groups)
    if plan is not None:
      # Before publishing the policy trained on them: the curriculum of the
      # groups that it admits depends on this record.
      plan.record(groups[0].group // rl.prompts, groups)

  def save(step, state, is_last):
    if step % rl.checkpoint_every == 0 or is_last:
      checkpoints.save(step, state.own())
      # Receivers and a resumed trainer need only versions since the oldest
      # checkpoint that is kept.
      published.collect_garbage(2 * rl.checkpoint_every + 1, bar.message)

  def log(step, metrics, groups):
    if plan is not None:
      metrics |= plan.measure(step - 1)
    job.writer.write('rl', step, **metrics)
    for breach in metrics.get('gate', []):
      bar.message(f'step {step}: out of its band: {breach}')
    bar.update(
      step,
      reward=metrics['reward'],
      passed=metrics['pass_rate'],
      invalid=metrics['invalid_rate'],
      entropy=metrics['entropy'],
      staleness=metrics['staleness'],
    )
    # For audits: the edits of all groups, those without an advantage included.
    edits = [
      edit
      for g in groups
      for r in g.rollouts
      for edit in stages.edits_of(job, r)
    ]
    files.write_atomic(
      processes.own_folder(job.workdir) / 'rl_edits' / f'{step:06d}.txt',
      '\n'.join(edits).encode(),
    )
    if step % rl.episodes_every == 0 or step == 1:
      job.log_episodes('rl', step, list(groups[0].rollouts[:2]))

  return trainer_worker.Ports(
    buffer=buffer,
    wait=wait,
    accept=accept,
    publish=published.publish,
    save=save,
    saved_step=lambda: max(checkpoints.steps()[:-1], default=0),
    log=log,
  )


def _in_lockstep(wait: Any, buffer: buffers.GroupBuffer) -> Wait:
  """Makes all processes train on one batch plan, which process 0 writes.

  A plan has the groups of a step in order, with hashes; all read the groups.
  Only in process 0 is there a `wait`.
  """

  def wait_for_plan(ids: list[int]) -> list[records.Group]:
    plan = processes.lead(lambda: buffer.seals(wait(ids)))
    return [buffer.get(group, seal) for group, seal in plan]

  return wait_for_plan


@contextlib.contextmanager
def _processes(
  job: jobs.Job, buffer: buffers.GroupBuffer, check: Callable[[], None]
) -> Iterator[Wait]:
  """Rollouts run in a process of their own, beside the trainer."""
  rl = job.spec.rl
  trainer_cores, worker_cores = controller.divide_cores()
  say = progress.teller('rl')
  say(f'judging in {job.judge_level}')
  # Sandboxes keep all cores; the worker itself calls `_yield_to_sandboxes`.
  worker = controller.RolloutProcess(
    [*job.command, '--role=rollout'],
    log=job.workdir / _WORKER_LOG,
    cores=[*trainer_cores, *worker_cores],
    max_restarts=rl.max_restarts,
    report=say,
  )
  controller.pin(trainer_cores)

  def while_waiting() -> None:
    processes.beat()
    worker.check()
    check()

  try:
    yield lambda ids: buffer.wait(
      ids, timeout_s=rl.wait_timeout_s, while_waiting=while_waiting
    )
  finally:
    worker.close()
    controller.pin([*trainer_cores, *worker_cores])


@contextlib.contextmanager
def _colocated(
  job: jobs.Job,
  transport: seams.WeightTransport,
  buffer: buffers.GroupBuffer,
  settle: Callable[[], None],
  base: Any,
) -> Iterator[Wait]:
  """Trainer and engine take turns; policies still travel through the store.

  `base` are the trainer's frozen parameters, if the engine shares them.
  """
  spec = job.spec
  served = None
  with (
    job.runner() as runner,
    contextlib.closing(transport.receiver(in_background=False)) as receiver,
  ):
    collector = stages.collector_of(
      spec,
      job.systems,
      job.tokenizer,
      runner,
      split='train',
      workdir=job.workdir,
    )

    def wait(ids: list[int]) -> list[records.Group]:
      nonlocal served
      settle()
      if served is None:
        served = _served(spec, job.systems, receiver, within_s=0.0, base=base)
      else:
        receiver.look()
        served()
      rollout_worker.run(
        collector, buffer, served, spec.rl, until_version=served.version
      )
      return [buffer.get(g) for g in ids]

    yield wait


def _served(
  spec: specs.Spec,
  systems: seams.Systems,
  receiver: seams.WeightReceiver,
  *,
  within_s: float,
  base: Any = None,
) -> rollout_worker.Served:
  """Makes an engine of the first policy received, which follows later ones."""
  first = receiver.first(within_s)
  values, shares = {**first.variables, 'params': base}, base is not None
  if not shares:
    like = stages.served_like(spec)
    values = stages.with_base(systems, first.variables, like)
  engine = stages.make_engine(spec, values, first.version, shares_base=shares)
  receiver.follow(engine)
  return rollout_worker.Served(engine, first, receiver)


def serve_rollouts(
  spec: specs.Spec, systems: seams.Systems, workdir: pathlib.Path
) -> None:
  """Runs a rollout worker process from its start to the end of the run."""
  say = progress.teller('rollout')
  level = systems.settle_judge(workdir)
  tokenizer = systems.load_tokenizer(workdir / jobs.TOKENIZER)
  with contextlib.ExitStack() as stack:
    runner = stack.enter_context(systems.open_runner(level))
    # Before the engine's threads exist: they inherit cores and priority.
    _yield_to_sandboxes()
    transport = systems.transport(workdir)
    receiver = transport.receiver(in_background=True)
    stack.enter_context(contextlib.closing(receiver))
    served = _served(spec, systems, receiver, within_s=_FIRST_POLICY_S)
    say(f'serving version {served.version}, judging in {level}')
    version = rollout_worker.run(
      stages.collector_of(
        spec, systems, tokenizer, runner, split='train', workdir=workdir
      ),
      buffers.GroupBuffer(workdir / 'groups'),
      served,
      spec.rl,
      until_version=spec.rl.steps,
    )
  say(f'done at version {version}')


def _yield_to_sandboxes() -> None:
  """Gives sandboxes priority over the engine on the cores they share.

  A tool call alternates many times between an episode's thread and a sandbox;
  behind a decode step that holds the core, each exchange would wait for a whole
  time slice. Sandboxes already run: they keep their priority and all cores,
  while this process takes its share of cores at a lower priority.
  """
  sys.setswitchinterval(5e-4)
  controller.pin(controller.divide_cores()[1])
  if hasattr(os, 'nice'):
    os.nice(5)
