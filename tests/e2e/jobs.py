"""Starts the smoke job, watches it from outside, and reads its files."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import psutil

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.tasks.list_functions import family
from composer_jax.telemetry import writer as writers
from composer_jax.train.checkpoints import export
from tests import programs

ROOT = programs.ROOT
CONFIG = 'configs/composer/tiny.py:smoke'
# Six steps at this rate teach SFT which tokens are frequent, so that calls end
# early and episodes differ in their invalid calls: groups have a gradient.
OVERRIDES = (
  # With the same options, both stages have one program.
  *(
    f'--config.{stage}.{change}'
    for stage in ('cpt', 'sft')
    for change in (
      'learning_rate=0.05',
      'adam_learning_rate=0.05',
      'warmup_steps=1',
      # Makes the run write the metrics of both passes.
      'muon.qk_clip=100.0',
    )
  ),
  '--config.episode.max_turns=12',
)
# For a job that hangs; on a busy machine a job takes many minutes.
TIMEOUT_S = 3600

# Fields of a line of metrics that a clock measured, or that say how a version
# was published: after a restart it may be published already, or lack its base.
UNCERTAIN = (
  'time',
  'tokens_per_s',
  'mfu',
  'sandbox_ms',
  'wait_s',
  'train_s',
  'publish_s',
  'encode_s',
  'upload_s',
  'kind',
  'bytes',
  'changed',
  'cut_bytes',
  'keyframe_bytes',
)


# Flags that give the tests' own processes eight devices.
DEVICES = (
  '--xla_force_host_platform_device_count',
  '--xla_cpu_multi_thread_eigen',
)


def environment() -> dict[str, str]:
  """Returns this process's environment without the tests' eight devices."""
  flags = [
    flag
    for flag in os.environ.get('XLA_FLAGS', '').split()
    if flag.partition('=')[0] not in DEVICES
  ]
  # Caching even quick programs pays, since a resumed run compiles them again.
  return os.environ | {
    'XLA_FLAGS': ' '.join(flags),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }


def arguments(workdir: pathlib.Path, *more: str) -> list[str]:
  return [f'--config={CONFIG}', f'--workdir={workdir}', *OVERRIDES, *more]


def run(
  workdir: pathlib.Path, *more: str, run=programs.run
) -> subprocess.CompletedProcess:
  """Runs the command line to its end."""
  return run(
    'experiments.composer',
    *arguments(workdir, *more),
    env=environment(),
    timeout_s=TIMEOUT_S,
  )


def start(
  zygote: programs.Zygote,
  workdir: pathlib.Path,
  log: pathlib.Path,
  *more: str,
) -> int:
  """Starts a run from a zygote, without the cost of imports."""
  with log.open('a') as output:
    return zygote.start(
      ['-m', 'experiments.composer', *arguments(workdir, *more)],
      env=environment(),
      out=output.fileno(),
      err=output.fileno(),
      imports=(*programs.IMPORTS, 'tensorboardX'),
    )


# RL starts from these files; with them every earlier stage does nothing.
BEFORE_RL = (
  'corpus',
  'tokenizer.json',
  'sandbox.json',
  'exports/cpt',
  'exports/sft',
  'demonstrations.json',
  'sft_transcripts.txt',
  *(
    f'evaluation_sft{axis}{end}'
    for axis in ('', *(f'_{axis}' for axis in list(family.AXES)[1:]))
    for end in ('.json', '_episodes.jsonl')
  ),
)


def copy_before_rl(source: pathlib.Path, target: pathlib.Path) -> None:
  """Makes a workdir whose next stage is RL, with any config of RL."""
  (target / 'exports').mkdir(parents=True)
  for name in BEFORE_RL:
    if (source / name).is_dir():
      shutil.copytree(source / name, target / name)
    else:
      shutil.copyfile(source / name, target / name)


def descendants(pid: int) -> list[psutil.Process]:
  try:
    return psutil.Process(pid).children(recursive=True)
  except psutil.NoSuchProcess:
    return []


def mentioning(workdir: pathlib.Path) -> list[psutil.Process]:
  """Returns processes whose command line names the workdir."""
  processes = []
  for process in psutil.process_iter():
    with contextlib.suppress(psutil.Error):
      if any(str(workdir) in a for a in process.cmdline()):
        processes.append(process)
  return processes


def assert_gone(processes: list[psutil.Process], within_s: float = 30) -> None:
  _, alive = psutil.wait_procs(processes, timeout=within_s)
  # A zombie has ended and only waits for init to read its status.
  alive = [p for p in alive if p.is_running()]
  alive = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
  assert not alive, f'these outlived the process that started them: {alive}'


@dataclasses.dataclass(frozen=True)
class Strike:
  """A moment at which to kill.

  Attributes:
    name: name of the moment.
    is_due: function of the workdir; true once the moment has come.
    worker: true to kill the rollout worker instead of the main process.
  """

  name: str
  is_due: Callable[[pathlib.Path], bool]
  worker: bool = False


def strike(pid: int, workdir: pathlib.Path, moment: Strike) -> bool:
  """Kills when the moment comes; returns False if the run ended before it.

  Checks that no process started by the killed one outlives it.
  """
  main = psutil.Process(pid)
  deadline = time.monotonic() + TIMEOUT_S
  while not moment.is_due(workdir):
    assert time.monotonic() < deadline, f'{moment.name}: never came'
    if not main.is_running() or main.status() == psutil.STATUS_ZOMBIE:
      return False
    time.sleep(0.004)
  victim = main
  if moment.worker:
    victim = next(p for p in mentioning(workdir) if p.ppid() == pid)
  family = descendants(victim.pid)
  try:
    os.kill(victim.pid, signal.SIGKILL)
  except ProcessLookupError:
    return False
  assert_gone(family)
  return True


def metrics(workdir: pathlib.Path) -> list[dict]:
  """Returns the metrics that must be bit-equal, ordered by stage and step."""
  rows = [
    {k: v for k, v in row.items() if k not in UNCERTAIN}
    for row in writers.read(workdir)
    if row['stage'] != 'fleet'  # Who sampled, and what went wrong meanwhile.
  ]
  # Stages write in order; a held-out loss and a loss share a step.
  return sorted(rows, key=lambda r: (r['stage'], r['step'], sorted(r)))


def steps(workdir: pathlib.Path, stage: str) -> list[int]:
  """Returns the steps of a stage whose loss the metrics have by now."""
  return [
    r['step']
    for r in writers.read(workdir)
    if r['stage'] == stage and 'loss' in r
  ]


def weights(workdir: pathlib.Path, stage: str) -> dict[str, np.ndarray]:
  """Returns the exported masters of a finished stage, by name."""
  config = model_config.ModelConfig.from_dict(
    json.loads((workdir / 'config.json').read_text())['model']
  )
  shapes, _ = decoder.abstract(config)
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), shapes
  )
  return named(export.load(workdir, stage, like))


def named(variables: dict) -> dict[str, np.ndarray]:
  return {n: np.asarray(a) for n, a in trees.flatten_names(variables).items()}


def episodes(workdir: pathlib.Path) -> list[dict]:
  return [
    json.loads(line)
    for line in (workdir / 'episodes.jsonl').read_text().splitlines()
  ]


@contextlib.contextmanager
def locked(path: pathlib.Path) -> Iterator[None]:
  with path.open('w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield
