"""Finished groups on disk, between rollout workers and the trainer.

One file per group, written whole or not at all: readers never see half a group,
and a crash of either side loses no finished group. Groups are consumed in the
order of their ids: step `v` trains on groups `v * P` to `v * P + P - 1` only.
Together with `admitted` this bounds staleness, and the step counter alone
ensures that each group is trained exactly once.

A file is an `.npz` followed by the SHA-256 of its bytes, which readers of zip
archives ignore.
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
  """Number of groups that may be started in all once `version` is published.

  Group g is trained at version g // prompts, so starting it no earlier than
  version g // prompts - max_staleness bounds its staleness: the capacity rule
  of Fireworks' recipe for asynchronous RL, for consumption in order.
  """
  return min(version + max_staleness + 1, steps) * prompts


class GroupBuffer:
  """Groups by id, in a directory that workers and the trainer share."""

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

  def seals(self, groups: Sequence[records.Group]) -> list[tuple[int, str]]:
    """Returns the number and hash of stored groups: a batch plan."""
    contents = ((g.group, self.path(g.group).read_bytes()) for g in groups)
    return [(group, data[-_HASH_BYTES:].hex()) for group, data in contents]

  def get(self, group: int, seal: str | None = None) -> records.Group:
    """Reads one group.

    Args:
      seal: hash that a batch plan has of it; None for any.

    Raises:
      ValueError: the file is damaged. It is renamed to `.damaged`, so that
        running the same command again samples the group anew.
    """
    path = self.path(group)
    content = path.read_bytes()
    data, own = content[:-_HASH_BYTES], content[-_HASH_BYTES:]
    try:
      # Before parsing: zip and npy may fail in any way on a flipped bit.
      if hashlib.sha256(data).digest() != own:
        raise ValueError('its hash is wrong')
      if seal not in (None, own.hex()):
        raise ValueError('it is not the one that process 0 planned')
      stored = group_bytes.from_bytes(data)
      if stored.group != group:
        raise ValueError(f'it holds group {stored.group}')
    except (ValueError, KeyError, TypeError) as error:
      # KeyError, TypeError: intact, but written by code with other fields.
      aside = path.with_suffix('.damaged')
      path.replace(aside)
      raise ValueError(
        f'The finished group {path} is damaged ({error}). It was set aside as '
        f'{aside.name}, and the same command samples it anew.'
      ) from error
    return stored

  def wait(
    self,
    ids: Sequence[int],
    *,
    timeout_s: float,
    while_waiting: Callable[[], None],
  ) -> list[records.Group]:
    """Blocks until all groups of `ids` are finished; returns them in order.

    Args:
      timeout_s: seconds without any new group after which to give up.
      while_waiting: callback between two polls; raises to end the wait.

    Raises:
      TimeoutError: groups are missing, which the message names.
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
    """Drops groups with tokens of a policy newer than `version`.

    A trainer that resumes from `version` publishes other policies under later
    numbers; it must not train on what the lost policies sampled. Damaged groups
    are moved aside and count as dropped. All dropped groups are sampled anew.
    """
    dropped = []
    for group in self.ids():
      try:
        stored = self.get(group)
      except ValueError as error:
        _log.warning('%s', error)
        dropped.append(group)
        continue
      if max(stored.versions) > version:
        self.path(group).unlink()
        dropped.append(group)
    return dropped

  def remove_below(self, group: int) -> None:
    """Deletes smaller ids, once a durable checkpoint has trained on them."""
    for stored in self.ids():
      if stored < group:
        self.path(stored).unlink(missing_ok=True)
