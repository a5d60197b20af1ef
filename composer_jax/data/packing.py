"""Plans how documents fill rows, and fills them. No jax.

A plan of an epoch depends on lengths alone, so that any row can be filled
without those before it, which makes resuming exact and cheap. `concatenate`
cuts documents at the ends of rows (pretraining; padding only at the end of the
epoch), `first_fit` keeps every document whole (transcripts).
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

# A rearranged piece shorter than this teaches nothing about the middle.
_MIN_FIM_PIECE = 32
# Rows that are open for further documents: more rows fill better but slower.
_NUM_OPEN = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPart:
  """Tokens `documents[document][start:stop]` in a row.

  With `is_fim` it is rearranged for fill-in-the-middle, which takes
  `fim_overhead` more tokens in the row.
  """

  document: int
  start: int
  stop: int
  is_fim: bool = False


Row = tuple[DocumentPart, ...]
# int32 tokens, and a bool mask of those that carry loss; None for all.
Learned = tuple[np.ndarray, np.ndarray | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FilledRow:
  """One row of a batch; axes and meanings as in `core.batches.LMBatch`."""

  tokens_T: np.ndarray
  segment_ids_T: np.ndarray
  positions_T: np.ndarray
  loss_weights_T: np.ndarray


def concatenate(
  lengths: Sequence[int],
  seq_len: int,
  *,
  rng: np.random.Generator,
  fim_rate: float = 0.0,
  fim_overhead: int = 0,
) -> list[Row]:
  """Lays documents end to end in random order and cuts at the ends of rows.

  Every token of every document appears exactly once. Only the last row may be
  short, apart from what `fim_overhead` reserves in vain.

  Args:
    rng: draws the order and which pieces are rearranged.
    fim_rate: share of pieces of at least 32 tokens that are rearranged.
    fim_overhead: tokens that rearranging adds to a piece.
  """
  rows: list[Row] = []
  row: list[DocumentPart] = []
  space = seq_len
  for document in rng.permutation(len(lengths)).tolist():
    start, length = 0, int(lengths[document])
    while start < length:
      room = space - fim_overhead
      is_fim = (
        fim_rate > 0
        and min(length - start, room) >= _MIN_FIM_PIECE
        and rng.random() < fim_rate
      )
      stop = min(length, start + (room if is_fim else space))
      row.append(
        DocumentPart(document=document, start=start, stop=stop, is_fim=is_fim)
      )
      space -= stop - start + (fim_overhead if is_fim else 0)
      start = stop
      if not space:
        rows.append(tuple(row))
        row, space = [], seq_len
  return [*rows, tuple(row)] if row else rows


def first_fit(
  lengths: Sequence[int], seq_len: int, *, rng: np.random.Generator
) -> list[Row]:
  """Puts each document into the first open row with room; refuses long ones."""
  longest = max(lengths, default=0)
  if longest > seq_len:
    raise ValueError(
      f'A document of {longest} tokens does not fit whole into a row of '
      f'seq_len ({seq_len}); raise seq_len or leave such documents out.'
    )
  done: list[Row] = []
  rows: list[list[DocumentPart]] = []
  spaces: list[int] = []
  for document in rng.permutation(len(lengths)).tolist():
    length = int(lengths[document])
    if not length:
      continue
    index = next((i for i, s in enumerate(spaces) if s >= length), None)
    if index is None:
      if len(rows) == _NUM_OPEN:
        fullest = spaces.index(min(spaces))
        done.append(tuple(rows.pop(fullest)))
        spaces.pop(fullest)
      index = len(rows)
      rows.append([])
      spaces.append(seq_len)
    rows[index].append(DocumentPart(document=document, start=0, stop=length))
    spaces[index] -= length
  return done + [tuple(row) for row in rows]


def fill(
  row: Row, seq_len: int, get: Callable[[DocumentPart], Learned]
) -> FilledRow:
  """Writes the parts of a row one after another, each its own segment.

  The first token of a part has no loss, since nothing before it predicts it. A
  row without parts is all padding.

  `get` returns the tokens and the loss mask of a part.
  """
  filled = FilledRow(
    tokens_T=np.zeros(seq_len, np.int32),
    segment_ids_T=np.zeros(seq_len, np.int32),
    positions_T=np.zeros(seq_len, np.int32),
    loss_weights_T=np.zeros(seq_len, np.float32),
  )
  start = 0
  for segment, piece in enumerate(row, 1):
    tokens, mask = get(piece)
    stop = start + len(tokens)
    filled.tokens_T[start:stop] = tokens
    filled.segment_ids_T[start:stop] = segment
    filled.positions_T[start:stop] = np.arange(len(tokens))
    filled.loss_weights_T[start + 1 : stop] = 1 if mask is None else mask[1:]
    start = stop
  return filled
