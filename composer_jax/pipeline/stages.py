"""The stages before and around RL: pretraining, SFT, evaluation."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from composer_jax.agent import episode, rewards
from composer_jax.core import files, processes, records, seams
from composer_jax.data import stream as streams
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.models import placement as model_placement
from composer_jax.parallel import layouts, topology
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import spec as specs
from composer_jax.rl import behaviour, collect
from composer_jax.rollout import engine as engines
from composer_jax.telemetry import progress
from composer_jax.text import fim
from composer_jax.train import loop
from composer_jax.train import placement as placements
from composer_jax.train import state as train_state
from composer_jax.train.checkpoints import export

# Added to the run's seed, so that stages share neither tasks nor random
# numbers; the offset of SFT is in `tasks.practice.transcripts`.
RL_SEED, EVAL_SEED = 2_000_003, 3_000_017


def pretrain(job: jobs.Job) -> None:
  """Continues pretraining on code; does nothing when it is finished."""
  if not job.spec.cpt.steps:
    return
  if export.finished_step(job.workdir, 'cpt') is not None:
    return
  with job.times.stage('cpt'):
    stage = job.spec.cpt
    stream = pretraining_stream(job)
    heldout = _stream(job, stage, job.documents[1], seed=0, num_epochs=1)
    initial = _imported(job) if job.systems.initial else None
    _train(job, 'cpt', stage, stream, heldout, initial)


def pretraining_stream(job: jobs.Job) -> streams.LMStream:
  """The corpus, partly rearranged for fill-in-the-middle."""
  return _stream(
    job,
    job.spec.cpt,
    job.documents[0],
    seed=job.spec.seed,
    opening=job.spec.cpt.opening,
    fim_rate=job.corpus.fim_rate,
    fim_marks=fim.marks_of(job.tokenizer),
  )


def _stream(
  job: jobs.Job,
  stage: specs.StageOptions,
  documents: Sequence[Any],
  **options: Any,
) -> streams.LMStream:
  """Streams the rows of a stage that meet devices of this process."""
  stream = streams.lm_stream(
    documents,
    batch_size=stage.batch_size,
    seq_len=stage.seq_len,
    rows=job.placement.rows_here(stage.batch_size),
    **options,
  )
  # Rows of two batches in one step would train on neither.
  processes.check_equal('documents', stream.fingerprint)
  return stream


def finetune(job: jobs.Job) -> None:
  """Runs SFT on imperfect transcripts of the tool protocol; 0 steps copy."""
  if export.finished_step(job.workdir, 'sft') is not None:
    return
  with job.times.stage('sft'):
    stage = job.spec.sft
    if not stage.steps:
      variables = decoder.without_base(_pretrained(job))
      export.save(job.workdir, 'sft', 0, variables)
      return
    with job.times.stage('demonstrations'):
      training, held_out = sft_documents(job)
    whole = functools.partial(_stream, job, stage, whole=True)
    heldout = whole(held_out, seed=0, num_epochs=1)
    stream = whole(training, seed=job.spec.seed, opening=stage.opening)
    _train(job, 'sft', stage, stream, heldout, _pretrained(job))


def _pretrained(job: jobs.Job) -> Any:
  """Returns the variables that SFT begins with."""
  return load_variables(job, 'cpt' if job.spec.cpt.steps else 'import')


def _imported(
  job: jobs.Job, placement: placements.Placement | None = None
) -> Any:
  """Returns the variables of the import.

  Adapters, which change nothing yet, and heads that it has not are made.
  """
  like = _like(job, placement or job.placement)
  imported, key = _base(job.systems, like), jax.random.key(job.spec.seed)
  for name, init in (
    ('adapters', decoder.init_adapters),
    ('mtp', decoder.init_heads),
  ):
    if name in like and name not in imported:
      places = jax.tree.map(lambda leaf: leaf.sharding, like[name])
      make = jax.jit(
        functools.partial(init, job.spec.model), out_shardings=places
      )
      imported[name] = make(key)
  return imported


def _base(systems: seams.Systems, like: Any) -> Any:
  """Returns what the import has of the variables that `like` describes."""
  assert systems.initial is not None
  return systems.initial.variables(
    {name: tree for name, tree in like.items() if name != 'adapters'}
  )


def with_base(systems: seams.Systems, variables: Any, like: Any) -> Any:
  """Returns variables with the frozen parameters of a model with adapters."""
  if decoder.trained(variables) == 'params':
    return variables
  return {**variables, 'params': _base(systems, like)['params']}


def _train(
  job: jobs.Job,
  name: str,
  stage: specs.StageOptions,
  stream: Any,
  heldout: Any,
  initial: Any,
) -> None:
  shown = [field.name for field in dataclasses.fields(loop.TrainingOptions)]
  options = loop.LoopOptions(
    stage=name,
    optimizer=stage.optimizer_options(),
    bias_rate=stage.bias_update_rate,
    seed=job.spec.seed,
    heads=job.spec.mtp.training(
      name, job.spec.lm_model, stage.optimizer_options()
    ),
    **{field: getattr(stage, field) for field in shown},
  )
  loop.run(
    options,
    workdir=job.workdir,
    model=job.spec.lm_model,
    placement=job.placement,
    stream=stream,
    heldout=list(itertools.islice(heldout, stage.eval_batches)),
    writer=job.writer,
    initial=initial,
  )


def load_variables(
  job: jobs.Job, stage: str, placement: placements.Placement | None = None
) -> Any:
  """Loads variables: exported by a finished stage, or those of the import."""
  if stage == 'import':
    return _imported(job, placement)
  like = _like(job, placement or job.placement)
  trained = export.load(job.workdir, stage, decoder.without_base(like))
  return with_base(job.systems, trained, like)


def sft_documents(job: jobs.Job) -> tuple[list[Any], list[Any]]:
  """Pairs (tokens, loss mask): those that SFT trains on, and held-out ones."""
  training, held_out = job.systems.family.demonstrations(job)
  if job.systems.initial is not None:
    talks = job.systems.initial.conversations(job.workdir)
    if talks:
      progress.teller('sft')(f"{len(talks)} of the user's own conversations")
    if not held_out:  # A family without demonstrations.
      count = min(len(talks), max(1, len(talks) // 20))
      held_out, talks = talks[:count], talks[count:]
    training = [*training, *talks]
  return training, held_out


def _like(job: jobs.Job, placement: placements.Placement) -> Any:
  """Shapes, dtypes and shardings of the variables."""
  return placed_like(job.spec.model, placement.variables)


def placed_like(model: model_config.ModelConfig, places: Any) -> Any:
  shapes, _ = decoder.abstract(model)
  return jax.tree.map(
    lambda shape, place: shape.update(sharding=place), shapes, places
  )


def served_like(spec: specs.Spec) -> Any:
  """Shapes, dtypes and shardings of the variables of the run's engine."""
  devices = jax.devices()[: spec.rollout.devices]
  mesh = topology.make_mesh(fsdp=len(devices), devices=devices)
  places = model_placement.variable_shardings(
    spec.model, layout=layouts.DECODE, mesh=mesh
  )
  return placed_like(spec.model, places)


def collector_of(
  spec: specs.Spec,
  systems: seams.Systems,
  tokenizer: Any,
  runner: seams.Runner,
  *,
  split: str,
  orders: Mapping[int, seams.GroupOrder] | None = None,
) -> collect.Collector:
  """Makes a collector: groups on training tasks, or episodes of held-out ones.

  Args:
    split: 'train' or one of the family's axes.
    orders: what the trainer says of each group that is played; None for the
      rewards of the config and tasks in their order.
  """
  seed = spec.seed + (RL_SEED if split == 'train' else EVAL_SEED)
  family = systems.family
  tasks = family.tasks(tokenizer, split=split, seed=seed)
  task_of_group: Callable[[int], Any] = tasks.of_group
  reward_of_group = lambda group: spec.rewards
  is_training = split == 'train'
  samples = spec.evaluation.samples
  if orders is not None:
    task_of_group = lambda group: tasks.of_id(orders[group].task_id)
    reward_of_group = lambda group: rewards.RewardOptions(
      **orders[group].rewards
    )
  judged: dict[str, Any] = {}
  if is_training and systems.judge is not None:
    judge = systems.judge(tokenizer, None)
    judged['judge'] = lambda group: judge(group, reward_of_group(group.group))
  return collect.Collector(
    task_of_group=task_of_group,
    play=collect.episode_player(
      tokenizer,
      lambda task: family.environment(task, runner),
      spec.episode,
      reward_of_group=reward_of_group,
      # Nobody learns from the hints of an evaluation.
      hints=systems.hints if is_training else None,
      summary=spec.summary,
    ),
    rollouts_per_group=spec.rl.rollouts_per_prompt if is_training else samples,
    seed=seed,
    **judged,
  )


def training_orders(
  job: jobs.Job,
) -> tuple[Callable[[int], seams.GroupOrder], seams.Curriculum | None]:
  """The trainer's order of each group of RL, and the curriculum behind it."""
  seed, rl = job.spec.seed + RL_SEED, job.spec.rl
  tasks = job.systems.family.tasks(job.tokenizer, split='train', seed=seed)
  plan = None
  if job.systems.curriculum is not None:
    plan = job.systems.curriculum(tasks, job.workdir, seed)
  prices = rewards.Switch(
    job.workdir / rewards.FILE,
    job.spec.rewards,
    progress.teller('rewards'),
  )

  def order(group: int) -> seams.GroupOrder:
    drawn = plan.task_of(group) if plan else tasks.of_group(group).task_id
    return seams.GroupOrder(
      group=group,
      task_id=drawn,
      min_version=rl.window.min_version(group),
      rewards=dataclasses.asdict(prices.of_group(group)),
    )

  return order, plan


def make_engine(
  spec: specs.Spec,
  values: Any,
  version: int,
  *,
  shares_base: bool = False,
  **fields: Any,
) -> engines.Engine:
  """Makes an engine of weights; `fields` are EngineOptions for serving."""
  options = dataclasses.replace(spec.engine_options(), **fields)
  return engines.Engine(
    spec.model, values, version, options, shares_base=shares_base
  )


def evaluate(job: jobs.Job, stage: str) -> None:
  """Plays a finished stage's policy on each axis of held-out tasks, once.

  The evaluation on the first axis has the stage's name, others 'STAGE_AXIS'.
  """
  first, *others = job.systems.family.axes
  names = {stage: first} | {f'{stage}_{axis}': axis for axis in others}

  def missing() -> list[str]:
    done = {path.name for path in job.workdir.glob('evaluation_*.json')}
    return [n for n in names if f'evaluation_{n}.json' not in done]

  due = processes.lead(missing)
  if not due:
    return
  with job.times.stage(f'eval_{stage}'):
    # By all, since processes read together; to a device of their own.
    variables = load_variables(job, stage, job.single)
    if processes.is_first():
      trained = decoder.trained(variables)
      rounded = functools.partial(
        train_state.policy_values, config=job.spec.model
      )
      values = jax.jit(rounded)(variables[trained])
      variables |= {trained: values}
      shares = job.spec.shares_base
      engine = make_engine(job.spec, variables, 0, shares_base=shares)
      with job.runner() as runner:
        for name in due:
          _evaluate(job, stage, name, names[name], engine, runner)
    processes.lead(lambda: None)  # The others wait.


def _evaluate(
  job: jobs.Job, stage: str, name: str, axis: str, engine: Any, runner: Any
) -> None:
  say, family = progress.teller('eval'), job.systems.family
  episodes = job.spec.evaluation.episodes
  say(f'playing {stage} on {episodes} tasks of {axis}')
  with progress.Progress('eval', episodes) as bar:
    groups = collect.groups(
      collector_of(job.spec, job.systems, job.tokenizer, runner, split=axis),
      engine,
      range(episodes),
      on_progress=bar.update,
    )
  rollouts = [r for g in groups for r in g.rollouts]

  # Without an edit, an empty call: as wrong as any other.
  firsts = [
    family.is_right_edit(r.task_id, [*edits_of(job, r), ''][0])
    for r in rollouts
  ]
  result = behaviour.pass_rate(rollouts, firsts)
  fields = dataclasses.asdict(result)
  # At least 1: the point of RL must not hide that of SFT, even with no steps.
  step = max(job.spec.rl.steps, 1) if stage == 'rl' else 0
  # Removes the line of an evaluation that was killed before its last file,
  # but not the line of the other stage, which is not written again.
  job.writer.truncate('eval', step - 1, name=name)
  job.writer.write(
    'eval',
    step,
    name=name,
    axis=axis,
    pass_rate=result.rate,
    pass_low=result.low,
    pass_high=result.high,
    temperature=job.spec.episode.temperature,
    **{k: v for k, v in fields.items() if k not in ('low', 'high')},
  )
  job.log_episodes(f'eval_{name}', 0, rollouts[:6])
  files.write_atomic(
    job.workdir / f'evaluation_{name}_episodes.jsonl',
    ''.join(_episode_line(job, r) for r in rollouts).encode(),
  )
  # Last: its existence says that the evaluation is done.
  files.write_json(job.workdir / f'evaluation_{name}.json', fields)
  first = result.first_edit_rate
  say(
    f'{stage} on {axis}: {result.passed} of {result.episodes} passed = '
    f'{result.rate:.3f} (95 % interval {result.low:.3f} to {result.high:.3f});'
    f' first edits right {"?" if first is None else f"{first:.3f}"},'
    f' calls invalid {result.invalid_rate:.3f},'
    f' unfinished {result.unfinished_rate:.3f}'
  )


def edits_of(job: jobs.Job, rollout: records.Rollout) -> list[str]:
  """The edit calls of a rollout, as the policy wrote them."""
  return [
    turn['text']
    for turn in episode.turns(rollout, job.tokenizer)
    if turn['role'] == 'call' and turn['text'].startswith('edit ')
  ]


def _episode_line(job: jobs.Job, rollout: records.Rollout) -> str:
  """Returns an episode as JSON for studies and audits, without arrays."""
  fields = {
    'task_id': rollout.task_id,
    'passed': behaviour.passed(rollout),
    'correct': rollout.verdict.num_passed == rollout.verdict.num_tests,
    'status': rollout.verdict.status,
    'flags': list(rollout.flags),
    'num_invalid': rollout.num_invalid,
    'num_turns': rollout.num_turns,
    'edits': edits_of(job, rollout),
  }
  return json.dumps(fields) + '\n'
