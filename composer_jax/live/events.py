"""Events of users on an episode, and the windows in which they count.

Each kind of event has a window, in seconds from the last answer. An episode is
ripe, and its reward is settled, when its longest window has closed. Whatever
comes of an event is one of the fates below; nothing is dropped without one.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.core import checks

# What the user's client may send, and what the server itself notes.
KINDS = ('edit_kept', 'follow_up', 'thumb', 'tool_call')
ANSWERED = 'answered'
# Results of a tool call; `invalid` is one that no tool takes.
OUTCOMES = ('ok', 'failed', 'invalid')

COUNTED = 'counted'
DOUBLE = 'double'  # the same event once more
EARLY = 'early'  # says more of an edit than its age allows
LATE = 'late'  # after its window
UNKNOWN = 'unknown'  # of an episode that was withdrawn, or has no answer yet

_MAX_TEXT, _MAX_EVENTS = 8000, 1000
_ID = re.compile(r'[\w.:-]{1,80}', re.ASCII)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowOptions:
  """Seconds from the last answer within which events count.

  Attributes:
    edit_kept_s: window of what is left of an edit.
    follow_up_s: window of how the user's next message sounds.
    thumb_s: window of a thumb up or down.
    tool_call_s: window of what a tool said of a call.
    kept_after_s: least age of an edit that is reported as kept.
  """

  edit_kept_s: float = 7200.0
  follow_up_s: float = 3600.0
  thumb_s: float = 3600.0
  tool_call_s: float = 600.0
  kept_after_s: float = 3600.0

  def __post_init__(self):
    checks.positive(self, *(f'{kind}_s' for kind in KINDS))
    is_inside = 0 <= self.kept_after_s < self.edit_kept_s
    rule = f'lie in 0..edit_kept_s ({self.edit_kept_s:g})'
    checks.require(self, 'kept_after_s', is_inside, rule)

  def of(self, kind: str) -> float:
    return getattr(self, f'{kind}_s')

  @property
  def longest_s(self) -> float:
    return max(self.of(kind) for kind in KINDS)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
  """One event.

  Attributes:
    id: name that the client gives it, by which a repetition is known.
    kind: one of `KINDS`, or `ANSWERED` of the server.
    at: seconds of the server's clock at which the event came.
    value: share of an edit that is kept, 0 to 1; satisfaction of a follow-up or
      a thumb, -1 to 1; seconds of an answer.
    after_s: age of the edit, where the kind is 'edit_kept'.
    tool: tool that was called; '' for a call that names none.
    outcome: one of `OUTCOMES`, of a tool call.
    text: the user's next message, which a model has to judge; '' with a value.
  """

  id: str
  kind: str
  at: float
  value: float = 0.0
  after_s: float = 0.0
  tool: str = ''
  outcome: str = 'ok'
  text: str = ''


def parse(body: Mapping[str, Any], now: float) -> Event:
  """Reads an event that a client sends; a ValueError names what is wrong."""
  known = ('id', 'kind', 'value', 'after_s', 'tool', 'outcome', 'text')
  for name in body:
    checks.known_name(name, known, 'an event')
  name = body.get('id')
  if not isinstance(name, str) or not _ID.fullmatch(name):
    raise ValueError(
      f'id ({name!r:.100}) must be a text of 1 to 80 letters, digits or any of '
      '_.:-, the same whenever the same event is sent.'
    )
  kind = body.get('kind')
  if kind not in KINDS:
    raise ValueError(f'kind must be one of {KINDS}, not {kind!r:.100}.')
  text = body.get('text', '')
  if text and (kind != 'follow_up' or 'value' in body):
    raise ValueError(
      "text is the user's next message, which a model judges: it goes with "
      "kind 'follow_up', in place of a value."
    )
  if not isinstance(text, str) or len(text) > _MAX_TEXT:
    raise ValueError(f'text must be a text of at most {_MAX_TEXT} letters.')
  value = after_s = 0.0
  if kind != 'tool_call' and not text:
    lowest = 0.0 if kind == 'edit_kept' else -1.0
    value = _number(body, 'value', lowest, 1.0)
  if kind == 'edit_kept':
    after_s = _number(body, 'after_s', 0.0, 1e9)
  tool, outcome = body.get('tool', ''), body.get('outcome', 'ok')
  if not isinstance(tool, str) or len(tool) > 100 or outcome not in OUTCOMES:
    raise ValueError(
      f'tool must be a name of at most 100 letters and outcome one of '
      f'{OUTCOMES}, not {tool!r:.100} and {outcome!r:.100}.'
    )
  return Event(
    id=name,
    kind=kind,
    at=now,
    value=value,
    after_s=after_s,
    tool=tool,
    outcome=outcome,
    text=text,
  )


def _number(
  body: Mapping[str, Any], name: str, lowest: float, highest: float
) -> float:
  value = body.get(name)
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  # Of NaN both are false.
  if is_number and lowest <= value <= highest:
    return float(value)
  raise ValueError(
    f'{name} must be a number from {lowest:g} to {highest:g} for kind '
    f'{body["kind"]!r}, not {value!r:.100}.'
  )


def answered_at(events: Sequence[Event]) -> float | None:
  """Returns when the last answer ended; None before the first."""
  return max((e.at for e in events if e.kind == ANSWERED), default=None)


def ripe_at(events: Sequence[Event], windows: WindowOptions) -> float | None:
  """Returns when the last window closes; None before the first answer."""
  last = answered_at(events)
  return None if last is None else last + windows.longest_s


def fate_of(
  event: Event, before: Sequence[Event], windows: WindowOptions
) -> str:
  """Says what becomes of an event that comes after others of its episode.

  Raises:
    ValueError: another event has the same id, or there are too many.
  """
  for known in before:
    if known.id == event.id:
      if dataclasses.replace(known, at=event.at) == event:
        return DOUBLE
      raise ValueError(
        f'The event {event.id!r} is known with other fields '
        f'({known.kind}, {known.value:g}); give each event an id of its own.'
      )
  if len(before) >= _MAX_EVENTS:
    raise ValueError(f'An episode has at most {_MAX_EVENTS} events.')
  last = answered_at(before)
  if last is None:
    return UNKNOWN
  if event.at > last + windows.of(event.kind):
    return LATE
  # What happened since the answer is as old as the answer at most.
  if event.kind == 'edit_kept' and not (
    windows.kept_after_s <= event.after_s <= event.at - last
  ):
    return EARLY
  return COUNTED
