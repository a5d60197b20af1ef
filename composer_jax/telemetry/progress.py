"""Progress that a person watches: a live bar on a terminal, lines elsewhere.

Log files, notebooks and continuous integration get one plain line every few
seconds instead of control characters.
"""

import collections
import contextlib
import functools
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from composer_jax.core import processes


def duration(seconds: float) -> str:
  """Formats seconds as '8s', '3m20s' or '2h05m'."""
  seconds = max(0, round(seconds))
  if seconds < 60:
    return f'{seconds}s'
  if seconds < 3600:
    return f'{seconds // 60}m{seconds % 60:02d}s'
  return f'{seconds // 3600}h{seconds % 3600 // 60:02d}m'


def number(value: Any) -> str:
  """Formats a metric in at most four digits: 3.142, 12.35k, 4.1e-05."""
  if not isinstance(value, (int, float)):
    return str(value)
  if isinstance(value, int) and abs(value) < 10_000:
    return str(value)
  size = abs(value)
  for limit, unit in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if size >= limit:
      return f'{value / (1e3 if unit == "k" else limit):.4g}{unit}'
  if size and size < 1e-3:
    return f'{value:.1e}'
  return f'{value:.4g}'


class Progress(contextlib.AbstractContextManager):
  """Shows how far a stage is.

    with progress.Progress('cpt', total=400) as bar:
      for step in range(start, 400):
        ...
        bar.update(step + 1, loss=loss, tokens_per_s=rate)

  The rate and the time left come from the later half of the steps that this
  process did, and from the fifth on: steps that compile are soon forgotten.
  """

  def __init__(
    self,
    stage: str,
    total: int,
    *,
    start: int = 0,
    every_s: float = 5.0,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Begins a stage.

    Args:
      total: number of steps of the whole stage.
      start: number of steps done by earlier processes.
      every_s: seconds between plain lines; the first and last always show.
      stream: place to write to; None is standard output.
    """
    self._stage, self._total = stage, total
    self._every_s = every_s
    self._stream = stream or sys.stdout
    self._clock = clock
    # Number of the first step that was reported.
    self._first: int | None = None
    # Time and number of the steps of the later half.
    self._later = collections.deque[tuple[float, int]]()
    self._shown_at: float | None = None
    self._line = ''  # Not printed yet.
    self._bar = self._open_bar(start) if self._stream.isatty() else None

  def _open_bar(self, start: int) -> Any:
    import rich.console
    import rich.progress

    bar = rich.progress.Progress(
      rich.progress.TextColumn('[bold]{task.description:>5}'),
      rich.progress.BarColumn(bar_width=24),
      rich.progress.TextColumn('{task.completed}/{task.total}'),
      rich.progress.TextColumn('{task.fields[text]}', markup=False),
      console=rich.console.Console(file=self._stream),
      refresh_per_second=4,
    )
    self._task = bar.add_task(
      self._stage, total=self._total, completed=start, text=''
    )
    bar.start()
    return bar

  def update(self, step: int, **metrics: Any) -> None:
    """Shows progress; call it every step: plain lines are thinned out here."""
    processes.beat()
    now = self._clock()
    parts = [f'{name} {number(value)}' for name, value in metrics.items()]
    first, later = step if self._first is None else self._first, self._later
    self._first = first
    if not later or step > later[-1][1]:
      later.append((now, step))
    while len(later) > 2 and later[1][1] <= (first + step) / 2:
      later.popleft()
    elapsed, done = now - later[0][0], step - later[0][1]
    if step - first >= 4 and done > 0 and elapsed > 0:
      rate = done / elapsed
      parts.append(f'{number(rate)} steps/s')
      parts.append(f'{duration((self._total - step) / rate)} left')
    text = '  '.join(parts)
    if self._bar is not None:
      self._bar.update(self._task, completed=step, text=text)
      return
    self._line = f'[{self._stage}] {step}/{self._total}  {text}'.rstrip()
    if self._shown_at is None or now - self._shown_at >= self._every_s:
      self._shown_at = now
      self._print()

  def _print(self) -> None:
    print(self._line, file=self._stream, flush=True)
    self._line = ''

  def message(self, text: str) -> None:
    """Prints a line of its own above the bar."""
    processes.beat()
    line = f'[{self._stage}] {text}'
    if self._bar is not None:
      self._bar.console.print(line, markup=False, highlight=False)
    else:
      print(line, file=self._stream, flush=True)

  def close(self) -> None:
    if self._bar is not None:
      self._bar.stop()
      self._bar = None
    elif self._line:
      self._print()

  def __exit__(self, *unused) -> None:
    self.close()


def teller(stage: str) -> Callable[[str], None]:
  """Returns a function that prints plain lines, for work without steps."""
  return functools.partial(print, f'[{stage}]', flush=True)
