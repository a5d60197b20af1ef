"""One run in one workdir: the objects that all stages share."""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from composer_jax.agent import episode
from composer_jax.core import files, processes, records, seams
from composer_jax.parallel import layouts, topology
from composer_jax.pipeline import spec as specs
from composer_jax.telemetry import machine, progress, stage_times
from composer_jax.telemetry import writer as writers
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train import placement as placements
from composer_jax.train import workdir as workdirs

TOKENIZER = 'tokenizer.json'  # in the workdir, where rollout workers read it


@dataclasses.dataclass(frozen=True)
class Job:
  """A run; cached properties are made when a stage first needs them.

  Attributes:
    systems: task family, corpus, sandbox and the other systems of the run.
    workdir: folder of everything that outlives the process.
    command: command line of this program.
    judge_level: level of isolation of the code that tasks execute.
  """

  spec: specs.Spec
  systems: seams.Systems
  workdir: pathlib.Path
  command: tuple[str, ...]
  writer: writers.Writer
  judge_level: str

  @functools.cached_property
  def times(self) -> stage_times.StageTimes:
    return stage_times.StageTimes(processes.own_folder(self.workdir))

  @functools.cached_property
  def corpus(self) -> seams.CodeCorpus:
    with self.times.stage('corpus'):
      return processes.in_turn(lambda: self.systems.corpus(self.workdir))

  @functools.cached_property
  def tokenizer(self) -> Any:
    with self.times.stage('tokenizer'):
      if self.systems.initial is not None:
        return self.systems.initial.tokenizer(self.workdir)
      # Saved where a rollout worker finds it.
      path, vocab_size = self.workdir / TOKENIZER, self.spec.model.vocab_size
      if processes.lead(lambda: not path.exists()):
        corpus, family = self.corpus, self.systems.family
        if processes.is_first():
          corpus.train_tokenizer(family.texts()).save(path)
        processes.lead(lambda: None)  # The others wait until it is there.
      tokenizer = tokenizers.Tokenizer.load(path)
      if tokenizer.vocab_size > vocab_size:
        raise ValueError(
          f'{path} has {tokenizer.vocab_size} tokens, the model {vocab_size}; '
          'delete the file, and the next run trains a tokenizer that fits.'
        )
      return tokenizer

  @functools.cached_property
  def documents(self) -> tuple[Sequence[Any], Sequence[Any]]:
    """Token ids of the corpus: for training, and held out."""
    with self.times.stage('tokenizer'):
      # The tokenizer first, so that an unusable one is reported at once.
      tokenizer, corpus = self.tokenizer, self.corpus
      return processes.in_turn(lambda: corpus.documents(tokenizer))

  @functools.cached_property
  def placement(self) -> placements.Placement:
    """Placement of pretraining and SFT, on the run's whole mesh."""
    stage = self.spec.cpt
    return placements.build(
      self.spec.lm_model,
      mesh=_mesh(self.spec.mesh, may_leave=False),
      layout=layouts.BY_NAME[self.spec.layout],
      options=self.spec.parallel,
      num_tokens=stage.batch_size // stage.accumulate * stage.seq_len,
    )

  @functools.cached_property
  def single(self) -> placements.Placement:
    """Placement of held-out episodes, on a device of this process."""
    mesh = topology.make_mesh(devices=jax.local_devices()[:1])
    return placements.build(
      self.spec.model, mesh=mesh, layout=layouts.REPLICATED
    )

  @functools.cached_property
  def rl_placement(self) -> placements.Placement:
    """Placement of RL's trainer: the first devices; engines get the others."""
    rl = self.spec.rl
    if rl.mesh.size == processes.count() == 1:
      return self.single
    return placements.build(
      self.spec.model,
      mesh=_mesh(rl.mesh, may_leave=True),
      layout=layouts.BY_NAME[self.spec.layout],
      options=self.spec.parallel,
      num_tokens=rl.rows * rl.seq_len,
    )

  @contextlib.contextmanager
  def runner(self) -> Iterator[seams.Runner]:
    """Opens the sandbox that judges code, and reports its isolation level."""
    progress.teller('sandbox')(f'judging in {self.judge_level}')
    with self.systems.open_runner(self.judge_level) as runner:
      yield runner

  def log_episodes(
    self, stage: str, step: int, rollouts: list[records.Rollout]
  ) -> None:
    """Writes readable episodes; a step written again replaces later ones."""
    path = processes.own_folder(self.workdir) / 'episodes.jsonl'
    is_kept = lambda row: row['stage'] != stage or row['step'] < step
    rows = list(filter(is_kept, writers.read(path)))
    for rollout in rollouts:
      versions = {
        int(v)
        for t in rollout.trajectories
        for v in t.policy_version_T[t.loss_mask_T]
      }
      row = {
        'stage': stage,
        'step': step,
        'task_id': rollout.task_id,
        'reward': rollout.reward,
        'verdict': dataclasses.asdict(rollout.verdict),
        'flags': list(rollout.flags),
        'reward_version': rollout.reward_version,
        'reward_terms': dict(rollout.reward_terms),
        'versions': sorted(versions),
        'turns': episode.turns(rollout, self.tokenizer),
      }
      rows.append(row)
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    files.write_atomic(path, text.encode())


def _mesh(axes: specs.Mesh, *, may_leave: bool) -> jax.sharding.Mesh:
  """Makes a mesh of the first devices of each process.

  Others may be left over with `may_leave`, or if they are emulated: there are
  as many as the largest mesh of a run needs.
  """
  devices, count = jax.devices(), processes.count()
  assert axes.size % count == 0, 'whoever started the processes checks this'
  if may_leave or devices[0].platform == 'cpu':
    each = axes.size // count
    devices = [d for p in range(count) for d in jax.local_devices(p)[:each]]
  return topology.make_mesh(**dataclasses.asdict(axes), devices=devices)


@contextlib.contextmanager
def open_run(
  spec: specs.Spec,
  systems: seams.Systems,
  workdir: pathlib.Path,
  command: list[str],
) -> Iterator[Job]:
  """Opens a workdir for this spec; also writes the report of a failed run.

  Raises:
    ValueError: the workdir belongs to another config (the message names the
      differences), another process runs in it, or a file that the config names
      is unusable (a new workdir then stays as it was).
    OSError: the workdir cannot be made.
  """
  # Digests of the files that the config names.
  content = {'imported': '', 'conversations': ''}
  if systems.initial is not None:
    content = systems.initial.claim()
  content['task_set'] = systems.family.identity()
  identity = spec.as_dict() | content
  is_first = processes.is_first()
  lock = files.alone(workdir) if is_first else contextlib.nullcontext()
  with _ended_by_sigterm(), lock:
    level = processes.in_turn(
      lambda: _bind(identity, systems, workdir, command)
    )
    with writers.Writer(
      processes.own_folder(workdir),
      tensorboard=spec.telemetry.tensorboard and is_first,
      wandb=spec.telemetry.wandb and is_first,
    ) as writer:

      def report() -> None:
        writer.flush()
        if is_first:
          print(f'Report: {systems.write_report(workdir)}', flush=True)

      try:
        yield Job(spec, systems, workdir, tuple(command), writer, level)
      except BaseException:
        _report_anyway(report)
        raise
      report()


def _bind(
  identity: dict[str, Any],
  systems: seams.Systems,
  workdir: pathlib.Path,
  command: list[str],
) -> str:
  """Binds a workdir to a config, or checks that; returns the judge's level."""
  if (workdir / workdirs.CONFIG).exists():
    _claim(identity, workdir)
  else:
    with _leaving_nothing(workdir):
      systems.begin(workdir)
      systems.settle_judge(workdir)
      _claim(identity, workdir)
  level = systems.settle_judge(workdir)
  if processes.is_first():
    files.sweep(workdir)
    run = {
      'machine': machine.describe(),
      'command': ' '.join(command[1:]),
      'sandbox_level': level,
    }
    files.write_json(workdir / 'run.json', run)
  return level


def _report_anyway(report: Callable[[], None]) -> None:
  """Writes the report of an interrupted run, if that is possible."""
  try:
    report()
  except (OSError, ValueError) as error:
    progress.teller('report')(f'not written: {error}')
  except Exception:
    # Even a bug in the report must not hide the error that ended the run.
    logging.exception('The report of the interrupted run failed:')


@contextlib.contextmanager
def _leaving_nothing(workdir: pathlib.Path) -> Iterator[None]:
  """Removes what a failed start wrote; the workdir, too, if it was empty."""
  before = set(os.listdir(workdir)) - {'lock'}
  try:
    yield
  except BaseException:
    for name in set(os.listdir(workdir)) - before:
      path = workdir / name
      shutil.rmtree(path) if path.is_dir() else path.unlink()
    with contextlib.suppress(OSError):
      workdir.rmdir()
    raise


def _claim(config: dict[str, Any], workdir: pathlib.Path) -> None:
  # Folders may move, but their content may not change. No result depends on
  # the gate, which at most ends a run, on the transport of policies, nor, at
  # staleness 0, on who samples. Live learning begins when all stages are over.
  ignored = ('telemetry', 'rl.placement', 'rl.gate', 'delta', 'fleet', 'live')
  ignored += ('initial', 'tasks.folder', 'accelerator')
  workdirs.claim(workdir, config, ignored=ignored)
  path = workdir / workdirs.CONFIG
  stored = files.read_json(path)
  # Other programs read these from the workdir: exports the folder of the
  # import, followers of the run the place of the store.
  current = {name: config[name] for name in ('initial', 'delta', 'tasks')}
  # Through JSON, so that tuples compare equal to the lists of the file.
  updated = stored | json.loads(json.dumps(current))
  # Those of process 0: on each host they may lie elsewhere.
  if stored != updated and processes.is_first():
    files.write_json(path, updated)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
  """Makes SIGTERM (docker stop, Slurm) end the run as an exception does.

  Only a main thread can set a handler; other threads leave it unchanged.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def end(number: int, _: Any) -> None:
    # A second SIGTERM must not interrupt the report; SIGKILL still can.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)

  before = signal.signal(signal.SIGTERM, end)
  try:
    yield
  finally:
    # None stands for a handler that was not set from Python.
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
