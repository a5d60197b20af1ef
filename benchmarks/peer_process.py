"""A peer that runs in a process of its own, in turns with what is measured.

The process inherits the core to which ours is pinned, and ours waits while it
works. It reads its task as a line of JSON, prints a line when it is ready, and
then for each further line works once and prints {"units", "seconds"}.

MKL multiplies by a slow path on processors that are not Intel's. `unlocked`
returns the environment in which it takes its fast one.
"""

import atexit
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

Rates = tuple[list[float], list[float]]


class PeerError(Exception):
  """The peer cannot do its task here."""


class Peer:
  """A running process; `rate` makes it work once."""

  def __init__(
    self,
    command: list[str],
    task: dict[str, Any],
    environment: dict[str, str] | None = None,
  ):
    """Starts the process and waits until it is ready.

    Raises:
      PeerError: the process ended; the last lines that it wrote say why.
    """
    self._errors: Any = tempfile.TemporaryFile('w+')  # noqa: SIM115
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
      env=os.environ | (environment or {}),
    )
    self.ready = self._ask(json.dumps(task))

  def _ask(self, line: str) -> dict[str, Any]:
    assert self._process.stdin is not None
    assert self._process.stdout is not None
    answer = ''
    try:
      self._process.stdin.write(line + '\n')
      self._process.stdin.flush()
      answer = self._process.stdout.readline()
    except BrokenPipeError:
      pass
    if not answer:
      self._process.wait()
      self._errors.seek(0)
      raise PeerError(self._errors.read().strip()[-500:])
    return json.loads(answer)

  def rate(self) -> float:
    """Returns units of work per second, by the clock of the process."""
    answer = self._ask('')
    return answer['units'] / answer['seconds']

  def close(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.communicate()
    self._errors.close()


def serve(prepare: Callable[[dict[str, Any]], Callable[[], float]]) -> None:
  """Is the main function of a peer's process.

  Args:
    prepare: function of the task that returns what works once and counts its
      units; it has worked once before.
  """
  run = prepare(json.loads(sys.stdin.readline()))
  print(json.dumps({'ready': True}), flush=True)
  torch: Any = sys.modules.get('torch')
  has_gpu = torch is not None and torch.cuda.is_available()
  clock = time.perf_counter if has_gpu else time.process_time
  for _ in sys.stdin:
    start = clock()
    units = run()
    seconds = clock() - start
    print(json.dumps({'units': units, 'seconds': seconds}), flush=True)


def in_turns(
  ours: Callable[[], float],
  peer_rate: Callable[[], float],
  rounds: int,
  *,
  clock: Callable[[], float] = time.process_time,
) -> Rates:
  """Returns rates like `interleaved.rates`; the peer measures its own rate."""
  rates_of_both: Rates = ([], [])
  for turn in range(rounds + 1):
    start = clock()
    units = ours()
    rate = units / (clock() - start)
    peers_rate = peer_rate()
    if turn:
      rates_of_both[0].append(rate)
      rates_of_both[1].append(peers_rate)
  return rates_of_both


def fastest(peers: dict[str, Callable[[], Peer]], rounds: int) -> str:
  """Returns the name of the peer with the highest of `rounds` rates.

  Peers that cannot do the task are named on standard error and left out.

  Raises:
    PeerError: none can.
  """
  best_rates = {}
  for name, start in peers.items():
    try:
      peer = start()
      best_rates[name] = max(peer.rate() for _ in range(rounds))
      peer.close()
    except PeerError as error:
      print(f'{name}: {error}', file=sys.stderr)
  print(
    ', '.join(f'{name} {rate:.0f}' for name, rate in best_rates.items()),
    file=sys.stderr,
    flush=True,
  )
  if not best_rates:
    raise PeerError(f'None of {sorted(peers)} can do its task here.')
  return max(best_rates, key=lambda name: best_rates[name])


@functools.cache
def unlocked() -> dict[str, str] | None:
  """Returns variables under which MKL takes its fast path on any processor.

  MKL asks a function of its own whether the processor is Intel's; a preloaded
  library answers yes. None without a C compiler, or off Linux.
  """
  compiler = shutil.which('cc') or shutil.which('gcc')
  if compiler is None or sys.platform != 'linux':
    return None
  folder = pathlib.Path(tempfile.mkdtemp(prefix='mkl_unlocked_'))
  atexit.register(shutil.rmtree, folder)
  source, library = folder / 'unlocked.c', folder / 'unlocked.so'
  source.write_text('int mkl_serv_intel_cpu_true(void) { return 1; }\n')
  command = [compiler, '-shared', '-fPIC', '-o', str(library), str(source)]
  subprocess.run(command, check=True)
  return {'LD_PRELOAD': str(library)}


def libraries() -> dict[str, dict[str, str]]:
  """Returns the environments of torch on a CPU that are worth measuring."""
  fast = unlocked()
  as_shipped: dict[str, dict[str, str]] = {'MKL as shipped': {}}
  return as_shipped if fast is None else {'MKL unlocked': fast} | as_shipped
