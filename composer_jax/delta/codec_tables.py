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
def leaning(guess, lean, context):
  """A guess of near steps whose signs fall as they did one exponent below.

  Of `lean[context, 1]` steps there, `lean[context, 0]` were negative. With a
  history, signs are relative to the last change, and most steps of sparse
  classes go back.
  """
  counts = np.empty(guess.size, np.int64)
  changed = lean[context, 1] + 2 * LEAN
  for s in range(0, guess.size, 2):
    pair = guess[s] + guess[s + 1]
    counts[s + 1] = pair * (lean[context, 0] + LEAN) // changed
    counts[s] = pair - counts[s + 1]
  return counts
