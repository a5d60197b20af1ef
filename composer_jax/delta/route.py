"""Plans the way from what is held to a version that costs fewest bytes.

Versions are towns and bundles are roads: a delta leads from its base, a
keyframe from anywhere. A delta coded with history can be walked only by who
came along all deltas since that history began, so a town is entered in as many
states as there are histories.
"""

import heapq
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from composer_jax.delta import manifest as manifests


class Start(NamedTuple):
  """Weights that a way may begin at.

  Attributes:
    version: of the weights.
    target_id: of the weights.
    history_since: when their history context began, None without one.
  """

  version: int
  target_id: str
  history_since: int | None = None


class Way(NamedTuple):
  """The bundles to apply, in order.

  Attributes:
    bytes: what they cost together, manifests included.
    start: which of the starts the first one needs, None for a keyframe.
    edges: the bundles; none where a start has the weights already.
  """

  bytes: int
  start: int | None
  edges: tuple[manifests.Edge, ...]


def cheapest(
  edges: Iterable[manifests.Edge],
  version: int,
  starts: Sequence[Start] = (),
  banned: Collection[str] = (),
) -> Way | None:
  """Returns the cheapest way to a version; of equal ones the shortest.

  Args:
    edges: bundles of the run.
    version: to reach.
    starts: what is held; what a rewind made void is not started from.
    banned: manifests that turned out to be unusable.

  Returns:
    None if there is no way.
  """
  edges = [edge for edge in edges if edge.manifest not in banned]
  targets = {edge.version: edge.target for edge in edges}
  leaving: dict[int, list[manifests.Edge]] = {}
  # (bytes, edges, order of entry, version, history since, start, path); the
  # path is linked backwards so that a step costs the same however long it is.
  order = itertools.count()
  queue: list[tuple] = []
  for number, start in enumerate(starts):
    short = start.target_id[:16]
    if targets.get(start.version, short) == short:
      state = start.version, start.history_since
      queue.append((0, 0, next(order), *state, number, None))
    for other, target in targets.items():
      if target == short and other != start.version:
        queue.append((0, 0, next(order), other, None, number, None))
  for edge in edges:
    if edge.base_version is None:
      path = edge, None
      queue.append((edge.bytes, 1, next(order), edge.version, None, None, path))
    else:
      leaving.setdefault(edge.base_version, []).append(edge)
  heapq.heapify(queue)
  seen = set()
  while queue:
    cost, hops, _, town, since, start, path = heapq.heappop(queue)
    if town == version:
      return Way(cost, start, _unlink(path))
    if (town, since) in seen:
      continue
    seen.add((town, since))
    for edge in leaving.get(town, ()):
      if edge.history in (None, town, since):
        entry = edge.version, edge.history, start, (edge, path)
        heapq.heappush(
          queue, (cost + edge.bytes, hops + 1, next(order), *entry)
        )
  return None


def _unlink(path) -> tuple[manifests.Edge, ...]:
  edges = []
  while path is not None:
    edge, path = path
    edges.append(edge)
  return tuple(reversed(edges))
