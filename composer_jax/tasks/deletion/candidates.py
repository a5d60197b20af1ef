"""Lists what could be deleted from a package, tier by tier.

Definitions are connected by the names that they mention. One name stands for
everything that the package defines under it, so the graph of users has too many
edges rather than too few.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from composer_jax.tasks.deletion import edit as deletion_edit
from composer_jax.tasks.deletion import workspace
from composer_jax.tasks.repository import task_set

_MIN_LINES = 3
_MIN_CLASS_LINES = 6
_MIN_METHODS = 2
_FILE_LINES = (12, 600)
_MAX_CLOSURE = 6
_SHIM = """

class _Deleted(type):
    def _raise(self, *args, **kwargs):
        raise NotImplementedError('deleted')

    __call__ = __getattr__ = __getitem__ = __iter__ = __len__ = _raise
    __add__ = __or__ = __contains__ = __instancecheck__ = _raise
    __enter__ = __subclasscheck__ = __mro_entries__ = _raise


_deleted_before = globals().get('__getattr__')


def __getattr__(name):
    if {test}:
        return type.__new__(_Deleted, name, (), {{}})
    if _deleted_before is not None:
        return _deleted_before(name)
    raise AttributeError(name)
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
  """A deletion to try.

  Attributes:
    tier: one of `task_set.TIERS`.
    deleted: definitions or files to delete, sorted.
    touched: tests that enter them.
  """

  tier: str
  deleted: tuple[task_set.Deleted, ...]
  touched: frozenset[str]

  @property
  def key(self) -> str:
    """Name of the deletion, unique within its package."""
    return f'{self.tier}/' + '+'.join(
      f'{d.path}:{d.symbol}' if d.symbol else d.path for d in self.deleted
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TestMap:
  """Tests by the functions that they enter.

  Attributes:
    tests: tests that enter a function, by its 'path:qualified name'.
    at_import: functions that run when the package or its tests are imported.
    num_tests: number of tests.
  """

  tests: Mapping[str, Collection[str]]
  at_import: Collection[str]
  num_tests: int

  def touched(self, path: str, name: str) -> frozenset[str]:
    """Tests that enter a definition, or any function of a file (name '')."""
    return frozenset().union(
      *(tests for f, tests in self.tests.items() if _is_within(f, path, name))
    )


def _is_within(function: str, path: str, name: str) -> bool:
  """True if a function ('path:name') is a definition or a part of it."""
  its_path, _, its_name = function.partition(':')
  if its_path != path or its_name.startswith('<'):
    return False
  return not name or f'{its_name}.'.startswith(f'{name}.')


def test_map(
  entered: Mapping[str, Iterable[str]], tests: Collection[str]
) -> TestMap:
  """Inverts a trace.

  Args:
    entered: functions ('path:qualified name') that each test entered; those of
      '' ran during imports.
    tests: tests to map.
  """
  by_function: dict[str, set[str]] = collections.defaultdict(set)
  for test in tests:
    for function in entered.get(test, ()):
      by_function[function].add(test)
  return TestMap(
    tests=by_function,
    at_import=tuple(entered.get('', ())),
    num_tests=len(tests),
  )


def candidates(
  texts: Mapping[str, str],
  mapped: TestMap,
  tier: str,
  *,
  max_share: float,
  seed: str,
  lines: range = range(_MIN_LINES, 1 << 20),
) -> list[Deletion]:
  """Lists the deletions of a tier that some tests enter, but not nearly all.

  Args:
    texts: text of each module of the package, by path.
    mapped: tests by the functions that they enter.
    tier: one of `task_set.TIERS`.
    max_share: largest share of the tests that may enter the deleted code.
    seed: seed of the order.
    lines: numbers of lines of code that a body or symbol may have.
  """
  deletions = []
  for targets in _targets(texts, tier, lines):
    touched = frozenset().union(*(mapped.touched(*t) for t in targets))
    runs_at_import = tier == 'body' and any(
      _is_within(function, *target)
      for function in mapped.at_import
      for target in targets
    )
    functions = {test.partition('[')[0] for test in touched}
    if runs_at_import or len(functions) < 2:
      continue
    if len(touched) > max_share * mapped.num_tests:
      continue
    deleted = tuple(
      task_set.Deleted(path=path, symbol=name) for path, name in sorted(targets)
    )
    deletions.append(Deletion(tier=tier, deleted=deleted, touched=touched))
  deletions.sort(key=lambda deletion: deletion.key)
  random.Random(f'{seed}/{tier}').shuffle(deletions)
  return deletions


def _targets(
  texts: Mapping[str, str], tier: str, lines: range
) -> list[tuple[tuple[str, str], ...]]:
  """(path, name) of the definitions of each possible deletion of a tier."""
  symbols = {
    path: deletion_edit.symbols(path, text) for path, text in texts.items()
  }
  outer = {
    path: [s for s in of_file if s.kind != 'method']
    for path, of_file in symbols.items()
  }
  if tier == 'file':
    return [
      ((path, ''),)
      for path, of_file in outer.items()
      if not path.endswith(('__init__.py', '__main__.py'))
      and len(of_file) >= _MIN_METHODS
      and _FILE_LINES[0] <= sum(s.num_lines for s in of_file) <= _FILE_LINES[1]
    ]
  if tier == 'closure':
    return _closures([s for of_file in outer.values() for s in of_file])
  return [
    ((s.path, s.name),)
    for of_file in symbols.values()
    for s in of_file
    if _suits(s, tier, lines)
  ]


def _suits(symbol: deletion_edit.Symbol, tier: str, lines: range) -> bool:
  if tier == 'class':
    return (
      symbol.kind == 'class'
      and symbol.num_methods >= _MIN_METHODS
      and symbol.num_lines >= _MIN_CLASS_LINES
    )
  if symbol.kind == 'class' or symbol.num_lines not in lines:
    return False
  # A class that loses a special method inherits one: nothing would be missing.
  is_special = symbol.name.rpartition('.')[2].startswith('__')
  return tier == 'body' or not is_special


def _closures(
  symbols: Sequence[deletion_edit.Symbol],
) -> list[tuple[tuple[str, str], ...]]:
  """Features of several definitions: one and the helpers that only it uses.

  A definition without such helpers goes with everything that uses it.
  """
  users: dict[str, set[str]] = collections.defaultdict(set)
  by_name: dict[str, list[deletion_edit.Symbol]] = {}
  for symbol in symbols:
    by_name.setdefault(symbol.name, []).append(symbol)
    for name in symbol.names:
      users[name].add(symbol.name)
  unique = {name: same[0] for name, same in by_name.items() if len(same) == 1}

  def helpers(group: set[str]) -> set[str]:
    mentioned = {name for member in group for name in unique[member].names}
    return {n for n in mentioned if n in unique and users[n] - {n} <= group}

  def callers(group: set[str]) -> set[str]:
    return {user for member in group for user in users.get(member, ())}

  closures = set()
  for name, symbol in unique.items():
    if symbol.num_lines < _MIN_LINES:
      continue
    group = _grown(name, helpers)
    if len(group) == 1:
      group = _grown(name, callers)
    if 2 <= len(group) <= _MAX_CLOSURE and group <= unique.keys():
      closures.add(tuple(sorted((unique[n].path, n) for n in group)))
  return sorted(closures)


def _grown(name: str, neighbours: Callable[[set[str]], set[str]]) -> set[str]:
  """Adds neighbours until there are no more, or too many."""
  group = {name}
  while len(group) <= _MAX_CLOSURE:
    new = neighbours(group) - group
    if not new:
      break
    group |= new
  return group


def definitions(
  deleted: Iterable[task_set.Deleted], texts: Mapping[str, str]
) -> list[deletion_edit.Symbol]:
  """All definitions that a deletion takes along."""
  return [
    symbol
    for d in deleted
    for symbol in deletion_edit.symbols(d.path, texts[d.path])
    if not d.symbol or f'{symbol.name}.'.startswith(f'{d.symbol}.')
  ]


def shapes(
  deleted: Sequence[task_set.Deleted], texts: Mapping[str, str]
) -> set[str]:
  """Bodies that a deletion takes along, whatever their names are."""
  parts = definitions(deleted, texts)
  kept = [s for s in parts if s.num_lines >= _MIN_LINES] or parts
  return {deletion_edit.shape(texts[s.path], s.name) for s in kept}


def edit(
  texts: Mapping[str, str],
  layout: workspace.PackageLayout,
  candidate: Deletion,
) -> tuple[dict[str, str | None], dict[str, set[str]]]:
  """Carries a deletion out.

  Returns:
    The text of each changed module, None for a removed one; and the top-level
    names that each module has lost.

  Raises:
    deletion_edit.CannotEdit: the remaining code does not compile.
  """
  by_path: dict[str, list[str]] = collections.defaultdict(list)
  for item in candidate.deleted:
    by_path[item.path].append(item.symbol)
  changes: dict[str, str | None] = {}
  if candidate.tier == 'body':
    for path, names in by_path.items():
      changes[path] = deletion_edit.stub(texts[path], names)
    return changes, {}
  gone: dict[str, set[str]] = {}
  remaining = dict(texts)
  for path, names in by_path.items():
    if '' in names:
      changes[path] = None
      gone[path] = {deletion_edit.EVERYTHING}
      del remaining[path]
    else:
      remaining[path] = changes[path] = deletion_edit.remove(texts[path], names)
      gone[path] = {name for name in names if '.' not in name}
  modules = {path: layout.module(path) for path in texts}
  repaired, lost = deletion_edit.repair(remaining, modules, gone)
  return {**changes, **repaired}, lost


def shim(text: str, names: Collection[str]) -> str:
  """Adds to a module stand-ins for names that it has lost.

  A test file that imports a deleted name fails as a whole. With stand-ins, the
  tests that need the feature fail one by one. No task ever contains one.

  Args:
    text: text of the module.
    names: names to stand in for; `EVERYTHING` for any name.
  """
  if deletion_edit.EVERYTHING in names:
    return text + _SHIM.format(test="not name.startswith('__')")
  return text + _SHIM.format(test=f'name in {sorted(names)!r}')
