"""The frame of a tape of routes: header, runs and checksum, little-endian.

  magic 'MoEr' | version u8 | form u8 | E u16 | A u16 | M u16 | start u32 |
  tokens u32 | runs u32 | M layers u16 | runs u32 each | payload | BLAKE3 of
  all before, 16 bytes

Runs are lengths in tokens, of recorded and unrecorded ones in turn (none in the
plain form). What the payload holds is of `core.routes.codec`. X is a run.
"""

import dataclasses
import struct

import blake3
import numpy as np

PACKED, PLAIN = FORMS = ('packed', 'plain')

_MAGIC = b'MoEr'
_VERSION = 1
_HEADER = struct.Struct('<4sBBHHHIII')
_HASH_BYTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Header:
  """What a message says of its payload.

  Attributes:
    form: PACKED or PLAIN.
    num_experts: E.
    num_active: A.
    layers: index in the decoder of each MoE layer.
    start: position of the first token in its context window.
    num_tokens: with a record or without.
    runs_X: int64 lengths of recorded and unrecorded runs in turn.
  """

  form: str
  num_experts: int
  num_active: int
  layers: tuple[int, ...]
  start: int
  num_tokens: int
  runs_X: np.ndarray

  @property
  def num_recorded(self) -> int:
    """Tokens that the packed form has a payload for."""
    return int(self.runs_X[::2].sum())


def write(header: Header, payload: list[bytes]) -> bytes:
  """Returns the message of a header and the parts of its payload."""
  fixed = _HEADER.pack(
    _MAGIC,
    _VERSION,
    FORMS.index(header.form),
    header.num_experts,
    header.num_active,
    len(header.layers),
    header.start,
    header.num_tokens,
    len(header.runs_X),
  )
  layers, runs_X = np.array(header.layers, '<u2'), header.runs_X.astype('<u4')
  parts = [fixed, layers.tobytes(), runs_X.tobytes(), *payload]
  return b''.join([*parts, _digest(*parts)])


def read(data: bytes) -> tuple[Header, memoryview]:
  """Returns the header and the payload of a message.

  Nothing is allocated but the runs, which are in the message.

  Raises:
    ValueError: a message that is damaged, truncated or of another kind.
  """
  shortest = _HEADER.size + _HASH_BYTES
  if len(data) < shortest:
    raise ValueError(
      f'The routes are {len(data)} bytes, fewer than the {shortest} of any: '
      'truncated.'
    )
  view = memoryview(data)
  magic, version, form, num_experts, num_active, num_layers, *rest = (
    _HEADER.unpack(view[: _HEADER.size])
  )
  start, num_tokens, num_runs = rest
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
  offset = runs_at + 4 * num_runs
  if offset + _HASH_BYTES > len(data):
    raise ValueError(
      f'The routes are {len(data)} bytes, too few for {num_layers} layers and '
      f'{num_runs} runs.'
    )
  layers = np.frombuffer(view[_HEADER.size : runs_at], '<u2')
  header = Header(
    form=FORMS[form],
    num_experts=num_experts,
    num_active=num_active,
    layers=tuple(layers.tolist()),
    start=start,
    num_tokens=num_tokens,
    runs_X=np.frombuffer(view[runs_at:offset], '<u4').astype(np.int64),
  )
  _check_runs(header)
  return header, view[offset:-_HASH_BYTES]


def to_runs(recorded_T: np.ndarray) -> np.ndarray:
  """Returns lengths of recorded and unrecorded runs in turn."""
  if not recorded_T.size:
    return np.zeros(0, np.int64)
  # A tape that begins without a record begins with an empty run.
  edges = np.flatnonzero(np.diff(recorded_T, prepend=True))
  return np.diff(edges, prepend=0, append=recorded_T.size)


def from_runs(runs_X: np.ndarray) -> np.ndarray:
  """Returns the recorded_T of `to_runs`."""
  return np.repeat(np.arange(len(runs_X)) % 2 == 0, runs_X)


def _check_runs(header: Header) -> None:
  runs_X, num_tokens = header.runs_X, header.num_tokens
  if header.form == PLAIN:
    if runs_X.size:
      raise ValueError(
        f'The routes have {runs_X.size} runs; in the plain form there are none.'
      )
  elif int(runs_X.sum()) != num_tokens or not runs_X[1:].all():
    raise ValueError(
      f'The runs of the routes begin with {runs_X[:8].tolist()}; all must add '
      f'up to {num_tokens} tokens, and none but the first may be empty.'
    )


def _digest(*parts: bytes | memoryview) -> bytes:
  hasher = blake3.blake3()
  for part in parts:
    hasher.update(part)
  return hasher.digest(length=_HASH_BYTES)
