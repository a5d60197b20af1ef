"""The processes of one run: process 0 decides and writes, the others follow.

Every process of a trainer runs the same program under `jax.distributed`. Arrays
on devices meet in collectives; what the host decides meets here, in small files
of a folder that all see. A wait for such a file is a loop that polls and says
that this process is alive, while a collective would block in C++ for as long as
process 0 builds a corpus or waits for groups.

A supervisor (system `fleet`) starts each process with a `Ticket`. A program
without one is the only process of its run, and writes nothing here.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from composer_jax.core import files

# Variable with a Ticket as JSON. A process takes it out of its environment, so
# that what it starts (rollout workers, sandboxes) is no member.
TICKET = 'COMPOSER_JAX_TICKET'
# Exit codes of members: it cannot go on, and a restart would not help; or other
# processes were lost, and it may.
REFUSED, LOST = 1, 75
_POLL_S = 0.02
_BEAT_S = 0.2
# Processes cannot be this many decisions apart: collectives lie between.
_KEPT = 1000

T = TypeVar('T')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ticket:
  """What a supervisor tells a process that it starts.

  Attributes:
    folder: folder of this start of all processes, which all of them see.
    address: host and port at which the processes find each other.
    process: number given to `jax.distributed`.
    count: number of processes.
    devices: CPU devices to emulate; None for the devices that are there.
    beat: file whose time of change tells the supervisor that this process makes
      progress; '' for none.
    start_s: seconds in which all processes must have started.
  """

  folder: str
  address: str
  process: int
  count: int
  devices: int | None = None
  beat: str = ''
  start_s: float = 1800.0

  def to_environment(self) -> dict[str, str]:
    return {TICKET: json.dumps(dataclasses.asdict(self))}


@dataclasses.dataclass
class _Membership:
  index: int = 0
  count: int = 1
  folder: pathlib.Path | None = None
  beat: str = ''
  beaten: float = 0.0
  decisions: Any = dataclasses.field(default_factory=itertools.count)


_self = _Membership()


def take_ticket() -> Ticket | None:
  """Takes the ticket of this process, if a supervisor gave it one."""
  text = os.environ.pop(TICKET, None)
  if text is None:
    return None
  ticket = Ticket(**json.loads(text))
  _self.beat = ticket.beat
  return ticket


def join(ticket: Ticket) -> None:
  """Joins the other processes; call it before any device is used."""
  import jax

  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(
    ticket.address,
    num_processes=ticket.count,
    process_id=ticket.process,
    initialization_timeout=int(ticket.start_s),
  )
  # On a TPU the slice numbers the processes, not the ticket.
  _self.index, _self.count = jax.process_index(), jax.process_count()
  _self.folder = pathlib.Path(ticket.folder)
  beat()


def count() -> int:
  return _self.count


def is_first() -> bool:
  """Returns true in process 0, which alone writes what a run has once."""
  return _self.index == 0


def own_folder(workdir: pathlib.Path) -> pathlib.Path:
  """Returns where this process alone writes: for process 0, the workdir.

  What the others measure is equal, and theirs are removed by a later start.
  """
  if is_first():
    return workdir
  assert _self.folder is not None
  return _self.folder / f'process_{_self.index}'


def lead(decide: Callable[[], Any]) -> Any:
  """Returns what process 0 decides, as JSON has it, in all processes.

  All make the same calls in the same order. If process 0 fails, the others wait
  until the supervisor ends them.
  """
  if _self.count == 1:
    return decide()
  assert _self.folder is not None
  number = next(_self.decisions)
  path = _self.folder / f'decision_{number}.json'
  if is_first():
    files.write_json(path, decide())
    old = _self.folder / f'decision_{number - _KEPT}.json'
    old.unlink(missing_ok=True)
  while not path.exists():
    beat()
    time.sleep(_POLL_S)
  return files.read_json(path)


def in_turn(make: Callable[[], T]) -> T:
  """Calls `make` in process 0, then in the others, which find what it left."""
  if not is_first():
    lead(lambda: None)
    return make()
  made = make()
  lead(lambda: None)
  return made


def check_equal(what: str, value: Any) -> None:
  """Raises a ValueError in a process whose value is not that of process 0."""
  first = lead(lambda: value)
  if value != first:
    raise ValueError(
      f'Process {_self.index} has other {what} than process 0: {value!r}, not '
      f'{first!r}. All processes must see the same files and run the same code.'
    )


def beat() -> None:
  """Tells the supervisor that this process makes progress; cheap."""
  now = time.monotonic()
  if _self.beat and now - _self.beaten >= _BEAT_S:
    _self.beaten = now
    pathlib.Path(_self.beat).write_bytes(b'')
    os.utime(_self.beat)
