"""Model FLOPs utilisation: useful arithmetic over what the device could do.

The numerator counts the model's own multiplications (`models.flops`), never
what XLA executes, so recomputation and padding lower it. Attention counts
unmasked, as in PaLM's appendix B: every query meets all keys of its row, though
the mask hides half of them and other documents (MaxText halves it). Peaks are
those of dense products on one device; a CPU's is estimated (`measure_peak`).
"""

import functools
import os
import subprocess
import sys

from composer_jax.telemetry import machine

# Dense FLOP/s per `jax.Device` by `device_kind`, lower case, bfloat16.
# NVIDIA: data sheets. TPU: cloud.google.com/tpu/docs; v2 to v3 list two devices
# a chip, whose peak is halved here. The whole name decides: 'L4' is not 'L40S',
# an H100 on PCIe not one on SXM ('80GB HBM3'), a MIG slice not its device.
PEAKS = {
  'nvidia a100-sxm4-40gb': 312e12,
  'nvidia a100-sxm4-80gb': 312e12,
  'nvidia a100-pcie-40gb': 312e12,
  'nvidia a100 80gb pcie': 312e12,
  'nvidia h100 80gb hbm3': 989e12,
  'nvidia h100 pcie': 756e12,
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

# Prints the best FLOP/s of 0.1 seconds of CPU time.
_CORE_RATE = """
import time
import numpy as np
matrix, best = np.ones((512, 512), np.float32), 0.0
matrix @ matrix
began = time.process_time()
while time.process_time() - began < 0.1:
  start = time.process_time()
  matrix @ matrix
  spent = time.process_time() - start
  best = max(best, 2.0 * 512**3 / spent if spent else 0.0)
print(best)
"""

_ONE_THREAD = {
  'OPENBLAS_NUM_THREADS': '1',
  'MKL_NUM_THREADS': '1',
  'VECLIB_MAXIMUM_THREADS': '1',
}


def peak_flops(device_kind: str) -> float | None:
  """Returns the bfloat16 FLOP/s of a `jax.Device.device_kind`, if known."""
  return PEAKS.get(device_kind.lower())


@functools.cache
def measure_peak() -> float:
  """Estimates the float32 FLOP/s of the cores that this process may use.

  This is the rate of numpy's matrix product on one core, in CPU time, times the
  cores, so a busy machine gives the same as an idle one. Hyper-threads, which
  share arithmetic units, make it too large. The product runs in a process of
  its own: BLAS reads its number of threads when it is loaded, and several
  threads burn CPU time waiting for one another.
  """
  printed = subprocess.run(
    [sys.executable, '-c', _CORE_RATE],
    env=os.environ | _ONE_THREAD,
    capture_output=True,
    text=True,
    check=True,
  )
  return float(printed.stdout) * machine.usable_cores()
