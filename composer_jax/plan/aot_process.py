"""Compiles a program in a separate process, to its code or its schedule.

The TPU compiler decides on memory and on the order of operations long before it
ends; most of its time goes into machine code. The process is therefore stopped
at the schedule where code is not wanted.
"""

import dataclasses
import multiprocessing
import pathlib
import re
import tempfile
import time
from multiprocessing import connection

from composer_jax.plan import aot, programs, topologies
from composer_jax.plan import case as cases

UNTIL = ('code', 'schedule')
# The last file that the TPU compiler writes before it makes code.
_LAST = '*after_optimizations_after_buffer_assignment.txt'
# Temporaries, and results that take no donated argument's place.
_TEMPORARIES = (
  r'^allocation \d+: size (\d+), '
  r'(?!color|parameter)(?:preallocated-temp|.*maybe-live-out)'
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileTask:
  case: cases.Case
  options: programs.StepOptions
  topology_name: str
  libtpu: str
  program: str = 'train'


def compile_step(task: CompileTask, until: str = 'code') -> aot.Compiled:
  """Compiles a step in a separate process.

  Only the TPU compiler can stop at the 'schedule'. A ValueError says why a step
  cannot be lowered; a RuntimeError is a failure of the compiler.
  """
  if until not in UNTIL:
    raise ValueError(f'until {until!r} is not one of {UNTIL}.')
  platform = topologies.MACHINES[task.case.machine].platform
  if until == 'schedule' and platform != 'tpu':
    raise ValueError(
      f'{task.topology_name} is compiled by XLA:{platform.upper()}, which '
      "shows its schedule only at the end; until must be 'code'."
    )
  context = multiprocessing.get_context('spawn')
  receiver, sender = context.Pipe()
  with tempfile.TemporaryDirectory() as folder:
    process = context.Process(target=_work, args=(sender, task, folder))
    process.start()
    sender.close()
    try:
      return _receive(receiver, pathlib.Path(folder), until)
    except EOFError:
      process.join()
      raise RuntimeError(
        f'The process that compiles for {task.topology_name} ended with exit '
        f'code {process.exitcode} and no result. Code -9 usually means that '
        'this machine ran out of memory; otherwise see what it printed, and '
        f'check that the compiler is whole (--libtpu={task.libtpu!r}).'
      ) from None
    finally:
      process.kill()
      process.join()


def _work(pipe: connection.Connection, task: CompileTask, folder: str) -> None:
  """Compiles; sends a Traced and a Compiled, or the error instead."""
  try:
    topologies.prepare(task.topology_name, task.libtpu)
    devices = topologies.devices(task.topology_name)
    traced, lowered = programs.lower(
      task.case, task.program, task.options, devices
    )
    pipe.send(traced)
    pipe.send(aot.compile_lowered(traced, lowered, pathlib.Path(folder)))
  except (ValueError, RuntimeError) as error:
    pipe.send(error)


def _receive(
  pipe: connection.Connection, folder: pathlib.Path, until: str
) -> aot.Compiled:
  traced, start = None, 0.0
  while True:
    if pipe.poll(0.5):
      message = pipe.recv()
      if isinstance(message, Exception):
        raise message
      if isinstance(message, aot.Compiled):
        return message
      traced, start = message, time.perf_counter()
    if traced and until == 'schedule' and any(folder.glob(_LAST)):
      # The file is written piece by piece and has no end mark.
      size = -1
      while size != (size := sum(p.stat().st_size for p in folder.glob(_LAST))):
        time.sleep(1.0)
      return _scheduled(traced, folder, time.perf_counter() - start)


def _scheduled(
  traced: programs.Traced, folder: pathlib.Path, seconds: float
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
