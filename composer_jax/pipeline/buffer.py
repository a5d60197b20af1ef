"""Finished groups on disk, between rollout workers and the trainer.

One file per group, written whole or not at all, so that a reader never sees
half a group and a crash of either side loses nothing that was finished. Groups
are consumed in the order of their ids: step `v` trains on groups `v * P` to
`v * P + P - 1` and on nothing else. Together with `admitted` this bounds
staleness and makes "trained exactly once" a property of the step counter alone.

A file is an `.npz` with the SHA-256 of its bytes behind it, which readers of
zip archives ignore.
"""

import hashlib
import logging
import pathlib
import time
from collections.abc import Callable, Sequence

from composer_jax.core import files, group_bytes, records

_HASH_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)


def admitted(
  version: int, *, prompts: int, max_staleness: int, steps: int
) -> int:
  """How many groups may have been started when `version` is the newest policy.

  Group g is trained at version g // prompts, so starting it no earlier than
  version g // prompts - max_staleness bounds its staleness; this is the
  capacity rule of Fireworks (recipe of asynchronous RL) for in-order
  consumption.
  """
  return min(version + max_staleness + 1, steps) * prompts


class GroupBuffer:
  """Groups by id in a directory that workers and the trainer share."""

  def __init__(self, directory: pathlib.Path):
    self._directory = pathlib.Path(directory)
    self._directory.mkdir(parents=True, exist_ok=True)

  def path(self, group: int) -> pathlib.Path:
    return self._directory / f'{group:08d}.npz'

  def ids(self) -> list[int]:
    return sorted(int(p.stem) for p in self._directory.glob('[0-9]*.npz'))

  def put(self, group: records.Group) -> None:
    data = group_bytes.to_bytes(group)
    seal = hashlib.sha256(data).digest()
    files.write_atomic(self.path(group.group), data + seal)

  def _read(self, group: int) -> records.Group:
    """Raises ValueError after setting a damaged file aside."""
    path = self.path(group)
    content = path.read_bytes()
    data, seal = content[:-_HASH_BYTES], content[-_HASH_BYTES:]
    try:
      # Before parsing: what zip and npy make of a flipped bit is anything.
      if hashlib.sha256(data).digest() != seal:
        raise ValueError('its hash is wrong')
      found = group_bytes.from_bytes(data)
      if found.group != group:
        raise ValueError(f'it holds group {found.group}')
    except (ValueError, KeyError, TypeError) as error:
      # The last two: intact, but of a version of this code with other fields.
      aside = path.with_suffix('.damaged')
      path.replace(aside)
      raise ValueError(
        f'The finished group {path} is damaged ({error}). It was set aside as '
        f'{aside.name}'
      ) from error
    return found

  def get(self, group: int) -> records.Group:
    """Reads one group.

    Raises:
      ValueError: the file is damaged. It is set aside as `.damaged`, so that
        running the same command again samples the group anew.
    """
    try:
      return self._read(group)
    except ValueError as error:
      raise ValueError(
        f'{error}; run the same command again to sample it anew.'
      ) from error

  def wait(
    self,
    ids: Sequence[int],
    *,
    timeout_s: float,
    while_waiting: Callable[[], None],
  ) -> list[records.Group]:
    """Blocks until all of `ids` are there, and returns them in that order.

    Args:
      ids: groups to wait for.
      timeout_s: without any new group for so long, the wait is given up.
      while_waiting: called between looks; raises when no worker can come back.

    Raises:
      TimeoutError: names the groups that are missing.
    """
    missing = list(ids)
    last_arrival = time.monotonic()
    while True:
      arrived = [g for g in missing if self.path(g).exists()]
      if arrived:
        missing = [g for g in missing if g not in arrived]
        last_arrival = time.monotonic()
      if not missing:
        return [self.get(g) for g in ids]
      while_waiting()
      if time.monotonic() - last_arrival > timeout_s:
        raise TimeoutError(
          f'No group finished in {timeout_s:.0f} s while the trainer waits '
          f'for groups {missing}. The rollout worker lives but makes no '
          'progress; see rollout_worker.log in the workdir.'
        )
      time.sleep(0.005)

  def discard_newer(self, version: int) -> list[int]:
    """Drops groups that a policy newer than `version` had a part in.

    A trainer that resumes from `version` will publish other policies under the
    numbers after it; what the lost ones sampled must not be trained on. Damaged
    groups are set aside and count as dropped: both are sampled anew.
    """
    dropped = []
    for group in self.ids():
      try:
        found = self._read(group)
      except ValueError as error:
        _log.warning('%s and is sampled anew.', error)
        dropped.append(group)
        continue
      if max(found.versions) > version:
        self.path(group).unlink()
        dropped.append(group)
    return dropped

  def remove_below(self, group: int) -> None:
    """Deletes groups with smaller ids: a durable checkpoint holds them."""
    for found in self.ids():
      if found < group:
        self.path(found).unlink(missing_ok=True)
