"""Repeats a step in larger receive buffers when its tokens did not fit.

A ragged exchange receives as many rows as routers send, at worst `EP` times the
mean. A step is compiled for smaller buffers (buckets) and reports the rows that
it needed; where they did not fit it leaves the state unchanged, and the host
repeats it with a bucket that fits. No token is ever dropped.

The host reads a step's metrics when the next step is already dispatched. That
one reads on the device whether the step before fitted, and if not changes
nothing either.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import batches
from composer_jax.train import state as train_state

# Rows of a receive buffer over the mean; None holds the worst case.
Bucket = float | None

# Steps that a smaller bucket would have held before it is taken.
_PATIENCE = 20


class Retry(NamedTuple):
  """A step that did not fit: `needed` rows against `capacity`."""

  step: int
  needed: int
  capacity: int
  bucket: Bucket
  next_bucket: Bucket

  def __str__(self) -> str:
    first, second = (
      'worst-case' if bucket is None else f'{bucket:g}x'
      for bucket in (self.bucket, self.next_bucket)
    )
    return (
      f'step {self.step}: {self.needed} rows did not fit {self.capacity} of '
      f'the {first} bucket; repeated with {second}'
    )


@dataclasses.dataclass(kw_only=True)
class Sent:
  """A dispatched step, which is repeated if it did not fit.

  Attributes:
    batch: input, kept until the step is known to have fitted.
    metrics: metrics of the last attempt; final once the next step, or
      `BucketedStep.settle`, has returned.
    is_done: device scalar, true if the step and the one before fitted; None
      where nothing can overflow.
  """

  step: int
  batch: batches.LMBatch
  bucket: Bucket = None
  metrics: Any = None
  is_done: jax.Array | None = None

  def rows_needed(self) -> int:
    """Returns the largest need of its exchanges; waits for the step."""
    return int(np.max(self.metrics.loss.exchanged.needed_rows))


class BucketSize:
  """Chooses the next step's bucket by the rows that recent steps needed.

  Goes up at once, but down only after `_PATIENCE` steps that the smaller bucket
  would have held: a change may compile, and an overflow costs a second step.
  """

  def __init__(
    self, buckets: Iterable[float], rows_of: Callable[[Bucket], int]
  ):
    """Starts with the largest of rising buckets below the worst case."""
    worst = rows_of(None)
    smaller = {b: rows for b in buckets if (rows := rows_of(b)) < worst}
    # Rows of each bucket, rising.
    self.rows: dict[Bucket, int] = {**smaller, None: worst}
    self.now: Bucket = next(reversed(smaller), None)
    self._recent: collections.deque[int] = collections.deque(maxlen=_PATIENCE)

  def that_holds(self, needed: int) -> Bucket:
    """Returns the smallest bucket of at least so many rows."""
    for bucket, rows in self.rows.items():
      if rows >= needed:
        return bucket
    raise AssertionError(f'{needed} rows exceed the worst case {self.rows}')

  def get_state(self) -> dict[str, Any]:
    """Returns the JSON value that `set_state` takes.

    The order of sums depends on the bucket: a resumed run repeats its losses
    bit for bit only in the same buckets.
    """
    return {
      'rows': list(self.rows.values()),
      'now': self.rows[self.now],
      'recent': list(self._recent),
    }

  def set_state(self, state: dict[str, Any] | None) -> None:
    """Restores a state; ignores one of other bucket sizes."""
    if state is not None and state['rows'] == list(self.rows.values()):
      self.now = self.that_holds(state['now'])
      self._recent.extend(state['recent'])

  def saw(self, needed: int) -> None:
    self._recent.append(needed)
    wanted = self.that_holds(max(self._recent))
    grows = self.rows[wanted] > self.rows[self.now]
    if grows or len(self._recent) == _PATIENCE:
      self.now = wanted


@dataclasses.dataclass(eq=False)
class BucketedStep:
  """Takes steps that always fit, whatever buckets they need.

  Attributes:
    program: function from a bucket to a jitted step (`step.make`) that donates
      the state and tells if it fitted, which it does not without a `size`.
    size: choice of the bucket; None where the transport cannot overflow.
    report: function called with every step that is repeated.
  """

  program: Callable[[Bucket], Any]
  size: BucketSize | None
  report: Callable[[Retry], None]
  _pending: Sent | None = None

  def __call__(
    self, state: train_state.TrainState, batch: batches.LMBatch, step: int
  ) -> tuple[train_state.TrainState, Sent]:
    """Dispatches a step, donating the state, and completes the one before."""
    sent = Sent(step=step, batch=batch)
    if self.size is None:
      state, sent.metrics = self.program(None)(state, batch)
      return state, sent
    before, self._pending = self._pending, sent
    is_due = jnp.bool_(True) if before is None else before.is_done
    state = self._send(state, sent, self.size.now, is_due)
    if before is not None:
      state, fitted = self._complete(state, before)
      if not fitted:
        # The step before had not fitted, so this one changed nothing.
        state = self._send(state, sent, sent.bucket, before.is_done)
    return state, sent

  def settle(self, state: train_state.TrainState) -> train_state.TrainState:
    """Waits for the last step; afterwards it is part of the state."""
    if self._pending is not None:
      state, _ = self._complete(state, self._pending)
      self._pending = None
    return state

  def _send(self, state, sent: Sent, bucket: Bucket, is_due):
    sent.bucket = bucket
    state, sent.metrics, sent.is_done = self.program(bucket)(
      state, sent.batch, is_due
    )
    return state

  def _complete(self, state, sent: Sent):
    """Repeats a step until it fits; also returns if it did at once."""
    assert self.size is not None
    fitted = True
    while not bool(sent.is_done):
      fitted = False
      needed, capacity = sent.rows_needed(), self.size.rows[sent.bucket]
      # Layers after the first overflow see wrong activations, so this need may
      # be too small; the repeated step reports it again.
      bucket = self.size.that_holds(max(needed, capacity + 1))
      self.report(Retry(sent.step, needed, capacity, sent.bucket, bucket))
      state = self._send(state, sent, bucket, jnp.bool_(True))
    self.size.saw(sent.rows_needed())
    return state, fitted
