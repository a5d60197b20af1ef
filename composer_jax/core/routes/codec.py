"""Encodes tapes: the recorded routes of consecutive tokens, as bytes.

A route is the ordered tuple of a token's experts in one layer; the order
decides the bits of the sum over experts. Without frequencies, the best size of
a route is log2(E (E - 1) .. (E - A + 1)): 68.6 bits for Kimi K2, where uint16
takes 128. A message is, little-endian:

  magic 'MoEr' | version u8 | form u8 | E u16 | A u16 | M u16 | start u32 |
  tokens u32 | runs u32 | M layers u16 | runs u32 each | payload | BLAKE3 of
  all before, 16 bytes

The payload is 'packed' (`core.routes.bits`), or 'plain': the uint16 ids. A
packed payload has only recorded tokens; runs are the lengths, in tokens, of
recorded and unrecorded parts in turn. The plain form has no runs. A tape may
begin at any token, so that each turn of an episode sends its own part.

Axes: Z is a route, of a token in a layer; X a run.
"""

import dataclasses
import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

import blake3
import numpy as np

from composer_jax.core import checks, records
from composer_jax.core.routes import bits

PACKED, PLAIN = FORMS = ('packed', 'plain')

_MAGIC = b'MoEr'
_VERSION = 1
_HEADER = struct.Struct('<4sBBHHHIII')
_HASH_BYTES = 16

# Far above any router's. The time of Lehmer's code grows with the square.
_MOST_ACTIVE = 1024
# Limit of decoded ids. Unrecorded tokens take no bytes in a message, so that a
# short one could otherwise ask for all memory.
_MAX_BYTES = 1 << 30
# Routes encoded at once, whose arrays fit in a CPU's cache.
_CHUNK_ROUTES = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteScheme:
  """Meaning of the ids of a tape.

  Attributes:
    num_experts: number of routed experts of a layer (E).
    num_active: number of experts of a token (A).
    layers: ascending indices in the decoder of the MoE layers.
  """

  num_experts: int
  num_active: int
  layers: tuple[int, ...]

  def __post_init__(self):
    is_known = 1 <= self.num_experts <= records.NO_ROUTE
    rule = f'lie in 1..{records.NO_ROUTE}'
    checks.require(self, 'num_experts', is_known, rule)
    most = min(self.num_experts, _MOST_ACTIVE)
    rule = f'lie in 1..{most}, with num_experts ({self.num_experts})'
    checks.require(self, 'num_active', 1 <= self.num_active <= most, rule)
    bounded = (-1, *self.layers, records.NO_ROUTE + 1)
    ascending = all(a < b for a, b in zip(bounded, bounded[1:]))
    rule = f'be ascending indices in 0..{records.NO_ROUTE}, at least one'
    checks.require(self, 'layers', self.layers and ascending, rule)

  @property
  def sizes(self) -> tuple[int, int]:
    """E and A."""
    return self.num_experts, self.num_active


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RouteTape:
  """Routes of consecutive tokens.

  Attributes:
    start: position of the first token in its context window.
    ids_TMA: uint16 expert ids, all NO_ROUTE for a token without a record.
  """

  start: int
  ids_TMA: np.ndarray
  scheme: RouteScheme


def check(
  ids_TMA: np.ndarray, scheme: RouteScheme, *, start: int = 0
) -> np.ndarray:
  """Returns which tokens have a record; a ValueError names a wrong route."""
  if ids_TMA.dtype != np.uint16:
    raise ValueError(f'ids_TMA must be of uint16, not {ids_TMA.dtype}.')
  want = (len(scheme.layers), scheme.num_active)
  if ids_TMA.ndim != 3 or ids_TMA.shape[1:] != want:
    raise ValueError(
      f'ids_TMA has shape {ids_TMA.shape}; (tokens, {want[0]} layers, '
      f'{want[1]} active experts) is required.'
    )
  recorded_T = ids_TMA[:, 0, 0] != records.NO_ROUTE
  step = max(1, _CHUNK_ROUTES // len(scheme.layers))
  for first in range(0, len(ids_TMA), step):
    ids_tMA = ids_TMA[first : first + step]
    ids_AZ = np.ascontiguousarray(ids_tMA.reshape(-1, scheme.num_active).T)
    fault_Z = (ids_AZ >= scheme.num_experts).any(0)
    for a in range(1, scheme.num_active):
      fault_Z |= (ids_AZ[a:] == ids_AZ[a - 1]).any(0)
    fault_tM = fault_Z.reshape(ids_tMA.shape[:2])
    missing_t = ~recorded_T[first : first + step]
    if missing_t.any():
      fault_tM[missing_t] = (ids_tMA[missing_t] != records.NO_ROUTE).any(-1)
    if fault_tM.any():
      t, m = (int(i) for i in np.argwhere(fault_tM)[0])
      raise ValueError(
        f'Token {start + first + t}, layer {scheme.layers[m]} has the experts '
        f'{ids_tMA[t, m].tolist()}; ids of a route must differ and be below '
        f'num_experts ({scheme.num_experts}), or NO_ROUTE ({records.NO_ROUTE}) '
        'must fill all layers of the token.'
      )
  return recorded_T


def encode(
  ids_TMA: np.ndarray,
  scheme: RouteScheme,
  *,
  start: int = 0,
  form: str = PACKED,
) -> bytes:
  """Returns a tape's message; 'plain' is for readers without this module."""
  if form not in FORMS:
    raise ValueError(f'form must be one of {FORMS}, not {form!r}.')
  if not 0 <= start < 1 << 32:
    raise ValueError(f'start must lie in 0..{(1 << 32) - 1}, not {start}.')
  recorded_T = check(ids_TMA, scheme, start=start)
  if form == PLAIN:
    runs_X, payload = np.zeros(0, '<u4'), [ids_TMA.astype('<u2').tobytes()]
  else:
    runs_X, payload = _to_runs(recorded_T), []
    for tokens in _chunks(recorded_T, scheme):
      ids_ZA = ids_TMA[tokens].reshape(-1, scheme.num_active)
      payload.append(bits.pack(ids_ZA, scheme.num_experts))
  sizes = (*scheme.sizes, len(scheme.layers), start, len(ids_TMA), len(runs_X))
  header = _HEADER.pack(_MAGIC, _VERSION, FORMS.index(form), *sizes)
  layers_M = np.array(scheme.layers, '<u2')
  message = b''.join([header, layers_M.tobytes(), runs_X.tobytes(), *payload])
  return message + _digest(message)


class _Message(NamedTuple):
  form: str
  scheme: RouteScheme
  start: int
  num_tokens: int
  runs_X: np.ndarray
  payload: memoryview


def decode(data: bytes, max_bytes: int = _MAX_BYTES) -> RouteTape:
  """Reads a message; refuses one damaged, too large or of another format."""
  message = _read(data)
  _check_size(message, max_bytes)
  scheme, payload = message.scheme, message.payload
  shape = (message.num_tokens, len(scheme.layers), scheme.num_active)
  if message.form == PLAIN:
    ids_TMA = np.frombuffer(payload, '<u2').astype(np.uint16).reshape(shape)
    check(ids_TMA, scheme, start=message.start)
  else:
    ids_TMA = np.full(shape, records.NO_ROUTE, np.uint16)
    is_recorded_X = np.arange(len(message.runs_X)) % 2 == 0
    recorded_T = np.repeat(is_recorded_X, message.runs_X)
    for tokens in _chunks(recorded_T, scheme):
      num_routes = ids_TMA[tokens].size // scheme.num_active
      num_bytes = bits.num_bytes(num_routes, *scheme.sizes)
      ids_ZA = bits.unpack(payload[:num_bytes], num_routes, *scheme.sizes)
      ids_TMA[tokens] = ids_ZA.reshape(-1, *shape[1:])
      payload = payload[num_bytes:]
  return RouteTape(start=message.start, ids_TMA=ids_TMA, scheme=scheme)


def _read(data: bytes) -> _Message:
  """Parses a message; allocates only its runs."""
  shortest = _HEADER.size + _HASH_BYTES
  if len(data) < shortest:
    raise ValueError(
      f'The routes are {len(data)} bytes, fewer than the {shortest} of any: '
      'truncated.'
    )
  view = memoryview(data)
  magic, version, form, *numbers = _HEADER.unpack(view[: _HEADER.size])
  num_experts, num_active, num_layers, start, num_tokens, num_runs = numbers
  if (magic, version) != (_MAGIC, _VERSION) or form >= len(FORMS):
    raise ValueError(
      f'The routes begin with {magic!r}, version {version}, form {form}; this '
      f'reader knows {_MAGIC!r}, version {_VERSION}, forms 0..{len(FORMS) - 1}.'
    )
  if view[-_HASH_BYTES:] != _digest(view[:-_HASH_BYTES]):
    raise ValueError(
      f'The checksum of the routes ({len(data)} bytes) is wrong: they were '
      'truncated or damaged; ask for them again.'
    )
  runs_at = _HEADER.size + 2 * num_layers
  payload_at = runs_at + 4 * num_runs
  if payload_at + _HASH_BYTES > len(data):
    raise ValueError(
      f'The routes are {len(data)} bytes, too few for {num_layers} layers and '
      f'{num_runs} runs.'
    )
  runs_X = np.frombuffer(view[runs_at:payload_at], '<u4').astype(np.int64)
  if FORMS[form] == PLAIN:
    if num_runs:
      raise ValueError(
        f'The routes have {num_runs} runs; in the plain form there are none.'
      )
  elif int(runs_X.sum()) != num_tokens or not runs_X[1:].all():
    raise ValueError(
      f'The runs of the routes begin with {runs_X[:8].tolist()}; all must add '
      f'up to {num_tokens} tokens, and none but the first may be empty.'
    )
  layers_M = np.frombuffer(view[_HEADER.size : runs_at], '<u2')
  return _Message(
    form=FORMS[form],
    scheme=RouteScheme(
      num_experts=num_experts,
      num_active=num_active,
      layers=tuple(layers_M.tolist()),
    ),
    start=start,
    num_tokens=num_tokens,
    runs_X=runs_X,
    payload=view[payload_at:-_HASH_BYTES],
  )


def _check_size(message: _Message, max_bytes: int) -> None:
  """Raises a ValueError if the payload's size is wrong or too large."""
  scheme, num_tokens = message.scheme, message.num_tokens
  num_layers = len(scheme.layers)
  needed = 2 * num_tokens * num_layers * scheme.num_active
  if needed > max_bytes:
    raise ValueError(
      f'The routes are {needed} bytes as ids ({num_tokens} tokens, '
      f'{num_layers} layers, {scheme.num_active} experts); the reader takes '
      f'{max_bytes}: send them in increments.'
    )
  if message.form == PACKED:
    num_routes = int(message.runs_X[::2].sum()) * num_layers
    needed = bits.num_bytes(num_routes, *scheme.sizes)
  if len(message.payload) != needed:
    raise ValueError(
      f'The payload of the routes is {len(message.payload)} bytes; '
      f'{num_tokens} tokens of {scheme} need {needed}.'
    )


def _to_runs(recorded_T: np.ndarray) -> np.ndarray:
  """Returns lengths of recorded and unrecorded runs in turn."""
  if not recorded_T.size:
    return np.zeros(0, '<u4')
  # A tape that begins without a record begins with an empty run.
  edges = np.flatnonzero(np.diff(recorded_T, prepend=True))
  return np.diff(edges, prepend=0, append=recorded_T.size).astype('<u4')


def _digest(data: bytes | memoryview) -> bytes:
  return blake3.blake3(data).digest(length=_HASH_BYTES)


def _chunks(
  recorded_T: np.ndarray, scheme: RouteScheme
) -> Iterator[slice | np.ndarray]:
  """Yields the recorded tokens in parts that fill whole bytes, but the last."""

  routes = bits.aligned_routes(*scheme.sizes)
  tokens = routes // math.gcd(routes, len(scheme.layers))
  tokens *= max(1, _CHUNK_ROUTES // (tokens * len(scheme.layers)))
  if recorded_T.all():
    # Slices are views, which copy nothing.
    for first in range(0, len(recorded_T), tokens):
      yield slice(first, first + tokens)
    return
  recorded = np.flatnonzero(recorded_T)
  for first in range(0, len(recorded), tokens):
    yield recorded[first : first + tokens]
