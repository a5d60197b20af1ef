"""Static shapes of the engine, and how it goes about weights and prefixes."""

import dataclasses
from typing import Any

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


def _several(value: Any) -> tuple[Any, ...]:
  return value if isinstance(value, tuple) else (value,)
