"""Users of known taste, who ask a server over HTTP and say what they think.

Users of `web` like a comment at the end of a line and users of `data` do not;
all want right code. They keep an edit or undo it, send a thumb now and then,
and are annoyed by questions. Time is simulated: it passes at once.
"""

import dataclasses
import itertools
import json
import random
import threading
import urllib.error
import urllib.request
from concurrent import futures
from typing import Any

from experiments.studies.live import world

LIKES_COMMENTS = {'web': True, 'data': False}
# Chances that an edit is kept: right in the style of the domain, right in the
# other, and wrong.
KEPT_IN_STYLE, KEPT, KEPT_WRONG = 0.97, 0.4, 0.03
_THUMBS = 0.3


class Clock:
  """Seconds that pass when somebody says so."""

  def __init__(self, start: float):
    self._now, self._lock = start, threading.Lock()

  def __call__(self) -> float:
    with self._lock:
      return self._now

  def advance(self, seconds: float) -> None:
    with self._lock:
      self._now += seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
  """An episode that a user has to say something about."""

  url: str
  episode: str
  withdrawal: str
  task: world.LiveRequest
  call: world.ReadCall


@dataclasses.dataclass
class Users:
  """Users who come one after another, each with one request.

  Attributes:
    urls: addresses of the servers, by arm.
    clock: clock of the servers.
    seed: seed of requests and tastes.
    quiet: share of users who never say anything.
    patience: factor on the chance that an edit is kept; users with little undo
      almost any edit, which a policy may then learn to avoid.
    leaving: share of users who withdraw their consent in the end.
  """

  urls: dict[str, str]
  clock: Clock
  seed: int = 0
  quiet: float = 0.05
  patience: float = 1.0
  leaving: float = 0.02

  def __post_init__(self):
    self._count = itertools.count()

  def skip(self, count: int) -> None:
    """Leaves out the first users, who came before an interruption."""
    self._count = itertools.count(count)

  def come(self, count: int) -> list[Asked]:
    """Has so many users ask, wait, and say what they think."""
    first = [next(self._count) for _ in range(count)]
    with futures.ThreadPoolExecutor(16, 'user') as pool:
      asked = list(pool.map(self._ask, first))
      self.clock.advance(30.0)
      list(pool.map(self._react, asked))
      # Longer than it takes to keep an edit.
      self.clock.advance(3700.0)
      list(pool.map(self._keep, asked))
    self.clock.advance(7200.0)
    for each in asked:
      draw = random.Random(f'leaves/{each.task.task_id}')
      if draw.random() < self.leaving:
        body = {'withdrawal': each.withdrawal}
        _post(each.url, '/v1/live/withdrawal', body)
    return asked

  def _ask(self, number: int) -> Asked:
    task = world.LiveRequest(task_id=f'live/train/users-{self.seed}/{number}')
    user = f'user-{self.seed}-{number}'
    url = self.urls['control']
    opened = _post(
      url,
      '/v1/live/episodes',
      {'user': user, 'consent': True, 'domain': task.package},
    )
    url = self.urls[opened['arm']]
    answer = _post(
      url,
      '/v1/chat/completions',
      {
        'messages': [{'role': 'user', 'content': task.prompt}],
        'metadata': {'episode': opened['episode']},
        'max_tokens': 24,
        # Runs compare: the draws of a user depend on nothing else.
        'seed': random.Random(user).getrandbits(40),
      },
    )
    choice = answer['choices'][0]
    text = choice['message']['content'] or ''
    is_whole = choice['finish_reason'] == 'stop'
    call = world.read(text) if is_whole else world.ReadCall(tool='')
    return Asked(
      url=url,
      episode=opened['episode'],
      withdrawal=opened['withdrawal'],
      task=task,
      call=call,
    )

  def _react(self, asked: Asked) -> None:
    """Tells what tools and users say at once."""
    call, outcome = asked.call, 'ok' if asked.call.tool else 'invalid'
    # Said by the client itself, whatever the user does.
    self._event(asked, 'call', 'tool_call', tool=call.tool, outcome=outcome)
    is_kept, has_thumb, is_quiet = self._opinion(asked)
    if is_quiet:
      return
    if call.tool != 'edit':
      self._event(asked, 'next', 'follow_up', value=-0.5)
    elif has_thumb:
      self._event(asked, 'thumb', 'thumb', value=2.0 * is_kept - 1)

  def _keep(self, asked: Asked) -> None:
    """Tells an hour later what is left of an edit."""
    is_kept, _, is_quiet = self._opinion(asked)
    if asked.call.tool == 'edit' and not is_quiet:
      what = {'value': float(is_kept), 'after_s': 3650}
      self._event(asked, 'kept', 'edit_kept', **what)

  def _opinion(self, asked: Asked) -> tuple[bool, bool, bool]:
    """Returns whether a user keeps it, gives a thumb, and is quiet."""
    draw = random.Random(f'opinion/{asked.task.task_id}')
    likes = self.patience * pleases(asked.task, asked.call)
    return (
      draw.random() < likes,
      draw.random() < _THUMBS,
      draw.random() < self.quiet,
    )

  def _event(self, asked: Asked, name: str, kind: str, **fields: Any) -> None:
    body = {'episode': asked.episode, 'id': name, 'kind': kind, **fields}
    _post(asked.url, '/v1/live/events', body)


def _post(url: str, path: str, body: Any) -> Any:
  request = urllib.request.Request(
    url + path, json.dumps(body).encode(), {'content-type': 'application/json'}
  )
  try:
    with urllib.request.urlopen(request, timeout=300) as answer:
      return json.load(answer)
  except urllib.error.HTTPError as error:
    text = error.read().decode(errors='replace')
    raise RuntimeError(f'{path}: {error.code} {text}') from error


def pleases(task: world.LiveRequest, call: world.ReadCall) -> float:
  """Returns the chance that a user keeps what a call did."""
  if call.tool != 'edit':
    return 0.0
  if call.code != world.CODE[task.item]:
    return KEPT_WRONG
  is_liked = call.is_commented == LIKES_COMMENTS[task.package]
  return KEPT_IN_STYLE if is_liked else KEPT
