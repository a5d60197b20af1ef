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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import batches
from composer_jax.parallel import exchange
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step

# Rows of a receive buffer over the mean; None holds the worst case.
Bucket = float | None

# (state, batch, whether the step before fitted) -> (state, metrics, whether
# this one and all before it did).
GuardedFunction = Callable[
  [train_state.TrainState, batches.LMBatch, jax.Array],
  tuple[train_state.TrainState, train_step.StepMetrics, jax.Array],
]

# Steps that a smaller bucket must have sufficed for before it is taken.
_PATIENCE = 20


def fits(stats: exchange.ExchangeStats | None) -> jax.Array:
  """Returns whether every exchange had the rows that it needed."""
  if stats is None:
    return jnp.bool_(True)
  return (stats.needed_rows <= stats.capacity).all()


def guard(step: train_step.StepFunction) -> GuardedFunction:
  """Makes a step that changes nothing unless it and the one before it fitted.

  What an overflow leaves behind may be anything, NaN included: it is selected
  away, element by element, so that a donated state is still written in place.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retry:
  """A step that did not fit: `needed` rows against `capacity`."""

  step: int
  needed: int
  capacity: int
  bucket: Bucket
  next_bucket: Bucket

  def __str__(self) -> str:
    return (
      f'step {self.step}: {self.needed} rows did not fit {self.capacity} of '
      f'the {name(self.bucket)} bucket; repeated with {name(self.next_bucket)}'
    )


def name(bucket: Bucket) -> str:
  return 'worst-case' if bucket is None else f'{bucket:g}x'


@dataclasses.dataclass(kw_only=True)
class Sent:
  """A step on its way to the devices, sent again where it did not fit.

  Attributes:
    step: its number.
    batch: kept until the step is known to have fitted.
    bucket: of its buffers.
    metrics: of the last time it was sent; final once the next step, or
      `BucketedStep.settle`, has returned.
    is_done: on the device; None where nothing can overflow.
  """

  step: int
  batch: batches.LMBatch
  bucket: Bucket
  metrics: train_step.StepMetrics
  is_done: jax.Array | None


def rows_needed(metrics: train_step.StepMetrics) -> int:
  """Returns the largest need of a step's exchanges; waits for the step."""
  assert metrics.loss.exchanged is not None
  return int(np.max(metrics.loss.exchanged.needed_rows))


class BucketSize:
  """Which bucket the next step takes, by what recent steps needed.

  Up at once, down only after `_PATIENCE` steps that the smaller one would have
  held: each change may compile, and a step that overflows costs two.
  """

  def __init__(
    self, buckets: Iterable[float], rows_of: Callable[[Bucket], int]
  ):
    """Starts with the largest bucket below the worst case.

    Args:
      buckets: rising.
      rows_of: the rows that a bucket holds.
    """
    worst = rows_of(None)
    sizes = [(rows_of(b), b) for b in buckets]
    self._sizes: list[tuple[int, Bucket]] = [
      *((rows, b) for rows, b in sizes if rows < worst),
      (worst, None),
    ]
    self._now: Bucket = self._sizes[max(len(self._sizes) - 2, 0)][1]
    self._recent: collections.deque[int] = collections.deque(maxlen=_PATIENCE)

  def rows(self, bucket: Bucket) -> int:
    return next(rows for rows, b in self._sizes if b == bucket)

  def that_holds(self, needed: int) -> Bucket:
    """Returns the smallest bucket of at least so many rows."""
    for rows, bucket in self._sizes:
      if rows >= needed:
        return bucket
    raise RuntimeError(
      f'An exchange needs {needed} rows and the worst case was computed to be '
      f'{self._sizes[-1][0]}: a bug of the transport, of which no step was '
      "applied. --config.parallel.buckets='()' does without buckets."
    )

  def next(self) -> Bucket:
    return self._now

  def get_state(self) -> dict[str, Any]:
    """Returns what `set_state` needs, as JSON.

    The order of a sum follows the room there is: only in the same buckets does
    a run that goes on from a checkpoint repeat its losses bit for bit.
    """
    return {
      'rows': [rows for rows, _ in self._sizes],
      'now': self.rows(self._now),
      'recent': list(self._recent),
    }

  def set_state(self, state: dict[str, Any] | None) -> None:
    """Goes on from there; begins anew where buckets are of other sizes."""
    if state is None or state['rows'] != [rows for rows, _ in self._sizes]:
      return
    self._now = self.that_holds(state['now'])
    self._recent.extend(state['recent'])

  def saw(self, needed: int) -> None:
    """Takes in what a step needed."""
    self._recent.append(needed)
    wanted = self.that_holds(max(self._recent))
    grows = self.rows(wanted) > self.rows(self._now)
    if grows or len(self._recent) == _PATIENCE:
      self._now = wanted


class BucketedStep:
  """Calls steps of any bucket as if there were one that always fits."""

  def __init__(
    self,
    program: Callable[[Bucket], Any],
    size: BucketSize | None,
    report: Callable[[Retry], None],
  ):
    """Compiles nothing yet.

    Args:
      program: bucket -> jitted `GuardedFunction`, state donated. Without a
        `size` it is called with None and gives a `StepFunction`.
      size: chooses; None where the transport cannot overflow.
      report: of every step that is repeated.
    """
    self._program = program
    self._size = size
    self._report = report
    self._pending: Sent | None = None

  def __call__(
    self,
    state: train_state.TrainState,
    batch: batches.LMBatch,
    step: int,
    needed: int | None = None,
  ) -> tuple[train_state.TrainState, Sent]:
    """Dispatches a step, and makes sure of the one before it.

    Args:
      state: donated.
      batch: on the devices.
      step: its number.
      needed: rows, where the routes are known beforehand.

    Raises:
      RuntimeError: a step needed more than the worst case.
    """
    if self._size is None:
      state, metrics = self._program(None)(state, batch)
      return state, Sent(
        step=step, batch=batch, bucket=None, metrics=metrics, is_done=None
      )
    size, before = self._size, self._pending
    bucket = size.next() if needed is None else size.that_holds(needed)
    is_due = jnp.bool_(True) if before is None else before.is_done
    state, sent = self._send(state, step, batch, bucket, is_due)
    if before is not None:
      state, fitted = self._made_sure(state, before)
      if not fitted:
        # Sent while it was not due, it has changed nothing.
        state, again = self._send(state, step, batch, bucket, before.is_done)
        sent.metrics, sent.is_done = again.metrics, again.is_done
    self._pending = sent
    return state, sent

  def settle(self, state: train_state.TrainState) -> train_state.TrainState:
    """Waits for the last step; afterwards it is part of the state."""
    if self._pending is not None:
      state, _ = self._made_sure(state, self._pending)
      self._pending = None
    return state

  def _send(self, state, step, batch, bucket, is_due):
    state, metrics, is_done = self._program(bucket)(state, batch, is_due)
    return state, Sent(
      step=step, batch=batch, bucket=bucket, metrics=metrics, is_done=is_done
    )

  def _made_sure(self, state, sent):
    """Repeats a step until it fits; returns whether it did at once."""
    assert self._size is not None
    fitted = True
    while not bool(sent.is_done):
      fitted = False
      needed = rows_needed(sent.metrics)
      # Behind the first exchange that overflowed the numbers are those of a
      # forward pass gone wrong: too small a need is told again, each time of a
      # later exchange or with a larger bucket.
      bucket = self._size.that_holds(
        max(needed, self._size.rows(sent.bucket) + 1)
      )
      self._report(
        Retry(
          step=sent.step,
          needed=needed,
          capacity=self._size.rows(sent.bucket),
          bucket=sent.bucket,
          next_bucket=bucket,
        )
      )
      state, again = self._send(
        state, sent.step, sent.batch, bucket, jnp.bool_(True)
      )
      sent.bucket, sent.metrics = again.bucket, again.metrics
      sent.is_done = again.is_done
    self._size.saw(rows_needed(sent.metrics))
    return state, fitted
