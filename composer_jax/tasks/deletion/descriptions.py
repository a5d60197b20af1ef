"""Finds what a package says of its definitions, for the prompts of tasks.

Few functions of popular packages have a docstring. A method without one has
that of the method that it overrides, as for `inspect.getdoc`, and a constructor
that of its class if it tells of a parameter. Where nothing else does, tests
that stay and name a definition describe it, if there are enough of them.
"""

import collections
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from composer_jax.tasks.deletion import candidates, edit, leaks, workspace
from composer_jax.tasks.repository import task_set

_MAX_EXAMPLES = 5


class Description(NamedTuple):
  """What the prompt of a task says of the definitions that it deletes.

  Attributes:
    by: 'docstring', 'override', 'class' or 'examples'; '' for nothing.
    said: text for definitions without a docstring, by 'path:symbol'.
    examples: tests that name what is deleted.
  """

  by: str = ''
  said: Mapping[str, str] = {}
  examples: str = ''


def describe(
  work: workspace.Workspace,
  deleted: Sequence[task_set.Deleted],
  shown: Collection[str],
  least: int,
) -> Description:
  """Describes the definitions of a task.

  Args:
    work: the package.
    deleted: the definitions.
    shown: node ids of tests of the feature that stay.
    least: number of test functions that make up for a lack of prose.
  """
  texts = work.texts
  parts = candidates.definitions(deleted, texts)
  code = [symbol.code(texts[symbol.path]) for symbol in parts]
  kinds = ['docstring'] if any(symbol.docstring for symbol in parts) else []
  said = {}
  for item in deleted:
    for kind, place, text in _inherited(item, texts):
      # A text that repeats the code would tell the answer.
      if not leaks.copied_share(code, [text]):
        kinds.append(kind)
        said[f'{item.path}:{item.symbol}'] = f'{place}:\n\n{text}'
        break
  if kinds:
    return Description(kinds[0], said)
  functions = {test.partition('[')[0] for test in shown}
  every = [s for path in texts for s in edit.symbols(path, texts[path])]
  # A name that two classes have does not say which is meant.
  counts = collections.Counter(s.name.rpartition('.')[2] for s in every)
  names = {d.symbol.rpartition('.')[2] for d in deleted}
  names = {name for name in names if counts[name] == 1}
  examples = [
    symbol.code(text)
    for path, text in work.tests.items()
    for symbol in edit.symbols(path, text)
    if names & symbol.names
    and f'{path}::{symbol.name.replace(".", "::")}' in functions
  ]
  if not examples or len(examples) < least:
    return Description()
  shortest = sorted(examples, key=len)[:_MAX_EXAMPLES]
  return Description('examples', {}, '\n\n'.join(shortest))


def _inherited(
  item: task_set.Deleted, texts: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
  """Yields kinds, places and texts that describe a method without docstring."""
  owner, _, name = item.symbol.rpartition('.')
  own = {s.name: s for s in edit.symbols(item.path, texts[item.path])}
  if not owner or own[item.symbol].docstring:
    return
  symbols = [s for path in texts for s in edit.symbols(path, texts[path])]
  counts = collections.Counter(symbol.name for symbol in symbols)
  # One of two classes of a name might be the wrong one.
  known = {s.name: s for s in symbols if counts[s.name] == 1} | own
  lineage = [owner]
  for each in lineage:
    bases = known[each].signature.partition(f'class {each}(')[2]
    for base in re.findall(r'\w+', bases):
      if base in known and base not in lineage:
        lineage.append(base)
        if (method := known.get(f'{base}.{name}')) and method.docstring:
          place = f'Docstring of `{base}.{name}`, which it overrides'
          yield 'override', place, method.docstring
  parameters = re.findall(r'\w+', own[item.symbol].signature)[3:]
  documented = re.findall(r'\w+', own[owner].docstring)
  if name == '__init__' and {*parameters} & {*documented}:
    yield 'class', f'Docstring of class `{owner}`', own[owner].docstring
