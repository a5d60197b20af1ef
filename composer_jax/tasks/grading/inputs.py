"""Makes inputs of functions from those of tests, to ask other ones too."""

import collections
import functools
import itertools
import json
import random
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from composer_jax.tasks.grading import variations

MAX_CALLS = 24  # of each kind; twice of those that are no test's
# Recorded ones, others near them, larger ones, numbers between and beyond them.
KINDS = 5
GROWN = 2
BETWEEN, BEYOND = 3, 4  # all must agree: they have no odd forms
# For each call: the original refuses most texts, and more of what is larger.
_CANDIDATES = {1: 8, GROWN: 16, BETWEEN: 2}
_MAX_PAST = 24  # of an object that is made larger
_MAX_SCANNED, _MAX_FAR = 512, 64  # numbers beyond those of tests


class Recorded(NamedTuple):
  """One call of a function, in the encoding of `tasks.grading.plain`.

  Attributes:
    module: dotted name of the module.
    symbol: qualified name of the function.
    past: history of a method's object: [arguments that made it, [method,
      arguments] of each earlier call]; None for a function, and for a method
      whose object is its first argument.
    arguments: [positional, named] arguments, and the table of their objects if
      there are any.
  """

  module: str
  symbol: str
  past: Any
  arguments: Any


class History(Recorded):
  """A call of which the object crosses as it is, with its past instead.

  Such objects are made larger by their past alone.
  """


def make(
  recorded: Sequence[Recorded], draw: random.Random, exact: Iterable[str] = ()
) -> tuple[list[int], list[Recorded]]:
  """The kinds of calls, and the calls: no call stands twice.

  There are more than are asked of a solution; those with which a kind begins
  are first.
  """
  histories = [call for call in recorded if isinstance(call, History)]
  recorded = [call for call in recorded if not isinstance(call, History)]
  calls = list(recorded[: 4 * MAX_CALLS])
  kinds = [0] * len(calls)
  seen = {json.dumps(call) for call in recorded}
  grown = functools.partial(_grown, exact={*exact})
  for kind, change in ((BETWEEN, _between), (1, _varied), (GROWN, grown)):
    most = _CANDIDATES[kind] * MAX_CALLS
    for _ in range(2 * most):
      if not recorded or kinds.count(kind) == most:
        break
      known = recorded
      if kind == GROWN and histories and draw.random() < 0.5:
        known = histories
      call = change(known, draw.choice(known), draw)
      key = json.dumps(call)
      if key not in seen:
        seen.add(key)
        calls.append(call)
        kinds.append(kind)
  # Of each function in turn.
  first = {call[:2]: call for call in recorded}.values()
  rows = itertools.zip_longest(*(_beyond(recorded, c, draw) for c in first))
  beyond = [call for row in rows for call in row if call is not None]
  calls += beyond[: _MAX_SCANNED + _MAX_FAR]
  kinds += [BEYOND] * (len(calls) - len(kinds))
  counts = collections.Counter[int]()
  ranks = []
  for kind in kinds:
    ranks.append(counts[kind])
    counts[kind] += kind > 0
  order = sorted(range(len(kinds)), key=ranks.__getitem__)
  return [kinds[at] for at in order], [calls[at] for at in order]


def _numbers(recorded: Sequence[Recorded], call: Recorded) -> list[int]:
  """Numbers given to a function for which one is all it takes; or none."""
  given = [r.arguments for r in recorded if r[:2] == call[:2]]
  numbers = [row[0][0] for row in given if len(row[0]) == 1 and not row[1]]
  if call.past or len(numbers) < len(given) or {*map(type, numbers)} != {int}:
    return []
  return numbers


def _beyond(
  recorded: Sequence[Recorded], call: Recorded, draw: random.Random
) -> list[Recorded]:
  """The call with all numbers next to the largest, and with a few far ones."""
  if not (numbers := _numbers(recorded, call)):
    return []
  least = max(numbers) + 1
  most = least + _MAX_SCANNED
  far = [draw.randint(most, most + 20 * abs(most)) for _ in range(_MAX_FAR)]
  return [
    call._replace(arguments=[[number], {}])
    for number in (*range(least, most), *dict.fromkeys(far))
  ]


def _between(
  recorded: Sequence[Recorded], call: Recorded, draw: random.Random
) -> Recorded:
  """The call with a number between others, where one number is all it takes."""
  if not (numbers := _numbers(recorded, call)):
    return call
  number = draw.randint(min(numbers), max(numbers))
  return call._replace(arguments=[[number], {}])


def _grown(
  recorded: Sequence[Recorded],
  call: Recorded,
  draw: random.Random,
  *,
  exact: Container[str] = (),
) -> Recorded:
  """The call with more or larger arguments, or a longer past of its object."""
  by = draw.randint(1, 3)
  if call.past is not None and draw.random() < 0.3:
    call = _after(call, draw.choice(recorded))
  if draw.random() < (0.05 if call.past is None else 0.25):
    call = _scaled(call, 10 ** draw.randint(1, 6))
    if draw.random() < 0.5:
      return call
  if call.past is not None and draw.random() < 0.8:
    call = call._replace(past=_longer(call.past, by, draw))
    if draw.random() < 0.6:
      return call
  positional, named, *table = call.arguments
  if positional and draw.random() < 0.1:  # if it takes any number of them
    more = [
      variations.vary(draw.choice(positional), draw) for _ in range(by + 2)
    ]
    return call._replace(arguments=[[*positional, *more], named, *table])
  is_exact = call.symbol.rpartition('.')[2] in exact
  others = draw.choice([r.arguments[0] for r in recorded if r[:2] == call[:2]])
  for at, (value, other) in enumerate(zip(positional, others)):
    if (
      isinstance(value, str) and isinstance(other, str) and draw.random() < 0.5
    ):
      positional = [*positional[:at], value + other, *positional[at + 1 :]]
  arguments = _larger([positional, named, *table], by, draw, is_exact)
  return call._replace(arguments=arguments)


def _after(call: Recorded, other: Recorded) -> Recorded:
  """The call behind another of the same object: it shows what that did.

  What changes an object often returns nothing.
  """
  owner, _, name = other.symbol.rpartition('.')
  is_alike = call[0] == other[0] and call.symbol.rpartition('.')[0] == owner
  if not is_alike or other.past is None:
    return call
  made, before = other.past
  return call._replace(past=[made, [*before, [name, other.arguments]]])


def _scaled(call: Recorded, by: int) -> Recorded:
  """The call with all numbers so many times as large: they fit as before."""

  def scaled(arguments: list) -> list:
    positional, named, *table = arguments
    by_name = {name: variations.scale(v, by) for name, v in named.items()}
    return [variations.scale(positional, by), by_name, *table]

  past = call.past
  if past is not None:
    before = [[name, scaled(given)] for name, given in past[1]]
    past = [scaled(past[0]), before]
  return call._replace(past=past, arguments=scaled(call.arguments))


def _longer(past: list, by: int, draw: random.Random) -> list:
  """A past with more calls, of an object that may be made larger."""
  made, before = past
  least = 0
  if draw.random() < 0.6:
    made, least = _larger(made, by, draw), 2
  more = [
    [name, _varied_arguments(given, draw)]
    if draw.random() < 0.5
    else [name, _larger(given, 1, draw)]
    for _ in range(draw.randint(least, 5))
    for name, given in before
  ]
  return [made, [*before, *more][:_MAX_PAST]]


def _larger(
  arguments: list, by: int, draw: random.Random, is_exact: bool = False
) -> list:
  """Arguments that are grown; tables of numbers, all by as many columns."""
  if draw.random() < 0.4 and len(arguments) > 2:
    nested = variations.nest(arguments, draw)
    if nested is not arguments:
      return nested

  def grow(value: Any) -> Any:
    wide = variations.widen(value, by, draw) if draw.random() < 0.3 else None
    return wide or variations.grow(value, draw, is_exact)

  positional, named, *table = arguments
  return [
    [grow(value) for value in positional],
    {name: grow(value) for name, value in named.items()},
    *(variations.grow_table(rows, by, draw) for rows in table),
  ]


def _varied(
  recorded: Sequence[Recorded], call: Recorded, draw: random.Random
) -> Recorded:
  """The call with one value changed, in its arguments or its object's past."""
  past, arguments = call.past, call.arguments
  if len(arguments) > 2 and draw.random() < 0.5:
    other = draw.choice([r for r in recorded if r[:2] == call[:2]])
    return call._replace(arguments=_crossed(arguments, other.arguments, draw))
  place = draw.randrange(len(past[1]) + 2) if past is not None else 0
  if place == 0:
    arguments = _varied_arguments(arguments, draw)
  elif place == 1:
    past = [_varied_arguments(past[0], draw), past[1]]
  else:
    before = list(past[1])
    name, given = before[place - 2]
    before[place - 2] = [name, _varied_arguments(given, draw)]
    past = [past[0], before]
  return call._replace(past=past, arguments=arguments)


def _crossed(arguments: list, others: list, draw: random.Random) -> list:
  """The arguments with one of another call: an object that tests made."""
  positional, named, *table = arguments
  others = variations.moved(others, len(table[0]))
  at = draw.randrange(max(1, len(positional)))
  if at >= min(len(positional), len(others[0])):
    return arguments
  positional = [*positional[:at], others[0][at], *positional[at + 1 :]]
  return [positional, named, [*table[0], *(others[2:] or [[]])[0]]]


def _varied_arguments(arguments: list, draw: random.Random) -> list:
  positional, named, *table = arguments
  places = [*range(len(positional)), *named]
  if not places:
    return arguments
  place = draw.choice(places)
  if isinstance(place, int):
    changed = variations.vary(positional[place], draw)
    positional = [*positional[:place], changed, *positional[place + 1 :]]
  else:
    named = {**named, place: variations.vary(named[place], draw)}
  return [positional, named, *table]
