"""State on the host of sessions and of the requests that they serve.

Arrays of a session have room for tokens to come: `length` tokens are known, of
which `consumed` are in its pages. Between dispatches the last known token is
never consumed, since the step that consumes it samples the next.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import flax.struct
import numpy as np

from composer_jax.core import records

# Largest number of reports that a session holds before `Session.settle`.
MAX_PIECES = 32

# Stand for a token where the row was idle, or where values were not finite.
NOT_SAMPLED, NOT_FINITE = -1, -2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
  """Tokens sampled for a request in one dispatch, for streaming.

  The arrays are as in `records.Completion`; X = 0 from an engine that reports
  no alternatives. `position` is that of the first token in the session.
  """

  session: str
  position: int
  tokens_T: np.ndarray
  logprobs_T: np.ndarray
  raw_logprobs_T: np.ndarray
  policy_version_T: np.ndarray
  context_version_T: np.ndarray
  top_ids_TX: np.ndarray
  top_logprobs_TX: np.ndarray


OnTokens = Callable[[SampledTokens], None]


class Guide(Protocol):
  """Changes a request's distribution by what it has sampled, as a grammar does.

  For serving alone: a trainer could not recompute such log-probabilities. The
  engine's thread calls both methods, and an error of theirs would end it.
  """

  def bias(self) -> np.ndarray:
    """Returns float32 terms of the next logits; -inf excludes, never all."""

  def take(self, token: int) -> None:
    """Takes in the token that was sampled."""


def join_tokens(parts: Sequence[SampledTokens]) -> SampledTokens:
  """Concatenates consecutive parts, as a copy."""
  joined: dict[str, Any] = {
    name: np.concatenate([getattr(part, name) for part in parts])
    for name in SampledTokens.__slots__
    if name not in ('session', 'position')
  }
  return dataclasses.replace(parts[0], **joined)


class Sampled(flax.struct.PyTreeNode, kw_only=True):
  """Report of one decode dispatch; names are those of `records.Completion`.

  Attributes:
    tokens_TB: int32 tokens; NOT_SAMPLED behind a row's last, or NOT_FINITE.
    expert_ids_TMBA: uint16 routes of the consumed tokens; None if not recorded.
    counts_X: int32 number of passes over a row with drafts that kept 1, 2, ...
      tokens; None without speculation.
    drafts_BK: drafts of heads that follow each row's last token; None without.
    version: policy version that sampled the tokens; None on the device.
  """

  tokens_TB: Any
  logprobs_TB: Any
  raw_logprobs_TB: Any
  top_ids_TBX: Any
  top_logprobs_TBX: Any
  expert_ids_TMBA: Any
  counts_X: Any = None
  drafts_BK: Any = None
  version: Any = None

  def tokens(
    self, name: str, position: int, piece: tuple[int, int, int]
  ) -> SampledTokens:
    """Returns the tokens of a piece: (row, count, context version)."""
    row, count, context_version = piece
    return SampledTokens(
      session=name,
      position=position,
      tokens_T=self.tokens_TB[:count, row],
      logprobs_T=self.logprobs_TB[:count, row],
      raw_logprobs_T=self.raw_logprobs_TB[:count, row],
      policy_version_T=np.full(count, self.version, np.int32),
      context_version_T=np.full(count, context_version, np.int32),
      top_ids_TX=self.top_ids_TBX[:count, row],
      top_logprobs_TX=self.top_logprobs_TBX[:count, row],
    )


@dataclasses.dataclass(kw_only=True, eq=False)
class ServedRequest:
  """A request being served.

  Attributes:
    on_tokens: callback for tokens as they are sampled; None without streaming.
    guide: changes the distribution of its tokens; None leaves it the policy's.
    remaining: largest number of tokens still to sample.
    routes_start, num_cached, stopped: fields of the `records.Completion` to
      come.
    pieces: each dispatch since `Session.settle`, with arguments of
      `Sampled.tokens`.
    settled: tokens of earlier dispatches, also in the session's arrays.
    keys: keys of the pages of its context; None until they are looked up.
    is_first: true if it goes before all requests that are not.
    waits_for: key of a page that another session is filling; None if it does
      not wait.
    waiting: number of dispatches for which its context was put off.
    refreshed: true if a swap made it consume its tokens anew since it last
      sampled.
    row_W: int32 words of its row in decode; None until it decodes.
    drafts_K: drafts of heads that follow the last known token; None without.
  """

  request: records.SampleRequest
  on_tokens: OnTokens | None
  remaining: int
  routes_start: int
  num_cached: int = 0
  pieces: list[tuple[Sampled, tuple[int, int, int]]] = dataclasses.field(
    default_factory=list
  )
  settled: list[SampledTokens] = dataclasses.field(default_factory=list)
  stopped: bool = False
  keys: list[bytes] | None = None
  waits_for: bytes | None = None
  waiting: int = 0
  refreshed: bool = False
  row_W: np.ndarray | None = None
  drafts_K: np.ndarray | None = None
  guide: Guide | None = None
  is_first: bool = False

  def start_over(self) -> None:
    """Resets what was consumed; the tokens sampled so far stay."""
    self.keys = self.waits_for = self.row_W = self.drafts_K = None
    self.routes_start = self.num_cached = self.waiting = 0


@dataclasses.dataclass(kw_only=True, eq=False)
class Session:
  """A context window.

  Attributes:
    tokens_T: int32 tokens; `settle` fills in the sampled ones.
    routes_TMA: uint16 routes of consumed tokens; `settle` fills in those of
      sampled ones; NO_ROUTE where the engine records none.
    versions_T: int32 version that consumed each consumed token.
    length: number of known tokens.
    consumed: number of tokens in the KV cache.
    shareable: number of leading tokens whose keys and values would be the same
      in any session; None once weights changed after the first.
    pages: pages of the consumed tokens, in order, and room for those to come.
    work: request under way; None between requests.
  """

  name: str
  tokens_T: np.ndarray
  routes_TMA: np.ndarray
  versions_T: np.ndarray
  length: int = 0
  consumed: int = 0
  shareable: int | None = 0
  pages: list[int] = dataclasses.field(default_factory=list)
  work: ServedRequest | None = None

  @property
  def at_work(self) -> ServedRequest:
    """The request under way, in a session that is known to have one."""
    assert self.work is not None
    return self.work

  @property
  def needs_context(self) -> bool:
    return self.consumed < self.length - 1

  @property
  def last_token(self) -> int:
    """The last known token, settled or not."""
    if pieces := self.at_work.pieces:
      report, (row, count, _) = pieces[-1]
      return int(report.tokens_TB[count - 1, row])
    return int(self.tokens_T[self.length - 1])

  def start(
    self,
    request: records.SampleRequest,
    on_tokens: OnTokens | None,
    max_len: int,
    guide: Guide | None = None,
  ) -> None:
    """Adds the context of a request, and room for what it may sample."""
    known_T = self.tokens_T[: self.length]
    known_TMA = self.routes_TMA[: self.consumed]
    self.length += len(request.context_T)
    remaining = min(request.max_new_tokens, max_len - self.length)
    self.work = ServedRequest(
      request=request,
      on_tokens=on_tokens,
      guide=guide,
      remaining=remaining,
      routes_start=self.consumed,
    )
    room_T = np.zeros(remaining, np.int32)
    self.tokens_T = np.concatenate([known_T, request.context_T, room_T])
    shape = (len(self.tokens_T) - self.consumed, *known_TMA.shape[1:])
    room_TMA = np.full(shape, records.NO_ROUTE, np.uint16)
    self.routes_TMA = np.concatenate([known_TMA, room_TMA])
    self.versions_T = np.resize(self.versions_T, len(self.tokens_T))

  @property
  def is_torn_by_swap(self) -> bool:
    """True while its record could not tell which version computed what.

    That is while it consumes tokens of earlier requests anew, and once it has
    consumed the last token sampled but none of the context that follows.
    """
    work = self.work
    if work is None or work.pieces or work.settled:
      return False
    known = self.length - len(work.request.context_T)
    if not known:
      return False
    return (
      self.consumed > 0 if not work.routes_start else self.consumed == known
    )

  def consume(self, count: int, version: int, *, is_shareable: bool) -> None:
    """Counts tokens as consumed; they can be shared if all before them can."""
    if is_shareable and self.shareable == self.consumed:
      self.shareable = self.consumed + count
    self.versions_T[self.consumed : self.consumed + count] = version
    self.consumed += count

  def chunk(self, size: int) -> tuple[int, int]:
    """Returns where the next chunk of context starts and ends.

    Chunks end at multiples of `size`: a token's column is its position modulo
    `size`, however many tokens before it were cached.
    """
    start = self.consumed
    return start, min(start - start % size + size, self.length - 1)

  def settle(self) -> None:
    """Copies sampled tokens and routes out of the reports, and drops those.

    A report holds every row of its dispatch: a long request that kept its
    reports would keep the tokens of all its neighbours in memory.
    """
    work = self.at_work
    if not work.pieces:
      return
    start = end = self.length - sum(p[1] for _, p in work.pieces)
    parts = []
    for report, (row, count, oldest) in work.pieces:
      parts.append(report.tokens(self.name, end, (row, count, oldest)))
      if report.expert_ids_TMBA is not None:
        routes_TMA = report.expert_ids_TMBA[:count, :, row]
        self.routes_TMA[end - 1 : end - 1 + count] = routes_TMA
      end += count
    work.pieces.clear()
    work.settled.append(join_tokens(parts))
    self.tokens_T[start:end] = work.settled[-1].tokens_T

  def completion(self) -> records.Completion:
    """Returns the completion of the request under way, once settled."""
    work = self.at_work
    sampled = join_tokens(work.settled)
    has_top = sampled.top_ids_TX.shape[1] > 0
    consumed = slice(work.routes_start, self.length - 1)
    return records.Completion(
      session=self.name,
      tokens_T=sampled.tokens_T,
      logprobs_T=sampled.logprobs_T,
      policy_version_T=sampled.policy_version_T,
      context_version_T=sampled.context_version_T,
      consumed_expert_ids_TMA=self.routes_TMA[consumed].copy(),
      consumed_version_T=self.versions_T[consumed].copy(),
      stopped=work.stopped,
      raw_logprobs_T=sampled.raw_logprobs_T,
      routes_start=work.routes_start,
      num_cached=work.num_cached,
      top_ids_TX=sampled.top_ids_TX if has_top else None,
      top_logprobs_TX=sampled.top_logprobs_TX if has_top else None,
    )
