"""Static shapes of the engine, and how it goes about weights and prefixes."""

import dataclasses
from typing import Any

from composer_jax.core import checks

KEEP, REFRESH = 'keep', 'refresh'
ON_SWAP = (KEEP, REFRESH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingOptions:
  """How the engine serves requests, whatever they are.

  Attributes:
    devices: the first ones, which share the model out; on a CPU one is fastest.
    num_slots: requests worked on at once.
    prefill_chunk: context tokens that a session consumes in one extend.
    prefill_rows: sessions in one extend; of several numbers, each a program of
      its own, the smallest that suffices.
    decode_steps: tokens of a session in one dispatch; weights change between.
    page_size: tokens of a page of the KV cache.
    num_pages: of the KV cache; 0 for num_slots sessions at their longest.
    record_routes: whether it is recorded which experts each token passed, which
      replay needs.
    share_prefixes: whether sessions with equal prefixes share their pages: the
      prompt of a group is computed once.
    on_swap: what running sessions do with keys and values of older weights:
      'keep' them, or 'refresh' them by consuming all their tokens anew, once
      between two sampled tokens, so that they get on however fast swaps come.
  """

  devices: int = 1
  num_slots: int = 64
  prefill_chunk: int = 32
  prefill_rows: int | tuple[int, ...] = 8
  decode_steps: int = 4
  page_size: int = 64
  num_pages: int = 0
  record_routes: bool = True
  share_prefixes: bool = True
  on_swap: str = KEEP


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(ServingOptions):
  """What the compiled programs and the page tables are made for.

  Attributes:
    max_len: tokens in a session at most, context and sampled together.
    max_stop_tokens: stop tokens a request may name.
    num_top: likeliest tokens reported at each place.
  """

  max_len: int = 320
  max_stop_tokens: int = 4
  num_top: int = 0

  def __post_init__(self):
    sizes = ('num_slots', 'prefill_chunk', 'decode_steps', 'page_size')
    checks.at_least(self, 1, 'devices', *sizes, 'max_stop_tokens')
    # A session of the shortest max_len has a context token and samples one.
    checks.at_least(self, 2, 'max_len')
    checks.at_least(self, 0, 'num_pages', 'num_top')
    rows = _several(self.prefill_rows)
    is_right = rows and all(type(n) is int and n >= 1 for n in rows)
    checks.require(self, 'prefill_rows', is_right, 'name numbers of at least 1')
    checks.one_of(self, 'on_swap', ON_SWAP)
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


def _several(value: Any) -> tuple[Any, ...]:
  return value if isinstance(value, tuple) else (value,)
