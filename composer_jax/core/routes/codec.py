"""The tape of routes: which experts every token passed, as bytes.

A route is the ordered tuple of a token's experts in one layer. Order is kept:
it decides the bits of the sum over experts. There are E (E - 1) .. (E - A + 1)
of them, so `bound_bits` of each is what a code can reach that knows nothing of
their frequencies; Kimi K2 needs 68.6 bits, 53.3 for the set and 15.3 for the
order, where uint16 takes 128.

  packed  each id becomes its rank among the experts not yet taken (Lehmer's
          code); as many of these digits as fit go into a word of a mixed radix
          and of at most 63 bits, and the words follow each other bit by bit
  plain   the ids as they are, little-endian

A tape begins at any token, so that each turn of an episode sends what it adds:
`concatenate` joins increments that follow each other, `update` also takes those
of an engine that consumed tokens anew. Tokens without a record are runs in the
header and take no place in the payload, so that a reader bounds what a message
may unfold to. The frame around both is of `core.routes.message`.

Axes: Z is a route, of a token in a layer; X a run or a place.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from composer_jax.core import records
from composer_jax.core.routes import bits, message

PACKED, PLAIN = FORMS = message.FORMS

# More experts of a token than any router takes. Lehmer's code takes time with
# the square of this, and words may meet digits as before only after as many
# routes.
_MOST_ACTIVE = 1024
# Routes worked on at once: arrays of them stay in the cache.
_CHUNK_ROUTES = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouteScheme:
  """What ids mean; tapes of two schemes do not mix.

  Attributes:
    num_experts: E, routed experts of a layer.
    num_active: A, experts of a token.
    layers: index in the decoder of each MoE layer, ascending.
  """

  num_experts: int
  num_active: int
  layers: tuple[int, ...]

  def __post_init__(self):
    if not 1 <= self.num_active <= self.num_experts <= records.NO_ROUTE:
      raise ValueError(
        f'num_active ({self.num_active}) and num_experts ({self.num_experts}) '
        f'must satisfy 1 <= num_active <= num_experts <= {records.NO_ROUTE}.'
      )
    if self.num_active > _MOST_ACTIVE:
      raise ValueError(
        f'num_active ({self.num_active}) must not exceed {_MOST_ACTIVE}: no '
        'router takes more experts of a token.'
      )
    bounded = (-1, *self.layers, records.NO_ROUTE + 1)
    ascending = all(a < b for a, b in zip(bounded, bounded[1:]))
    if not self.layers or not ascending:
      raise ValueError(
        'layers must be ascending indices of decoder layers in '
        f'0..{records.NO_ROUTE}, at least one, not {self.layers}.'
      )

  @property
  def sizes(self) -> tuple[int, int]:
    """E and A."""
    return self.num_experts, self.num_active


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RouteTape:
  """Routes of consecutive tokens.

  Attributes:
    start: position of the first token in its context window.
    ids_TMA: uint16; NO_ROUTE in all of a token where there is no record.
    scheme: of the ids.
  """

  start: int
  ids_TMA: np.ndarray
  scheme: RouteScheme

  @property
  def stop(self) -> int:
    return self.start + len(self.ids_TMA)


def bound_bits(scheme: RouteScheme) -> float:
  """Returns log2(E! / (E - A)!): bits of one token in one layer."""
  radices = range(
    scheme.num_experts, scheme.num_experts - scheme.num_active, -1
  )
  return math.fsum(map(math.log2, radices))


def check(ids_TMA: np.ndarray, scheme: RouteScheme, *, start: int = 0) -> None:
  """Refuses what is no route.

  Args:
    ids_TMA: of consecutive tokens.
    scheme: what they should be.
    start: position of the first, for the messages.

  Raises:
    ValueError: names the token, the layer and its ids.
  """
  _check_shape(ids_TMA, scheme)
  _recorded(ids_TMA, scheme, start)


def encode(
  ids_TMA: np.ndarray,
  scheme: RouteScheme,
  *,
  start: int = 0,
  form: str = PACKED,
) -> bytes:
  """Returns the message of a tape.

  Args:
    ids_TMA: uint16; NO_ROUTE in all of a token where there is no record.
    scheme: of the ids.
    start: position of the first token in its context window.
    form: 'packed', or 'plain' for readers without this module.

  Raises:
    ValueError: as `check`.
  """
  if form not in FORMS:
    raise ValueError(f'form must be one of {FORMS}, not {form!r}.')
  _check_shape(ids_TMA, scheme)
  if not 0 <= start < 1 << 32:
    raise ValueError(f'start must lie in 0..{(1 << 32) - 1}, not {start}.')
  recorded_T = _recorded(ids_TMA, scheme, start)
  if form == PLAIN:
    runs_X, payload = np.zeros(0, np.int64), [ids_TMA.astype('<u2').tobytes()]
  else:
    runs_X, payload = message.to_runs(recorded_T), []
    for tokens in _chunks(recorded_T, scheme):
      ids_ZA = ids_TMA[tokens].reshape(-1, scheme.num_active)
      payload.append(bits.pack(ids_ZA, scheme.num_experts))
  header = message.Header(
    form=form,
    num_experts=scheme.num_experts,
    num_active=scheme.num_active,
    layers=scheme.layers,
    start=start,
    num_tokens=len(ids_TMA),
    runs_X=runs_X,
  )
  return message.write(header, payload)


def decode(
  data: bytes,
  scheme: RouteScheme | None = None,
  num_tokens: int | None = None,
  *,
  max_bytes: int = 1 << 30,
) -> RouteTape:
  """Reads a message.

  Args:
    data: of `encode`.
    scheme: that it must have; None takes any.
    num_tokens: that it must have; None takes any.
    max_bytes: that the ids may take as uint16. Tokens without a record take
      none in a message, so that a short one may ask for all memory.

  Raises:
    ValueError: names what is wrong; nothing is guessed or filled in.
  """
  header, payload = message.read(data)
  found = RouteScheme(
    num_experts=header.num_experts,
    num_active=header.num_active,
    layers=header.layers,
  )
  if scheme is not None and found != scheme:
    raise ValueError(
      f'The routes are of {found}, the reader has {scheme}: the rollout fleet '
      'runs another model.'
    )
  if num_tokens is not None and header.num_tokens != num_tokens:
    raise ValueError(
      f'The routes are of {header.num_tokens} tokens, the reader has '
      f'{num_tokens}.'
    )
  shape = (header.num_tokens, len(found.layers), found.num_active)
  _check_size(header, found, len(payload), max_bytes)
  if header.form == PLAIN:
    ids_TMA = np.frombuffer(payload, '<u2').astype(np.uint16).reshape(shape)
    check(ids_TMA, found, start=header.start)
    return RouteTape(start=header.start, ids_TMA=ids_TMA, scheme=found)
  ids_TMA = np.full(shape, records.NO_ROUTE, np.uint16)
  for tokens in _chunks(message.from_runs(header.runs_X), found):
    num_routes = ids_TMA[tokens].size // found.num_active
    num_bytes = bits.num_bytes(num_routes, *found.sizes)
    ids_ZA = bits.unpack(payload[:num_bytes], num_routes, *found.sizes)
    ids_TMA[tokens] = ids_ZA.reshape(-1, *shape[1:])
    payload = payload[num_bytes:]
  return RouteTape(start=header.start, ids_TMA=ids_TMA, scheme=found)


def concatenate(tapes: Sequence[RouteTape]) -> RouteTape:
  """Joins increments of one context window.

  Raises:
    ValueError: there is none, one has another scheme, or one does not begin
      where the one before it ends.
  """
  if not tapes:
    raise ValueError('There is no tape to join; at least one is needed.')
  for n, (left, right) in enumerate(zip(tapes, tapes[1:]), start=1):
    if right.scheme != left.scheme:
      raise ValueError(
        f'Increment {n} is of {right.scheme}, those before it are of '
        f'{left.scheme}.'
      )
    if right.start != left.stop:
      raise ValueError(
        f'Increment {n} starts at token {right.start}, the one before it ends '
        f'at {left.stop}; send what is between them, or drop what is twice.'
      )
  ids_TMA = np.concatenate([tape.ids_TMA for tape in tapes])
  return RouteTape(
    start=tapes[0].start, ids_TMA=ids_TMA, scheme=tapes[0].scheme
  )


def update(tape: RouteTape, increment: RouteTape) -> RouteTape:
  """Returns a tape with what an engine sent next.

  From its start on an increment replaces what is there: the engine consumed
  those tokens anew, with other weights or because their cache was given away.
  `agent.episode` does the same to the routes of completions.

  Raises:
    ValueError: the increment has another scheme or leaves out tokens.
  """
  kept = max(0, increment.start - tape.start)
  left = dataclasses.replace(tape, ids_TMA=tape.ids_TMA[:kept])
  if increment.start < tape.start:
    left = dataclasses.replace(left, start=increment.start)
  return concatenate([left, increment])


def _check_shape(ids_TMA: np.ndarray, scheme: RouteScheme) -> None:
  if ids_TMA.dtype != np.uint16:
    raise ValueError(f'ids_TMA must be of uint16, not {ids_TMA.dtype}.')
  want = (len(scheme.layers), scheme.num_active)
  if ids_TMA.ndim != 3 or ids_TMA.shape[1:] != want:
    raise ValueError(
      f'ids_TMA has shape {ids_TMA.shape}; (tokens, {want[0]} layers, '
      f'{want[1]} active experts) is required.'
    )


def _recorded(
  ids_TMA: np.ndarray, scheme: RouteScheme, start: int
) -> np.ndarray:
  """Returns which tokens have a record, after checking every route."""
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
      missing = bool(missing_t[t])
      _refuse(ids_tMA[t, m], missing, scheme, start + first + t, m)
  return recorded_T


def _refuse(ids_A, missing, scheme, token, m):
  if missing or (ids_A == records.NO_ROUTE).any():
    why = (
      f'NO_ROUTE ({records.NO_ROUTE}) must fill all layers of a token, or none'
    )
  elif (ids_A >= scheme.num_experts).any():
    why = f'an id must be below num_experts ({scheme.num_experts})'
  else:
    why = 'an expert may stand in a route once'
  raise ValueError(
    f'Token {token}, layer {scheme.layers[m]} has the experts '
    f'{ids_A.tolist()}: {why}.'
  )


def _check_size(
  header: message.Header,
  scheme: RouteScheme,
  num_bytes: int,
  max_bytes: int,
) -> None:
  """Refuses a payload that is not what its header says, or unfolds too far."""
  num_layers = len(scheme.layers)
  num_ids = header.num_tokens * num_layers * scheme.num_active
  if 2 * num_ids > max_bytes:
    raise ValueError(
      f'The routes are {2 * num_ids} bytes as ids ({header.num_tokens} tokens, '
      f'{num_layers} layers, {scheme.num_active} experts); the reader takes '
      f'{max_bytes}: send them in increments, or raise max_bytes.'
    )
  needed = 2 * num_ids
  if header.form == PACKED:
    num_routes = header.num_recorded * num_layers
    needed = bits.num_bytes(num_routes, *scheme.sizes)
  if num_bytes != needed:
    raise ValueError(
      f'The payload of the routes is {num_bytes} bytes; {header.num_tokens} '
      f'tokens of {scheme} need {needed}.'
    )


def _chunks(
  recorded_T: np.ndarray, scheme: RouteScheme
) -> Iterator[slice | np.ndarray]:
  """Yields the recorded tokens in parts that are whole bytes, but the last.

  Where parts end shows in no byte of the message.
  """
  routes = bits.aligned_routes(*scheme.sizes)
  tokens = routes // math.gcd(routes, len(scheme.layers))
  tokens *= max(1, _CHUNK_ROUTES // (tokens * len(scheme.layers)))
  if recorded_T.all():
    for first in range(0, len(recorded_T), tokens):
      yield slice(first, min(first + tokens, len(recorded_T)))
    return
  where_X = np.flatnonzero(recorded_T)
  for first in range(0, len(where_X), tokens):
    yield where_X[first : first + tokens]
