"""Tables of the coder, compiled for both of its directions."""

import numpy as np

from composer_jax.delta import codec_compile as compiler
from composer_jax.delta import codec_model as model

SCALE = model.SCALE
RAW_BITS = model.RAW_BITS
LEAN = model.LEAN
OCTAVE = model.OCTAVE
EVEN = model.EVEN


@compiler.part
def plain_bits(level):
  """`model.plain_bits`, compiled."""
  return min(RAW_BITS, max(0, (level - EVEN) // OCTAVE - 2))


@compiler.part
def table(counts, frequencies, first):
  """Fills in frequencies that sum to SCALE, none of them zero, and starts."""
  total = 0
  most = 0
  for s in range(counts.size):
    total += counts[s]
    if counts[s] > counts[most]:
      most = s
  spare = SCALE - counts.size
  rest = SCALE
  for s in range(counts.size):
    frequencies[s] = 1 + counts[s] * spare // total
    rest -= frequencies[s]
  frequencies[most] += rest
  start = 0
  for s in range(counts.size):
    first[s] = start
    start += frequencies[s]


@compiler.part
def leaning(guess, negative, changed):
  """A guess of near steps whose signs fall as they did one exponent below.

  Of `changed` steps there, `negative` were.
  """
  counts = np.empty(guess.size, np.int64)
  for s in range(0, guess.size, 2):
    pair = guess[s] + guess[s + 1]
    counts[s + 1] = pair * (negative + LEAN) // (changed + 2 * LEAN)
    counts[s] = pair - counts[s + 1]
  return counts
