"""What the engine knows of a session and of the request that it serves.

Numpy only. Arrays of a session grow ahead of their use: `length` tokens are
known, of which `consumed` are in its pages; between dispatches the last known
token is never consumed, since the step that consumes it samples the next.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from composer_jax.core import records
from composer_jax.rollout import prefixes

# Dispatches whose reports a session may hold, see `Session.settle`.
MAX_PIECES = 32

# In place of a token: the row was idle; its values were not finite.
NOT_SAMPLED = -1
NOT_FINITE = -2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
  """Tokens sampled for a request in one dispatch, told while it goes on.

  The arrays are as in `records.Completion`; X = 0 from an engine that reports
  no alternatives.

  Attributes:
    session: as in the request.
    position: of the first of them in the session.
  """

  session: str
  position: int
  tokens_T: np.ndarray
  logprobs_T: np.ndarray
  raw_logprobs_T: np.ndarray
  policy_version_T: np.ndarray
  top_ids_TX: np.ndarray
  top_logprobs_TX: np.ndarray


OnTokens = Callable[[SampledTokens], None]


def join_tokens(parts: Sequence[SampledTokens]) -> SampledTokens:
  """Returns, as a copy, what parts that follow each other say together."""
  joined: dict[str, Any] = {
    name: np.concatenate([getattr(part, name) for part in parts])
    for name in SampledTokens.__slots__
    if name not in ('session', 'position')
  }
  return dataclasses.replace(parts[0], **joined)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
  """What one decode dispatch reports of its rows.

  Attributes:
    tokens_TB: int32; NOT_SAMPLED behind a row's last one, or NOT_FINITE.
    logprobs_TB: float32, as in `records.Completion`.
    raw_logprobs_TB: float32, likewise.
    top_ids_TBX: int32, likewise.
    top_logprobs_TBX: float32, likewise.
    expert_ids_TMBA: uint16 of the tokens consumed; None if not recorded.
    version: of the policy that sampled them.
  """

  tokens_TB: np.ndarray
  logprobs_TB: np.ndarray
  raw_logprobs_TB: np.ndarray
  top_ids_TBX: np.ndarray
  top_logprobs_TBX: np.ndarray
  expert_ids_TMBA: np.ndarray | None
  version: int

  def tokens(
    self, name: str, position: int, row: int, count: int
  ) -> SampledTokens:
    """Returns the first `count` tokens of a row."""
    return SampledTokens(
      session=name,
      position=position,
      tokens_T=self.tokens_TB[:count, row],
      logprobs_T=self.logprobs_TB[:count, row],
      raw_logprobs_T=self.raw_logprobs_TB[:count, row],
      policy_version_T=np.full(count, self.version, np.int32),
      top_ids_TX=self.top_ids_TBX[:count, row],
      top_logprobs_TX=self.top_logprobs_TBX[:count, row],
    )


@dataclasses.dataclass(kw_only=True, eq=False)
class Work:
  """A request being served.

  Attributes:
    request: what was asked.
    on_tokens: told of sampled tokens; None if nobody asks.
    first: tokens of the session that were known when it came.
    remaining: tokens still to sample at most.
    pieces: (report, row, count) of the last dispatches that sampled for it.
    settled: what those before sampled; the session's arrays hold it.
    stopped: a stop token was sampled.
    keys: of the pages of its context; None until they are looked up.
    waits_for: key of a page that another session is filling.
    routes_start: as in `records.Completion`.
    num_cached: likewise.
    context_version: likewise; None until some context is consumed.
    waiting: dispatches its context has been put off for.
    refreshed: a swap made it consume its tokens anew since it last sampled.
    row_W: what the compiled decode reads of it; None until it decodes.
  """

  request: records.SampleRequest
  on_tokens: OnTokens | None
  first: int
  remaining: int
  routes_start: int
  pieces: list[tuple[Sampled, int, int]] = dataclasses.field(
    default_factory=list
  )
  settled: list[SampledTokens] = dataclasses.field(default_factory=list)
  stopped: bool = False
  keys: list[bytes] | None = None
  waits_for: bytes | None = None
  num_cached: int = 0
  context_version: int | None = None
  waiting: int = 0
  refreshed: bool = False
  row_W: np.ndarray | None = None

  @property
  def done(self) -> bool:
    return self.stopped or self.remaining == 0

  def start_over(self) -> None:
    """Forgets what was consumed; the tokens sampled so far stay."""
    self.keys = self.waits_for = self.context_version = self.row_W = None
    self.routes_start = self.num_cached = self.waiting = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class Session:
  """A context window.

  Attributes:
    name: as in the requests.
    route_shape: (MoE layers, active experts).
    tokens_T: int32; sampled ones are filled in by `settle`.
    routes_TMA: uint16 of consumed tokens, sampled ones by `settle`; None where
      the engine records none.
    length: tokens known.
    consumed: of those in the pages.
    shareable: leading tokens whose keys and values are those that any other
      session with these tokens would get; None once weights changed between.
    pages: hold its consumed tokens, in order, and room for those to come.
    work: the request at hand, None between requests.
  """

  name: str
  route_shape: tuple[int, int]
  tokens_T: np.ndarray
  routes_TMA: np.ndarray | None
  length: int = 0
  consumed: int = 0
  shareable: int | None = 0
  pages: list[int] = dataclasses.field(default_factory=list)
  work: Work | None = None

  @property
  def at_work(self) -> Work:
    """The request at hand of a session that is known to have one."""
    assert self.work is not None
    return self.work

  @property
  def needs_context(self) -> bool:
    return self.consumed < self.length - 1

  @property
  def last_token(self) -> int:
    """The last known token, be it settled or not."""
    if pieces := self.at_work.pieces:
      report, row, count = pieces[-1]
      return int(report.tokens_TB[count - 1, row])
    return int(self.tokens_T[self.length - 1])

  def start(self, request: records.SampleRequest, work: Work) -> None:
    """Adds the context of a request, and room for what it may sample."""
    room = self.length + len(request.context_T) + work.remaining
    tokens_T = np.zeros(room, np.int32)
    tokens_T[: self.length] = self.tokens_T[: self.length]
    tokens_T[self.length : work.first] = request.context_T
    self.tokens_T, self.length, self.work = tokens_T, work.first, work
    if self.routes_TMA is not None:
      routes_TMA = np.zeros((room, *self.route_shape), np.uint16)
      routes_TMA[: self.consumed] = self.routes_TMA[: self.consumed]
      self.routes_TMA = routes_TMA

  def chunk(self, size: int) -> tuple[int, int]:
    """Returns where the next chunk of context starts and ends.

    Chunks end at multiples of `size`, wherever the session began: a token's
    column is its position modulo `size`, whatever it found cached.
    """
    start = self.consumed
    return start, min(start - start % size + size, self.length - 1)

  def settle(self) -> None:
    """Fills in what the pieces of the request at hand sampled, and drops them.

    A report is of every row of its dispatch. A long request that kept its
    reports would keep what all its neighbours sampled too.
    """
    work = self.at_work
    if not work.pieces:
      return
    end = self.length
    for report, row, count in work.pieces[::-1]:
      if self.routes_TMA is not None and report.expert_ids_TMBA is not None:
        routes_TMA = report.expert_ids_TMBA[:count, :, row]
        self.routes_TMA[end - 1 - count : end - 1] = routes_TMA
      end -= count
    found = join_tokens(
      [
        report.tokens(self.name, end, row, count)
        for report, row, count in work.pieces
      ]
    )
    self.tokens_T[end : self.length] = found.tokens_T
    work.settled.append(found)
    work.pieces.clear()

  def completion(self) -> records.Completion:
    """Returns what the request at hand came to, once settled."""
    work = self.at_work
    found = join_tokens(work.settled)
    has_top = found.top_ids_TX.shape[1] > 0
    start, end = work.routes_start, self.length - 1
    if self.routes_TMA is None:
      routes_TMA = np.full(
        (end - start, *self.route_shape), records.NO_ROUTE, np.uint16
      )
    else:
      routes_TMA = self.routes_TMA[start:end].copy()
    return records.Completion(
      session=self.name,
      tokens_T=found.tokens_T,
      logprobs_T=found.logprobs_T,
      policy_version_T=found.policy_version_T,
      consumed_expert_ids_TMA=routes_TMA,
      stopped=work.stopped,
      raw_logprobs_T=found.raw_logprobs_T,
      routes_start=start,
      context_version=work.context_version,
      num_cached=work.num_cached,
      top_ids_TX=found.top_ids_TX if has_top else None,
      top_logprobs_TX=found.top_logprobs_TX if has_top else None,
    )

  def routes(self, entry_start: int, count: int) -> np.ndarray | None:
    """Returns a copy of the routes of consumed tokens."""
    if self.routes_TMA is None:
      return None
    return self.routes_TMA[entry_start : entry_start + count].copy()

  def adopt(self, match: prefixes.Match) -> None:
    """Takes over what the store had of its prefix."""
    for entry in [*match.full, *([match.partial] if match.partial else [])]:
      end = self.consumed + entry.count
      if self.routes_TMA is not None:
        assert entry.routes_TMA is not None
        self.routes_TMA[self.consumed : end] = entry.routes_TMA
      self.consumed = end
    self.shareable = self.at_work.num_cached = self.consumed
