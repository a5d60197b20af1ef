"""Plans the way from what is held to a version that costs fewest bytes.

A delta leads from its base to its version, a keyframe from anywhere: the way is
the shortest path by bytes.
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
  """

  version: int
  target_id: str


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
  # (bytes, edges, order of entry, version, start, path); the path is linked
  # backwards so that a step costs the same however long it is.
  order = itertools.count()
  queue: list[tuple] = []
  for number, start in enumerate(starts):
    short = start.target_id[:16]
    if targets.get(start.version, short) == short:
      queue.append((0, 0, next(order), start.version, number, None))
    for other, target in targets.items():
      if target == short and other != start.version:
        queue.append((0, 0, next(order), other, number, None))
  for edge in edges:
    if edge.base_version is None:
      path = edge, None
      queue.append((edge.bytes, 1, next(order), edge.version, None, path))
    else:
      leaving.setdefault(edge.base_version, []).append(edge)
  heapq.heapify(queue)
  seen = set()
  while queue:
    cost, hops, _, reached, start, path = heapq.heappop(queue)
    if reached == version:
      return Way(cost, start, _unlink(path))
    if reached in seen:
      continue
    seen.add(reached)
    for edge in leaving.get(reached, ()):
      entry = edge.version, start, (edge, path)
      heapq.heappush(queue, (cost + edge.bytes, hops + 1, next(order), *entry))
  return None


def _unlink(path) -> tuple[manifests.Edge, ...]:
  edges = []
  while path is not None:
    edge, path = path
    edges.append(edge)
  return tuple(reversed(edges))
