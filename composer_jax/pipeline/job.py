"""One run in one workdir: what every stage needs, opened once."""

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from composer_jax.agent import episode
from composer_jax.core import files, records
from composer_jax.corpus import build as corpora
from composer_jax.corpus import tokens as corpus_tokens
from composer_jax.hf import identity, imported
from composer_jax.hf.text import conversations
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.pipeline import meshes, sections
from composer_jax.pipeline import spec as specs
from composer_jax.sandbox import open as sandboxes
from composer_jax.tasks import families
from composer_jax.tasks.list_functions import family, runners
from composer_jax.telemetry import machine, stage_times
from composer_jax.telemetry import writer as writers
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train import placement as placements
from composer_jax.train import workdir as workdirs


@dataclasses.dataclass(frozen=True)
class Job:
  """A run; cached properties are made when a stage first needs them.

  Attributes:
    spec: of the run.
    workdir: holds everything that outlives the process.
    command: starts this program again, for a rollout worker.
    writer: of metrics.
  """

  spec: specs.Spec
  workdir: pathlib.Path
  command: tuple[str, ...]
  writer: writers.Writer

  @functools.cached_property
  def times(self) -> stage_times.StageTimes:
    return stage_times.StageTimes(self.workdir)

  @functools.cached_property
  def corpus(self) -> corpora.Corpus:
    with self.times.stage('corpus'):
      return build_corpus(self.spec, self.workdir)

  @functools.cached_property
  def tokenizer(self) -> hf_tokenizer.AnyTokenizer:
    spec = self.spec
    with self.times.stage('tokenizer'):
      if spec.initial:
        return imported.tokenizer(
          spec.initial, self.workdir, spec.model.vocab_size
        )
      return train_tokenizer(self.spec, self.workdir, self.corpus)

  @functools.cached_property
  def documents(self) -> dict[str, corpus_tokens.Documents]:
    with self.times.stage('tokenizer'):
      # The tokenizer first: one that cannot be used is told at once.
      tokenizer = self.tokenizer
      return corpus_tokens.tokenise(self.corpus, tokenizer, report=tell('data'))

  @functools.cached_property
  def placement(self) -> placements.Placement:
    """Of pretraining and SFT: all devices."""
    return meshes.language_model(self.spec)

  @functools.cached_property
  def single(self) -> placements.Placement:
    """Of held-out episodes: one device."""
    return meshes.single(self.spec)

  @functools.cached_property
  def rl_placement(self) -> placements.Placement:
    """Of RL's trainer."""
    is_one = self.spec.rl.mesh.size == 1
    return self.single if is_one else meshes.reinforcement(self.spec)

  @contextlib.contextmanager
  def runner(self) -> Iterator[runners.Runner]:
    """A sandbox, or the runner that executes nothing; says which."""
    tell('sandbox')(f'judging in {self.spec.sandbox.level}')
    with open_runner(self.spec.sandbox, self.spec.tasks.folder) as runner:
      yield runner

  def log_episodes(
    self, stage: str, step: int, rollouts: list[records.Rollout]
  ) -> None:
    """Keeps readable episodes; writing a step again replaces it."""
    path = self.workdir / 'episodes.jsonl'
    kept = []
    if path.exists():
      for line in path.read_text().splitlines():
        row = json.loads(line)
        if row['stage'] != stage or row['step'] < step:
          kept.append(line)
    for rollout in rollouts:
      row = {
        'stage': stage,
        'step': step,
        'task_id': rollout.task_id,
        'reward': rollout.reward,
        'verdict': dataclasses.asdict(rollout.verdict),
        'flags': list(rollout.flags),
        'reward_version': rollout.reward_version,
        'reward_terms': dict(rollout.reward_terms),
        'versions': sorted(
          {
            int(v)
            for t in rollout.trajectories
            for v in t.policy_version_T[t.loss_mask_T]
          }
        ),
        'turns': episode.turns(rollout, self.tokenizer),
      }
      kept.append(json.dumps(row))
    files.write_atomic(path, ('\n'.join(kept) + '\n').encode())


def tell(stage: str):
  """A reporter of plain lines for what has no step count."""

  def say(text: str) -> None:
    print(f'[{stage}] {text}', flush=True)

  return say


def build_corpus(
  spec: specs.Spec, workdir: pathlib.Path, report_line: Any = None
) -> corpora.Corpus:
  """The corpus of the run, without anything the tasks hold out."""
  packages, functions, bodies = family.holdout()
  packages += families.held_out_names(spec)
  return corpora.build(
    # The flag `--config.data.sources=a,b` arrives as one string.
    [name for names in spec.data.sources for name in names.split(',')],
    workdir=workdir / 'corpus',
    holdout=corpora.HoldOut(
      packages=packages, functions=functions, bodies=bodies
    ),
    options=corpora.CorpusOptions(
      max_bytes=spec.data.max_bytes,
      weights=spec.data.weights,
      heldout_share=spec.data.heldout_share,
      seed=spec.seed,
      archives=spec.data.archives,
    ),
    report=report_line or tell('data'),
  )


def train_tokenizer(
  spec: specs.Spec, workdir: pathlib.Path, corpus: corpora.Corpus
) -> tokenizers.Tokenizer:
  """The run's tokenizer, also saved where a rollout worker finds it."""
  path = workdir / 'tokenizer.json'
  if not path.exists():
    tokenizer = corpus_tokens.train_tokenizer(
      corpus,
      spec.model.vocab_size,
      max_bytes=spec.tokenizer.train_bytes,
      extra_texts=families.protocol_texts(spec),
      report=tell('data'),
    )
    tokenizer.save(path)
  tokenizer = tokenizers.Tokenizer.load(path)
  if tokenizer.vocab_size > spec.model.vocab_size:
    raise ValueError(
      f'{path} has {tokenizer.vocab_size} tokens, the model '
      f'{spec.model.vocab_size}; delete it to have it trained again.'
    )
  return tokenizer


@contextlib.contextmanager
def open_runner(
  options: sections.Sandbox, images: str = ''
) -> Iterator[runners.Runner]:
  """Opens what runs the tests; closed on exit.

  Args:
    options: of the sandbox.
    images: folder of a task set; '' for tasks that bring their files.
  """
  if options.level == 'static':
    yield runners.StaticRunner()
    return
  packages = list(options.packages)
  if images:
    packages += families.requirements(images)
  sandbox = sandboxes.open_sandbox(
    options.level,
    options.limits(),
    allow_unsafe=options.allow_unsafe,
    size=options.workers,
    images=pathlib.Path(images).resolve() if images else None,
    packages=packages,
  )
  try:
    yield sandbox
  finally:
    sandbox.close()


def settle_sandbox(
  spec: specs.Spec,
  workdir: pathlib.Path,
  probe: Callable[[], list[tuple[str, bool, str]]] = sandboxes.probe,
) -> specs.Spec:
  """Decides what judges code before anything is trained, and says so.

  Where no namespaces are to be had, the run goes on with verifier tasks that
  execute no generated code. The decision is kept in the workdir: a resumed run
  must not change its judge.
  """
  path = workdir / 'sandbox.json'
  if path.exists():
    level = files.read_json(path)['level']
  elif spec.sandbox.level != 'auto':
    level = spec.sandbox.level
    with open_runner(spec.sandbox, spec.tasks.folder):
      pass  # Refused now rather than after the training before it.
  else:
    found = probe()
    usable = [n for n, works, _ in found if works and n != 'rlimits']
    level = usable[0] if usable else 'static'
    say = tell('sandbox')
    for name, works, why in found:
      say(f'{name}: {"works" if works else "not here"}: {why}')
    if level == 'static' and spec.tasks.is_deletion:
      raise ValueError(
        f'--config.tasks.family {spec.tasks.family!r} executes code of the '
        'policy, and no isolation works here: '
        + '; '.join(f'{name}: {why}' for name, _, why in found)
      )
    if level == 'static':
      say(
        'No isolation here, so no generated code is executed: the tasks are '
        'judged by form (verifier tasks). For real execution use Linux with '
        'user namespaces allowed (sysctl kernel.unprivileged_userns_clone=1; '
        'on Ubuntu 23.10 and later '
        'kernel.apparmor_restrict_unprivileged_userns=0; or a container '
        'started with --privileged), with bubblewrap where there is one.'
      )
    else:
      say(f'code is judged in {level}')
  files.write_json(path, {'level': level})
  return dataclasses.replace(
    spec, sandbox=dataclasses.replace(spec.sandbox, level=level)
  )


def _report(workdir: pathlib.Path, writer: writers.Writer) -> None:
  # Loads matplotlib, which a resumed run need not wait for.
  from composer_jax.report import document

  writer.flush()
  print(f'Report: {document.write_report(workdir)}', flush=True)


@contextlib.contextmanager
def open_run(
  spec: specs.Spec,
  workdir: pathlib.Path,
  command: list[str],
  write_report: Callable[[pathlib.Path, writers.Writer], None] = _report,
) -> Iterator[Job]:
  """Opens a workdir for this spec, and leaves a report behind, always.

  Raises:
    ValueError: the workdir belongs to another config; names what differs. Or
      another process runs in it. Or something of an import cannot be used,
      which does not bind the workdir to it.
    OSError: the workdir cannot be made.
  """
  if spec.initial:
    imported.check_model(spec.initial, spec.model)
  claimed = _claimed(spec)
  with _ended_by_sigterm(), files.alone(workdir):
    if spec.initial and not (workdir / workdirs.CONFIG).exists():
      imported.take(
        spec.initial,
        workdir,
        spec.model.vocab_size,
        talks=spec.demonstrations.conversations,
        seq_len=spec.sft.seq_len,
      )
    _claim(claimed, workdir)
    files.sweep(workdir)
    spec = settle_sandbox(spec, workdir)
    files.write_json(
      workdir / 'run.json',
      {
        'machine': machine.describe(),
        'command': ' '.join(command[1:]),
        'sandbox_level': spec.sandbox.level,
      },
    )
    with writers.Writer(
      workdir,
      tensorboard=spec.telemetry.tensorboard,
      wandb=spec.telemetry.wandb,
    ) as writer:
      try:
        yield Job(spec, workdir, tuple(command), writer)
      except BaseException:
        try:
          write_report(workdir, writer)
        except (OSError, ValueError) as error:
          tell('report')(f'not written: {error}')
        except Exception:
          # Not even a bug of the report may hide what interrupted the run.
          logging.exception('The report of the interrupted run failed:')
        raise
      write_report(workdir, writer)


def _claimed(spec: specs.Spec) -> dict[str, Any]:
  """Returns what a workdir is bound to: spec, and content of what it names."""
  talks = spec.demonstrations.conversations
  return dataclasses.asdict(spec) | {
    'imported': identity.of(spec.initial) if spec.initial else '',
    'task_set': families.identity(spec),
    'conversations': conversations.identity(talks) if talks else '',
  }


def _claim(config: dict[str, Any], workdir: pathlib.Path) -> None:
  # A folder may be moved; what it holds may not change. No result depends on
  # the gate, which looks, and ends a run at most; nor on how policies travel.
  ignored = ('telemetry', 'rl.placement', 'rl.gate', 'delta', 'initial')
  ignored += ('tasks.folder',)
  workdirs.claim(workdir, config, ignored=ignored)
  path = workdir / workdirs.CONFIG
  there = files.read_json(path)
  # Exports read the import, too, and who follows the run its store.
  current = {name: config[name] for name in ('initial', 'delta', 'tasks')}
  # Through JSON, so that tuples compare equal to what was read.
  if there != (updated := there | json.loads(json.dumps(current))):
    files.write_json(path, updated)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
  """Makes SIGTERM (docker stop, Slurm) end the run as an exception does.

  Only a main thread can; elsewhere the signal does what it did.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return

  def end(number: int, _: Any) -> None:
    # A second one must not interrupt the report; SIGKILL still ends anything.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)

  before = signal.signal(signal.SIGTERM, end)
  try:
    yield
  finally:
    # None: a handler that was not set from Python.
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
