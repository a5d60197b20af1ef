"""Writes the prompt of a task, and chooses the tests that it hides."""

import contextlib
import random
import textwrap
from collections.abc import Collection, Mapping, Sequence

from composer_jax.tasks.deletion import descriptions, edit
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
  described: descriptions.Description,
) -> str:
  """Asks for the feature, by its signatures and what describes it."""
  parts = [_describe(item, texts[item.path], described) for item in deleted]
  if described.examples:
    parts.append(f'Tests that stay use it so:\n\n{described.examples}')
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


def _describe(
  item: task_set.Deleted, text: str, described: descriptions.Description
) -> str:
  symbols = edit.symbols(item.path, text)
  if item.symbol:
    symbol = next(s for s in symbols if s.name == item.symbol)
    outer = item.symbol.rpartition('.')[0]
    where = f'`{item.path}`' + (f', class `{outer}`' if outer else '')
    said = described.said.get(f'{item.path}:{item.symbol}', '')
    return _entry(symbol, where, said) + _methods(symbol, symbols)
  listed = [s for s in symbols if s.kind != 'method'][:_MAX_MEMBERS]
  entries = [
    f'- {_entry(s, "")}{_methods(s, symbols)}'
    for s in listed
    if not s.name.startswith('_')
  ]
  return f'`{item.path}`, which held\n\n' + '\n'.join(entries)


def _entry(symbol: edit.Symbol, where: str, said: str = '') -> str:
  head = f'`{symbol.signature}`' + (f' in {where}' if where else '')
  doc = symbol.docstring or said
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

  A test function is hidden with all its parameters; at least one stays.

  Args:
    failing: node ids of tests that fail without the feature.
    tests: texts of the test files, by path.
    share: share of the functions to hide; at least one is.
    seed: seed of the choice.

  Returns:
    The ids that stay and the changed test files; all ids and {} if no function
    can be hidden.
  """
  groups: dict[tuple[str, str], list[str]] = {}
  for test in sorted(failing):
    path, *names = test.partition('[')[0].split('::')
    groups.setdefault((path, '.'.join(names)), []).append(test)
  order = sorted(
    (path, name)
    for path, name in groups
    if path in tests
    and name in {s.name for s in edit.symbols(path, tests[path])}
  )
  random.Random(seed).shuffle(order)
  count = min(max(1, round(share * len(groups))), len(groups) - 1)
  hidden: list[tuple[str, str]] = []
  changed: dict[str, str] = {}
  for path, name in order:
    if len(hidden) >= count:
      break
    with contextlib.suppress(edit.CannotEdit):
      changed[path] = edit.remove(changed.get(path, tests[path]), [name])
      hidden.append((path, name))
  shown = [
    i for group, ids in groups.items() if group not in hidden for i in ids
  ]
  return tuple(sorted(shown)), changed


def difficulty(
  tier: str, num_lines: int, num_symbols: int, num_failing: int
) -> float:
  """First estimate of a task's difficulty, in [0, 1).

  Grows with the tier, the deleted lines and definitions, and the failing tests.
  """
  effort = (
    0.25 * task_set.TIERS.index(tier)
    + num_lines / 40
    + 0.1 * (num_symbols - 1)
    + num_failing / 200
  )
  return round(effort / (1 + effort), 4)
