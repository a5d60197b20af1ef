"""Restores documents from their fill-in-the-middle form."""

import numpy as np

from composer_jax.text import fim


def restore(ids: np.ndarray, marks: fim.Marks = fim.OWN) -> np.ndarray:
  """Undoes `fim.transform`; the EOD that it may have added stays.

  In SPM order prefix and middle are restored joined, in one piece.
  """
  where = [
    np.flatnonzero(ids == mark)
    for mark in (marks.prefix, marks.suffix, marks.middle)
  ]
  if [len(w) for w in where] == [0, 0, 0]:
    return ids
  if [len(w) for w in where] != [1, 1, 1]:
    raise ValueError(
      'A rearranged document holds each fill-in-the-middle mark once.'
    )
  pre, suf, mid = (int(w[0]) for w in where)
  head, prefix = ids[:pre], ids[pre + 1 : suf]
  suffix, middle = ids[suf + 1 : mid], ids[mid + 1 :]
  return np.concatenate([head, prefix, middle[:-1], suffix, middle[-1:]])
