"""Turns the metrics of steps into lines, one step late, and stops on NaN."""

import functools
import math
import time
from typing import Any, Protocol

import jax
import numpy as np

from composer_jax.kernels.grouped import schedule
from composer_jax.parallel import exchange
from composer_jax.telemetry import mfu, progress
from composer_jax.train import buckets
from composer_jax.train import placement as train_placement
from composer_jax.train import step as train_step


class MetricsWriter(Protocol):
  """What the loop needs of `telemetry.writer.Writer`."""

  def write(self, stage: str, step: int, **metrics: Any) -> None: ...

  def truncate(self, stage: str, step: int) -> None: ...


class Speed:
  """Tokens per second and MFU since the last reading.

  The clock starts with the first finished step, so that compilation does not
  count; evaluation and checkpoints do.
  """

  def __init__(self, train_flops_per_token: float):
    """Looks up the peak of the devices, or measures that of a CPU."""
    self._flops = train_flops_per_token
    device = jax.devices()[0]
    is_cpu = device.platform == 'cpu'
    kind = device.device_kind
    self._peak = mfu.measure_peak() if is_cpu else mfu.peak_flops(kind)
    # Emulated CPU devices share the cores of one machine.
    self._num_devices = jax.process_count() if is_cpu else jax.device_count()
    self._since: float | None = None
    self._tokens = 0

  def add(self, num_tokens: int) -> None:
    if self._since is None:
      self._since = time.perf_counter()
    else:
      self._tokens += num_tokens

  def read(self) -> dict[str, float]:
    """Returns tokens_per_s and mfu; empty before the second step.

    No mfu of a device whose peak is not known.
    """
    if self._since is None or not self._tokens:
      return {}
    now = time.perf_counter()
    rate = self._tokens / (now - self._since)
    self._since, self._tokens = now, 0
    if self._peak is None:
      return {'tokens_per_s': rate}
    share = mfu.mfu(
      self._flops, rate, num_devices=self._num_devices, peak=self._peak
    )
    return {'tokens_per_s': rate, 'mfu': share}


class Reporter:
  """Holds the metrics of the last dispatched step until the next is on its way.

  Reading them waits for the device; by then the device has its next step.
  """

  def __init__(
    self,
    stage: str,
    *,
    writer: MetricsWriter,
    bar: progress.Progress,
    speed: Speed,
    learning_rates: np.ndarray,
    log_every: int,
    expert_shards: int = 1,
    expert_rows: int | None = None,
  ):
    """Takes what it reports with.

    Args:
      stage: of the lines.
      writer: of metrics.
      bar: of progress.
      speed: clock.
      learning_rates: of each step.
      log_every: steps between lines.
      expert_shards: devices that share the experts out among them.
      expert_rows: that the experts' kernel has room for on one device, where
        it is known how many it computes of them.
    """
    self._stage = stage
    self._writer = writer
    self._bar = bar
    self._speed = speed
    self._learning_rates = learning_rates
    self._log_every = log_every
    self._expert_shards = expert_shards
    self._expert_rows = expert_rows
    self._pending: buckets.Sent | None = None
    self._last_finite: float | None = None

  def push(self, sent: buckets.Sent) -> None:
    """Takes a dispatched step and reports the one before.

    Raises:
      FloatingPointError: the step before was not finite.
    """
    before, self._pending = self._pending, sent
    if before is not None:
      self._report(before)

  def flush(self) -> None:
    """Reports the pending step, which is settled; waits for the device."""
    pending, self._pending = self._pending, None
    if pending is not None:
      self._report(pending)

  def retry(self, retry: buckets.Retry) -> None:
    """Tells of a step that is repeated, on a line of its own."""
    self._writer.write(
      self._stage,
      retry.step,
      retry=str(retry),
      retry_needed_rows=retry.needed,
      retry_capacity=retry.capacity,
    )
    self._bar.message(str(retry))

  def heldout(self, step: int, loss: float, **others: Any) -> None:
    """Writes the held-out loss after `step` steps, and metrics beside it."""
    self._writer.write(self._stage, step, heldout_loss=loss, **others)
    self._bar.message(f'step {step}: held-out loss {loss:.4f}')

  def _report(self, sent: buckets.Sent) -> None:
    step, metrics = sent.step, jax.device_get(sent.metrics)
    self._check_finite(step, metrics)
    self._speed.add(int(metrics.loss.num_tokens))
    self._bar.update(step, loss=float(metrics.loss.loss))
    if step % self._log_every:
      return
    load_ME = metrics.loss.load_ME
    self._writer.write(
      self._stage,
      step,
      loss=float(metrics.loss.loss),
      aux_loss=float(metrics.loss.aux_loss),
      z_loss=float(metrics.loss.z_loss),
      grad_norm=float(metrics.update.grad_norm),
      update_norm=float(metrics.update.update_norm),
      lr=float(self._learning_rates[step - 1]),
      expert_load_max=train_step.expert_load_max(load_ME),
      expert_load=load_ME.tolist(),
      **self._experts(load_ME, metrics.loss.exchanged),
      **_attention(metrics.loss.max_logits_LN),
      **self._speed.read(),
    )

  def _experts(
    self, load_ME: np.ndarray, stats: exchange.ExchangeStats | None
  ) -> dict[str, Any]:
    """Returns what shards of experts had to do, and what their kernel did."""
    found = {}
    num_rows = self._expert_rows
    if self._expert_shards > 1:
      found = _shards(load_ME, self._expert_shards) | _received(stats)
      num_rows = num_rows and found['received_rows']
    if num_rows:
      load_E = load_ME.reshape(-1, load_ME.shape[1] // self._expert_shards)
      executed = _executed_rows(load_E, num_rows)
      found['executed_share'] = float(executed.sum() / max(load_ME.sum(), 1))
    return found

  def _check_finite(self, step: int, metrics: train_step.StepMetrics) -> None:
    values = {
      'loss': float(metrics.loss.loss),
      'aux_loss': float(metrics.loss.aux_loss),
      'z_loss': float(metrics.loss.z_loss),
      'grad_norm': float(metrics.update.grad_norm),
      'update_norm': float(metrics.update.update_norm),
    }
    if all(math.isfinite(v) for v in values.values()):
      self._last_finite = values['loss']
      return
    text = ', '.join(f'{name} {value:g}' for name, value in values.items())
    raise FloatingPointError(
      f'Stage {self._stage!r} stopped at step {step}: {text}, loss weights '
      f'sum to {float(metrics.loss.loss_weight):g} over '
      f'{int(metrics.loss.num_tokens)} tokens, learning rate '
      f'{self._learning_rates[step - 1]:g}, last finite loss '
      f'{self._last_finite}. No checkpoint of this step was written. Lower '
      'the learning rate or inspect the batch.'
    )


def placed(placement: train_placement.Placement) -> dict[str, str]:
  """Returns what a stage says once of its devices."""
  axes = ' x '.join(f'{k}={n}' for k, n in placement.mesh.shape.items())
  found = {'mesh': axes}
  if placement.expert_shards > 1:
    found['transport'] = placement.transport
  return found


@functools.partial(jax.jit, static_argnums=1)
def _executed_rows(load_PE, num_rows):
  """Returns the rows that each shard of each layer multiplies."""
  count = functools.partial(schedule.executed_rows, num_rows=num_rows)
  return jax.vmap(count)(load_PE)


def _shards(load_ME: np.ndarray, expert_shards: int) -> dict[str, float]:
  """Returns the busiest expert shard's rows over the mean, worst layer."""
  load_MP = load_ME.reshape(len(load_ME), expert_shards, -1).sum(-1)
  return {'shard_load_max': train_step.expert_load_max(load_MP)}


def _received(stats: exchange.ExchangeStats | None) -> dict[str, int]:
  """Returns the largest need of an exchange, and the room it had."""
  assert stats is not None
  layer = int(np.argmax(stats.needed_rows))
  return {
    'needed_rows': int(stats.needed_rows[layer]),
    'received_rows': int(stats.capacity[layer]),
  }


def _attention(max_logits_LN: jax.Array | None) -> dict[str, Any]:
  """Returns metrics of the largest logits; {} where nobody asked for them."""
  if max_logits_LN is None:
    return {}
  return {
    'max_logit': float(max_logits_LN.max()),
    'max_logit_layers': max_logits_LN.max(1).tolist(),
  }
