"""Work that a pool of threads does in order, a few items at a time."""

import collections
from collections.abc import Callable, Generator, Iterable
from concurrent import futures
from typing import TypeVar

# Items in flight for each thread. They hold pieces and blocks of weights, so
# they bound memory.
_AHEAD = 4

In = TypeVar('In')
Out = TypeVar('Out')


def in_order(
  work: Callable[[In], Out], items: Iterable[In], threads: int
) -> Generator[Out, None, None]:
  """Yields work(item) in the order of the items.

  The first error, of the work or of the items, ends it: what did not begin is
  dropped, and no thread is left when the error reaches the caller. Who may
  stop early closes the generator, which does the same.
  """
  if threads < 1:
    raise ValueError(f'threads must be at least 1, not {threads}.')
  flying: collections.deque[futures.Future] = collections.deque()
  pool = futures.ThreadPoolExecutor(threads, 'delta')
  try:
    for item in items:
      flying.append(pool.submit(work, item))
      if len(flying) >= _AHEAD * threads:
        yield flying.popleft().result()
    while flying:
      yield flying.popleft().result()
  finally:
    pool.shutdown(cancel_futures=True)
