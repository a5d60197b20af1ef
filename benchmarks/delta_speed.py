"""Rates of encoding and verified applying, beside one core's memcpy.

Memcpy and decoding write to memory that no job has touched, as a receiver's
first copy of a policy does, so that page faults are included. All jobs take
turns on one pinned core and count CPU seconds; the gain of two threads is
measured by the wall clock. Gigabytes are those of the weights.
"""

import functools
import hashlib
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures

import numpy as np

from benchmarks import delta_bounds, delta_data, delta_peers, interleaved
from composer_jax.delta.codec import coding
from composer_jax.delta.format import identity

_COPIED = 2**27
_PASSES = 8  # rate of two threads over that of one
Boxes = list[tuple[np.ndarray, np.ndarray]]
Job = Callable[[], object]


def boxes(base: delta_data.Policy, policy: delta_data.Policy) -> Boxes:
  """Returns the flat chunks of a bundle: pairs (base, values)."""
  chunks = []
  for name, array in policy.items():
    cut = identity.of(array.shape)
    for number in range(cut.num_chunks):
      box = tuple(slice(*ends) for ends in cut.chunk(number))
      old, new = base[name][box], array[box]
      chunks.append((old.reshape(-1).copy(), new.reshape(-1).copy()))
  return chunks


def turns(
  jobs: dict[str, Job], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
  """Returns seconds of each job, turn by turn; the first turn is a warm-up."""
  seconds: dict[str, list[float]] = {name: [] for name in jobs}
  for turn in range(rounds + 1):
    for name, job in jobs.items():
      start = clock()
      job()
      if turn:
        seconds[name].append(clock() - start)
  return seconds


def _encode(old: np.ndarray, new: np.ndarray, tier: str) -> tuple[int, bytes]:
  return coding.encode(new, old, tier=tier)


def _encode_and_hash(old: np.ndarray, new: np.ndarray, tier: str) -> bytes:
  blob = coding.encode(new, old, tier=tier)[1]
  return hashlib.sha256(blob).digest() + identity.hash_chunk(new)


def _decode(
  old: np.ndarray, coded: tuple[int, bytes], into: np.ndarray
) -> np.ndarray:
  return coding.decode(*coded, old.size, old.dtype, old, out=into)


def _apply(
  old: np.ndarray, coded: tuple[int, bytes], post: bytes, into: np.ndarray
) -> None:
  hashlib.sha256(coded[1])
  assert identity.hash_chunk(_decode(old, coded, into)) == post


def _fresh(
  function: Callable[..., object], arrays: Sequence[np.ndarray], *columns
) -> Job:
  """Returns a job that also gives each call fresh memory like its array.

  It is one allocation, larger than those that the allocator keeps.
  """
  ends = np.cumsum([array.nbytes for array in arrays])

  def job() -> None:
    memory = np.empty(ends[-1], np.uint8)
    for end, array, *row in zip(ends, arrays, *columns, strict=True):
      into = memory[end - array.nbytes : end].view(array.dtype)
      function(*row, into)

  return job


def _each(function: Callable[..., object], *columns: Sequence) -> Job:
  """Returns a job that calls a function on every row and drops the results."""

  def job() -> None:
    for row in zip(*columns, strict=True):
      function(*row)

  return job


def _copy() -> Job:
  """Returns a job that copies more bytes than caches hold."""
  data = np.ones(_COPIED, np.uint8)
  return _fresh(lambda into: np.copyto(into, data), [data])


def described(case: delta_data.Case) -> tuple[str, Boxes, float]:
  """Returns the last step of a case: label, chunks, share that changed."""
  pair = case.policies[-2], case.policies[-1]
  differ, total = delta_bounds.changed(*pair)
  label = f'{case.label}, {differ / total:.2%} changed'
  return label, boxes(*pair), differ / total


def measure(
  label: str, chunks: Boxes, rounds: int, *, share: float
) -> dict[str, float]:
  """Prints the rates of both tiers; returns the medians in GB/s by name.

  Args:
    label: label of the printed lines.
    chunks: pairs (base, values).
    rounds: number of turns.
    share: share of changed weights; goals hold at about 1 % and below.
  """
  olds, news = ([pair[n] for pair in chunks] for n in (0, 1))
  jobs: dict[str, Job] = {
    'memcpy': _copy(),
    'hash': _each(identity.hash_chunk, news),
  }
  for tier in coding.TIERS:
    jobs |= _jobs(tier, chunks)
  squeezed = [delta_peers.xor(*pair) for pair in chunks]
  listed = [delta_peers.gaps(*pair) for pair in chunks]
  counts = [coding.count_changed(new, old) for old, new in chunks]
  for (old, new), packed, entries, count in zip(
    chunks, squeezed, listed, counts, strict=True
  ):
    bits = delta_bounds.bits_of(new)
    assert np.array_equal(delta_peers.undo_xor(packed, old), bits)
    assert np.array_equal(delta_peers.undo_gaps(entries, old, count), bits)
  jobs |= {
    'XOR+zstd-1 encode': _each(delta_peers.xor, olds, news),
    'XOR+zstd-1 decode': _each(delta_peers.undo_xor, squeezed, olds),
    'gap lists encode': _each(delta_peers.gaps, olds, news),
    'gap lists decode': _each(delta_peers.undo_gaps, listed, olds, counts),
  }
  seconds = turns(jobs, rounds, time.process_time)
  gigabytes = sum(new.nbytes for _, new in chunks) / 1e9
  rates = {
    name: [
      (_COPIED / 1e9 if name == 'memcpy' else gigabytes) / value
      for value in values
    ]
    for name, values in seconds.items()
  }
  _report(label, rates, _GOALS if share <= 0.015 else {})
  return {name: statistics.median(values) for name, values in rates.items()}


def _jobs(tier: str, chunks: Boxes) -> dict[str, Job]:
  olds, news = ([pair[n] for pair in chunks] for n in (0, 1))
  codes = [_encode(old, new, tier) for old, new in chunks]
  posts = [identity.hash_chunk(new) for new in news]
  encode = functools.partial(_encode, tier=tier)
  encode_and_hash = functools.partial(_encode_and_hash, tier=tier)
  return {
    f'{tier} encode': _each(encode, olds, news),
    f'{tier} encode and hash': _each(encode_and_hash, olds, news),
    f'{tier} decode': _fresh(_decode, news, olds, codes),
    f'{tier} verified apply': _fresh(_apply, news, olds, codes, posts),
  }


_GOALS = {
  'small encode and hash': 0.09,
  'small verified apply': 0.09,
  'fast encode and hash': 0.15,
  'fast verified apply': 0.18,
}


def _report(
  label: str, rates: dict[str, list[float]], goals: dict[str, float]
) -> None:
  for name, values in rates.items():
    if name == 'memcpy':
      continue
    goal = goals.get(name)
    interleaved.report(
      'delta',
      f'{name}: {label}',
      (values, rates['memcpy']),
      against='memcpy',
      limit=None,
      goal='none' if goal is None else f'ratio >= {goal}',
      met=lambda _, ratio: goal is None or ratio >= goal,  # noqa: B023
      unit='GB/s',
    )


def threads(label: str, chunks: Boxes, rounds: int, cores: set[int]) -> None:
  """Reports the gain of a second thread on two cores, by the wall clock."""
  before = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores)
  gigabytes = sum(new.nbytes for _, new in chunks) / 1e9
  try:
    for tier in coding.TIERS:
      for what, function in _one_by_one(tier, chunks).items():
        jobs: dict[str, Job] = {
          name: functools.partial(_all_of, count, function, len(chunks))
          for name, count in (('two', 2), ('one', 1))
        }
        seconds = turns(jobs, rounds, time.perf_counter)
        two, alone = (
          [_PASSES * gigabytes / s for s in seconds[name]]
          for name in ('two', 'one')
        )
        interleaved.report(
          'delta',
          f'{tier} {what}, two threads: {label}',
          (two, alone),
          against='one thread',
          limit=None,
          goal='ratio >= 1.8',
          met=lambda _, ratio: ratio >= 1.8,
          unit='GB/s',
        )
  finally:
    os.sched_setaffinity(0, before)


def _one_by_one(tier: str, chunks: Boxes) -> dict[str, Callable[[int], object]]:
  """Returns functions that encode or apply the chunk of a number."""
  codes = [_encode(old, new, tier) for old, new in chunks]
  posts = [identity.hash_chunk(new) for _, new in chunks]
  into = [np.zeros_like(new) for _, new in chunks]
  # A thread that waited may reach a chunk of the next pass with the other.
  locks = [threading.Lock() for _ in chunks]

  def encode(number: int) -> bytes:
    old, new = chunks[number]
    return _encode_and_hash(old, new, tier)

  def apply(number: int) -> None:
    with locks[number]:
      _apply(chunks[number][0], codes[number], posts[number], into[number])

  return {'encode and hash': encode, 'verified apply': apply}


def _all_of(
  threads: int, function: Callable[[int], object], count: int
) -> None:
  """Calls `function` on all numbers, often enough to hide the start of threads.

  Each thread is pinned to a core from the start: the kernel would take longer
  to separate them than the whole measurement takes.
  """
  cores: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
  for core in sorted(os.sched_getaffinity(0))[:threads]:
    cores.put({core})
  with futures.ThreadPoolExecutor(
    threads, initializer=lambda: os.sched_setaffinity(0, cores.get(timeout=1))
  ) as pool:
    for _ in pool.map(function, _PASSES * list(range(count))):
      pass
