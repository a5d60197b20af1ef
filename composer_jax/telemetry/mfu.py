"""Model FLOPs utilisation: useful arithmetic over what the device could do.

The numerator counts the model's own multiplications (`models.flops`), never
what XLA executes, so recomputation and padding lower it. Peaks are dense, per
device, without sparsity; the CPU's is an estimate (`measure_peak`).
"""

import time

import numpy as np

# Dense FLOP/s per `jax.Device` by `device_kind`, lower case, bfloat16.
# NVIDIA: data sheets (H100, H200 and B200 SXM). TPU: cloud.google.com/tpu/docs
# v2 to v3 list two devices a chip, whose peak is halved here.
PEAKS = {
  'nvidia a100': 312e12,
  'nvidia h100': 989e12,
  'nvidia h200': 989e12,
  'nvidia b200': 2250e12,
  'nvidia l4': 121e12,
  'tesla t4': 65e12,
  'tpu v2': 22.5e12,
  'tpu v3': 61.5e12,
  'tpu v4': 275e12,
  'tpu v5 lite': 197e12,
  'tpu v5e': 197e12,
  'tpu v5p': 459e12,
  'tpu v5': 459e12,
  'tpu v6 lite': 918e12,
  'tpu v6e': 918e12,
  'tpu7x': 1153.5e12,
}


def peak_flops(device_kind: str) -> float | None:
  """Returns the bfloat16 peak of a device in FLOP/s, None when unknown.

  Args:
    device_kind: as `jax.Device.device_kind`, e.g. 'NVIDIA H200'.
  """
  kind = device_kind.lower()
  # 'tpu v5 lite' also starts with 'tpu v5': the longest name decides.
  names = [name for name in PEAKS if kind.startswith(name)]
  return PEAKS[max(names, key=len)] if names else None


def measure_peak(size: int = 768, seconds: float = 0.2) -> float:
  """Measures float32 FLOP/s of numpy's matrix product on this machine's CPU.

  A stand-in for the peak that no data sheet gives: it uses all the cores that
  BLAS does, and rises and falls with what else runs on them.
  """
  left = np.ones((size, size), np.float32)
  right = np.ones((size, size), np.float32)
  left @ right  # Starts BLAS's threads.
  best = np.inf
  deadline = time.perf_counter() + seconds
  while time.perf_counter() < deadline:
    start = time.perf_counter()
    left @ right
    best = min(best, time.perf_counter() - start)
  return 2.0 * size**3 / best


def mfu(
  flops_per_token: float,
  tokens_per_s: float,
  *,
  num_devices: int,
  peak: float,
) -> float:
  """Returns the share of the devices' peak spent on useful arithmetic.

  Args:
    flops_per_token: of the whole step, forward and backward.
    tokens_per_s: over all devices.
    num_devices: that share the work; emulated CPU devices are one device.
    peak: FLOP/s of one device.
  """
  if not (peak > 0 and num_devices > 0):
    raise ValueError(
      f'peak ({peak}) and num_devices ({num_devices}) must be positive.'
    )
  return flops_per_token * tokens_per_s / (num_devices * peak)
