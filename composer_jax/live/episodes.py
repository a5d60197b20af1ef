"""The folder of recorded episodes: one folder a user, one in it an episode.

  secret, windows.json, trial.json
  users/USER/EPISODE/claim.json    domain, arm and trial
                     000.npz       an answer: tokens, log-probabilities, routes
                     events.jsonl  answers and counted events, without texts
  fates.jsonl                      numbers of events by fate; no content

Everything of a user is in one folder, so that withdrawing consent is to delete
it. Several servers may share the folder: each locks a user's folder while it
writes there, so that nothing of a user comes back after a withdrawal.
"""

import collections
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import shutil
import threading
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from composer_jax.core import files, group_bytes, records
from composer_jax.live import events, tokens
from composer_jax.telemetry import append, writer

_USERS, _CLAIM, _EVENTS = 'users', 'claim.json', 'events.jsonl'
_FATES, _WINDOWS = 'fates.jsonl', 'windows.json'
_WITHDRAWN = 'withdrawn.'
FORGED = 'forged'
TWO = 'two'  # the identity of no weights
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveEpisode:
  """An episode as it was recorded.

  Attributes:
    windows: context windows in order, merged where one extends another.
    policies: identity of the weights of each policy version in them; `TWO`
      where answers of one version came from different weights.
    events: answers and counted events, in the order in which they came.
  """

  claim: tokens.Claim
  windows: tuple[records.Trajectory, ...]
  policies: dict[int, str]
  events: tuple[events.Event, ...]


class Episodes:
  """Keeps and gives episodes; safe to call from threads and processes."""

  def __init__(
    self, folder: pathlib.Path, windows: events.WindowOptions | None = None
  ):
    """Opens a folder.

    Args:
      windows: windows of a new folder, or None for those that it has.

    Raises:
      ValueError: the folder has other windows, or none and none are given.
    """
    known = folder / _WINDOWS
    if known.exists():
      there = events.WindowOptions(**files.read_json(known))
      if windows not in (None, there):
        raise ValueError(
          f'{folder} was recorded with {there}, not {windows}: rewards of its '
          'episodes would not compare. Name another folder.'
        )
      windows = there
    elif windows is None:
      raise ValueError(
        f'{folder} holds no recorded episodes ({_WINDOWS} is missing); '
        './run.sh serve --record makes such a folder.'
      )
    self.folder, self.windows = folder, windows
    self.tokens = tokens.Tokens(folder)
    _put(known, _json(windows))
    self._lock = threading.Lock()
    self._delete_withdrawn()

  def open(self, claim: tokens.Claim) -> None:
    """Makes the folder of a new episode."""
    place = self._place(claim)
    while True:
      place.parent.mkdir(parents=True, exist_ok=True)
      with self._alone(claim.user) as is_there:
        if is_there:
          place.mkdir()
          _put(place / _CLAIM, _json(claim))
          return

  def keep(
    self,
    claim: tokens.Claim,
    window: records.Trajectory,
    policies: dict[int, str],
    *,
    seconds: float,
    now: float,
  ) -> bool:
    """Keeps an answer; false if consent was withdrawn or the episode is over.

    Args:
      window: whole context of the answer, and the answer.
      seconds: time that the answer took.
    """
    place = self._place(claim)
    with self._alone(claim.user):
      if not place.exists():
        return False
      known = _events(place)
      ripe = events.ripe_at(known, self.windows)
      if ripe is not None and now > ripe:
        return False
      number = sum(e.kind == events.ANSWERED for e in known)
      rollout = unjudged(claim.episode, (window,))
      group = records.Group(
        group=0, task_id=claim.episode, rollouts=(rollout,), policies=policies
      )
      _put(place / f'{number:03d}.npz', group_bytes.to_bytes(group))
      done = events.Event(
        id=f'{events.ANSWERED}:{number}',
        kind=events.ANSWERED,
        at=now,
        value=seconds,
      )
      # Last: an answer counts once it has its line.
      _append(place, done)
      return True

  def note(self, claim: tokens.Claim, event: events.Event) -> str:
    """Returns the fate of an event, and keeps it if it counts."""
    place, fate = self._place(claim), events.UNKNOWN
    with self._alone(claim.user):
      if place.exists():
        fate = events.fate_of(event, _events(place), self.windows)
        if fate == events.COUNTED:
          _append(place, event)
    self.count(fate, event.kind)
    return fate

  def withdraw(self, user: str) -> int:
    """Deletes all that is kept of a user; returns the number of episodes."""
    self._delete_withdrawn()
    place = self.folder / _USERS / user
    if not place.exists():
      return 0
    # First out of the way of readers, which see all of a user or nothing.
    gone = self.folder / f'{_WITHDRAWN}{os.urandom(8).hex()}'
    with self._alone(user) as is_there:
      if not is_there:
        return 0  # Another process was first.
      count = sum(path.is_dir() for path in place.iterdir())
      place.rename(gone)
    self._delete_withdrawn()
    self.count('withdrawn', 'episode', count)
    return count

  def _delete_withdrawn(self) -> None:
    """Deletes what a withdrawal that was killed had only moved away."""
    for path in self.folder.glob(f'{_WITHDRAWN}*'):
      while path.exists():
        with contextlib.suppress(FileNotFoundError):  # Another deletes it, too.
          shutil.rmtree(path)

  def expire(self, before: float) -> int:
    """Deletes episodes whose last answer is older; returns their number."""
    count = 0
    for claim in self.claims():
      last = events.answered_at(self._seen(claim))
      if last is not None and last < before:
        with self._alone(claim.user) as is_there:
          if is_there:
            shutil.rmtree(self._place(claim))
            count += 1
    if count:
      self.count('expired', 'episode', count)
    return count

  def claims(self, but: Collection[str] = ()) -> list[tokens.Claim]:
    """Returns the claims of all episodes, without those of these names."""
    found = []
    for path in (self.folder / _USERS).glob(f'*/*/{_CLAIM}'):
      if path.parent.name in but:
        continue
      with contextlib.suppress(FileNotFoundError):  # Withdrawn meanwhile.
        found.append(tokens.Claim(**files.read_json(path)))
    return sorted(found, key=lambda claim: claim.episode)

  def ripe(self, now: float, but: Collection[str] = ()) -> list[tokens.Claim]:
    """Returns answered episodes all of whose windows closed, oldest first.

    Those of the names `but` are left out, and not even read.
    """
    found = []
    for claim in self.claims(but):
      known = self._seen(claim)
      ripe = events.ripe_at(known, self.windows)
      if ripe is not None and now > ripe:
        found.append((ripe, claim.episode, claim))
    return [claim for _, _, claim in sorted(found, key=lambda row: row[:2])]

  def read(self, claim: tokens.Claim) -> LiveEpisode | None:
    """Returns an episode; None if consent was withdrawn."""
    place = self._place(claim)
    with self._alone(claim.user):
      if not place.exists():
        return None
      known = _events(place)
      answers = sum(e.kind == events.ANSWERED for e in known)
      groups = [
        group_bytes.from_bytes((place / f'{i:03d}.npz').read_bytes())
        for i in range(answers)
      ]
    policies: dict[int, str] = {}
    windows: list[records.Trajectory] = []
    for group in groups:
      for version, identity in (group.policies or {}).items():
        # The later one would pass for both.
        if policies.setdefault(version, identity) != identity:
          policies[version] = TWO
      (window,) = group.rollouts[0].trajectories
      whole = merged(windows[-1], window) if windows else None
      if whole is not None:
        windows.pop()
      windows.append(window if whole is None else whole)
    return LiveEpisode(
      claim=claim,
      windows=tuple(windows),
      policies=policies,
      events=tuple(known),
    )

  def count(self, fate: str, kind: str, count: int = 1) -> None:
    """Notes that so many events of a kind had a fate; no content is kept.

    A disk that does not take the number is a warning: neither the engine nor
    the thread that records ends for it.
    """
    row = {'fate': fate, 'kind': kind, 'count': count}
    try:
      lines = append.AppendFile(self.folder / _FATES, 'a fate')
      with self._lock, lines:
        lines.add(row)
    except OSError as error:
      _log.warning('A fate is not counted (%s): %s', row, error)

  def fates(self) -> dict[str, int]:
    """Returns the number of events by fate, forged ones included."""
    total = collections.Counter[str]()
    for row in writer.read(self.folder / _FATES):
      total[row['fate']] += row['count']
    return dict(total)

  def _place(self, claim: tokens.Claim) -> pathlib.Path:
    return self.folder / _USERS / claim.user / claim.episode

  def _seen(self, claim: tokens.Claim) -> list[events.Event]:
    with contextlib.suppress(FileNotFoundError):
      return _events(self._place(claim))
    return []

  @contextlib.contextmanager
  def _alone(self, user: str) -> Iterator[bool]:
    """Locks a user's folder; gives whether it is there."""
    path = self.folder / _USERS / user
    try:
      descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
      yield False
      return
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX)
      # Withdrawn, and maybe made anew, while this waited?
      yield path.exists() and os.path.samestat(
        os.fstat(descriptor), path.stat()
      )
    finally:
      os.close(descriptor)


def _json(value: Any) -> bytes:
  return json.dumps(dataclasses.asdict(value)).encode()


def _put(path: pathlib.Path, data: bytes) -> None:
  """Writes a file whole, which may be there.

  Not `files.write_atomic`: a learner that starts in the workdir deletes what it
  takes for temporary files of killed processes.
  """
  made = path.with_name(f'{path.name}.{os.urandom(4).hex()}.part')
  with made.open('wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
  os.replace(made, path)
  files.fsync_directory(path.parent)


def _events(place: pathlib.Path) -> list[events.Event]:
  return [events.Event(**row) for row in writer.read(place / _EVENTS)]


def _append(place: pathlib.Path, event: events.Event) -> None:
  with append.AppendFile(place / _EVENTS, 'an event') as lines:
    lines.cut_torn_line()
    lines.add(dataclasses.asdict(event))
    lines.sync()


def unjudged(
  episode: str, windows: tuple[records.Trajectory, ...]
) -> records.Rollout:
  """Returns windows as a rollout that nobody has judged yet."""
  return records.Rollout(
    task_id=episode,
    group=0,
    member=0,
    trajectories=windows,
    verdict=records.Verdict(
      passed=False,
      num_passed=0,
      num_tests=0,
      status=records.UNFINISHED,
      sandbox_level='none',
    ),
    reward=0.0,
    num_turns=0,
    num_invalid=0,
  )


# Of a merged window's first part: what was recorded when it was sampled.
_SAMPLED = (
  *('loss_mask_T', 'logprobs_T', 'policy_version_T', 'context_version_T'),
)


def merged(
  first: records.Trajectory, second: records.Trajectory
) -> records.Trajectory | None:
  """Returns two answers as one window; None if that is not what they are.

  The second request must repeat all tokens of the first answer. Its pass
  consumed them last, so routes are those of the second.
  """
  count = len(first)
  is_longer = count < len(second) and first.temperature == second.temperature
  if not is_longer or (first.tokens_T != second.tokens_T[:count]).any():
    return None
  # A server that was rolled back in between gives two windows.
  if first.policy_version_T[-1] > second.context_version_T[-1]:
    return None
  parts: Any = {
    name: np.concatenate([getattr(first, name), getattr(second, name)[count:]])
    for name in _SAMPLED
  }
  return dataclasses.replace(second, **parts)
