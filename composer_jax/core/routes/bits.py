"""Packs routes into bits: Lehmer's code in words of a mixed radix.

A route of A distinct experts out of E is A digits: the rank of each expert
among those not taken before, of radix E, E - 1 and so on. As many digits as fit
into 63 bits form a word, of the fewest bits that hold it; words follow each
other bit by bit. Each wastes less than one of more than 47 bits, so that the
total is within 2.2 % of log2(E! / (E - A)!).

Axes: Z is the route, X the word, S the period after which words begin at the
same digits again. Ids are not checked here.
"""

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# Less than 64 bits, so that a word never spans three 64-bit numbers.
_LARGEST_WORD = 1 << 63


def num_bytes(num_routes: int, num_experts: int, num_active: int) -> int:
  """Returns the bytes that routes are packed into."""
  return -(-_layout(num_experts, num_active).num_bits(num_routes) // 8)


def aligned_routes(num_experts: int, num_active: int) -> int:
  """Returns a number of routes that fill whole 64-bit numbers."""
  return 64 * _layout(num_experts, num_active).routes


class _Words(NamedTuple):
  """Places of words in the stream of bits."""

  index_X: np.ndarray  # 64-bit number of the stream in which the word begins
  shift_X: np.ndarray  # first bit in that number
  width_X: np.ndarray  # number of bits
  limit_X: np.ndarray  # bound of the word's value, exclusive


class _Layout(NamedTuple):
  """Assignment of digits to words, periodic in routes."""

  num_active: int  # digits of a route (A)
  routes: int  # routes of a period, which ends where a word does
  words: tuple[tuple[int, ...], ...]  # radices of each word, first digit first

  def split(self, num_routes: int) -> tuple[int, list[tuple[int, ...]]]:
    """Returns the whole periods of some routes, and the words after them."""
    periods, left = divmod(num_routes, self.routes)
    num_digits, words = left * self.num_active, []
    for radices in self.words:
      if num_digits > 0:
        words.append(radices[:num_digits])
      num_digits -= len(radices)
    return periods, words

  def num_bits(self, num_routes: int) -> int:
    periods, words = self.split(num_routes)
    return periods * sum(map(_width, self.words)) + sum(map(_width, words))

  def place(self, num_routes: int) -> _Words:
    periods, words = self.split(num_routes)

    def of_all(function):
      period = np.array([function(word) for word in self.words], np.uint64)
      last = np.array([function(word) for word in words], np.uint64)
      return np.concatenate([np.tile(period, periods), last])

    width_X = of_all(_width)
    begin_X = np.cumsum(width_X) - width_X
    return _Words(
      index_X=(begin_X >> np.uint64(6)).astype(np.intp),
      shift_X=begin_X & np.uint64(63),
      width_X=width_X,
      limit_X=of_all(math.prod),
    )

  def digits(self) -> Iterator[list[tuple[int, int, int]]]:
    """Yields (slot, route of the period, radix) of the digits of each word."""
    digit = 0
    for radices in self.words:
      yield [
        ((digit + i) % self.num_active, (digit + i) // self.num_active, radix)
        for i, radix in enumerate(radices)
      ]
      digit += len(radices)


def _width(radices: tuple[int, ...]) -> int:
  return (math.prod(radices) - 1).bit_length()


def _full_word(first: int, num_experts: int, num_active: int) -> tuple:
  """Returns the radices of a word that begins at digit `first` of a route."""
  radices, product = (), 1
  while True:
    radix = num_experts - (first + len(radices)) % num_active
    product *= radix
    if product > _LARGEST_WORD:
      return radices
    radices += (radix,)


@functools.lru_cache(maxsize=64)
def _layout(num_experts: int, num_active: int) -> _Layout:
  """Finds the period that wastes the fewest bits.

  Full words may never end where a route does, so the last word of a period is
  shortened. The digits at which words begin repeat after at most A words, so
  that longer periods gain little.
  """
  if num_experts == 1:
    return _Layout(1, 1, ((1,),))
  words, num_digits, bits = [], 0, 0
  best, least = None, math.inf
  for _ in range(num_active + 1):
    radices = _full_word(num_digits, num_experts, num_active)
    over = (num_digits + len(radices)) % num_active
    if over < len(radices):
      last = radices[: len(radices) - over]
      routes = (num_digits + len(radices)) // num_active
      if (needed := (bits + _width(last)) / routes) < least:
        best = _Layout(num_active, routes, (*words, last))
        least = needed
    if not over:
      break
    words.append(radices)
    num_digits += len(radices)
    bits += _width(radices)
  assert best is not None
  return best


def pack(ids_ZA: np.ndarray, num_experts: int) -> bytes:
  """Packs checked routes into whole bytes."""
  num_routes, num_active = ids_ZA.shape
  layout = _layout(num_experts, num_active)
  num_bits = layout.num_bits(num_routes)
  if not num_bits:
    return b''
  periods = -(-num_routes // layout.routes)
  # Digits beyond the last route are zero.
  digits_AZ = np.zeros((num_active, periods * layout.routes), np.uint16)
  digits_AZ[:, :num_routes] = ids_ZA.T
  for a in range(num_active - 1):
    digits_AZ[a + 1 :] -= digits_AZ[a + 1 :] > digits_AZ[a]
  value_SX = np.zeros((periods, len(layout.words)), np.uint64)
  for w, digits in enumerate(layout.digits()):
    value_S = np.zeros(periods, np.uint64)
    for a, n, radix in reversed(digits):
      value_S *= np.uint64(radix)
      value_S += digits_AZ[a, n :: layout.routes]
    value_SX[:, w] = value_S
  words = layout.place(num_routes)
  value_X = value_SX.reshape(-1)[: len(words.index_X)]
  # Words are shorter than the numbers of the stream: one begins in each, and
  # only the last that does reaches into the next.
  first_X = np.flatnonzero(np.diff(words.index_X, prepend=-1))
  last_X = np.append(first_X[1:], len(value_X)) - 1
  stream_X = np.zeros(len(first_X) + 1, np.uint64)
  stream_X[:-1] = np.add.reduceat(value_X << words.shift_X, first_X)
  # In two steps: a shift by 64 is not defined.
  over_X = (value_X >> np.uint64(1)) >> (np.uint64(63) - words.shift_X)
  stream_X[1:] |= over_X[last_X]
  return stream_X.astype('<u8').tobytes()[: -(-num_bits // 8)]


def unpack(
  blob: memoryview, num_routes: int, num_experts: int, num_active: int
) -> np.ndarray:
  """Returns the ids_ZA that `pack` packed; a ValueError for other bytes."""
  layout = _layout(num_experts, num_active)
  words = layout.place(num_routes)
  padded = bytes(blob).ljust(8 * (len(blob) // 8 + 2), b'\0')
  stream_X = np.frombuffer(padded, '<u8')
  low_X = stream_X[words.index_X] >> words.shift_X
  high_X = stream_X[words.index_X + 1] << np.uint64(1)
  high_X <<= np.uint64(63) - words.shift_X
  mask_X = (np.uint64(1) << words.width_X) - np.uint64(1)
  periods = -(-num_routes // layout.routes)
  value_SX = np.zeros((periods, len(layout.words)), np.uint64)
  value_X = value_SX.reshape(-1)[: len(words.index_X)]
  value_X[:] = (low_X | high_X) & mask_X
  unused = 8 * len(blob) - layout.num_bits(num_routes)
  if (value_X >= words.limit_X).any() or (unused and blob[-1] >> 8 - unused):
    raise ValueError(
      'The packed routes hold a word that no route has; they were written by '
      'another encoder or are damaged.'
    )
  ids_AZ = np.zeros((num_active, periods * layout.routes), np.uint16)
  for w, digits in enumerate(layout.digits()):
    value_S = np.ascontiguousarray(value_SX[:, w])
    for a, n, radix in digits:
      rest_S = value_S // np.uint64(radix)
      ids_AZ[a, n :: layout.routes] = value_S - rest_S * np.uint64(radix)
      value_S = rest_S
  for a in reversed(range(num_active - 1)):
    ids_AZ[a + 1 :] += ids_AZ[a + 1 :] >= ids_AZ[a]
  return ids_AZ[:, :num_routes].T
