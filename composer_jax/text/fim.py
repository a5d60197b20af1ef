"""Fill-in-the-middle: documents rearranged so that a prefix model can infill.

Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the
Middle": cut a document in three at random, mark the parts and move the middle
to the end. Half of the documents are in PSM order, half in SPM order (their
section 2.2; the SPM form keeps prefix and middle together behind the middle
mark). Here the cuts fall between tokens, so no middle starts inside a token.
"""

import dataclasses
from typing import Any

import numpy as np

from composer_jax.text import tokenizer as tokenizers

# Most tokens added: three marks, and an EOD where the document has none.
OVERHEAD = 4
# Share of rearranged documents in the order suffix, prefix, middle.
_SPM_SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
  """Ids that frame a document and its parts."""

  bos: int
  eod: int
  prefix: int
  middle: int
  suffix: int


def marks_of(tokenizer: Any) -> Marks:
  """Returns the marks of a tokenizer, or of the class `Tokenizer`."""
  return Marks(
    bos=tokenizer.BOS,
    eod=tokenizer.EOD,
    prefix=tokenizer.FIM_PREFIX,
    middle=tokenizer.FIM_MIDDLE,
    suffix=tokenizer.FIM_SUFFIX,
  )


OWN = marks_of(tokenizers.Tokenizer)


def transform(
  ids: np.ndarray,
  rng: np.random.Generator,
  rate: float = 1.0,
  marks: Marks = OWN,
) -> np.ndarray:
  """Rearranges a document with probability `rate`.

  A leading BOS stays first; an EOD after the middle tells the model where to
  stop. No token is lost, and at most `OVERHEAD` are added.

  Args:
    ids: int32 tokens of a document or of a piece of one.
    rng: source of the choice and of the two cuts.

  Raises:
    ValueError: the document already holds marks.
  """
  if rng.random() >= rate:
    return ids
  three = (marks.prefix, marks.middle, marks.suffix)
  if np.isin(ids, three).any():
    raise ValueError(
      f'The document already holds fill-in-the-middle marks {three}: transform '
      'it once, or take them out.'
    )
  head, body = np.split(ids, [int(ids[:1].tolist() == [marks.bos])])
  if body[-1:].tolist() == [marks.eod]:
    body = body[:-1]
  first, second = np.sort(rng.integers(0, len(body) + 1, 2))
  prefix, middle, suffix = np.split(body, [first, second])
  pre, mid, suf = (np.array([mark], np.int32) for mark in three)
  end = np.array([marks.eod], np.int32)
  if rng.random() < _SPM_SHARE:
    parts = [head, pre, suf, suffix, mid, prefix, middle, end]
  else:
    parts = [head, pre, prefix, suf, suffix, mid, middle, end]
  return np.concatenate(parts)
