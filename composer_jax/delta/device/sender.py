"""Sends the policies of a trainer as bundles, while it trains on.

Consumes: trees of arrays, one at a time.
Waits for: the store; a tree that comes while one is in flight waits for it.
Woken by: `publish` and `gc`; the clock, before the pointer expires.
Produces: a `BundleInfo` for each version; an error at the next call.
"""

import dataclasses
import logging
import os
import pathlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from composer_jax.delta import codec, publish_parts, signing
from composer_jax.delta import publish as publishing
from composer_jax.delta import store as stores
from composer_jax.delta.device import tensors

# How long processes wait for each other's parts, and for the key.
_TIMEOUT_S = 600.0

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BundleOptions:
  """How versions are encoded and kept.

  Attributes:
    tier: of the codec; 'small' has fewer bytes, 'fast' costs less time.
    keyframe_every: versions from a keyframe to the next; joiners start there.
    skip_levels: a version divisible by one of them also gets a delta from that
      many versions before, for receivers that lag.
    expires_s: after which receivers doubt a pointer that no one renewed; 0 for
      never.
    verify: decodes every chunk again before it is committed.
    threads: that encode.
  """

  tier: str = 'small'
  keyframe_every: int = 400
  skip_levels: tuple[int, ...] = (8,)
  expires_s: float = publishing.EXPIRES_S
  verify: bool = True
  threads: int = 2

  def __post_init__(self):
    object.__setattr__(self, 'skip_levels', tuple(self.skip_levels))
    if self.tier not in codec.TIERS:
      raise ValueError(
        f'tier is {self.tier!r}; it must be one of {", ".join(codec.TIERS)}.'
      )
    for name in ('keyframe_every', 'threads'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'BundleOptions.{name} must be at least 1; got {getattr(self, name)}.'
        )
    least = min(self.skip_levels, default=2)
    if least < 2 or any(level % least for level in self.skip_levels):
      raise ValueError(
        f'skip_levels are {self.skip_levels}; they must be multiples of the '
        'least, which is 2 or more: every version has a delta of 1 anyway.'
      )
    if self.expires_s < 0:
      raise ValueError(
        f'expires_s is {self.expires_s}; it must be positive, or 0 for never.'
      )


class Sender:
  """Publishes one run from a thread of its own, at most one tree at a time.

  The arrays of a tree must live until its version is published: nobody may
  donate them. `decoder.policy` makes new ones. They are brought to the host in
  the thread, shard by shard, each process its own.

  Under `jax.distributed` every process has one and calls it alike.

  Args:
    store_url: a folder or anything `delta.store.Store` opens.
    run_id: names the run in the store.
    key_path: of the key that signs; made when missing.
    options: how.
    parts: how several processes share the work; None asks jax for them.

  Raises:
    ValueError: the key, the store or the run's name is not sound.
  """

  def __init__(
    self,
    store_url: str | os.PathLike,
    run_id: str,
    key_path: str | os.PathLike,
    options: BundleOptions | None = None,
    *,
    parts: publish_parts.Parts | None = None,
  ):
    self._options = options or BundleOptions()
    parts = parts or _parts()
    store = stores.Store(store_url)
    self._publisher = publishing.Publisher(
      store,
      run_id,
      _key(key_path, parts, store, run_id),
      tier=self._options.tier,
      keyframe_every=self._options.keyframe_every,
      skip_levels=self._options.skip_levels,
      expires_s=self._options.expires_s,
      threads=self._options.threads,
      verify=self._options.verify,
      parts=parts,
    )
    self._done: queue.SimpleQueue[publishing.BundleInfo] = queue.SimpleQueue()
    self._errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
    self._renew_at = self._next_renewal()
    # A kill at any moment is one of the cases that publishing survives.
    self._thread = threading.Thread(
      target=self._run, name='bundles', daemon=True
    )
    self._thread.start()

  @property
  def version(self) -> int | None:
    """The last committed version, None before the first."""
    return self._publisher.version

  def publish(self, tree: Any, version: int) -> None:
    """Starts publishing; waits for what was started before.

    Raises:
      ValueError, OSError: of what was started before; this is not started.
    """
    self.wait()

    def send() -> None:
      info = self._publisher.publish(tensors.blocks(tree), version)
      self._renew_at = self._next_renewal()
      self._done.put(info)

    self._start(send)

  def results(self) -> list[publishing.BundleInfo]:
    """Returns what was finished since it was last asked, in order.

    Raises:
      ValueError, OSError: a version could not be published; said once.
    """
    self._raise()
    return [self._done.get() for _ in range(self._done.qsize())]

  def wait(self) -> None:
    """Waits until nothing is in flight; raises what `results` would."""
    self._tasks.join()
    self._raise()

  def rewind(self, version: int) -> None:
    """Makes published versions after `version` void; receivers follow."""
    self.wait()
    # In the thread, which may be about to renew the pointer.
    self._start(lambda: self._publisher.rewind(version))
    self.wait()

  def gc(self, keep: int, say: Callable[[str], None] = _log.warning) -> None:
    """Frees, after what is in flight, what no receiver needs any more.

    Old versions whose bundles are damaged cost room and nothing else: they end
    no run.

    Args:
      keep: newest versions that stay.
      say: is told why nothing could be deleted, from the thread.
    """

    def collect() -> None:
      try:
        self._publisher.gc(keep)
      except (ValueError, OSError) as error:
        say(f'old bundles are not deleted, the run goes on: {error}')

    self._start(collect)

  def close(self) -> None:
    """Waits for what is in flight and ends the thread.

    Raises:
      ValueError, OSError: a version could not be published, unless another
        error is on its way already.
    """
    if self._thread.is_alive():
      # Nobody would take it from the queue of a thread that has ended, and
      # `wait` would wait for that.
      self._tasks.put(None)
    self._thread.join()
    if sys.exc_info()[0] is None:
      self._raise()
    while not self._errors.empty():
      _log.error('Not published: %s', self._errors.get())

  def _start(self, task: Callable[[], None]) -> None:
    if not self._thread.is_alive():
      raise RuntimeError('This sender is closed; make another.')
    self._tasks.put(task)

  def _raise(self) -> None:
    if not self._errors.empty():
      raise self._errors.get()

  def _next_renewal(self) -> float:
    seconds = self._options.expires_s / 3
    return time.monotonic() + seconds if seconds else float('inf')

  def _run(self) -> None:
    while self._next():
      pass

  def _next(self) -> bool:
    """Does one thing; returns whether another may follow.

    Not the body of a loop, whose variables would hold the last tree on the
    devices until the next one comes.
    """
    left = max(self._renew_at - time.monotonic(), 0)
    try:
      # A longer timeout overflows.
      task = self._tasks.get(timeout=min(left, threading.TIMEOUT_MAX))
    except queue.Empty:
      self._renew()
      return True
    is_last = task is None
    try:
      if task is not None:
        task()
    except BaseException as error:  # noqa: BLE001  Raised in the caller.
      self._errors.put(error)
    del task
    self._tasks.task_done()
    return not is_last

  def _renew(self) -> None:
    self._renew_at = self._next_renewal()
    if self._publisher.version is None:
      return
    try:
      self._publisher.renew()
    except OSError as error:
      _log.warning('The pointer is not renewed, which will be tried: %s', error)
    except BaseException as error:  # noqa: BLE001  Raised in the caller.
      self._errors.put(error)


def _parts() -> publish_parts.Parts | None:
  """Returns the share of this process; collective, None if it is alone."""
  if jax.process_count() == 1:
    return None
  # Parts of an earlier launch must not be taken for those of this one.
  now = time.time_ns() >> 10
  words = np.array([now >> 31 & 0x7FFFFFFF, now & 0x7FFFFFFF], np.int32)
  high, low = multihost_utils.broadcast_one_to_all(words)
  return publish_parts.Parts(
    process=jax.process_index(),
    count=jax.process_count(),
    attempt=f'{int(high):08x}{int(low):08x}',
    timeout_s=_TIMEOUT_S,
  )


def open_signer(
  path: str | os.PathLike,
) -> signing.Hmac | signing.Ed25519Signer:
  """Opens a key that signs; ValueError for one that can only verify."""
  key = signing.open_key(path)
  if isinstance(key, signing.Ed25519Verifier):
    raise ValueError(
      f'{path} is a public key, which cannot sign; name the private one.'
    )
  return key


def _key(
  path: str | os.PathLike,
  parts: publish_parts.Parts | None,
  store: stores.Store,
  run_id: str,
) -> signing.Hmac | signing.Ed25519Signer:
  """Opens or makes the key; of several processes the first one makes it."""
  path = pathlib.Path(path)
  if parts is not None and parts.process:
    deadline = time.monotonic() + _TIMEOUT_S
    while not path.exists():
      if time.monotonic() > deadline:
        raise ValueError(
          f'{path}: no key within {_TIMEOUT_S:.0f} s; the processes of a run '
          'must see the same file, which the first one makes.'
        )
      time.sleep(0.05)
  if path.exists():
    return open_signer(path)
  # To a publisher a pointer of another key is a damaged one, to be replaced:
  # two jobs at one store would do that to each other without end.
  if store.read_pointer(run_id) is not None:
    raise ValueError(
      f'{store.url} has a run {run_id!r} already, and {path} is no key of it: '
      'there is none. Bring the key of that run, or choose another store.'
    )
  return signing.load_or_make_key(path)
