"""What an agent is told of a missing feature, and what it is not shown."""

import random
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence

from composer_jax.tasks.deletion import edit
from composer_jax.tasks.repository import task_set

_MAX_DOC = 1200
_MAX_PROMPT = 8000
_MAX_MEMBERS = 40
_GONE = {
  'body': 'The body of the following has been removed',
  'symbol': 'The following has been removed',
  'class': 'The following class has been removed',
  'file': 'The following module has been removed',
  'closure': 'The following have been removed',
}


def prompt(
  package: str,
  version: str,
  tier: str,
  deleted: Sequence[task_set.Deleted],
  texts: Mapping[str, str],
) -> str:
  """Asks for the feature back, by its interface and what it is said to do."""
  parts = [_describe(item, texts[item.path]) for item in deleted]
  text = '\n\n'.join(
    [
      f'The package {package} {version} in this folder has lost a feature. '
      'Bring it back, so that the tests of the feature pass and all others '
      'still do. Some of the tests that decide are not in this folder. Those '
      'that are here, and their configuration, must stay as they are; tests '
      'of your own belong into new files, and do not count.',
      f'{_GONE[tier]}:',
      *parts,
    ]
  )
  if len(text) > _MAX_PROMPT:
    text = text[:_MAX_PROMPT].rsplit('\n', 1)[0] + '\n[cut]'
  return text + '\n'


def _describe(item: task_set.Deleted, text: str) -> str:
  symbols = edit.symbols(item.path, text)
  if item.symbol:
    symbol = next(s for s in symbols if s.name == item.symbol)
    outer = item.symbol.rpartition('.')[0]
    where = f'`{item.path}`' + (f', class `{outer}`' if outer else '')
    return _entry(symbol, where) + _methods(symbol, symbols)
  named = [s for s in symbols if s.kind != 'method']
  entries = [
    f'- {_entry(s, "")}{_methods(s, symbols)}'
    for s in named[:_MAX_MEMBERS]
    if not s.name.startswith('_')
  ]
  return f'`{item.path}`, which held\n\n' + '\n'.join(entries)


def _entry(symbol: edit.Symbol, where: str) -> str:
  head = f'`{symbol.signature}`' + (f' in {where}' if where else '')
  doc = symbol.docstring
  if not where:
    doc = doc.split('\n\n')[0]
  if len(doc) > _MAX_DOC:
    doc = doc[:_MAX_DOC].rsplit('\n', 1)[0] + '\n...'
  return head + ('\n\n' + textwrap.indent(doc, '    ') if doc else '')


def _methods(symbol: edit.Symbol, symbols: Sequence[edit.Symbol]) -> str:
  if symbol.kind != 'class':
    return ''
  lines = []
  for other in symbols:
    if other.name.startswith(f'{symbol.name}.'):
      line = f'\n    - `{other.signature}`'
      if other.docstring:
        line += ': ' + ' '.join(other.docstring.split('\n\n')[0].split())
      lines.append(line)
  return ('\n' if lines else '') + ''.join(lines[:_MAX_MEMBERS])


def hide(
  failing: Collection[str], tests: Mapping[str, str], *, share: float, seed: str
) -> tuple[tuple[str, ...], dict[str, str]]:
  """Chooses tests that the agent never sees, and cuts them out.

  Whole test functions go, with all their parameters, and at least one stays.

  Args:
    failing: node ids that the deletion made fail.
    share: of the functions; at least one is hidden.

  Returns:
    The ids that stay, and the changed test files; all ids and {} where nothing
    can be hidden.
  """
  groups: dict[tuple[str, str], list[str]] = {}
  for test in sorted(failing):
    groups.setdefault(_function(test), []).append(test)
  defined = {
    path: {s.name for s in edit.symbols(path, tests[path])}
    for path in {path for path, _ in groups}
    if path in tests
  }
  possible = [
    group for group in groups if group[1] in defined.get(group[0], ())
  ]
  count = min(max(1, round(share * len(groups))), len(groups) - 1)
  order = sorted(possible)
  random.Random(seed).shuffle(order)
  chosen: list[tuple[str, str]] = []
  changed: dict[str, str] = {}
  for path, name in order:
    if len(chosen) >= count:
      break
    try:
      text = changed.get(path, tests[path])
      changed[path] = edit.remove(text, [name])
    except edit.CannotEdit:
      continue
    chosen.append((path, name))
  shown = [
    test
    for group, members in groups.items()
    if group not in chosen
    for test in members
  ]
  return tuple(sorted(shown)), changed


def _function(test: str) -> tuple[str, str]:
  """(path, dotted name) of the function of a node id."""
  path, *names = re.split('::', test.partition('[')[0])
  return path, '.'.join(names)


def difficulty(
  tier: str, num_lines: int, num_symbols: int, num_failing: int
) -> float:
  """Grows with the tier, what is to be written and what must hold; below 1.

  An estimate to begin with; a curriculum learns better from what agents do.
  """
  effort = (
    0.25 * task_set.TIERS.index(tier)
    + num_lines / 40
    + 0.1 * (num_symbols - 1)
    + num_failing / 200
  )
  return round(effort / (1 + effort), 4)
