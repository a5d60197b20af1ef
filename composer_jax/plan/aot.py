"""Compiles a training step for machines that are not there.

The program is the one that `train.loop` runs: forward, backward, update of a
donated state. The compilers are the real ones (libtpu, XLA:GPU, XLA:CPU), so
memory, collectives and schedule are those of a run; nothing is allocated and
nothing runs.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from composer_jax.core import batches, platforms
from composer_jax.models import config as model_config
from composer_jax.optim import groups
from composer_jax.parallel import shardings, topology
from composer_jax.plan import case as cases
from composer_jax.plan import topologies
from composer_jax.train import loop
from composer_jax.train import placement as train_placement

PRINTED = 'printed.txt'  # What a compiler prints, among what it leaves.
# XLA's words where it found no way to reshard but to gather everything.
_WARNING = 'Involuntary full rematerialization'
# And where a program does not fit: of temporaries, or of all.
_TEMPORARIES = (
  r'temporaries \(([\d.]+)([GM])\) exceeds available HBM \(([\d.]+)'
)
_USED = r'Used ([\d.]+)([GM]) of ([\d.]+)G hbm'
_UNITS = {'G': 1 << 30, 'M': 1 << 20}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
  """What is trained on, and how.

  Attributes:
    batch_size: rows of a step on all devices; 0: in every microbatch one row
      for each device that has rows of its own.
    accumulate: microbatches of a step.
    optimizer: 'muon' or 'adam'.
    bucket: room of the experts' receive buffers in means; 0 for the worst case.
    remat_saves: what recomputation keeps; None as the model's config has it.
  """

  batch_size: int = 0
  seq_len: int = 4096
  accumulate: int = 1
  optimizer: str = 'muon'
  bucket: float = 1.25
  parallel: train_placement.ParallelOptions = train_placement.ParallelOptions()
  remat_saves: tuple[str, ...] | None = None

  def __post_init__(self):
    for name in ('seq_len', 'accumulate'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} must be at least 1, not {getattr(self, name)}.'
        )
    if self.batch_size < 0:
      raise ValueError(f'batch_size must not be below 0: {self.batch_size}.')
    if self.bucket and self.bucket < 1:
      raise ValueError(
        f'bucket must be at least 1 (the mean), or 0 for the worst case, not '
        f'{self.bucket}.'
      )


class Traced(NamedTuple):
  """What is known of a step before it is compiled.

  Attributes:
    num_tokens: on all devices.
    arguments: bytes of the state and the batch on one device.
    seconds: to trace and lower.
    lines: what was chosen of what devices exchange.
  """

  num_tokens: int
  arguments: int
  seconds: float
  lines: tuple[str, ...]


class Live(NamedTuple):
  """An array that is there when memory is fullest."""

  name: str
  scope: str
  bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """What a compiler made of a step; bytes are of one device.

  Attributes:
    text: of the program, a schedule.
    seconds: to compile, on the clock of this machine.
    has_code: false where the schedule and the memory are final, and machine
      code was not waited for.
    temporaries: bytes beside `traced.arguments`.
    limit: bytes that the compiler has for both; None where it names none.
    error: of the compiler, where it gave up for want of memory; '' else.
    warnings: lines that it wrote of involuntary rematerialisation.
    live: the largest arrays when memory is fullest, if the compiler told.
  """

  text: str
  traced: Traced
  seconds: float
  has_code: bool
  temporaries: int
  limit: int | None
  error: str
  warnings: tuple[str, ...]
  live: tuple[Live, ...]

  @property
  def peak(self) -> int:
    """Returns all bytes; what is donated comes back in its own place."""
    return self.traced.arguments + self.temporaries


def lower(
  case: cases.Case, options: StepOptions, devices: list[Any]
) -> tuple[Traced, Any]:
  """Traces the step of a case for devices that need not exist.

  Returns:
    What is known of it, and what `compile_lowered` takes.

  Raises:
    ValueError: something does not divide; names it.
  """
  mesh = topology.make_mesh(*case.mesh.shape.values(), devices=devices)
  platform = topologies.MACHINES[case.machine].platform
  model = case.model
  if options.remat_saves is not None:
    model = dataclasses.replace(model, remat_saves=options.remat_saves)
  elsewhere = (
    contextlib.nullcontext()
    if platform == jax.default_backend()
    else platforms.targeting(platform)
  )
  start = time.perf_counter()
  with elsewhere:
    placement, takes, lowered = _lower(case, model, mesh, options)
  traced = Traced(
    num_tokens=takes[1].tokens_BT.size,
    arguments=_argument_bytes(takes),
    seconds=time.perf_counter() - start,
    lines=placement.lines,
  )
  return traced, lowered


def _lower(
  case: cases.Case,
  model: model_config.ModelConfig,
  mesh: Mesh,
  options: StepOptions,
) -> tuple[train_placement.Placement, Any, Any]:
  """Returns the placement, what the step takes, and the step of it."""
  rows = shardings.product(case.layout.batch, mesh)
  batch_size = options.batch_size or rows * options.accumulate
  placement = train_placement.build(
    model,
    mesh=mesh,
    layout=case.layout,
    options=options.parallel,
    num_tokens=batch_size * options.seq_len // options.accumulate,
  )
  muon = case.muon or groups.MuonChoices()
  programs = loop.make_programs(
    loop.LoopOptions(
      stage='plan',
      steps=1000,
      batch_size=batch_size,
      seq_len=options.seq_len,
      accumulate=options.accumulate,
      # Rates and their schedule are numbers in the program, not its shape.
      optimizer=groups.OptimizerOptions(
        name=options.optimizer,
        learning_rate=1e-3,
        adam_learning_rate=1e-3,
        warmup_steps=100,
        decay_steps=100,
        final_ratio=0.1,
        muon=muon,
      ),
      bias_rate=0.001,
      checkpoint_every=1000,
      eval_every=1000,
      log_every=1,
      seed=0,
    ),
    model,
    placement,
  )

  def tokens(dtype):
    shape = (batch_size, options.seq_len)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placement.batch)

  # Described, not there: a batch holds shapes where arrays are declared.
  batch_of: Any = batches.LMBatch
  integers = tokens(jnp.int32)
  batch = batch_of(
    tokens_BT=integers,
    segment_ids_BT=integers,
    positions_BT=integers,
    loss_weights_BT=tokens(jnp.float32),
  )
  takes: list[Any] = [programs.like, batch]
  if placement.buckets:
    takes.append(
      jax.ShapeDtypeStruct((), jnp.bool_, sharding=placement.replicated)
    )
  step = programs.step(options.bucket or None)
  return placement, takes, step.lower(*takes)


def compile_lowered(
  traced: Traced,
  lowered: Any,
  folder: pathlib.Path,
  compiler_options: dict[str, Any] | None = None,
) -> Compiled:
  """Compiles what `lower` returns, to the end.

  Args:
    traced: of `lower`, as `lowered` is.
    lowered: the step.
    folder: empty; the compiler writes its intermediate results into it.
    compiler_options: beside those that training sets.

  Raises:
    jax.errors.JaxRuntimeError: the compiler failed for another reason than
      memory.
  """
  options = {
    **(compiler_options or {}),
    'xla_dump_to': str(folder),
    'xla_dump_hlo_as_text': True,
    'xla_dump_hlo_module_re': 'jit_',
  }
  error, compiled = '', None
  start = time.perf_counter()
  with _stderr(folder / PRINTED):
    try:
      compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as raised:
      error = str(raised)
      if 'RESOURCE_EXHAUSTED' not in error:
        raise
  seconds = time.perf_counter() - start
  if compiled is None:
    text = dumped(folder, 'after_optimizations.txt')
    temporaries, limit = _wanted(error, traced.arguments)
  else:
    text, limit = compiled.as_text(), None
    memory = compiled.memory_analysis()
    # What is not donated needs room of its own.
    temporaries = memory.temp_size_in_bytes + max(
      0, memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
  return Compiled(
    text=text,
    traced=traced,
    seconds=seconds,
    has_code=compiled is not None,
    temporaries=temporaries,
    limit=limit,
    error=error,
    warnings=warnings(folder),
    live=live(folder, text),
  )


def warnings(folder: pathlib.Path) -> tuple[str, ...]:
  """Returns the lines of involuntary rematerialisation that were printed."""
  lines = (folder / PRINTED).read_text(errors='replace').splitlines()
  return tuple(line for line in lines if _WARNING in line)


def _argument_bytes(takes: Any) -> int:
  return sum(
    jnp.dtype(leaf.dtype).itemsize
    * math.prod(leaf.sharding.shard_shape(leaf.shape))
    for leaf in jax.tree.leaves(takes)
  )


def _wanted(error: str, arguments: int) -> tuple[int, int]:
  """Reads what a program that does not fit wanted, and what there is.

  What the TPU compiler calls temporaries are the arguments too.
  """
  for pattern in (_TEMPORARIES, _USED):
    found = re.search(pattern, error)
    if found:
      size, unit, limit = found.groups()
      wanted = round(float(size) * _UNITS[unit])
      return max(wanted - arguments, 0), round(float(limit) * _UNITS['G'])
  raise ValueError(f'No sizes in what the compiler says: {error[:400]}')


def dumped(folder: pathlib.Path, suffix: str) -> str:
  """Returns the largest file that the compiler left under a name, or ''."""
  found = sorted(folder.glob(f'*{suffix}'), key=lambda p: p.stat().st_size)
  return found[-1].read_text() if found else ''


def live(folder: pathlib.Path, text: str) -> tuple[Live, ...]:
  """Reads the arrays of the fullest moment out of what the compiler left."""
  _, _, peak = dumped(folder, 'live-range.txt').partition('(peak):\n')
  scopes = dict(
    re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', text, re.M)
  )
  found = []
  for line in peak.splitlines():
    match = re.match(r'\s*([\w.-]+)\{[\d,]*\}: (\d+) bytes', line)
    if match is None:
      break
    name, size = match.groups()
    found.append(Live(name, scopes.get(name, ''), int(size)))
  return tuple(sorted(found, key=lambda live: -live.bytes))


@contextlib.contextmanager
def _stderr(path: pathlib.Path) -> Iterator[None]:
  """Writes what C++ prints to a file; Python's stream sees none of it."""
  kept = os.dup(2)
  with path.open('wb') as file:
    os.dup2(file.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(kept, 2)
      os.close(kept)
