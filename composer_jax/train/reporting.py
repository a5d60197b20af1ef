"""Writes metrics of steps, one step late, and stops on values not finite."""

import dataclasses
import math
import time
from typing import Any

import jax
import numpy as np

from composer_jax.models import mtp
from composer_jax.optim.muon import plan as muon_plan
from composer_jax.telemetry import mfu, progress
from composer_jax.telemetry import writer as writers
from composer_jax.train import lm_loss
from composer_jax.train import placement as train_placement
from composer_jax.train import step as train_step


class Speed:
  """Tokens per second and MFU since the last reading.

  The clock starts with the first finished step, so that compilation does not
  count; evaluation and checkpoints do.
  """

  def __init__(self, train_flops_per_token: float):
    self._flops = train_flops_per_token
    device = jax.devices()[0]
    is_cpu = device.platform == 'cpu'
    self._peak = (
      mfu.measure_peak() if is_cpu else mfu.peak_flops(device.device_kind)
    )
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
    """Returns tokens_per_s, and mfu if known; {} before the second step."""
    if self._since is None or not self._tokens:
      return {}
    now = time.perf_counter()
    rate = self._tokens / (now - self._since)
    self._since, self._tokens = now, 0
    if self._peak is None:
      return {'tokens_per_s': rate}
    share = self._flops * rate / (self._num_devices * self._peak)
    return {'tokens_per_s': rate, 'mfu': share}


@dataclasses.dataclass(eq=False)
class Reporter:
  """Reports each step after the next one is dispatched.

  Reading metrics waits for the device, which by then has its next step.
  """

  stage: str
  _: dataclasses.KW_ONLY
  writer: writers.Writer
  bar: progress.Progress
  speed: Speed
  learning_rates: np.ndarray
  log_every: int
  expert_shards: int = 1
  _pending: tuple[int, train_step.StepMetrics] | None = None
  _last_finite: float | None = None

  def push(self, step: int, metrics: train_step.StepMetrics) -> None:
    """Takes a dispatched step; reports the one before, which must be finite."""
    self.flush()
    self._pending = step, metrics

  def flush(self) -> None:
    """Reports the pending step; waits for the device."""
    pending, self._pending = self._pending, None
    if pending is not None:
      self._report(*pending)

  def heldout(self, step: int, loss: float, **others: Any) -> None:
    """Writes the held-out loss after `step` steps, and metrics beside it."""
    self.writer.write(self.stage, step, heldout_loss=loss, **others)
    self.bar.message(f'step {step}: held-out loss {loss:.4f}')

  def _report(self, step: int, sent: train_step.StepMetrics) -> None:
    metrics: Any = jax.device_get(sent)
    loss, update = metrics.loss, metrics.update
    values = {
      'loss': float(loss.loss),
      'aux_loss': float(loss.aux_loss),
      'z_loss': float(loss.z_loss),
      'grad_norm': float(update.grad_norm),
      'update_norm': float(update.update_norm),
    }
    if metrics.heads is not None:
      values['mtp_grad_norm'] = float(metrics.heads.grad_norm)
    self._check_finite(step, values, loss)
    self.speed.add(int(loss.num_tokens))
    self.bar.update(step, loss=values['loss'])
    if step % self.log_every:
      return
    attention = {}
    if loss.max_logits_LN is not None:
      attention = {
        'max_logit': float(loss.max_logits_LN.max()),
        'max_logit_layers': loss.max_logits_LN.max(1).tolist(),
      }
    self.writer.write(
      self.stage,
      step,
      **values,
      lr=float(self.learning_rates[step - 1]),
      expert_load_max=train_step.expert_load_max(loss.load_ME),
      expert_load=loss.load_ME.tolist(),
      **self._experts(loss.load_ME, loss.rounds_M),
      **attention,
      **(mtp.metrics(loss.heads) if loss.heads is not None else {}),
      **self.speed.read(),
    )

  def _experts(
    self, load_ME: np.ndarray, rounds_M: np.ndarray | None
  ) -> dict[str, Any]:
    """Returns metrics of the experts' shards."""
    if self.expert_shards == 1:
      return {}
    assert rounds_M is not None
    load_MP = load_ME.reshape(len(load_ME), self.expert_shards, -1).sum(-1)
    return {
      'shard_load_max': train_step.expert_load_max(load_MP),
      'exchange_rounds': int(rounds_M.max()),
    }

  def _check_finite(
    self, step: int, values: dict[str, float], loss: lm_loss.LossStats
  ) -> None:
    if all(map(math.isfinite, values.values())):
      self._last_finite = values['loss']
      return
    text = ', '.join(f'{name} {value:g}' for name, value in values.items())
    raise FloatingPointError(
      f'Stage {self.stage!r} stopped at step {step}: {text}, loss weights '
      f'sum to {float(loss.loss_weight):g} over {int(loss.num_tokens)} tokens, '
      f'learning rate {self.learning_rates[step - 1]:g}, last finite loss '
      f'{self._last_finite}. No checkpoint of this step was written. Lower '
      'the learning rate or inspect the batch.'
    )


def placed(placement: train_placement.Placement) -> dict[str, str]:
  axes = ' x '.join(f'{k}={n}' for k, n in placement.mesh.shape.items())
  if placement.plan is None or placement.expert_shards == 1:
    return {'mesh': axes}
  return {'mesh': axes, 'transport': placement.plan.transport}


def muon_metrics(plan: muon_plan.MuonPlan | None) -> dict[str, float | int]:
  """Returns totals for one device, but matrices of all; {} without a plan."""
  if plan is None:
    return {}
  matrices = sum(
    group.count * plan.devices // (group.num_shards * group.num_replicas)
    for group in plan.groups
  )
  return {
    'muon_matrices': matrices,
    'muon_groups': len(plan.groups),
    'muon_flops': plan.flops,
    'muon_flops_ideal': plan.ideal_flops,
    'muon_bytes': plan.wire_bytes,
  }
