"""Deletes functions, classes and modules from the source text of a package.

Edits are of whole lines, found by the parser; all other bytes stay. What a
deletion leaves dangling in `__all__` and in import lists is repaired, as far
as names are concerned: nothing here is executed.
"""

import ast
import copy
import dataclasses
import functools
import re
from collections.abc import Collection, Iterable, Mapping

from composer_jax.tasks import source

# Every name of a module, for one that is removed whole.
EVERYTHING = '*'
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Scope = ast.Module | ast.ClassDef
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_STUB = 'raise NotImplementedError'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Symbol:
  """A definition at the top of a module, or a method of a class there.

  Attributes:
    name: 'f', 'C' or 'C.m'.
    kind: 'function', 'method' or 'class'.
    start, stop: its lines, from 1, with decorators and the comments above.
    num_lines: lines of code: no empty ones, comments or docstrings.
    num_methods: of a class.
    signature: as the source has it, on one line.
    docstring: '' where there is none.
    names: identifiers that the code mentions.
  """

  path: str
  name: str
  kind: str
  start: int
  stop: int
  num_lines: int
  num_methods: int
  signature: str
  docstring: str
  names: frozenset[str]

  @property
  def short(self) -> str:
    return self.name.rpartition('.')[2]


class CannotEdit(ValueError):
  """A deletion that leaves no module that compiles."""


@functools.lru_cache(maxsize=2000)
def _parsed(text: str) -> ast.Module:
  """The tree of a text, which nobody changes: a package is parsed once."""
  return source.parse(text)


@functools.lru_cache(maxsize=2000)
def _imports(text: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
  return tuple(
    node
    for node in ast.walk(_parsed(text))
    if isinstance(node, ast.Import | ast.ImportFrom)
  )


@functools.lru_cache(maxsize=2000)
def symbols(path: str, text: str) -> tuple[Symbol, ...]:
  """The definitions of a module in order.

  Of a name that is defined more than once in its scope (overloads, property
  setters, alternatives) there is none: a deletion would be of a part.

  Raises:
    ValueError: the text does not parse.
  """
  tree = _parsed(text)
  lines = text.split('\n')
  found = []
  for scope in (tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))):
    prefix = '' if scope is tree else f'{scope.name}.'  # pyrefly: ignore
    for node in scope.body:
      if isinstance(node, Definition):
        if scope is not tree and not isinstance(node, _FUNCTIONS):
          continue
        same = sum(getattr(n, 'name', None) == node.name for n in scope.body)
        if same == 1:
          found.append(_symbol(path, prefix, node, lines))
  return tuple(found)


def _symbol(path: str, prefix: str, node, lines: list[str]) -> Symbol:
  start, stop = _span(node, lines)
  is_class = isinstance(node, ast.ClassDef)
  names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
  names |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
  methods = [n for n in node.body if isinstance(n, _FUNCTIONS)]
  return Symbol(
      path=path, name=prefix + node.name,
      kind='class' if is_class else 'method' if prefix else 'function',
      start=start, stop=stop, num_lines=_num_lines(node),
      num_methods=len(methods) if is_class else 0, signature=signature(node),
      docstring=ast.get_docstring(node) or '', names=frozenset(names),
  )  # fmt: skip


def signature(node) -> str:
  """One line that says how to call it, or what a class inherits."""
  marks = ''.join(f'@{ast.unparse(d)} ' for d in node.decorator_list)
  if isinstance(node, ast.ClassDef):
    bases = ', '.join(ast.unparse(b) for b in [*node.bases, *node.keywords])
    return f'{marks}class {node.name}' + (f'({bases})' if bases else '')
  kind = 'async def' if isinstance(node, ast.AsyncFunctionDef) else 'def'
  returns = f' -> {ast.unparse(node.returns)}' if node.returns else ''
  return f'{marks}{kind} {node.name}({ast.unparse(node.args)}){returns}'


def _num_lines(node) -> int:
  """Lines on which a statement of the body begins or goes on."""
  counted: set[int] = set()
  for inner in ast.walk(node):
    if isinstance(inner, ast.stmt) and inner is not node:
      is_doc = isinstance(inner, ast.Expr) and isinstance(
        inner.value, ast.Constant
      )
      if not is_doc:
        counted.update((inner.lineno, inner.end_lineno or inner.lineno))
  return len(counted)


def _span(node, lines: list[str]) -> tuple[int, int]:
  """First and last line, with decorators and the comments right above."""
  start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
  indent = ' ' * node.col_offset
  while start > 1 and re.match(rf'{indent}#', lines[start - 2]):
    start -= 1
  return start, _stop(node, lines)


def _stop(node, lines: list[str]) -> int:
  """The last line, with comments that are indented like the body."""
  stop = node.end_lineno
  for number in range(stop, len(lines)):
    line = lines[number]
    indent = len(line) - len(line.lstrip())
    if line.strip() and not (
      line.lstrip().startswith('#') and indent > node.col_offset
    ):
      break
    if line.strip():
      stop = number + 1
  return stop


def _find(tree: ast.Module, name: str) -> tuple[Scope, Definition]:
  scope: Scope = tree
  *outer, last = name.split('.')
  for part in outer:
    scope = next(
      n for n in scope.body if isinstance(n, ast.ClassDef) and n.name == part
    )
  return scope, next(
    n for n in scope.body if isinstance(n, Definition) and n.name == last
  )


def stub(text: str, names: Iterable[str]) -> str:
  """Replaces bodies by `raise NotImplementedError`; docstrings stay.

  Raises:
    CannotEdit: a body begins on the line of its signature.
  """
  tree, lines = _parsed(text), text.split('\n')
  for name in sorted(names, key=lambda n: -_find(tree, n)[1].lineno):
    _, node = _find(tree, name)
    has_doc = ast.get_docstring(node, clean=False) is not None
    body = node.body[has_doc:]
    if not body:
      raise CannotEdit(f'{name} has no body.')
    first = body[0]
    start = min(
      [first.lineno, *(d.lineno for d in getattr(first, 'decorator_list', ()))]
    )
    above = (node.body[0].end_lineno if has_doc else None) or node.lineno
    while start - 1 > above and lines[start - 2].lstrip()[:1] in ('', '#'):
      start -= 1
    before = lines[first.lineno - 1][: first.col_offset]
    if before.strip():
      raise CannotEdit(f'{name} has its body on the line of its signature.')
    indent = ' ' * len(before) if '\t' not in before else before
    lines[start - 1 : _stop(node, lines)] = [indent + _STUB]
  return _checked('\n'.join(lines))


def remove(text: str, names: Iterable[str]) -> str:
  """Removes definitions; a scope that becomes empty gets a `pass`.

  Raises:
    CannotEdit: what is left does not compile.
  """
  tree, lines = _parsed(text), text.split('\n')
  names = sorted(names, key=lambda n: -_find(tree, n)[1].lineno)
  left: dict[int, int] = {}
  for name in names:
    scope, node = _find(tree, name)
    start, stop = _span(node, lines)
    while stop < len(lines) and not lines[stop].strip():
      stop += 1
    after = lines[stop:]
    left[id(scope)] = left.get(id(scope), len(scope.body)) - 1
    filler = []
    if left[id(scope)] == 0 and scope is not tree:
      filler = [' ' * node.col_offset + 'pass']
    kept = lines[: start - 1]
    while kept and not kept[-1].strip():
      kept.pop()
    space = [''] * (2 if scope is tree else 1) if any(after) else ['']
    lines = [*kept, *filler, *space, *after]
  return _checked('\n'.join(lines))


def _checked(text: str) -> str:
  try:
    source.check(text)
  except ValueError as error:
    raise CannotEdit(f'the edited module does not compile: {error}') from error
  return text


def repair(
  texts: Mapping[str, str],
  modules: Mapping[str, str],
  gone: Mapping[str, Collection[str]],
) -> tuple[dict[str, str], dict[str, set[str]]]:
  """Takes names that are gone out of `__all__` and out of import lists.

  A module that re-exported such a name has lost it too, which goes on to those
  that import it from there.

  Args:
    texts: path -> text of all modules of the package that are left.
    modules: path -> dotted name, of those that are removed too.
    gone: path -> deleted names at the top of that module, or `EVERYTHING`.

  Returns:
    The changed texts; and for each path all names that it no longer has.
  """
  lost = {path: set(gone.get(path, ())) for path in (*texts, *gone)}
  path_of = {name: path for path, name in modules.items()}
  trees = {path: _parsed(text) for path, text in texts.items()}
  dropped: dict[str, list[tuple[ast.stmt, list[ast.alias]]]] = {}
  changed = True
  while changed:
    changed = False
    for path, tree in trees.items():
      dropped[path] = []
      for node in _imports(texts[path]):
        found = [
          a
          for a in node.names
          if _is_gone(node, a, path, modules, path_of, lost)
        ]
        names = {a.asname or a.name for a in found if a.name != EVERYTHING}
        if isinstance(node, ast.Import):
          names = {a.asname or a.name.split('.')[0] for a in found if a.asname}
        star = _star(node, path, modules, path_of, lost)
        if found:
          dropped[path].append((node, found))
        new = (names | star) - lost[path]
        if new and node in tree.body:
          lost[path] |= new
          changed = True
  edited = {
    path: _repaired(texts[path], trees[path], dropped[path], lost[path])
    for path in texts
  }
  return (
    {path: text for path, text in edited.items() if text != texts[path]},
    {path: names for path, names in lost.items() if names},
  )


def _target(node: ast.ImportFrom, path: str, modules: Mapping[str, str]) -> str:
  """The dotted name of the module that an import takes names from."""
  if not node.level:
    return node.module or ''
  parts = modules[path].split('.')
  # A package is the parent of what lies in it; a module lies in its parent.
  up = node.level - (1 if path.endswith('__init__.py') else 0)
  base = parts[: len(parts) - up] if up else parts
  return '.'.join([*base, *([node.module] if node.module else [])])


def _is_gone(node, alias, path, modules, path_of, lost) -> bool:
  if isinstance(node, ast.Import):
    return EVERYTHING in lost.get(path_of.get(alias.name, ''), ())
  target = _target(node, path, modules)
  names = lost.get(path_of.get(target, ''), ())
  whole = lost.get(path_of.get(f'{target}.{alias.name}', ''), ())
  if EVERYTHING in names or EVERYTHING in whole:
    return True
  return alias.name != EVERYTHING and alias.name in names


def _star(node, path, modules, path_of, lost) -> set[str]:
  """Names that `from MODULE import *` used to bring and does no longer."""
  if not isinstance(node, ast.ImportFrom) or node.names[0].name != EVERYTHING:
    return set()
  names = lost.get(path_of.get(_target(node, path, modules), ''), set())
  return {n for n in names if not n.startswith('_') and n != EVERYTHING}


def _repaired(text: str, tree: ast.Module, dropped, lost: set[str]) -> str:
  edits: list[tuple[int, int, list[str]]] = []
  for node, aliases in dropped:
    kept = [a for a in node.names if a not in aliases]
    indent = ' ' * node.col_offset
    if kept:
      left = copy.copy(node)
      left.names = kept
      new = [indent + ast.unparse(left)]
    else:
      new = [f'{indent}pass'] if indent else []
    edits.append((node.lineno, node.end_lineno or node.lineno, new))
  if lost:
    edits += _exports(tree, lost)
  lines = text.split('\n')
  for start, stop, new in sorted(edits, reverse=True):
    lines[start - 1 : stop] = new
  return _checked('\n'.join(lines)) if edits else text


def _exports(tree: ast.Module, lost: set[str]):
  """Edits that take names out of assignments of lists to `__all__`."""
  for node in tree.body:
    targets = getattr(node, 'targets', [getattr(node, 'target', None)])
    named = any(isinstance(t, ast.Name) and t.id == '__all__' for t in targets)
    value = getattr(node, 'value', None)
    if not named or not isinstance(value, ast.List | ast.Tuple):
      continue
    kept = [
      e
      for e in value.elts
      if not (isinstance(e, ast.Constant) and e.value in lost)
    ]
    if len(kept) == len(value.elts):
      continue
    items = [f'    {ast.unparse(e)},' for e in kept]
    left = '[' if isinstance(value, ast.List) else '('
    right = ']' if left == '[' else ')'
    sign = '+=' if isinstance(node, ast.AugAssign) else '='
    yield (
      node.lineno,
      node.end_lineno or node.lineno,
      [f'__all__ {sign} {left}', *items, right],
    )
