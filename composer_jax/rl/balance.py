"""Divides packed rows among devices so that each has as many tokens.

A step waits for the device with the most tokens. Dealing out first-fit rows in
order gives the first devices the full ones. Here every device gets the longest
trajectory that is left, while it has the fewest tokens (LPT, Graham 1969), and
then single trajectories change places while that lowers the most. No row is
overfilled, and there are no more microbatches than first-fit needs. A device
counts once in each microbatch; those that come out alike share a microbatch.

The fullest differs from another by at most its shortest trajectory, where that
one has room for it. So with some ten trajectories on a device the difference is
small; a row that holds a single one of more than the mean is a bound for any
division.
"""

from collections.abc import Iterator, Sequence

# Imbalance that is not worth a search.
_ENOUGH = 0.01

# Of trajectories, by row.
Rows = list[list[int]]


class _Shards:
  """Rows of groups of devices, with their tokens and what is free."""

  def __init__(self, sizes: Sequence[int], taken: Sequence[int], seq_len: int):
    """Begins without rows; `taken` is what each trajectory takes of a row."""
    self._sizes, self._taken, self._seq_len = sizes, taken, seq_len
    self.rows: list[Rows] = []

  def load(self, shard: int) -> int:
    return sum(self._sizes[i] for row in self.rows[shard] for i in row)

  def free(self, row: list[int]) -> int:
    return self._seq_len - sum(self._taken[i] for i in row)

  def fit(self, shard: int, i: int) -> list[int] | None:
    """Returns the fullest row of a shard with room for a trajectory."""
    rows = [r for r in self.rows[shard] if self.free(r) >= self._taken[i]]
    return min(rows, key=self.free, default=None)

  def fill(self, count: int, num_rows: int) -> bool:
    """Places all trajectories by LPT; false if rows have no room for one."""
    self.rows = [[[] for _ in range(num_rows)] for _ in range(count)]
    loads = [0] * count
    for i in sorted(range(len(self._sizes)), key=lambda i: -self._sizes[i]):
      for shard in sorted(range(count), key=loads.__getitem__):
        row = self.fit(shard, i)
        if row is not None:
          row.append(i)
          loads[shard] += self._sizes[i]
          break
      else:
        return False
    return True

  def deal(self, rows: Rows, count: int, num_rows: int) -> None:
    """Places whole rows by LPT."""
    tokens = [sum(self._sizes[i] for i in row) for row in rows]
    self.rows, loads = [[] for _ in range(count)], [0] * count
    for row in sorted(range(len(rows)), key=lambda row: -tokens[row]):
      open_shards = [s for s in range(count) if len(self.rows[s]) < num_rows]
      shard = min(open_shards, key=loads.__getitem__)
      self.rows[shard].append(list(rows[row]))
      loads[shard] += tokens[row]
    for shard in self.rows:
      shard += [[] for _ in range(num_rows - len(shard))]

  def even_out(self) -> float:
    """Changes places while that helps; returns the imbalance that is left."""
    loads = list(map(self.load, range(len(self.rows))))
    mean = sum(loads) / len(loads)
    while True:
      order = sorted(range(len(loads)), key=loads.__getitem__)
      if loads[order[-1]] <= (1 + _ENOUGH) * mean:
        break
      for shard in order[:-1]:
        moved = self._relieve(order[-1], shard, loads[order[-1]] - loads[shard])
        if moved:
          loads[order[-1]] -= moved
          loads[shard] += moved
          break
      else:
        break
    return max(loads) / mean - 1

  def _relieve(self, high: int, low: int, gap: int) -> int:
    """Moves about half a gap of tokens to another shard; returns how many."""
    changes = [c for c in self._changes(high, low) if c[0] < gap]
    if not changes:
      return 0
    moved, source, i, target, j = min(
      changes, key=lambda change: abs(2 * change[0] - gap)
    )
    source.remove(i)
    target.append(i)
    if j is not None:
      target.remove(j)
      source.append(j)
    return moved

  def _changes(
    self, high: int, low: int
  ) -> Iterator[tuple[int, list[int], int, list[int], int | None]]:
    """Yields (tokens, row, trajectory, other row, what comes back) that fit."""
    others = [(row, self.free(row), [*row, None]) for row in self.rows[low]]
    for source in self.rows[high]:
      for i in source:
        for target, free, back in others:
          for j in back:
            came = 0 if j is None else self._taken[j]
            moved = self._sizes[i] - (0 if j is None else self._sizes[j])
            # What comes back is shorter, and fits where the other was.
            if moved > 0 and self._taken[i] <= free + came:
              yield moved, source, i, target, j


def balanced(
  rows: Rows,
  sizes: Sequence[int],
  taken: Sequence[int],
  *,
  seq_len: int,
  rows_per_batch: int,
  shards: int,
) -> Rows:
  """Returns rows of whole microbatches, those of each shard one after another.

  Args:
    rows: a packing that fits, of trajectories by their numbers.
    sizes: tokens of each trajectory.
    taken: tokens of a row that each takes, a longer one no fewer.
    rows_per_batch: rows of a microbatch; every shard holds an equal part.
  """
  num_batches = -(-len(rows) // rows_per_batch)
  num_rows = rows_per_batch // shards
  divisions: list[tuple[float, list[Rows]]] = []
  for is_dealt in (False, True):
    state = _Shards(sizes, taken, seq_len)
    if is_dealt:
      state.deal(rows, num_batches * shards, num_rows)
    elif not state.fill(num_batches * shards, num_rows):
      continue
    divisions.append((state.even_out(), state.rows))
    if divisions[-1][0] <= _ENOUGH:
      break
  _, best = min(divisions, key=lambda division: division[0])
  # Shards that are alike share a microbatch, at whose end they wait.
  tokens = lambda shard: -sum(sizes[i] for row in shard for i in row)
  ordered = sorted(best, key=tokens)
  firsts = range(0, len(ordered), shards)
  parts = [ordered[first : first + shards] for first in firsts]
  alternate = [part[:: 1 - 2 * (m % 2)] for m, part in enumerate(parts)]
  return [row for part in alternate for shard in part for row in shard]
