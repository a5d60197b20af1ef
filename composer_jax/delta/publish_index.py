"""Which bundles of a run are listed, so that everyone finds a way to the head.

A listed bundle is an edge: from the version it needs to the one it makes, or
from nothing for a keyframe. What is not listed any more, `gc` deletes.

What stays listed, for a window of the last `keep` versions:
  the newest keyframe that is not inside the window, and every later one;
  every bundle that ends inside the window;
  before the window, of the bundles that start at that keyframe or later, those
  that no longer one spans.
So every version of the window can be reached from a keyframe and leads on to
the head, and the way from the keyframe is short. A receiver that holds an older
version starts over from the keyframe.
"""

from collections.abc import Iterable, Sequence

from composer_jax.delta import manifest


def pruned(
  edges: Iterable[manifest.Edge], keep: int
) -> tuple[manifest.Edge, ...]:
  """Returns the edges that the last `keep` versions and joiners need."""
  edges = list(edges)
  versions = sorted({edge.version for edge in edges})
  if not versions:
    return ()
  # The first version of the window.
  first = versions[max(len(versions) - keep, 0)]
  keys = [e.version for e in edges if e.kind == manifest.KEY]
  start = max((v for v in keys if v <= first), default=min(keys, default=0))
  kept = [e for e in edges if _start(e) >= start or e.version >= first]
  old = [e for e in kept if e.version < first and e.kind == manifest.DELTA]
  return tuple(
    e for e in kept if e not in old or not any(_spans(o, e) for o in old)
  )


def last_keyframe(edges: Iterable[manifest.Edge]) -> int | None:
  """Returns the newest version that has a keyframe."""
  found = (e.version for e in edges if e.kind == manifest.KEY)
  return max(found, default=None)


def up_to(
  edges: Iterable[manifest.Edge], version: int
) -> tuple[manifest.Edge, ...]:
  return tuple(e for e in edges if e.version <= version)


def head(edges: Sequence[manifest.Edge], version: int) -> manifest.Edge | None:
  """Returns the bundle of a version that a follower would take."""
  found = [e for e in edges if e.version == version]
  # The shortest delta; a keyframe starts nowhere.
  return max(found, key=lambda e: _base(e), default=None)


def _base(edge: manifest.Edge) -> int:
  return -1 if edge.base_version is None else edge.base_version


def _start(edge: manifest.Edge) -> int:
  # A keyframe is entered at its own version.
  return edge.version if edge.base_version is None else edge.base_version


def _spans(longer: manifest.Edge, edge: manifest.Edge) -> bool:
  ends = _base(longer), longer.version
  inner = _base(edge), edge.version
  return ends != inner and ends[0] <= inner[0] and inner[1] <= ends[1]
