"""Static shapes of the engine, and its policy on prefixes and new weights."""

import dataclasses
from typing import Any

from composer_jax.core import checks
from composer_jax.models import config as model_config
from composer_jax.numerics import formats

KEEP, REFRESH = 'keep', 'refresh'
ON_SWAP = (KEEP, REFRESH)
DRAFTERS = ('none', 'ngrams', 'heads')
# Drafts of a pass for which there are programs; 0 is plain decoding.
DEPTHS = (0, 2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
  """How the engine decodes several tokens of a session in one pass.

  It changes no token and no record, only how fast they come.

  Attributes:
    drafter: 'ngrams' drafts what followed the last tokens before, in the
      session or in earlier ones; 'heads' drafts by the model's heads for
      multi-token prediction; 'none' decodes a token a pass.
    depth: largest number of drafts of a session in one pass, 2 or 4; the engine
      takes fewer or none while that is faster.
  """

  drafter: str = 'none'
  depth: int = 4

  def __post_init__(self):
    checks.one_of(self, 'drafter', DRAFTERS)
    checks.require(self, 'depth', self.depth in DEPTHS[1:], 'be 2 or 4')

  @property
  def depths(self) -> tuple[int, ...]:
    """Numbers of drafts that a pass may have, ascending."""
    most = 0 if self.drafter == 'none' else self.depth
    return tuple(depth for depth in DEPTHS if depth <= most)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingOptions:
  """Options of the engine that the config shows.

  Attributes:
    devices: number of devices, the first ones, over which the model is sharded;
      on a CPU one is fastest.
    num_slots: requests worked on at once.
    prefill_chunk: context tokens that a session consumes in one extend.
    prefill_rows: sessions in one extend; several numbers compile one program
      each, of which the smallest sufficient one runs.
    decode_steps: passes over a session in one dispatch, each of which samples a
      token, or several with speculation; weights change between dispatches.
    page_size: tokens of a page of the KV cache.
    num_pages: pages of the KV cache; 0 for num_slots sessions of max_len.
    record_routes: true to record the expert ids of each token, which replay
      needs.
    share_prefixes: true to let sessions with equal prefixes share pages, so
      that the prompt of a group is computed once.
    on_swap: 'keep' leaves keys and values of older weights in use; 'refresh'
      makes sessions consume all their tokens anew, at most once between two
      sampled tokens, so that frequent swaps cannot stall them.
    compute_dtype: 'float32' or 'bfloat16' of activations, products and KV
      cache; '' for the model's, in which the trainer computes.
    experts: format in whose codes the engine holds the routed experts, and in
      which it multiplies by them; '' for values in bfloat16 and the products
      of `model.precision.experts`. Another format than that gives other
      log-probabilities than the trainer's.
    cache_dtype: 'float8_e4m3fn' of keys and values in the KV cache, which then
      has half the bytes of bfloat16, and log-probabilities that differ from the
      trainer's; '' for that of activations.
    speculation: who drafts tokens, and how many; none by default.
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
  compute_dtype: str = ''
  experts: str = ''
  cache_dtype: str = ''
  speculation: Speculation = Speculation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(ServingOptions):
  """All options of the engine, which shape its programs and page tables.

  Attributes:
    max_len: largest number of tokens in a session, context and sampled.
    max_stop_tokens: largest number of stop tokens of a request.
    num_top: number of likeliest tokens reported at each position.
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
    is_section = isinstance(self.speculation, Speculation)
    checks.require(self, 'speculation', is_section, 'be a Speculation')
    rows = _several(self.prefill_rows)
    is_valid = rows and all(type(n) is int and n >= 1 for n in rows)
    checks.require(self, 'prefill_rows', is_valid, 'name numbers of at least 1')
    checks.one_of(self, 'on_swap', ON_SWAP)
    checks.one_of(self, 'compute_dtype', ('', 'float32', 'bfloat16'))
    checks.one_of(self, 'experts', ('', *formats.NAMES))
    checks.one_of(self, 'cache_dtype', ('', 'float8_e4m3fn'))
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

  def heads_of(self, model: model_config.ModelConfig) -> int:
    """Returns the number of heads that draft, which have pages of their own."""
    drafts = self.speculation.drafter == 'heads'
    depth = model.mtp.depth if drafts and model.mtp is not None else 0
    return min(depth, self.speculation.depth)

  @property
  def extend_rows(self) -> tuple[int, ...]:
    """Numbers of rows that extend has a program for, ascending."""
    rows = {min(r, self.num_slots) for r in _several(self.prefill_rows)}
    return tuple(sorted(rows))


def served(
  model: model_config.ModelConfig, options: ServingOptions
) -> model_config.ModelConfig:
  """Returns the model as an engine of the options computes it.

  A ValueError says that experts of the model have no codes, that they or a
  cache of few bits break the law of its numerics, or that the model lacks heads
  to draft.
  """
  if options.speculation.drafter == 'heads' and model.mtp is None:
    raise ValueError(
      'speculation.drafter (--config.rollout, of a server --config.engine) is '
      "'heads', and the model has none: give it heads by model.mtp and train "
      "them, or set 'ngrams'."
    )
  if options.cache_dtype and model.numerics == 'batch_invariant':
    raise ValueError(
      f'cache_dtype is {options.cache_dtype!r}, and the numerics '
      "'batch_invariant' promise the trainer's log-probabilities bit for bit, "
      "which keys of few bits would change. Set cache_dtype='', or numerics "
      "'fast'."
    )
  name, precision = options.experts, model.precision
  if name:
    model.check_codes(f'experts={name!r} of an engine', name)
    if name != precision.experts and model.numerics == 'batch_invariant':
      raise ValueError(
        f'experts={name!r} of an engine are others than those of '
        f'precision.experts={precision.experts!r}, and the numerics '
        "'batch_invariant' promise the trainer's log-probabilities bit for "
        "bit. Set both alike, or numerics 'fast'."
      )
    if name != 'fp8' and precision.products == 'codes':
      raise ValueError(
        f'experts={name!r} of an engine are others than the products of codes '
        "that precision.products='codes' asks for: set it to 'fp8' or ''."
      )
    precision = dataclasses.replace(precision, experts=name)
  return dataclasses.replace(
    model,
    precision=precision,
    compute_dtype=options.compute_dtype or model.compute_dtype,
  )


def _several(value: Any) -> tuple[Any, ...]:
  return value if isinstance(value, tuple) else (value,)
