"""Size and speed of the tape of routes beside plain uint16 under zstd.

  python -m benchmarks.route_codec [--quick]

Routes have Kimi K2's shape, 8 active of 384 experts in 60 layers, and are drawn
in two ways: uniformly, and by routers that prefer some experts (scores get an
offset of standard deviation 1 over the experts of a layer; a token takes the
best 8 of scores with Gumbel noise). The limit of the size is log2(E! / (E -
A)!), which no code beats on uniform routes. Skewed routes hold less; a full run
estimates it by the entropy of each slot's ids, which 4,000 tokens give half a
bit too low. Megabytes are those of plain uint16, 16 bytes a route. Both check
what they read: ours by BLAKE3 and its form, the peer by zstd's XXH64.
"""

import argparse
import math
from collections.abc import Callable

import numpy as np
import zstandard

from benchmarks import interleaved
from composer_jax.core.routes import codec

SCHEME = codec.RouteScheme(
  num_experts=384, num_active=8, layers=tuple(range(1, 61))
)


def draw(num_tokens: int, skew: float) -> np.ndarray:
  """Draws ids_TMA whose experts are the best by noisy scores, best first."""
  rng = np.random.default_rng(0)
  num_layers, num_experts = len(SCHEME.layers), SCHEME.num_experts
  share_ME = skew * rng.standard_normal((num_layers, num_experts), np.float32)
  ids_TMA = np.empty((num_tokens, num_layers, SCHEME.num_active), np.uint16)
  for t in range(num_tokens):
    scores_ME = share_ME + rng.gumbel(size=share_ME.shape)
    order_ME = np.argsort(-scores_ME, axis=-1)
    ids_TMA[t] = order_ME[:, : SCHEME.num_active]
  return ids_TMA


def entropy_bits(ids_TMA: np.ndarray) -> float:
  """Returns the entropy of ids by layer and slot, summed over the slots."""
  total = 0.0
  for ids_TA in ids_TMA.transpose(1, 0, 2):
    for ids_T in ids_TA.T:
      share = np.bincount(ids_T) / len(ids_T)
      share = share[share > 0]
      total -= float((share * np.log2(share)).sum())
  return total / ids_TMA.shape[1]


def measure(name: str, skew: float, num_tokens: int, rounds: int) -> None:
  ids_TMA = draw(num_tokens, skew)
  routes, megabytes = ids_TMA[..., 0].size, ids_TMA.nbytes / 1e6
  compressor = zstandard.ZstdCompressor(level=3, write_checksum=True)
  decompressor = zstandard.ZstdDecompressor()
  packed = codec.encode(ids_TMA, SCHEME)
  squeezed = compressor.compress(ids_TMA.tobytes())

  def timed(function: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
      function()
      return megabytes

    return run

  bound = math.log2(math.perm(*SCHEME.sizes))
  case = f'{name}, {num_tokens} tokens'
  interleaved.report(
    'route_codec',
    f'size of a token in a layer: {case}',
    ([8 * len(packed) / routes], [8 * len(squeezed) / routes]),
    against='uint16 and zstd level 3',
    limit=bound,
    goal=f'<= {1.05 * bound:.1f} bits',
    met=lambda ours, _: ours <= 1.05 * bound,
    unit='bits',
  )
  for what, ours, peer in (
    (
      'encode',
      lambda: codec.encode(ids_TMA, SCHEME),
      lambda: compressor.compress(ids_TMA.tobytes()),
    ),
    (
      'decode',
      lambda: codec.decode(packed),
      lambda: np.frombuffer(decompressor.decompress(squeezed), np.uint16),
    ),
  ):
    interleaved.report(
      'route_codec',
      f'{what}: {case}',
      interleaved.rates(timed(ours), timed(peer), rounds),
      against='uint16 and zstd level 3',
      limit=None,
      goal='>= 50 MB/s',
      met=lambda ours, _: ours >= 50,
      unit='MB/s',
    )
  if skew and num_tokens >= 1000:
    interleaved.report(
      'route_codec',
      f'entropy of the slots of a token in a layer: {case}',
      ([entropy_bits(ids_TMA)], []),
      limit=None,
      goal='none',
      met=lambda ours, _: True,
      unit='bits',
      note='a code that learns frequencies could come near it',
    )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true')
  args = parser.parse_args()
  interleaved.pin_to_one_core()
  num_tokens, rounds = (300, 3) if args.quick else (4000, 7)
  for name, skew in (('uniform', 0.0), ('skewed', 1.0)):
    measure(name, skew, num_tokens, rounds)


if __name__ == '__main__':
  main()
