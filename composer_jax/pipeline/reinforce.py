"""The RL stage: connects trainer and rollouts, from SFT to trained policy."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

from composer_jax.core import files, processes, records, seams
from composer_jax.models import decoder
from composer_jax.optim import groups as optim_groups
from composer_jax.pipeline import (
  consumption,
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
from composer_jax.train import heads as train_heads
from composer_jax.train import placement as placements
from composer_jax.train import state as train_state
from composer_jax.train.checkpoints import export, manager

_WORKER_LOG = 'rollout_worker{}.log'
# Seconds that a worker waits for the first policy before it gives up.
_FIRST_POLICY_S = 300.0

# Between two looks for the groups of a step, and two readings of a store that
# does not answer.
_LOOK_S, _RETRY_S = 0.005, 1.0

# Function from a step to the groups that it trains on, which blocks.
Wait = Callable[[int], list[records.Group]]


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
  head_training: train_heads.HeadTraining | None,
) -> tuple[optax.GradientTransformation, Any, steps.Functions]:
  """Jits the functions of a step; cached, so compiled once in a process."""
  model, places = placement.model, placement.variables
  shapes, axes = decoder.abstract(model)
  trained = decoder.trained(shapes)
  optimizer = optim_groups.optimizer(
    optimizer_options,
    params=shapes[trained],
    axes=axes[trained],
    shardings=places[trained],
    total_steps=total_steps,
  )
  heads = train_heads.program(head_training, model, total_steps, places)
  device = placement.mesh.devices.flat[0]
  functions = steps.build(
    decoder.Decoder(model, placement.plan),
    optimizer,
    loss=functools.partial(policy_loss.loss, options=loss),
    hints=hints,
    placement=placement,
    compiler_options=compiler_options.of(device.platform, device.device_kind),
    heads=heads,
  )
  return optimizer, heads.optimizer if heads else None, functions


def prepare(
  job: jobs.Job, checkpoints: manager.Checkpoints, stage: str = 'sft'
) -> StartOfRL:
  """Builds the step functions and the state: restored, or made of a stage's."""
  spec, placement = job.spec, job.rl_placement
  for line in placement.lines:
    progress.teller('rl')(line)
  hints = spec.hints
  options = spec.rl.optimizer_options()
  training = spec.mtp.training('rl', placement.model, options)
  optimizer, heads, functions = _programs(
    placement, options, max(spec.rl.steps, 1), spec.rl.loss, hints, training
  )
  create = functools.partial(
    train_state.create,
    optimizer=optimizer,
    with_teacher=bool(hints.weight) and hints.teacher == 'ema',
    dtype=options.masters,
    heads=heads,
  )
  variables = stages.load_variables(job, stage, placement)
  places = train_state.shardings(
    jax.eval_shape(create, variables),
    placement.variables,
    placement.mesh,
    options.offload,
  )
  state = train_state.place(create, variables, places)
  teaches = bool(hints.weight) and hints.teacher == 'frozen'
  # The policy that it began with, even if the state is of a later step.
  is_needed = spec.rl.kl_coefficient or teaches
  first = functions.policy(state) if is_needed else None
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
    groups = job.systems.groups(job.workdir, job.judge_level)
    is_first = processes.is_first()
    # By all, since they decide together whether it is there.
    _ = job.tokenizer
    # What process 0 alone writes: orders, outcomes, what stopped a step.
    order, plan = stages.training_orders(job) if is_first else (None, None)
    if plan is not None:
      plan.truncate(first)
    source = _Source(job, groups, published, order, first)
    stack.callback(source.close)
    if is_first:
      kept, voided = groups.begin(first, source.queue.first, source.queue.ahead)
      if first or voided:
        say(
          f'going on from step {first}; {kept} finished groups kept, {voided} '
          'damaged or of void policies dropped'
        )
      source.admit(first)
    for stage in ('rl', 'fleet'):
      job.writer.truncate(stage, first)
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
      rollouts = _colocated(job, transport, source, base)
    else:
      rollouts = _processes(job, source)
    with (
      rollouts as first_wait,
      progress.Progress('rl', rl.steps, start=first) as bar,
    ):
      wait: Any = first_wait
      if processes.count() > 1:
        wait = _in_lockstep(wait, source)
      ports = dataclasses.replace(
        _ports(job, source, checkpoints, wait, bar, plan),
        prepare=lambda state: update.compile_ahead(
          state, start.functions, spec.batch_shape(), start.teacher
        ),
      )
      state = trainer_worker.run(start.state, learn, ports, rl)
      published.wait()
      source.is_over = True
  export.save(job.workdir, 'rl', rl.steps, state.trained())
  rows = writer.read(job.workdir) + writer.read(job.workdir / writer.RECEIVED)
  if waited := waiting.summary(rows):
    say(waited)


class _Source:
  """Where the groups of each step come from.

  Attributes:
    groups: exchange with the workers.
    published: publisher of the policies that sample them.
    queue: groups that are not trained yet; used by process 0 alone.
    taken: groups of the present step, those that were given up included.
    is_over: true once the last step is trained, so that workers may end.
  """

  def __init__(
    self,
    job: jobs.Job,
    groups: seams.GroupExchange,
    published: seams.WeightPublisher,
    order: Callable[[int], seams.GroupOrder] | None,
    first: int = 0,
  ):
    """Goes on at step `first`."""
    self.groups, self.published, self.is_over = groups, published, False
    self._rl, self._order, self.taken = job.spec.rl, order, list[int]()
    self._num_admitted = 0
    taken = () if order is None else _taken(job, first)
    self.queue = consumption.GroupQueue(self._rl.window, taken)

  def admit(self, version: int) -> None:
    """Lets groups be sampled that this version, yet to come, may begin."""
    assert self._order is not None
    # Those below were drawn for an earlier version.
    new = [g for g in self.queue.open(version) if g >= self._num_admitted]
    self.groups.admit([*map(self._order, new)])
    self._num_admitted = self._rl.window.admitted(version)

  def ready(self, step: int) -> list[records.Group] | None:
    """Returns the groups of a step once all are there and right."""
    bound = self._rl.max_staleness

    def fault_of(group: records.Group) -> str:
      late = trainer_worker.fault_of_staleness(group, step, bound)
      return late or self.published.fault_of(group)

    # Those that are there are read while others are waited for.
    picked = self.queue.pick(step, self.groups.finished)
    ready = self.groups.ready(picked, fault_of)
    if ready is None or len(picked) < self._rl.prompts:
      return None
    if not ready:
      raise ValueError(
        f'All groups of step {step} were given up: their members came back '
        'refused, or not at all, more often than --config.fleet.max_lost. See '
        'the logs of the workers.'
      )
    self.taken = picked
    self.queue.take(picked)
    return ready

  def is_done(self, version: int) -> bool:
    """Returns whether all groups are there that a version may begin."""
    return not self.groups.unfinished(version)

  def close(self) -> None:
    self.groups.close(is_over=self.is_over)


def _taken(job: jobs.Job, first: int) -> list[int]:
  """Returns the groups that the steps before `first` took."""
  rl = job.spec.rl
  if not rl.overtake:
    return [*range(first * rl.prompts)]
  by_step = {
    row['step'] - 1: row['taken']
    for row in writer.read(job.workdir)
    if row['stage'] == 'fleet' and 'taken' in row
  }
  if lacking := sorted(set(range(first)) - by_step.keys()):
    raise ValueError(
      f'{job.workdir / writer.METRICS} does not tell which groups step '
      f'{lacking[0]} took, so that those of later steps would be trained again '
      'or never. Put the file back, or begin a new --workdir.'
    )
  return [g for step in range(first) for g in by_step[step]]


def _ports(
  job: jobs.Job,
  source: _Source,
  checkpoints: manager.Checkpoints,
  wait: Wait,
  bar: progress.Progress,
  plan: seams.Curriculum | None,
) -> trainer_worker.Ports:
  rl, published, is_first = job.spec.rl, source.published, processes.is_first()

  def accept(step, groups):
    if plan is not None:
      # Before the next groups are drawn: the curriculum needs this record.
      plan.record(step, groups)
    if is_first:
      source.admit(step + 1)

  def publish(state, version):
    published.publish(state, version)
    if is_first:
      source.groups.announce(version)

  def trained(_):
    if is_first:
      source.groups.trained(source.taken)

  def save(step, state, is_last):
    if step % rl.checkpoint_every == 0 or is_last:
      checkpoints.save(step, state.own())
      # Receivers and a resumed trainer need only versions since the oldest
      # checkpoint that is kept.
      published.collect_garbage(2 * rl.checkpoint_every + 1, bar.message)
    if is_first:
      saved = max(checkpoints.steps()[:-1], default=0)
      source.groups.collect(rl.window.due(saved))

  def log(step, metrics, groups):
    if plan is not None:
      metrics |= plan.measure(step - 1)
    job.writer.write('rl', step, **metrics)
    if is_first:
      figures = source.groups.figures()
      job.writer.write('fleet', step, taken=source.taken, **figures)
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
    wait=wait,
    accept=accept,
    publish=publish,
    trained=trained,
    save=save,
    log=log,
  )


def _in_lockstep(wait: Any, source: _Source) -> Wait:
  """Makes all processes train on one batch plan, which process 0 writes.

  A plan has the groups of a step in order, with hashes; the others read them.
  Only in process 0 is there a `wait`.
  """

  def wait_for_plan(step: int) -> list[records.Group]:
    groups: list[records.Group] = []

    def decide() -> list[Any]:
      groups.extend(wait(step))
      return source.groups.plan([g.group for g in groups])

    plan = processes.lead(decide)
    if groups:
      return groups
    while (read := source.groups.read(plan)) is None:
      processes.beat()
      time.sleep(_RETRY_S)
    return read

  return wait_for_plan


@contextlib.contextmanager
def _processes(job: jobs.Job, source: _Source) -> Iterator[Wait]:
  """Rollouts run in processes of their own, beside the trainer or elsewhere."""
  rl, groups = job.spec.rl, source.groups
  trainer_cores, worker_cores = controller.divide_cores()
  say = progress.teller('rl')
  say(f'judging in {job.judge_level}')
  with contextlib.ExitStack() as stack:
    workers = []
    for number in range(job.spec.systems['fleet'].workers):
      # Sandboxes keep all cores; the worker itself calls `_yield_to_sandboxes`.
      worker = controller.RolloutProcess(
        job.systems.worker_command(job.workdir, number),
        log=job.workdir / _WORKER_LOG.format(f'_{number}' if number else ''),
        cores=[*trainer_cores, *worker_cores],
        max_restarts=rl.max_restarts,
        report=say,
        number=number,
      )
      stack.enter_context(contextlib.closing(worker))
      workers.append(worker)
    controller.pin(trainer_cores)
    stack.callback(controller.pin, [*trainer_cores, *worker_cores])
    groups.start()

    def wait(step: int) -> list[records.Group]:
      since, seen = time.monotonic(), -1
      while (ready := source.ready(step)) is None:
        processes.beat()
        done = groups.num_uploads()
        for worker in workers:
          worker.check(done, is_given_up=groups.is_given_up, blame=groups.blame)
        source.published.check()
        if done != seen:
          since, seen = time.monotonic(), done
        if time.monotonic() - since > rl.wait_timeout_s:
          raise TimeoutError(
            f'No rollouts came in {rl.wait_timeout_s:.0f} s '
            f'(--config.rl.wait_timeout_s) while the trainer waits for groups '
            f'{source.queue.open(step)}. See {_WORKER_LOG.format("*")} in the '
            'workdir, and the logs of workers elsewhere.'
          )
        time.sleep(_LOOK_S)
      return ready

    yield wait


@contextlib.contextmanager
def _colocated(
  job: jobs.Job,
  transport: seams.WeightTransport,
  source: _Source,
  base: Any,
) -> Iterator[Wait]:
  """Trainer and engine take turns; policies still travel through the store.

  `base` are the trainer's frozen parameters, if the engine shares them.
  """
  spec = job.spec
  served = None
  orders: dict[int, seams.GroupOrder] = {}
  leases = source.groups.leases(_capacity(spec))
  with (
    job.runner() as runner,
    contextlib.closing(transport.receiver(in_background=False)) as receiver,
    contextlib.closing(leases),
  ):
    collector = stages.collector_of(
      spec, job.systems, job.tokenizer, runner, split='train', orders=orders
    )

    def wait(step: int) -> list[records.Group]:
      nonlocal served
      source.published.wait()
      if served is None:
        served = _served(spec, job.systems, receiver, leases.note, base=base)
      else:
        receiver.look()
        served()
      while (ready := source.ready(step)) is None:
        is_done = functools.partial(source.is_done, served.version)
        worker = rollout_worker.RolloutWorker(collector, orders, leases, served)
        rollout_worker.run(worker, is_done)
      return ready

    yield wait


def _capacity(spec: specs.Spec) -> int:
  """Members that a worker holds: those it plays, and as many to go on with."""
  return 2 * spec.rollout.num_slots


def _served(
  spec: specs.Spec,
  systems: seams.Systems,
  receiver: seams.WeightReceiver,
  note: Callable[[dict[str, Any]], None],
  *,
  within_s: float = 0.0,
  base: Any = None,
  **fields: Any,
) -> rollout_worker.Served:
  """Makes an engine of the first policy received, which follows later ones."""
  first = receiver.first(within_s)
  values, shares = {**first.variables, 'params': base}, base is not None
  if not shares:
    like = stages.served_like(spec)
    values = stages.with_base(systems, first.variables, like)
  engine = stages.make_engine(
    spec, values, first.version, shares_base=shares, **fields
  )
  receiver.follow(engine)
  return rollout_worker.Served(engine, first, receiver, note)


def serve_rollouts(
  spec: specs.Spec,
  systems: seams.Systems,
  folder: pathlib.Path,
  level: str,
  make_leases: Callable[[int], seams.LeaseHolder],
) -> None:
  """Runs a rollout worker process from its start to the end of the run.

  Args:
    folder: folder with the run's key and tokenizer.
    level: isolation level that judges the run's code.
    make_leases: capacity -> door to the fleet, which joins with `start`; called
      again, for one of another name, whenever the run was rewound.
  """
  with joined_worker(spec, systems, folder, level, make_leases) as worker:
    worker.leases.start()
    version = rollout_worker.run(worker, lambda: worker.leases.is_over)
  progress.teller('rollout')(f'done at version {version}')


@contextlib.contextmanager
def joined_worker(
  spec: specs.Spec,
  systems: seams.Systems,
  folder: pathlib.Path,
  level: str,
  make_leases: Callable[[int], seams.LeaseHolder],
  **fields: Any,
) -> Iterator[rollout_worker.RolloutWorker]:
  """Yields a worker, once its policy is there; see `serve_rollouts`.

  `fields` are EngineOptions of an engine that serves others, too.
  """
  say = progress.teller('rollout')
  tokenizer = systems.load_tokenizer(folder / jobs.TOKENIZER)
  orders: dict[int, seams.GroupOrder] = {}
  join = functools.partial(make_leases, _capacity(spec))
  leases = join()
  with contextlib.ExitStack() as stack:
    runner = stack.enter_context(systems.open_runner(level))
    if not fields:
      # Before the engine's threads exist: they inherit cores and priority.
      _yield_to_sandboxes()
    receiver = systems.transport(folder).receiver(in_background=True)
    stack.enter_context(contextlib.closing(receiver))
    served = _served(
      spec, systems, receiver, leases.note, within_s=_FIRST_POLICY_S, **fields
    )
    say(f'{leases.name} serves version {served.version}, judging in {level}')
    collector = stages.collector_of(
      spec, systems, tokenizer, runner, split='train', orders=orders
    )
    worker = rollout_worker.RolloutWorker(
      collector, orders, leases, served, join=join, is_lent=bool(fields)
    )
    stack.callback(lambda: worker.leases.close())
    # Before the leases: these tell of the last turns.
    yield stack.enter_context(contextlib.closing(worker))


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
