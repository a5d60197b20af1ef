"""Compiles a train step for machines that need not exist.

The program is the one that `train.loop` runs: forward, backward, update of a
donated state. The compilers are the real ones (libtpu, XLA:GPU, XLA:CPU), so
memory, collectives and schedule are those of a run. No array is allocated and
no code runs.
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

from composer_jax.core import batches, checks, platforms
from composer_jax.models import config as model_config
from composer_jax.optim import groups
from composer_jax.parallel import rounds, shardings, topology
from composer_jax.plan import case as cases
from composer_jax.plan import topologies
from composer_jax.train import heads, loop
from composer_jax.train import placement as train_placement

PRINTED = 'printed.txt'  # The compiler's stderr, beside the files it dumps.
# XLA prints this where it can reshard an array only by gathering all of it.
_WARNING = 'Involuntary full rematerialization'
# Messages of programs that do not fit: the size of temporaries, or of all.
_TEMPORARIES = (
  r'temporaries \(([\d.]+)([GM])\) exceeds available HBM \(([\d.]+)'
)
_USED = r'Used ([\d.]+)([GM]) of ([\d.]+)G hbm'
_UNITS = {'G': 1 << 30, 'M': 1 << 20}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
  """Batch, optimizer and parallelism of a step.

  Attributes:
    batch_size: rows of a step on all devices; 0 gives each device that shards
      the batch one row a microbatch.
    seq_len: tokens of a row.
    accumulate: microbatches of a step.
    optimizer: 'muon' or 'adam'.
    state: dtype of masters and moments.
    offload: true for masters and moments in the host's memory.
    parallel: exchange of tokens and order of the sequence.
    remat_saves: names of the arrays that recomputation keeps; None takes those
      of the model's config.
  """

  batch_size: int = 0
  seq_len: int = 4096
  accumulate: int = 1
  optimizer: str = 'muon'
  state: str = 'float32'
  offload: bool = False
  parallel: train_placement.ParallelOptions = train_placement.ParallelOptions()
  remat_saves: tuple[str, ...] | None = None

  def __post_init__(self):
    checks.at_least(self, 1, 'seq_len', 'accumulate')
    checks.at_least(self, 0, 'batch_size')


class Traced(NamedTuple):
  """Facts about a step that need no compiler.

  `num_tokens` counts all devices; `arguments` are the bytes of one. `shards`
  exchange a microbatch, `micro_tokens` of each device; None without experts
  elsewhere.
  """

  num_tokens: int
  arguments: int
  seconds: float
  lines: tuple[str, ...]
  shards: rounds.Shards | None
  micro_tokens: int


class Live(NamedTuple):
  """An array that is allocated when memory is fullest."""

  name: str
  scope: str
  bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
  """A compiled step; bytes are those of one device.

  Attributes:
    text: scheduled HLO of the program.
    traced: facts from before the compilation.
    seconds: time to compile on this machine.
    has_code: true if the compiler made machine code; false if it was stopped
      at its schedule, or ran out of device memory.
    temporaries: bytes in addition to `traced.arguments`.
    limit: bytes that the compiler allows in all; None if it states no limit.
    error: message of a compiler that ran out of device memory; '' otherwise.
    warnings: the compiler's lines on involuntary rematerialisation.
    live: arrays when memory is fullest, largest first; empty if the compiler
      does not list them.
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
    """Bytes in all; results reuse the memory of the donated state."""
    return self.traced.arguments + self.temporaries


def lower(
  case: cases.Case, options: StepOptions, devices: list[Any]
) -> tuple[Traced, Any]:
  """Traces the step of a case for devices that need not exist.

  Raises:
    ValueError: a dimension does not divide over the mesh.
  """
  mesh = topology.make_mesh(*case.mesh.shape.values(), devices=devices)
  platform = topologies.MACHINES[case.machine].platform
  model = case.model
  if options.remat_saves is not None:
    model = dataclasses.replace(model, remat_saves=options.remat_saves)
  start = time.perf_counter()
  with (
    contextlib.nullcontext()
    if platform == jax.default_backend()
    else platforms.targeting(platform, case.machine)
  ):
    placement, arguments, lowered = _lower(case, model, mesh, options)
  shard_bytes = (
    leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
    for leaf in jax.tree.leaves(arguments)
    if leaf.sharding.memory_kind != 'pinned_host'
  )
  num_tokens = arguments[1].tokens_BT.size
  traced = Traced(
    num_tokens=num_tokens,
    arguments=sum(shard_bytes),
    seconds=time.perf_counter() - start,
    lines=placement.lines,
    shards=placement.shards_of(num_tokens // options.accumulate),
    micro_tokens=num_tokens // options.accumulate // mesh.size,
  )
  return traced, lowered


def _lower(
  case: cases.Case,
  model: model_config.ModelConfig,
  mesh: Mesh,
  options: StepOptions,
) -> tuple[train_placement.Placement, Any, Any]:
  rows = shardings.product(case.layout.batch, mesh)
  batch_size = options.batch_size or rows * options.accumulate
  placement = train_placement.build(
    model,
    mesh=mesh,
    layout=case.layout,
    options=options.parallel,
    num_tokens=batch_size * options.seq_len // options.accumulate,
  )
  # Learning rates and their schedule do not change the program's shape.
  optimizer = groups.OptimizerOptions(
    name=options.optimizer,
    state=options.state,
    offload=options.offload,
    learning_rate=1e-3,
    adam_learning_rate=1e-3,
    warmup_steps=100,
    decay_steps=100,
    final_ratio=0.1,
    muon=case.muon or groups.MuonChoices(),
  )
  programs = loop.make_programs(
    loop.LoopOptions(
      stage='plan',
      steps=1000,
      batch_size=batch_size,
      seq_len=options.seq_len,
      accumulate=options.accumulate,
      optimizer=optimizer,
      heads=heads.HeadSection().training('cpt', model, optimizer),
      bias_rate=0.001,
      checkpoint_every=1000,
      eval_every=1000,
      log_every=1,
      seed=0,
    ),
    model,
    placement,
  )

  shape = batch_size, options.seq_len
  integers, floats = (
    jax.ShapeDtypeStruct(shape, dtype, sharding=placement.batch)
    for dtype in (jnp.int32, jnp.float32)
  )
  # The batch holds shapes where its type declares arrays.
  batch_type: Any = batches.LMBatch
  batch = batch_type(
    tokens_BT=integers,
    segment_ids_BT=integers,
    positions_BT=integers,
    loss_weights_BT=floats,
  )
  arguments = programs.like, batch
  return placement, arguments, programs.step.lower(*arguments)


def compile_lowered(
  traced: Traced,
  lowered: Any,
  folder: pathlib.Path,
  compiler_options: dict[str, Any] | None = None,
) -> Compiled:
  """Compiles a lowered step; the empty folder takes what the compiler dumps.

  Want of device memory gives a result without code; another failure raises
  jax.errors.JaxRuntimeError.
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
    # Results that reuse no donated argument need memory in addition.
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
  lines = (folder / PRINTED).read_text(errors='replace').splitlines()
  return tuple(line for line in lines if _WARNING in line)


def _wanted(error: str, arguments: int) -> tuple[int, int]:
  """Returns the bytes of temporaries and of the limit that an error states.

  The TPU compiler counts arguments among the temporaries.
  """
  for pattern in (_TEMPORARIES, _USED):
    if match := re.search(pattern, error):
      size, unit, limit = match.groups()
      wanted = round(float(size) * _UNITS[unit])
      return max(wanted - arguments, 0), round(float(limit) * _UNITS['G'])
  raise ValueError(
    f"The compiler's error states no sizes that this reader knows: "
    f'{error[:400]}'
  )


def dumped(folder: pathlib.Path, suffix: str) -> str:
  """Returns the text of the largest dump with a suffix; '' if none exists."""
  paths = sorted(folder.glob(f'*{suffix}'), key=lambda p: p.stat().st_size)
  return paths[-1].read_text() if paths else ''


def live(folder: pathlib.Path, text: str) -> tuple[Live, ...]:
  """Returns the arrays when memory is fullest, from the compiler's dumps."""
  _, _, peak = dumped(folder, 'live-range.txt').partition('(peak):\n')
  scopes = dict(
    re.findall(r'^\s*(?:ROOT )?%?([\w.-]+) = .*op_name="([^"]*)"', text, re.M)
  )
  arrays = []
  for line in peak.splitlines():
    match = re.match(r'\s*([\w.-]+)\{[\d,]*\}: (\d+) bytes', line)
    if match is None:
      break
    name, size = match.groups()
    arrays.append(Live(name, scopes.get(name, ''), int(size)))
  return tuple(sorted(arrays, key=lambda array: -array.bytes))


@contextlib.contextmanager
def _stderr(path: pathlib.Path) -> Iterator[None]:
  """Redirects stderr to a file, including what C++ code prints."""
  kept = os.dup(2)
  with path.open('wb') as file:
    os.dup2(file.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(kept, 2)
      os.close(kept)
