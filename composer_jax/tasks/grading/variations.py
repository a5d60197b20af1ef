"""Makes inputs near known ones, and larger, in the encoding of `plain`."""

import json
import random
import re
from typing import Any

_MAX_GROWN = 64  # items added to a list
# Of numbers in texts that grow: those that floats hold are no test of others.
_MAX_DIGITS = 8
_EXACT = 10**16  # floats have not all integers from here on
_PIECES = re.compile(r'[A-Za-z]+|\d+|\s+|.', re.DOTALL)


def vary(data: Any, draw: random.Random) -> Any:
  """The encoding of another value of the same type, near this one.

  None, functions and ranges have no neighbours and stay.
  """
  if isinstance(data, bool):
    return not data
  if isinstance(data, int):
    return data + draw.choice((-2, -1, 1, 2, 3))
  if isinstance(data, float):
    return data + draw.choice((-1.5, -0.5, 0.5, 2.0))
  if isinstance(data, str):
    return _varied_text(data, draw)
  if isinstance(data, list):
    return _varied_items(data, draw)
  if isinstance(data, dict):
    ((kind, content),) = data.items()
    if kind == 'tuple':
      return {kind: _varied_items(content, draw)}
    if kind == 'dict' and content:
      at = draw.randrange(len(content))
      key, value = content[at]
      pairs = [[key, vary(value, draw)]] if draw.random() < 0.7 else []
      return {kind: content[:at] + pairs + content[at + 1 :]}
    if kind in ('set', 'frozenset') and content:
      return {kind: draw.sample(content, len(content) - 1)}
  return data


def grow(data: Any, draw: random.Random, is_exact: bool = False) -> Any:
  """The encoding of a value up to five times as large, of varied parts.

  Lists, texts and dicts that are not empty grow, also in depth if they hold
  others, and half of all numbers; everything else stays.

  Args:
    data: encoding of a value.
    draw: chooses.
    is_exact: true for some integers that no float is equal to.
  """
  is_number = type(data) is int or (type(data) is float and abs(data) < _EXACT)
  if is_number and draw.random() < 0.5:
    if is_exact and type(data) is int and draw.random() < 0.5:
      return data + draw.randint(_EXACT, 100 * _EXACT)
    if type(data) is int and draw.random() < 0.2:
      return data + 10 ** draw.randint(3, 12)
    return data + draw.randint(1, int(4 * abs(data)) + 8)
  if isinstance(data, str) and re.search(r'\d', data) and draw.random() < 0.3:
    count = lambda found: max(0, min(4, _MAX_DIGITS - len(found[0])))
    more = lambda found: (
      found[0] + ''.join(draw.choices('0123456789', k=count(found)))
    )
    return re.sub(r'\d+', more, data)
  if isinstance(data, str) and data and draw.random() < 0.15:
    at = draw.randrange(len(data))
    if not data[at].isdigit():
      return data[:at] + data[at] * draw.randint(5, 40) + data[at:]
  if isinstance(data, str) and data and draw.random() < 0.5:
    pieces = _PIECES.findall(data)
    return data + ''.join(draw.choices(pieces, k=draw.randint(2, 12)))
  if isinstance(data, str) and data:
    more = [vary(data, draw) for _ in range(draw.randint(1, 4))]
    return draw.choice(('', ' ', '\n', ',')).join([data, *more])
  if isinstance(data, list) and data:
    count = min(draw.randint(len(data), 4 * len(data)), _MAX_GROWN)
    more = [_beside(draw.choice(data), draw) for _ in range(count)]
    return [*data, *more, *_deeper([x for x in data if type(x) is list], draw)]
  if isinstance(data, dict) and data.get('dict'):
    pairs = {repr(k): [k, v] for k, v in data['dict']}
    for key, value in data['dict']:
      change = draw.choice((_beside, grow))
      key = vary(key, draw)
      pairs.setdefault(repr(key), [key, change(value, draw)])
    return {'dict': list(pairs.values())}
  return data


def _beside(data: Any, draw: random.Random) -> Any:
  """Another value as `vary` gives it; of a number above zero, one above it."""
  if isinstance(data, list | dict) and draw.random() < 0.5:
    return scale(data, 1, draw.randint(-20, 100))  # its parts fit as before
  changed = vary(data, draw)
  if type(data) in (int, float) and data > 0 >= changed:
    return data + 1
  return changed


def widen(data: Any, by: int, draw: random.Random) -> Any:
  """A table of numbers with so many more rows and columns; None for others."""
  rows = data if isinstance(data, list) else []
  if {*map(type, rows)} != {list} or len({*map(len, rows)}) > 1:
    return None
  cells = [cell for row in rows for cell in row]
  if {*map(type, cells)} not in ({int}, {float}):
    return None
  more = lambda count: [_beside(draw.choice(cells), draw) for _ in range(count)]
  wide = [[*row, *more(by)] for row in rows]
  return [*wide, *(more(len(wide[0])) for _ in range(by))]


def scale(data: Any, by: int, more: int = 0) -> Any:
  """The encoding with all whole numbers so many times as large, and more."""
  if type(data) is int:
    return data * by + more
  if isinstance(data, list):
    return [scale(item, by, more) for item in data]
  if isinstance(data, dict) and {*data} & {'dict', 'tuple', 'set', 'frozenset'}:
    return {kind: scale(content, by, more) for kind, content in data.items()}
  return data


def nest(arguments: list, draw: random.Random) -> list:
  """Arguments with objects of a table within more objects like them."""
  positional, named, *table = arguments
  rows = list(*table)
  used = json.dumps(positional)
  holding = [
    (number, place)
    for number, (_, given, state, *_) in enumerate(rows)
    for place, value in enumerate(given)
    if state is None
    and isinstance(value, list)
    and json.dumps({'ref': number}) in used
  ]
  if not holding:
    return arguments
  number, place = draw.choice(holding)
  top = number
  for _ in range(draw.randint(1, 4)):
    make, given, *parts = rows[top]
    held = [*given[place], {'ref': top}]
    rows.append([make, [*given[:place], held, *given[place + 1 :]], *parts])
    top = len(rows) - 1

  def put(data: Any) -> Any:
    if isinstance(data, list):
      return [put(item) for item in data]
    return {'ref': top} if data == {'ref': number} else data

  return [put(positional), named, rows]


def grow_table(table: list, by: int, draw: random.Random) -> list:
  """A table of objects with dates of other years, made by larger arguments.

  What objects hold beside the items of lists and dicts stays: parts of it may
  depend on each other.
  """
  shift = draw.choice((-1, 1)) * draw.randint(1, 900)
  rows = []
  for make, arguments, *parts in table:
    match make, arguments:
      case {'name': ['datetime', str()]}, [{'bytes': str(text)}, *rest]:
        year = min(max(int(text[:4], 16) + shift, 1), 9999)
        arguments = [{'bytes': f'{year:04x}{text[4:]}'}, *rest]
      case {'name': [str(module), str()]}, _ if module != 'copyreg':
        arguments = [widen(a, by, draw) or grow(a, draw) for a in arguments]
    state, items, pairs = (*parts, None, [], [])[:3]
    items = grow(items, draw)
    pairs = grow({'dict': pairs}, draw)['dict']
    rows.append([make, arguments, state, items, pairs])
  return rows


def _deeper(lists: list, draw: random.Random) -> list:
  """One of the lists within up to four others, if there is one."""
  if not lists:
    return []
  made = draw.choice(lists)
  for _ in range(draw.randint(1, 4)):
    made = [made]
  return [made]


def moved(data: Any, by: int) -> Any:
  """The encoding with its references to a table that begins later."""
  if isinstance(data, list):
    return [moved(item, by) for item in data]
  if isinstance(data, dict):
    return {
      k: v + by if k == 'ref' and type(v) is int else moved(v, by)
      for k, v in data.items()
    }
  return data


def _varied_text(text: str, draw: random.Random) -> str:
  if not text:
    return draw.choice(('a', 'Z9', ' b '))
  at = draw.randrange(len(text))
  marks = [i for i, char in enumerate(text) if not char.isalnum()]
  if marks and draw.random() < 0.5:  # mostly they mean something
    at = draw.choice(marks)
  return draw.choice((
    text[:at] + text[at + 1 :],
    text[:at] + text[at] + text[at:],
    text[at:] + text[:at],
    text + text[:at],
    text.swapcase(),
  ))  # fmt: skip


def _varied_items(items: list, draw: random.Random) -> list:
  if not items:
    return items
  at = draw.randrange(len(items))
  edit = draw.randrange(4)
  if edit == 0:
    return items[:at] + items[at + 1 :]
  if edit == 1:
    return items[at:] + items[:at]
  return items[:at] + [vary(items[at], draw)] + items[at + 1 :]
