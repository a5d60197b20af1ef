"""Wall seconds of a run's stages, added up over all the processes of the run.

`stages.json` holds {stage: seconds}. It is written when a stage begins and
ends, and every few seconds between, so that a killed process loses only those.
"""

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator

from composer_jax.core import files

STAGES = 'stages.json'


class StageTimes:
  """Measures the stages of one process on top of those before it.

  Stages nest, since one may be the first to need the result of another. A
  second counts for the innermost stage only, so that all of them add up.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    every_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Reads the times of earlier processes; writes every `every_s` seconds."""
    self._path = pathlib.Path(workdir) / STAGES
    self._seconds: dict[str, float] = {}
    if self._path.exists():
      self._seconds = files.read_json(self._path)
    self._every_s = every_s
    self._clock = clock
    self._open: list[str] = []
    self._since = 0.0
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def stage(self, name: str) -> Iterator[None]:
    """Counts the body's time for `name`; an error of the body comes first."""
    self._change(lambda: self._open.append(name))
    is_outermost = len(self._open) == 1
    with (
      self._regularly_written() if is_outermost else contextlib.nullcontext()
    ):
      try:
        yield
      except BaseException:
        with contextlib.suppress(OSError):
          self._change(self._open.pop)
        raise
      self._change(self._open.pop)

  def _change(self, change: Callable[[], object]) -> None:
    """Charges the innermost stage, then calls `change` on the stack; writes."""
    with self._lock:
      now = self._clock()
      if self._open:
        self._seconds[self._open[-1]] += now - self._since
      self._since = now
      change()
      if self._open:
        self._seconds.setdefault(self._open[-1], 0.0)
      rounded = {name: round(s, 3) for name, s in self._seconds.items()}
      files.write_json(self._path, rounded)

  @contextlib.contextmanager
  def _regularly_written(self) -> Iterator[None]:
    ended = threading.Event()

    def run():
      while not ended.wait(self._every_s):
        # The stage itself meets the full disk, and raises.
        with contextlib.suppress(OSError):
          self._change(lambda: None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
      yield
    finally:
      ended.set()
      thread.join()
