"""What the processes of a publisher do, each with its own boxes, when ordered.

Process 0 orders and does its share of it, too; where it is alone, nobody else
is told. The orders of one version: `key` where there is no base; `commit` when
the pointer has moved; `skip` and a keyframe where they are due; `end`.
"""

import dataclasses
from typing import Any

from composer_jax.delta import (
  manifest,
  publish_local,
  publish_parts,
  publish_run,
  publish_share,
)


class Crew:
  """Gives orders in process 0, and carries them out in all.

  Args:
    team: the processes.
    local: the boxes of this one.
    run: where the run stands.
  """

  def __init__(
    self,
    team: publish_parts.Team,
    local: publish_local.Local,
    run: publish_run.Run,
  ):
    self._team, self._local, self._run = team, local, run

  def gather(self, share: publish_share.Share) -> publish_share.Whole:
    """Returns this share and those of all others as one."""
    others = map(publish_share.Share.from_bytes, self._team.gather())
    return publish_share.merge([share, *others])

  def keyframe(self) -> publish_share.Whole:
    """Makes a bundle that stands alone of what is staged, else of the base."""
    return self._request({'do': 'key'})

  def skip(self, start: int, target_id: str) -> publish_share.Whole:
    """Makes a bundle that leads from an older version to the base.

    It has no `base_id` if a process does not know that version any more.
    """
    return self._request({'do': 'skip', 'start': start, 'from': target_id})

  def commit(self) -> None:
    """Makes what is staged, to which the pointer now leads, the base."""
    assert self._run.head is not None
    head = dataclasses.asdict(self._run.head)
    order = {'do': 'commit', 'head': head}
    # Before anyone can fail: the pointer has moved.
    self._do(order)
    self._team.order(order)

  def end(self, info: dict[str, Any]) -> None:
    self._team.order({'do': 'end', 'info': info})
    self._take_snapshots()

  def follow(self, share: publish_share.Share) -> dict[str, Any]:
    """Hands in a share and does what process 0 orders.

    Returns:
      The fields that its `end` was called with.
    """
    try:
      self._team.give(share.to_bytes())
      while True:
        order = self._team.next_order()
        if order['do'] == 'end':
          self._take_snapshots()
          return order['info']
        try:
          made = self._do(order)
        except OSError as error:
          # Process 0 knows whether this is the end of it.
          self._team.give_failure(error)
          continue
        if made is not None:
          self._team.give(made.to_bytes())
    except (ValueError, OSError):
      # The pointer may have moved, or not.
      self._run.is_unsure = True
      raise

  def _request(self, order: dict[str, Any]) -> publish_share.Whole:
    self._team.order(order)
    share = self._do(order)
    assert share is not None
    return self.gather(share)

  def _do(self, order: dict[str, Any]) -> publish_share.Share | None:
    """Carries out an order; returns what process 0 waits for."""
    match order['do']:
      case 'commit':
        self._run.head = manifest.Pointer(**order['head'])
        self._local.commit(self._run.head)
        return None
      case 'key':
        return self._local.encode_key()
      case 'skip':
        return self._local.encode_skip(order['start'], order['from'])
    raise AssertionError(order)

  def _take_snapshots(self) -> None:
    if self._run.head is not None:
      head = self._run.head
      self._local.take_snapshots(head.version, head.target_id)
