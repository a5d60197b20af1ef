"""Bytes and time of a delta bundle beside XOR + zstd-3 of the same weights.

  python -m benchmarks.delta_bundle [--quick]

The weights are synthetic: f32 masters N(0, 0.02), moved by AdamW as its
steady state moves them (momentum over noisy gradients), cast to bfloat16. The
limit of each size is the empirical entropy of (changed?, step) given nothing
but the marginal frequencies: what any coder without the base's exponents as
context could reach. Bundle bytes include the manifest and its hashes, the
peer's are of the blobs alone. Times are of the processor; waiting for the disk
is not in them. Figures are medians.
"""

import argparse
import tempfile
import time

import ml_dtypes
import numpy as np
import zstandard

from benchmarks import interleaved
from composer_jax.delta import bundle, codec, publish, subscribe
from composer_jax.delta import store as store_lib

TENSORS = 20


class AdamW:
  """The update of AdamW on noise with a weak signal, without the model."""

  def __init__(self, masters_NW: np.ndarray, rate: float, seed: int):
    self.masters_NW = masters_NW.copy()
    self._rate, self._rng = rate, np.random.default_rng(seed)
    self._first = np.zeros_like(masters_NW)
    self._second = np.zeros_like(masters_NW)
    self._count = 0

  def step(self) -> None:
    shape = self.masters_NW.shape
    gradient = self._rng.standard_normal(shape, np.float32)
    self._count += 1
    self._first += 0.1 * (gradient - self._first)
    self._second += 0.05 * (gradient**2 - self._second)
    mean = self._first / (1 - 0.9**self._count)
    scale = np.sqrt(self._second / (1 - 0.95**self._count)) + 1e-8
    decay = 0.01 * self.masters_NW
    self.masters_NW -= np.float32(self._rate) * (mean / scale + decay)

  def policy(self) -> dict[str, np.ndarray]:
    return {
      f'layer_{n}': row.astype(ml_dtypes.bfloat16)
      for n, row in enumerate(self.masters_NW)
    }


def blocks(arrays):
  for name, array in arrays.items():
    ends = tuple((0, length) for length in array.shape)
    yield name, str(array.dtype), array.shape, ends, array


def xor_zstd(base, arrays) -> int:
  compressor = zstandard.ZstdCompressor(level=3)
  return sum(
    len(
      compressor.compress(
        (bundle.flat_bits(a) ^ bundle.flat_bits(base[name])).tobytes()
      )
    )
    for name, a in arrays.items()
  )


def entropy_bytes(base, arrays) -> float:
  """Entropy of the steps, unchanged ones included, times their number."""
  steps = np.concatenate(
    [
      codec._ordered(bundle.flat_bits(a))
      - codec._ordered(bundle.flat_bits(base[name]))
      for name, a in arrays.items()
    ]
  )
  counts = np.unique(steps, return_counts=True)[1]
  share = counts / counts.sum()
  return float(-(share * np.log2(share)).sum() * steps.size / 8)


def cpu_seconds(function):
  start = time.process_time()
  result = function()
  return result, time.process_time() - start


def follow(rate: float, warmup: int, steps: int, parameters: int, seed: int):
  """Publishes and follows an AdamW run; yields one record a version."""
  rng = np.random.default_rng(seed)
  shape = (TENSORS, parameters // TENSORS)
  optimizer = AdamW(
    0.02 * rng.standard_normal(shape, np.float32), rate, seed + 1
  )
  for _ in range(warmup):
    optimizer.step()
  with tempfile.TemporaryDirectory() as root:
    store = store_lib.Store(root)
    publisher = publish.Publisher(store, 'run', keyframe_every=10**6)
    subscriber = subscribe.Subscriber(store, 'run')
    base = None
    for version in range(steps + 1):
      arrays = optimizer.policy()
      info, write = cpu_seconds(
        lambda: publisher.publish(blocks(arrays), version)  # noqa: B023
      )
      update, read = cpu_seconds(subscriber.poll)
      assert update.target_id == info.target_id, subscriber.problem
      yield base, arrays, info, write, read
      base = arrays
      optimizer.step()


def measure(rate: float, goal: float, args) -> None:
  records = list(follow(rate, args.warmup, args.steps, args.parameters, 0))
  full = records[0][2].full_bytes
  deltas = records[1:]
  case = f'AdamW lr {rate:g}, {args.parameters} weights'
  interleaved.report(
    'delta_bundle',
    f'{case}: full bytes / bundle bytes, peer XOR+zstd-3',
    (
      [full / info.bytes for _, _, info, *_ in deltas],
      [full / xor_zstd(base, a) for base, a, *_ in deltas],
    ),
    limit=full / entropy_bytes(*deltas[-1][:2]),
    goal=f'ratio >= {goal}',
    met=lambda _, ratio: ratio >= goal,
    unit='x',
  )
  times = (
    ('publish', [write for *_, write, _ in records]),
    ('poll and apply', [read for *_, read in records]),
  )
  for name, seconds in times:
    for kind, part in (('keyframe', seconds[:1]), ('delta', seconds[1:])):
      interleaved.report(
        'delta_bundle',
        f'{case}: {name} a {kind}',
        ([1e3 * second for second in part], []),
        limit=None,
        goal='< 60 ms',
        met=lambda ours, _: ours < 60,
        unit='ms',
      )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true')
  args = parser.parse_args()
  interleaved.pin_to_one_core()
  args.warmup, args.steps = (5, 2) if args.quick else (40, 7)
  args.parameters = 400_000 if args.quick else 2_000_000
  # Ratios to XOR+zstd that gaps and steps reached in earlier measurements,
  # rounded down; large steps leave little to gain.
  for rate, goal in ((1e-6, 1.8), (1e-3, 1.1)):
    measure(rate, goal, args)


if __name__ == '__main__':
  main()
