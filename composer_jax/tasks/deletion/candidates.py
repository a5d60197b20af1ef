"""What could be deleted from a package, tier by tier.

A name stands for whatever the package defines by it: the graph of who calls
whom is made of the names that definitions mention, and has edges too many
rather than too few.
"""

import dataclasses
import random
from collections.abc import Collection, Iterable, Mapping, Sequence

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
  """A deletion that nobody has tried.

  Attributes:
    deleted: what goes, sorted.
    touched: tests that enter it.
  """

  tier: str
  deleted: tuple[task_set.Deleted, ...]
  touched: frozenset[str]

  @property
  def key(self) -> str:
    """Names it within its package."""
    return f'{self.tier}/' + '+'.join(
      f'{d.path}:{d.symbol}' if d.symbol else d.path for d in self.deleted
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TestMap:
  """Which definitions tests enter.

  Attributes:
    tests: path -> name of a function -> the tests that enter it.
    at_import: path -> names of what runs when the package or its tests are
      imported.
  """

  tests: Mapping[str, Mapping[str, frozenset[str]]]
  at_import: Mapping[str, frozenset[str]]
  num_tests: int

  def touched(self, path: str, name: str) -> frozenset[str]:
    """Tests that enter a definition, or any of a file ('')."""
    found: set[str] = set()
    for entered, tests in self.tests.get(path, {}).items():
      if _is_of(entered, name):
        found |= tests
    return frozenset(found)

  def runs_at_import(self, path: str, name: str) -> bool:
    return any(_is_of(e, name) for e in self.at_import.get(path, ()))


def _is_of(entered: str, name: str) -> bool:
  if entered.startswith('<'):
    return False
  return not name or entered == name or entered.startswith(f'{name}.')


def test_map(
  entered: Mapping[str, Iterable[str]], tests: Collection[str]
) -> TestMap:
  """Turns what each test entered round; '' stands for imports.

  Args:
    entered: test -> `path:name` of functions.
    tests: those that count.
  """
  found: dict[str, dict[str, set[str]]] = {}
  at_import: dict[str, set[str]] = {}
  for test in ('', *tests):
    for where in entered.get(test, ()):
      path, _, name = where.partition(':')
      if test:
        found.setdefault(path, {}).setdefault(name, set()).add(test)
      else:
        at_import.setdefault(path, set()).add(name)
  return TestMap(
    tests={
      path: {name: frozenset(ids) for name, ids in names.items()}
      for path, names in found.items()
    },
    at_import={path: frozenset(names) for path, names in at_import.items()},
    num_tests=len(tests),
  )


def candidates(
  texts: Mapping[str, str],
  mapped: TestMap,
  tier: str,
  *,
  max_share: float,
  seed: str,
) -> list[Deletion]:
  """All deletions of a tier whose tests are some, but not nearly all.

  Args:
    texts: path -> text of the package's modules.
    max_share: largest share of the tests that may enter what goes.
  """
  found = []
  for targets in _targets(texts, tier):
    touched = frozenset(
      test for path, name in targets for test in mapped.touched(path, name)
    )
    in_import = tier == 'body' and any(
      mapped.runs_at_import(path, name) for path, name in targets
    )
    functions = {test.partition('[')[0] for test in touched}
    if in_import or len(functions) < 2:
      continue
    if len(touched) > max_share * mapped.num_tests:
      continue
    deleted = tuple(
      task_set.Deleted(path=path, symbol=name) for path, name in sorted(targets)
    )
    found.append(Deletion(tier=tier, deleted=deleted, touched=touched))
  found.sort(key=lambda candidate: candidate.key)
  random.Random(f'{seed}/{tier}').shuffle(found)
  return found


def _targets(
  texts: Mapping[str, str], tier: str
) -> list[tuple[tuple[str, str], ...]]:
  symbols = {
    path: deletion_edit.symbols(path, text) for path, text in texts.items()
  }
  if tier == 'file':
    return [
      ((path, ''),)
      for path, found in symbols.items()
      if not path.endswith(('__init__.py', '__main__.py'))
      and sum(s.kind != 'method' for s in found) >= _MIN_METHODS
      and _FILE_LINES[0] <= _num_lines(found) <= _FILE_LINES[1]
    ]
  everything = [s for found in symbols.values() for s in found]
  if tier == 'closure':
    return _closures([s for s in everything if s.kind != 'method'])
  return [((s.path, s.name),) for s in everything if _suits(s, tier)]


def _num_lines(found: Sequence[deletion_edit.Symbol]) -> int:
  return sum(s.num_lines for s in found if s.kind != 'method')


def _suits(symbol: deletion_edit.Symbol, tier: str) -> bool:
  if tier == 'class':
    return (
      symbol.kind == 'class'
      and symbol.num_methods >= _MIN_METHODS
      and symbol.num_lines >= _MIN_CLASS_LINES
    )
  if symbol.kind == 'class' or symbol.num_lines < _MIN_LINES:
    return False
  # A class without a special method has that of its parents: no feature of a
  # name is missing.
  return tier == 'body' or not symbol.short.startswith('__')


def _closures(
  symbols: Sequence[deletion_edit.Symbol],
) -> list[tuple[tuple[str, str], ...]]:
  """Features of several definitions: one, and the helpers of it alone.

  One without helpers goes with all that calls it.
  """
  users: dict[str, set[str]] = {}
  names: dict[str, list[deletion_edit.Symbol]] = {}
  for symbol in symbols:
    names.setdefault(symbol.name, []).append(symbol)
    for name in symbol.names:
      users.setdefault(name, set()).add(symbol.name)
  found = set()
  for seed in symbols:
    if len(names[seed.name]) > 1 or seed.num_lines < _MIN_LINES:
      continue
    group = _with_helpers(seed.name, names, users)
    if len(group) == 1:
      group = _with_callers(seed.name, users)
    if 2 <= len(group) <= _MAX_CLOSURE and all(
      len(names.get(n, ())) == 1 for n in group
    ):
      found.add(tuple(sorted((names[n][0].path, n) for n in group)))
  return sorted(found)


def _with_helpers(seed: str, names, users) -> set[str]:
  group = {seed}
  while True:
    new = {
      name
      for member in group
      for name in names[member][0].names
      if name in names
      and name not in group
      and len(names[name]) == 1
      and users[name] - {name} <= group
    }
    if not new or len(group) > _MAX_CLOSURE:
      return group
    group |= new


def _with_callers(seed: str, users) -> set[str]:
  group = {seed}
  while len(group) <= _MAX_CLOSURE:
    new = {u for member in group for u in users.get(member, ())} - group
    if not new:
      break
    group |= new
  return group


def edit(
  texts: Mapping[str, str], layout: workspace.PackageLayout, candidate: Deletion
) -> tuple[dict[str, str | None], dict[str, set[str]]]:
  """Carries a deletion out.

  Returns:
    path -> text of changed modules, None for a removed one; and for each
    module the names at its top that it no longer has.

  Raises:
    deletion_edit.CannotEdit: what is left does not compile.
  """
  by_path: dict[str, list[str]] = {}
  for item in candidate.deleted:
    by_path.setdefault(item.path, []).append(item.symbol)
  if candidate.tier == 'body':
    stubbed = {
      path: deletion_edit.stub(texts[path], names)
      for path, names in by_path.items()
    }
    return dict(stubbed), {}
  removed = [path for path, names in by_path.items() if '' in names]
  changes: dict[str, str | None] = dict.fromkeys(removed)
  gone: dict[str, set[str]] = {
    path: {deletion_edit.EVERYTHING} for path in removed
  }
  left = {path: text for path, text in texts.items() if path not in removed}
  for path, names in by_path.items():
    if path not in removed:
      left[path] = changes[path] = deletion_edit.remove(texts[path], names)
      gone[path] = {name for name in names if '.' not in name}
  modules = {path: layout.module(path) for path in texts}
  repaired, lost = deletion_edit.repair(left, modules, gone)
  changes.update(repaired)
  return changes, lost


def shimmed(
  texts: Mapping[str, str],
  changes: Mapping[str, str | None],
  lost: Mapping[str, Collection[str]],
) -> dict[str, str | None]:
  """The changes with all that is lost importable; see `shim`."""
  found = dict(changes)
  for path, names in lost.items():
    text = changes.get(path, texts[path])
    found[path] = shim(text or '', names)
  return found


def shim(text: str, names: Collection[str]) -> str:
  """The text of a module, and stand-ins for these names in it.

  A file of tests that imports what is gone fails as a whole. With stand-ins its
  tests fail one by one, for want of the feature. No task ever contains one.

  Args:
    names: that it lost, with `EVERYTHING` all it had.
  """
  if deletion_edit.EVERYTHING in names:
    return text + _SHIM.format(test="not name.startswith('__')")
  return text + _SHIM.format(test=f'name in {sorted(names)!r}')
