"""Static shapes of the engine, and how it goes about weights and prefixes."""

import dataclasses
from typing import Any

KEEP, REFRESH = 'keep', 'refresh'
ON_SWAP = (KEEP, REFRESH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
  """What the compiled programs and the page tables are made for.

  Of several numbers of rows the smallest that suffices is used; each is a
  program of its own, and the bits of a session may depend on its neighbours.
  A session between two requests holds pages but no slot. One that runs is
  refreshed once between two tokens that it samples, so that it gets on however
  fast swaps come; until then it keeps what it consumed.

  Attributes:
    devices: that share the model out, the first ones; on a CPU one is fastest.
    num_slots: requests worked on at once.
    max_len: tokens in a session at most, context and sampled together.
    prefill_chunk: context tokens a row consumes in one extend.
    prefill_rows: sessions extended together; or several numbers.
    decode_rows: numbers of sessions decoded together; () for num_slots.
    decode_steps: tokens per row in one dispatch; weights change between two.
    max_stop_tokens: stop tokens a request may name.
    page_size: tokens in a page of the KV cache.
    num_pages: of the KV cache; 0 for what num_slots need at max_len.
    record_routes: whether the host learns which experts each token passed.
    share_prefixes: whether sessions with equal prefixes share their pages.
    on_swap: 'keep' the cache of older weights, or 'refresh' every session's.
    num_top: likeliest tokens reported at each place.
  """

  devices: int = 1
  num_slots: int = 64
  max_len: int = 320
  prefill_chunk: int = 32
  prefill_rows: int | tuple[int, ...] = 8
  decode_rows: tuple[int, ...] = ()
  decode_steps: int = 4
  max_stop_tokens: int = 4
  page_size: int = 64
  num_pages: int = 0
  record_routes: bool = True
  share_prefixes: bool = True
  on_swap: str = KEEP
  num_top: int = 0

  def __post_init__(self):
    for name, value in vars(self).items():
      if name not in ('record_routes', 'share_prefixes', 'on_swap'):
        # A session of the shortest max_len has a context token and samples one.
        least = {'max_len': 2, 'num_pages': 0, 'num_top': 0}.get(name, 1)
        for number in _several(value):
          if type(number) is not int or number < least:
            raise ValueError(
              f'EngineOptions.{name} must be an integer of at least {least}, '
              f'not {number!r}.'
            )
    if self.prefill_rows == ():
      raise ValueError('EngineOptions.prefill_rows must name a number of rows.')
    if self.sample_rows[-1] != self.num_slots:
      raise ValueError(
        f'EngineOptions.decode_rows {self.decode_rows} must end at num_slots '
        f'({self.num_slots}): every slot may decode at once.'
      )
    if self.on_swap not in ON_SWAP:
      raise ValueError(
        f'EngineOptions.on_swap must be one of {ON_SWAP}, not {self.on_swap!r}.'
      )
    if self.pages < self.table_len:
      raise ValueError(
        f'num_pages ({self.num_pages}) of {self.page_size} tokens must hold a '
        f'session of max_len ({self.max_len}); use at least {self.table_len}.'
      )

  @property
  def table_len(self) -> int:
    """Pages of a session of max_len; its last token is never consumed."""
    return -(-(self.max_len - 1) // self.page_size)

  @property
  def pages(self) -> int:
    return self.num_pages or self.num_slots * self.table_len

  @property
  def extend_rows(self) -> tuple[int, ...]:
    """Numbers of rows that extend has a program for, ascending."""
    rows = {min(r, self.num_slots) for r in _several(self.prefill_rows)}
    return tuple(sorted(rows))

  @property
  def sample_rows(self) -> tuple[int, ...]:
    """Numbers of rows that decode has a program for, ascending."""
    return tuple(sorted(set(self.decode_rows or (self.num_slots,))))


def _several(value: Any) -> tuple[Any, ...]:
  return value if isinstance(value, tuple) else (value,)
