"""Compiles a step in a process of its own, to the end or to the schedule.

A TPU's compiler has decided on memory and on the order of everything long
before it ends: making the machine code takes most of its time. Who wants to
know how a step lies in memory and in time need not wait for that.
"""

import dataclasses
import multiprocessing
import pathlib
import re
import tempfile
import time
from multiprocessing import connection

from composer_jax.plan import aot, topologies
from composer_jax.plan import case as cases

UNTIL = ('code', 'schedule')
# What the TPU compiler writes last before it makes code.
_LAST = '*after_optimizations_after_buffer_assignment.txt'
_TEMPORARIES = r'^allocation \d+: size (\d+), preallocated-temp:'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileTask:
  """What a process compiles, after it has prepared for it."""

  case: cases.Case
  options: aot.StepOptions
  topology_name: str
  libtpu: str


def compile_step(task: CompileTask, until: str = 'code') -> aot.Compiled:
  """Compiles a step in a process of its own.

  Only a TPU's compiler can be left at the schedule.

  Raises:
    ValueError: as `aot.lower`.
    RuntimeError: the compiler failed for another reason than memory.
  """
  if until not in UNTIL:
    raise ValueError(f'until {until!r} is not one of {UNTIL}.')
  platform = topologies.MACHINES[task.case.machine].platform
  if until == 'schedule' and platform != 'tpu':
    raise ValueError(
      f'{task.topology_name} is compiled by XLA:{platform.upper()}, which '
      "tells its schedule only at the end; until must be 'code'."
    )
  context = multiprocessing.get_context('spawn')
  mine, its = context.Pipe()
  with tempfile.TemporaryDirectory() as folder:
    process = context.Process(target=_work, args=(its, task, folder))
    process.start()
    its.close()
    try:
      return _received(mine, pathlib.Path(folder), until)
    finally:
      process.kill()
      process.join()


def _work(pipe: connection.Connection, task: CompileTask, folder: str) -> None:
  """Runs in the other process; sends Traced, then Compiled, or an error."""
  try:
    topologies.prepare(task.topology_name, task.libtpu)
    devices = topologies.devices(task.topology_name)
    traced, lowered = aot.lower(task.case, task.options, devices)
    pipe.send(traced)
    pipe.send(aot.compile_lowered(traced, lowered, pathlib.Path(folder)))
  except (ValueError, RuntimeError) as error:
    pipe.send(error)


def _received(
  pipe: connection.Connection, folder: pathlib.Path, until: str
) -> aot.Compiled:
  traced, start = None, 0.0
  while True:
    if pipe.poll(0.5):
      try:
        found = pipe.recv()
      except EOFError:
        raise RuntimeError(
          'The process that compiles ended without a word; it may have run out '
          'of memory.'
        ) from None
      if isinstance(found, Exception):
        raise found
      if isinstance(found, aot.Compiled):
        return found
      traced, start = found, time.perf_counter()
    if traced and until == 'schedule' and any(folder.glob(_LAST)):
      # It is written piece by piece, and nothing says when it is whole.
      size = -1
      while size != (size := sum(p.stat().st_size for p in folder.glob(_LAST))):
        time.sleep(1.0)
      return _scheduled(traced, folder, time.perf_counter() - start)


def _scheduled(
  traced: aot.Traced, folder: pathlib.Path, seconds: float
) -> aot.Compiled:
  text = aot.dumped(folder, _LAST.lstrip('*'))
  buffers = aot.dumped(folder, 'after_optimizations-buffer-assignment.txt')
  sizes = re.findall(_TEMPORARIES, buffers, re.M)
  return aot.Compiled(
    text=text,
    traced=traced,
    seconds=seconds,
    has_code=False,
    temporaries=sum(map(int, sizes)),
    limit=None,
    error='',
    warnings=aot.warnings(folder),
    live=aot.live(folder, text),
  )
