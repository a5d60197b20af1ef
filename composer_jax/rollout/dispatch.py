"""Hands work to the device and its reports back, without waiting in between.

A dispatch returns at once; its report is on its way to the host while the next
one runs, and is read after that. Whatever the host must know to go on (who is
done, what was sampled) is read before it decides. Everything runs in the order
of its dispatch, since each takes over the cache of the one before: pages given
to another session are written only behind what their last owner had under way.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from composer_jax.models import config as config_lib
from composer_jax.rollout import forward, placing, sessions, slots, steps
from composer_jax.rollout import options as options_lib

# Pages that one call copies or clears.
_PAGES_A_CALL = 16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unread:
  """A dispatch whose report, still on the device, the host has not seen.

  Attributes:
    rows: whose they were.
    chunks: (start, count) of each row of an extend; None for a decode.
    version: of the weights.
  """

  rows: list[slots.Row]
  chunks: list[tuple[int, int]] | None
  report: Any
  version: int


class Dispatcher:
  """The weights, the cache and the programs of an engine.

  Attributes:
    served: the weights.
    programs: shared with engines of the same shapes.
  """

  def __init__(
    self,
    config: config_lib.ModelConfig,
    options: options_lib.EngineOptions,
    place: placing.EnginePlace,
    served: placing.PlacedWeights,
    table: slots.Slots,
  ):
    self.served = served
    self._options = options
    self._table = table
    self.programs = steps.build(config, options, place)
    self._place = place
    self._cache = jax.jit(
      lambda: forward.empty_cache(config, options.pages, options.page_size),
      out_shardings=place.pools,
    )()
    self._decode_row = steps.decode_row(options)
    self._extend_row = steps.extend_row(options)
    self._unread: collections.deque[Unread] = collections.deque()
    # Whose rows decode works on, and what the device knows of them.
    self._composition: list[slots.Row] = []
    self._rows_BW: Any = None
    self._state: Any = None

  def _put(self, inputs: Any) -> Any:
    # Committed like everything else: else the first call compiles once more.
    return jax.device_put(inputs, self._place.whole)

  def serve(self, served: placing.PlacedWeights) -> None:
    """Goes on with other weights; every report has been read."""
    self.served = served
    # Sessions may lose their pages by it.
    self._composition = []

  def clear(self, pages: Sequence[int]) -> None:
    """Sets pages to zero."""
    for pages_N in self._batches(pages):
      self._cache = forward.zero_pages(self._cache, self._put(pages_N))

  def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
    """Copies the first tokens of pages (`holdings.Copy`), in this order."""
    parts = [self._batches(part) for part in zip(*copies, strict=True)]
    for inputs in zip(*parts, strict=True):
      self._cache = forward.copy_pages(self._cache, *self._put(inputs))

  def _batches(self, pages: Sequence[int]) -> np.ndarray:
    """Splits a list into arrays of fixed length, past the end no page."""
    no_page = [self._options.pages] * (-len(pages) % _PAGES_A_CALL)
    return np.array([*pages, *no_page], np.int32).reshape(-1, _PAGES_A_CALL)

  def extend(self, served: Sequence[sessions.Session]) -> None:
    """Consumes a chunk of each session's context."""
    num_rows = _least(self._options.extend_rows, len(served))
    rows = np.zeros(num_rows, self._extend_row)
    chunks = []
    for row, session in zip(rows, served, strict=False):
      start, end = session.chunk(self._options.prefill_chunk)
      tokens_T = session.tokens_T[start:end]
      steps.pack_extend(row, session.pages, start, tokens_T)
      chunks.append((start, end - start))
      self._table.extend(session, end - start)
    self._add([(s, s.at_work) for s in served], chunks, self._run_extend(rows))

  def _run_extend(self, rows: np.ndarray) -> Any:
    self._cache, report = self.programs.extend(
      self.served.weights, self._cache, self._put(steps.words(rows))
    )
    return report

  def decode(self) -> None:
    """Decodes on where the device left off, or begins anew with other rows."""
    rows = [(session, session.at_work) for session in self._table.decoding()]
    if rows and rows == self._composition:
      if self._lacks_work():
        self.read()
      else:
        self._sample()
        self.read(keep=1)
      return
    self.read()
    # Some may have ended by what was read.
    if decoding := self._table.decoding():
      self._compose(decoding)
      self._sample()

  def _lacks_work(self) -> bool:
    """Whether what is under way samples all that its rows may sample."""
    coming = sum(unread.chunks is None for unread in self._unread)
    coming *= self._options.decode_steps
    return all(work.remaining <= coming for _, work in self._composition)

  def _compose(self, decoding: list[sessions.Session]) -> None:
    """Gives the rows of decode to these sessions; nothing may be unread."""
    assert not self._unread
    num_rows = _least(self._options.sample_rows, len(decoding))
    rows = np.zeros(num_rows, self._decode_row)
    state_3B = np.zeros((3, num_rows), np.int32)
    for index, session in enumerate(decoding):
      work = session.at_work
      if work.row is None:
        work.row = np.zeros((), self._decode_row)
        steps.pack_decode(work.row, session.pages, work.request)
      rows[index] = work.row
      counts = (session.last_token, session.consumed, work.remaining)
      state_3B[:, index] = counts
    self._composition = [(session, session.at_work) for session in decoding]
    self._put_rows(rows, state_3B)

  def _put_rows(self, rows: np.ndarray, state_3B: np.ndarray) -> None:
    names = ('tokens_B', 'positions_B', 'remaining_B')
    state = steps.State(**dict(zip(names, state_3B, strict=True)))
    self._rows_BW, self._state = self._put((steps.words(rows), state))

  def _sample(self) -> None:
    """Samples a few tokens for each session of the composition."""
    truncate = any(work.request.truncates for _, work in self._composition)
    self._add(self._composition, None, self._run_decode(truncate))

  def _run_decode(self, truncate: bool) -> Any:
    self._cache, self._state, report = self.programs.decode(
      self.served.weights, self._cache, self._rows_BW, self._state, truncate
    )
    return report

  def _add(self, rows: list[slots.Row], chunks: Any, report: Any) -> None:
    self._table.stats.dispatches += 1
    for array in jax.tree.leaves(report):
      array.copy_to_host_async()
    version = self.served.version
    self._unread.append(
      Unread(rows=rows, chunks=chunks, report=report, version=version)
    )

  def read(self, keep: int = 0) -> None:
    """Takes the oldest reports, all but `keep`; waits for what they say."""
    while len(self._unread) > keep:
      unread = self._unread.popleft()
      report = jax.tree.map(np.asarray, unread.report)
      if unread.chunks is None:
        report = report.replace(version=unread.version)
        self._table.sampled(unread.rows, report)
      else:
        self._read_extend(unread, unread.chunks, *report)

  def _read_extend(self, unread, chunks, finite_B, routes_MBTA) -> None:
    for row, (session, work) in enumerate(unread.rows):
      start, count = chunks[row]
      if session.work is not work:
        continue
      if not finite_B[row]:
        self._table.fail(session, start, count, unread.version)
        continue
      routes_TMA = None
      if routes_MBTA is not None:
        first = start % self._options.prefill_chunk
        routes_MTA = routes_MBTA[:, row, first : first + count]
        routes_TMA = routes_MTA.swapaxes(0, 1)
      self._table.extended(session, start, count, routes_TMA)

  def warm(self) -> None:
    """Compiles every program; it runs none of their rows."""
    self.read()
    for num_rows in self._options.extend_rows:
      self._run_extend(np.zeros(num_rows, self._extend_row))
    no_page = self._options.pages
    self.clear([no_page])
    self.copy([(0, no_page, 0)])
    for num_rows in self._options.sample_rows:
      for truncate in (False, True):
        rows = np.zeros(num_rows, self._decode_row)
        self._put_rows(rows, np.zeros((3, num_rows), np.int32))
        self._run_decode(truncate)
    self._composition = []


def _least(rows: tuple[int, ...], count: int) -> int:
  """Returns the smallest number of rows that suffices."""
  return next(r for r in rows if r >= count)
