"""Steps whose receive buffers hold a bucket of rows, repeated where too few.

A ragged exchange receives as many rows as routers send, and a buffer has a
size. The worst case is `EP` times the mean, mostly empty; so a step is compiled
for some smaller buckets, reports the rows that it needed, and where they did
not fit leaves the state as it was. The host then repeats it with a bucket that
fits. Nothing is ever dropped: what overflowed did not happen.

The host reads of a step one step late, when the next is on its way already.
That one is told on the device whether the step before it fitted, and changes
nothing either if not.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import batches
from composer_jax.parallel import exchange
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step

# Rows of a receive buffer over the mean; None holds the worst case.
Bucket = float | None

# Steps that a smaller bucket must have sufficed for before it is taken.
_PATIENCE = 20


def fits(stats: exchange.ExchangeStats | None) -> jax.Array:
  """Returns whether every exchange had the rows that it needed."""
  if stats is None:
    return jnp.bool_(True)
  return (stats.needed_rows <= stats.capacity).all()


def guard(step: train_step.StepFunction) -> Callable[..., Any]:
  """Makes a step that changes nothing unless it and the one before it fitted.

  Its last argument and its last result say so of the step before and of this
  one. What an overflow leaves behind may be anything, NaN included: it is
  selected away, element by element, so that a donated state is still written in
  place.
  """

  def guarded(state, batch, is_due):
    after, metrics = step(state, batch)
    with jax.named_scope('guard'):
      is_done = is_due & fits(metrics.loss.exchanged)
      state = jax.tree.map(
        lambda new, old: jnp.where(is_done, new, old), after, state
      )
    return state, metrics, is_done

  return guarded


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
  """A step on its way to the devices, sent again where it did not fit.

  Attributes:
    batch: kept until the step is known to have fitted.
    metrics: of the last time it was sent; final once the next step, or
      `BucketedStep.settle`, has returned.
    is_done: on the device; None where nothing can overflow.
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
  """Which bucket the next step takes, by what recent steps needed.

  Up at once, down only after `_PATIENCE` steps that the smaller one would have
  held: each change may compile, and a step that overflows costs two.
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
    raise RuntimeError(
      f'An exchange needs {needed} rows and the worst case was computed to be '
      f'{self.rows[None]}: a bug of the transport, of which no step was '
      "applied. --config.parallel.buckets='()' does without buckets."
    )

  def get_state(self) -> dict[str, Any]:
    """Returns what `set_state` needs, as JSON.

    The order of a sum follows the room there is: only in the same buckets does
    a run that goes on from a checkpoint repeat its losses bit for bit.
    """
    return {
      'rows': list(self.rows.values()),
      'now': self.rows[self.now],
      'recent': list(self._recent),
    }

  def set_state(self, state: dict[str, Any] | None) -> None:
    """Goes on from there; begins anew where buckets are of other sizes."""
    if state is not None and state['rows'] == list(self.rows.values()):
      self.now = self.that_holds(state['now'])
      self._recent.extend(state['recent'])

  def saw(self, needed: int) -> None:
    """Takes in what a step needed."""
    self._recent.append(needed)
    wanted = self.that_holds(max(self._recent))
    grows = self.rows[wanted] > self.rows[self.now]
    if grows or len(self._recent) == _PATIENCE:
      self.now = wanted


@dataclasses.dataclass(eq=False)
class BucketedStep:
  """Calls steps of any bucket as if there were one that always fits.

  Attributes:
    program: bucket -> jitted step of `guard`, state donated. Without a `size`
      it is called with None and gives a `StepFunction`.
    size: chooses; None where the transport cannot overflow.
    report: of every step that is repeated.
  """

  program: Callable[[Bucket], Any]
  size: BucketSize | None
  report: Callable[[Retry], None]
  _pending: Sent | None = None

  def __call__(
    self, state: train_state.TrainState, batch: batches.LMBatch, step: int
  ) -> tuple[train_state.TrainState, Sent]:
    """Dispatches a step, donating the state, and makes sure of the one before.

    Raises:
      RuntimeError: a step needed more than the worst case.
    """
    sent = Sent(step=step, batch=batch)
    if self.size is None:
      state, sent.metrics = self.program(None)(state, batch)
      return state, sent
    before, self._pending = self._pending, sent
    is_due = jnp.bool_(True) if before is None else before.is_done
    state = self._send(state, sent, self.size.now, is_due)
    if before is not None:
      state, fitted = self._made_sure(state, before)
      if not fitted:
        # Sent while it was not due, it has changed nothing.
        state = self._send(state, sent, sent.bucket, before.is_done)
    return state, sent

  def settle(self, state: train_state.TrainState) -> train_state.TrainState:
    """Waits for the last step; afterwards it is part of the state."""
    if self._pending is not None:
      state, _ = self._made_sure(state, self._pending)
      self._pending = None
    return state

  def _send(self, state, sent: Sent, bucket: Bucket, is_due):
    sent.bucket = bucket
    state, sent.metrics, sent.is_done = self.program(bucket)(
      state, sent.batch, is_due
    )
    return state

  def _made_sure(self, state, sent: Sent):
    """Repeats a step until it fits; returns whether it did at once."""
    assert self.size is not None
    fitted = True
    while not bool(sent.is_done):
      fitted = False
      needed, capacity = sent.rows_needed(), self.size.rows[sent.bucket]
      # Behind the first exchange that overflowed the numbers are those of a
      # forward pass gone wrong: too small a need is told again, each time of a
      # later exchange or with a larger bucket.
      bucket = self.size.that_holds(max(needed, capacity + 1))
      self.report(Retry(sent.step, needed, capacity, sent.bucket, bucket))
      state = self._send(state, sent, bucket, jnp.bool_(True))
    self.size.saw(sent.rows_needed())
    return state, fitted
