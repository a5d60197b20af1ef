"""The bundles that a version gets besides its delta: skips and keyframes.

They are written when the version is out, and listed by a second move of the
pointer. What the store has no room for is left out, since the version is
committed all the same: a skip for good, a keyframe until the next version.
"""

import contextlib
import logging
from collections.abc import Iterator

from composer_jax.delta import (
  manifest,
  publish_crew,
  publish_index,
  publish_run,
)

_log = logging.getLogger(__name__)


def add(
  run: publish_run.Run,
  crew: publish_crew.Crew,
  *,
  starts: dict[int, str],
  is_due: bool,
  keep: int,
) -> dict[str, int]:
  """Writes what is due of the head.

  Args:
    run: whose head it is.
    crew: that encodes.
    starts: version and identity of each that a skip starts from.
    is_due: whether there is to be a keyframe.
    keep: versions that stay listed whole.

  Returns:
    Bytes that were added, by kind.
  """
  assert run.head is not None
  version, added = run.head.version, []
  for base in starts.items():
    with forgiven(version):
      whole = crew.skip(*base)
      if whole.base_id == base[1]:
        added.append(run.write(whole, version, base))
  if is_due:
    with forgiven(version):
      whole = crew.keyframe()
      added.append(run.write(whole, version, None))
  if added:
    with forgiven(version):
      run.point_again(publish_index.pruned((*run.edges, *added), keep))
  sizes = {manifest.KEY: 0, manifest.DELTA: 0}
  for edge in added:
    sizes[edge.kind] += edge.bytes if edge in run.edges else 0
  return sizes


@contextlib.contextmanager
def forgiven(version: int) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    _log.warning(
      'version %d is out, but a skip or keyframe of it is not: %s',
      version,
      error,
    )
