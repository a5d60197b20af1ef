"""One run in one workdir: what every stage needs, opened once."""

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from composer_jax.agent import episode
from composer_jax.checkpoint import workdir as workdirs
from composer_jax.core import files, records
from composer_jax.data import corpus as corpora
from composer_jax.data import tokens as corpus_tokens
from composer_jax.parallel import layouts, topology
from composer_jax.pipeline import spec as specs
from composer_jax.sandbox import open as sandboxes
from composer_jax.tasks import list_functions, runners
from composer_jax.telemetry import machine
from composer_jax.telemetry import writer as writers
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train import placement as placements

# Tasks whose texts the tokenizer sees beside the corpus, so that the tool
# protocol costs few tokens; their seed is used for nothing else.
_PROTOCOL_TASKS = 1500
_PROTOCOL_SEED = 7_000_003

_LAYOUTS = {'hsdp': layouts.TRAIN, 'data_parallel': layouts.REPLICATED}


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
  def corpus(self) -> corpora.Corpus:
    return build_corpus(self.spec, self.workdir)

  @functools.cached_property
  def tokenizer(self) -> tokenizers.Tokenizer:
    return train_tokenizer(self.spec, self.workdir, self.corpus)

  @functools.cached_property
  def documents(self) -> dict[str, corpus_tokens.Documents]:
    return corpus_tokens.tokenise(
      self.corpus, self.tokenizer, report=tell('data')
    )

  @functools.cached_property
  def placement(self) -> placements.Placement:
    """Of pretraining and SFT: all devices."""
    mesh = topology.make_mesh(**dataclasses.asdict(self.spec.mesh))
    return placements.build(
      self.spec.model, mesh=mesh, layout=_LAYOUTS[self.spec.layout]
    )

  @functools.cached_property
  def single(self) -> placements.Placement:
    """Of RL: one device, since the rollout process needs the others."""
    mesh = topology.make_mesh(devices=jax.devices()[:1])
    return placements.build(
      self.spec.model, mesh=mesh, layout=layouts.REPLICATED
    )

  @contextlib.contextmanager
  def runner(self) -> Iterator[runners.Runner]:
    """A sandbox, or the runner that executes nothing."""
    with open_runner(self.spec.sandbox) as runner:
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
  packages, functions, bodies = list_functions.holdout()
  return corpora.build(
    spec.data.sources,
    workdir=workdir / 'corpus',
    holdout=corpora.HoldOut(
      packages=packages, functions=functions, bodies=bodies
    ),
    options=corpora.CorpusOptions(
      max_bytes=spec.data.max_bytes,
      heldout_fraction=spec.data.heldout_share,
      seed=spec.seed,
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
      extra_texts=_protocol_texts(),
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


def _protocol_texts() -> list[str]:
  texts = []
  for index in range(_PROTOCOL_TASKS):
    task = list_functions.generate(index, 'train', _PROTOCOL_SEED)
    calls = (
      f'read {task.path}\nedit {task.path} {task.function}\n'
      f'{task.reference}\ntest\nfinish\n'
    )
    texts.append('\n'.join([task.prompt, *task.files.values(), calls]))
  return texts


@contextlib.contextmanager
def open_runner(options: specs.Sandbox) -> Iterator[runners.Runner]:
  """Opens what runs the tests; closed on exit."""
  if options.level == 'static':
    yield runners.StaticRunner()
    return
  sandbox = sandboxes.open_sandbox(
    options.level,
    options.limits(),
    allow_unsafe=options.allow_unsafe,
    size=options.workers,
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
    with open_runner(spec.sandbox):
      pass  # Refused now rather than after the training before it.
  else:
    found = probe()
    usable = [n for n, works, _ in found if works and n != 'rlimits']
    level = usable[0] if usable else 'static'
    say = tell('sandbox')
    for name, works, why in found:
      say(f'{name}: {"works" if works else "not here"}: {why}')
    if level == 'static':
      say(
        'No isolation here, so no generated code is executed: the tasks are '
        'judged by form (verifier tasks). For real execution use Linux with '
        'user namespaces allowed (sysctl kernel.unprivileged_userns_clone=1, '
        'or a container started with --privileged), with bubblewrap where '
        'there is one.'
      )
    else:
      say(f'code is judged in {level}')
  files.write_json(path, {'level': level})
  return dataclasses.replace(
    spec, sandbox=dataclasses.replace(spec.sandbox, level=level)
  )


@contextlib.contextmanager
def open_run(
  spec: specs.Spec, workdir: pathlib.Path, command: list[str]
) -> Iterator[Job]:
  """Opens a workdir for this spec, and leaves a report behind, always.

  Raises:
    ValueError: the workdir belongs to another config; names what differs.
  """
  workdirs.claim(
    workdir, dataclasses.asdict(spec), ignored=('telemetry', 'rl.placement')
  )
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
      # The report of an interrupted run must not hide what interrupted it.
      with contextlib.suppress(OSError, ValueError):
        _report(workdir, writer)
      raise
    _report(workdir, writer)


def _report(workdir: pathlib.Path, writer: writers.Writer) -> None:
  # Loads matplotlib, which a resumed run need not wait for.
  from composer_jax.telemetry import report

  writer.flush()
  print(f'Report: {report.write_report(workdir)}', flush=True)
