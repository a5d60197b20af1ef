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
from composer_jax.rollout import (
  forward,
  holdings,
  placing,
  sessions,
  slots,
  steps,
)
from composer_jax.rollout import options as options_lib

# A session and the request of it that a dispatch worked on.
Row = tuple[sessions.Session, sessions.Work]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Unread:
  """A dispatch whose report the host has not seen.

  Attributes:
    rows: whose they were.
    chunks: (start, count) of each row of an extend; None for a decode.
    report: on the device.
    version: of the weights.
  """

  rows: list[Row]
  chunks: list[tuple[int, int]] | None
  report: Any
  version: int


class Dispatcher:
  """The weights, the cache and the programs of an engine.

  Attributes:
    weights: served.
    version: theirs.
    num_dispatches: extends and decodes so far.
    context_tokens: consumed by extend.
  """

  def __init__(
    self,
    config: config_lib.ModelConfig,
    options: options_lib.EngineOptions,
    place: placing.Place,
  ):
    self.weights: Any = None
    self.version = 0
    self.num_dispatches = self.context_tokens = 0
    self._options = options
    self._steps = steps.build(config, options, place)
    self._place = place
    self._cache = jax.jit(
      lambda: forward.empty_cache(config, options.pages, options.page_size),
      out_shardings=place.pools,
    )()
    self._decode_row = steps.DecodeRow(options)
    self._extend_row = steps.ExtendRow(options)
    self._unread: collections.deque[Unread] = collections.deque()
    # Whose rows decode works on, and what the device knows of them.
    self._composition: list[Row] = []
    self._rows_BW: Any = None
    self._state: Any = None

  @property
  def traces(self) -> dict[str, int]:
    return dict(self._steps.traces)

  @property
  def num_unread(self) -> int:
    return len(self._unread)

  def _put(self, inputs: Any) -> Any:
    # Committed like everything else: else the first call compiles once more.
    return jax.device_put(inputs, self._place.whole)

  def clear(self, pages: Sequence[int]) -> None:
    """Sets pages to zero."""
    for padded_N in _batches(pages, self._options.pages):
      self._cache = forward.zero_pages(self._cache, self._put(padded_N))

  def copy(self, copies: Sequence[holdings.Copy]) -> None:
    """Copies the first tokens of pages, in this order."""
    limit = self._options.pages
    parts = (
      _batches([copy.source for copy in copies], limit),
      _batches([copy.target for copy in copies], limit),
      _batches([copy.count for copy in copies], limit),
    )
    for inputs in zip(*parts, strict=True):
      self._cache = forward.copy_pages(self._cache, *self._put(inputs))

  def extend(self, served: Sequence[sessions.Session], table: slots.Slots):
    """Consumes a chunk of each session's context."""
    num_rows = options_lib.bucket(self._options.extend_rows, len(served))
    rows_BW = np.zeros((num_rows, self._extend_row.width), np.int32)
    chunks = []
    for row_W, session in zip(rows_BW, served, strict=False):
      start, end = session.chunk(self._options.prefill_chunk)
      tokens_T = session.tokens_T[start:end]
      self._extend_row.fill(row_W, session.pages, start, tokens_T)
      chunks.append((start, end - start))
      table.extend(session, end - start)
      self.context_tokens += end - start
    report = self._run_extend(rows_BW)
    self._add([(s, s.at_work) for s in served], chunks, report)

  def _run_extend(self, rows_BW: np.ndarray) -> Any:
    program = self._steps.extend(len(rows_BW))
    self._cache, report = program(self.weights, self._cache, self._put(rows_BW))
    return report

  def is_decoding(self, found: list[sessions.Session]) -> bool:
    """Whether the device knows these sessions, as they are now, by row."""
    return bool(found) and self._composition == [
      (session, session.work) for session in found
    ]

  def lacks_work(self) -> bool:
    """Whether what is under way samples all that its rows may sample."""
    coming = sum(u.chunks is None for u in self._unread)
    coming *= self._options.decode_steps
    return all(work.remaining <= coming for _, work in self._composition)

  def decompose(self) -> None:
    """Forgets what the device knows of the rows of decode."""
    self._composition = []

  def compose(self, found: list[sessions.Session]) -> None:
    """Gives the rows of decode to these sessions; nothing may be unread."""
    assert not self._unread
    num_rows = options_lib.bucket(self._options.sample_rows, len(found))
    rows_BW = np.zeros((num_rows, self._decode_row.width), np.int32)
    tokens_B, positions_B, remaining_B = np.zeros((3, num_rows), np.int32)
    for row, session in enumerate(found):
      work = session.at_work
      if work.row_W is None:
        work.row_W = self._decode_row.pack(session.pages, work.request)
      rows_BW[row] = work.row_W
      tokens_B[row] = session.last_token
      positions_B[row] = session.consumed
      remaining_B[row] = work.remaining
    self._composition = [(session, session.at_work) for session in found]
    self._rows_BW, self._state = self._put(
      (
        rows_BW,
        steps.State(
          tokens_B=tokens_B, positions_B=positions_B, remaining_B=remaining_B
        ),
      )
    )

  def decode(self) -> None:
    """Samples a few tokens for each session of the composition."""
    truncate = any(w.request.truncates for _, w in self._composition)
    self._add(self._composition, None, self._run_decode(truncate))

  def _run_decode(self, truncate: bool) -> Any:
    program = self._steps.decode(len(self._rows_BW), truncate)
    self._cache, self._state, report = program(
      self.weights, self._cache, self._rows_BW, self._state
    )
    return report

  def _add(self, rows: list[Row], chunks: Any, report: Any) -> None:
    self.num_dispatches += 1
    for array in jax.tree.leaves(report):
      array.copy_to_host_async()
    self._unread.append(
      Unread(
        rows=rows,
        chunks=chunks,
        report=report,
        version=self.version,
      )
    )

  def read(self, table: slots.Slots, keep: int = 0) -> None:
    """Takes the oldest reports, all but `keep`; waits for what they say."""
    while len(self._unread) > keep:
      unread = self._unread.popleft()
      report = jax.tree.map(np.asarray, unread.report)
      if unread.chunks is None:
        found = sessions.Sampled(**vars(report), version=unread.version)
        table.sampled(unread.rows, found)
      else:
        _read_extend(table, unread, self._options.prefill_chunk, *report)

  def warm(self) -> None:
    """Compiles every program; it runs none of their rows."""
    for num_rows in self._options.extend_rows:
      width = self._extend_row.width
      self._run_extend(np.zeros((num_rows, width), np.int32))
    self.clear([self._options.pages])
    nowhere = holdings.Copy(source=0, target=self._options.pages, count=0)
    self.copy([nowhere])
    for num_rows in self._options.sample_rows:
      for truncate in (False, True):
        self._rows_BW, self._state = self._put(
          (
            np.zeros((num_rows, self._decode_row.width), np.int32),
            steps.State(
              **dict.fromkeys(
                ('tokens_B', 'positions_B', 'remaining_B'),
                np.zeros(num_rows, np.int32),
              )
            ),
          )
        )
        self._run_decode(truncate)
    self.decompose()


def _batches(pages: Sequence[int], limit: int) -> list[np.ndarray]:
  """Splits a list into arrays of fixed length; `limit` stands for no page."""
  size = steps.PAGES_A_CALL
  found = []
  for start in range(0, len(pages), size):
    part = np.full(size, limit, np.int32)
    part[: len(pages[start : start + size])] = pages[start : start + size]
    found.append(part)
  return found


def _read_extend(
  table: slots.Slots, unread: Unread, chunk: int, finite_B, routes_MBTA
):
  assert unread.chunks is not None
  for row, (session, work) in enumerate(unread.rows):
    start, count = unread.chunks[row]
    if session.work is not work:
      continue
    if not finite_B[row]:
      table.fail(session, start, count, unread.version)
      continue
    routes_TMA = None
    if routes_MBTA is not None:
      columns = slice(start % chunk, start % chunk + count)
      routes_TMA = routes_MBTA[:, row, columns].swapaxes(0, 1)
    table.extended(session, work, start, routes_TMA, count)
