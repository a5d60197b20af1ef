"""Static shapes of the engine, and how it goes about weights and prefixes."""

import dataclasses

from composer_jax.kernels.attention import tiled
from composer_jax.models import config as config_lib

KEEP = 'keep'
REFRESH = 'refresh'
ON_SWAP = (KEEP, REFRESH)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
  """What the compiled programs and the page tables are made for.

  Attributes:
    num_slots: requests worked on at once. Sessions between requests hold pages
      but no slot.
    max_len: tokens in a session at most, context and sampled together.
    prefill_chunk: context tokens a row consumes in one extend.
    prefill_rows: sessions extended together. Of several numbers the smallest
      that suffices is used; each is a program of its own, and where there are
      several the bits of a session may depend on its neighbours.
    decode_steps: tokens per row in one dispatch; weights can be swapped, and
      tokens are told, between dispatches only.
    max_stop_tokens: stop tokens a request may name.
    page_size: tokens in a page of the KV cache.
    num_pages: of the cache; 0 means as many as every slot needs at max_len.
    decode_rows: rows decoded together, as prefill_rows; empty means num_slots.
    record_routes: whether the programs give the routes to the host.
    share_prefixes: whether sessions with equal prefixes share their pages.
    on_swap: 'keep' goes on with the keys and values of older weights,
      'refresh' consumes the tokens of every session anew: of one that runs once
      between two tokens that it samples, so that it gets on however fast swaps
      come. Until then it keeps what it consumed.
    num_top: likeliest tokens reported at each place.
  """

  num_slots: int
  max_len: int
  prefill_chunk: int
  prefill_rows: int | tuple[int, ...] = 8
  decode_steps: int = 4
  max_stop_tokens: int = 4
  page_size: int = 64
  num_pages: int = 0
  decode_rows: tuple[int, ...] = ()
  record_routes: bool = True
  share_prefixes: bool = True
  on_swap: str = KEEP
  num_top: int = 0

  def __post_init__(self):
    names = ('num_slots', 'max_len', 'prefill_chunk', 'decode_steps')
    for name in (*names, 'max_stop_tokens', 'page_size'):
      _check_integer(name, getattr(self, name), 1)
    for name in ('num_pages', 'num_top'):
      _check_integer(name, getattr(self, name), 0)
    if not isinstance(self.prefill_rows, tuple):
      _check_integer('prefill_rows', self.prefill_rows, 1)
    elif not self.prefill_rows:
      raise ValueError('EngineOptions.prefill_rows must name a number of rows.')
    for rows in (*self.extend_rows, *self.sample_rows):
      _check_integer('prefill_rows and decode_rows', rows, 1)
    if self.sample_rows[-1] != self.num_slots:
      raise ValueError(
        f'EngineOptions.decode_rows {self.decode_rows} must end at num_slots '
        f'({self.num_slots}): every slot may decode at once.'
      )
    if self.max_len < 2:
      raise ValueError(
        f'max_len ({self.max_len}) must hold a context token and a sampled '
        'one; use at least 2.'
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

  def check(self, config: config_lib.ModelConfig) -> None:
    """Raises a ValueError that says why the options do not suit a model."""
    block = tiled.KEY_BLOCK
    if config.numerics == 'batch_invariant' and self.page_size % block:
      raise ValueError(
        f'page_size ({self.page_size}) must be a multiple of {block} with '
        "numerics 'batch_invariant': its attention sums keys in blocks of that "
        'many.'
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
    """Row buckets of extend, ascending."""
    rows = self.prefill_rows
    rows = rows if isinstance(rows, tuple) else (rows,)
    return tuple(sorted({min(r, self.num_slots) for r in rows}))

  @property
  def sample_rows(self) -> tuple[int, ...]:
    """Row buckets of decode, ascending."""
    return tuple(sorted(set(self.decode_rows or (self.num_slots,))))


def bucket(rows: tuple[int, ...], count: int) -> int:
  """Returns the smallest bucket that holds `count` rows."""
  return next(r for r in rows if r >= count)


def _check_integer(name: str, value: object, least: int) -> None:
  if isinstance(value, bool) or not isinstance(value, int) or value < least:
    kind = 'a positive' if least else 'a non-negative'
    raise ValueError(
      f'EngineOptions.{name} must be {kind} integer, not {value!r}.'
    )
