"""Threads that take turns, few of them waiting at a time."""

import collections
from collections.abc import Callable
from concurrent import futures

# Turns waiting for each thread. They hold pieces, so they bound memory.
_TURNS_AHEAD = 4


class Crew:
  """Threads with a short queue; with one thread the caller works itself."""

  def __init__(self, threads: int):
    if threads < 1:
      raise ValueError(f'threads must be at least 1, not {threads}.')
    self._pool = None
    if threads > 1:
      self._pool = futures.ThreadPoolExecutor(threads, 'decode')
    self._ahead = _TURNS_AHEAD * threads
    self._waiting: collections.deque[futures.Future] = collections.deque()

  def __enter__(self) -> 'Crew':
    return self

  def __exit__(self, kind, *_) -> None:
    try:
      while kind is None and self._waiting:
        self._waiting.popleft().result()
    finally:
      if self._pool is not None:
        self._pool.shutdown(cancel_futures=True)

  def do(self, work: Callable[..., None], *args) -> None:
    if self._pool is None:
      work(*args)
      return
    self._waiting.append(self._pool.submit(work, *args))
    if len(self._waiting) > self._ahead:
      self._waiting.popleft().result()
