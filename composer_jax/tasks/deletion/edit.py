"""Deletes functions, classes and modules from the source text of a package.

Whole lines are edited, located by the parser; all other bytes stay. Deleted
names are also taken out of `__all__` and of import lists. Nothing is executed.
"""

import ast
import builtins
import collections
import copy
import dataclasses
import functools
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from composer_jax.tasks import source

# Stands for every name of a module, as in an import.
EVERYTHING = '*'
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_STUB = 'raise NotImplementedError'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Symbol:
  """A definition at the top of a module, or a method of a class there.

  Attributes:
    path: path of the module.
    name: 'f', 'C' or 'C.m'.
    kind: 'function', 'method' or 'class'.
    start, stop: first and last line (from 1), decorators and the comments above
      included.
    num_lines: number of lines of code, without comments and docstrings.
    num_methods: number of methods of a class.
    signature: the signature on one line.
    docstring: the docstring, '' if there is none.
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

  def code(self, text: str) -> str:
    """The definition's lines of its module."""
    return '\n'.join(text.split('\n')[self.start - 1 : self.stop])


class CannotEdit(ValueError):
  """A deletion after which the module would not compile."""


@functools.lru_cache(maxsize=2000)
def _parsed(text: str) -> ast.Module:
  """The shared tree of a text; callers do not change it."""
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
  """Lists the definitions of a module in order.

  A name that its scope defines more than once (overloads, property setters,
  alternatives) is left out: one definition alone could not be deleted.

  Raises:
    ValueError: the text does not parse.
  """
  tree, lines = _parsed(text), text.split('\n')
  listed = []
  for scope in (tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))):
    kinds = _FUNCTIONS if isinstance(scope, ast.ClassDef) else Definition
    prefix = f'{scope.name}.' if isinstance(scope, ast.ClassDef) else ''
    counts = collections.Counter(getattr(n, 'name', None) for n in scope.body)
    listed += [
      _symbol(path, prefix, node, lines)
      for node in scope.body
      if isinstance(node, kinds) and counts[node.name] == 1
    ]
  return tuple(listed)


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
      num_methods=len(methods) if is_class else 0, signature=_signature(node),
      docstring=ast.get_docstring(node) or '', names=frozenset(names),
  )  # fmt: skip


def _signature(node) -> str:
  """The decorators and signature of a definition on one line."""
  marks = ''.join(f'@{ast.unparse(d)} ' for d in node.decorator_list)
  if isinstance(node, ast.ClassDef):
    bases = ', '.join(ast.unparse(b) for b in [*node.bases, *node.keywords])
    return f'{marks}class {node.name}' + (f'({bases})' if bases else '')
  kind = 'async def' if isinstance(node, ast.AsyncFunctionDef) else 'def'
  returns = f' -> {ast.unparse(node.returns)}' if node.returns else ''
  return f'{marks}{kind} {node.name}({ast.unparse(node.args)}){returns}'


def _num_lines(node) -> int:
  """Number of lines on which a statement of the body begins or ends."""
  counted: set[int] = set()
  for inner in ast.walk(node):
    match inner:
      case ast.Expr(value=ast.Constant()):
        pass  # a docstring
      case ast.stmt() if inner is not node:
        counted.update((inner.lineno, inner.end_lineno or inner.lineno))
  return len(counted)


def _span(node, lines: list[str]) -> tuple[int, int]:
  """First and last line, decorators and the comments right above included."""
  start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
  indent = ' ' * node.col_offset
  while start > 1 and re.match(rf'{indent}#', lines[start - 2]):
    start -= 1
  return start, _stop(node, lines)


def _stop(node, lines: list[str]) -> int:
  """Last line, comments that are indented like the body included."""
  stop = node.end_lineno
  for number, line in enumerate(lines[stop:], stop + 1):
    text = line.lstrip()
    if text.startswith('#') and len(line) - len(text) > node.col_offset:
      stop = number
    elif text:
      break
  return stop


def _find(tree: ast.Module, name: str) -> tuple[Any, Any]:
  """The definition of a dotted name and the scope that holds it."""
  scope, node = tree, tree
  for part in name.split('.'):
    scope = node
    node = next(
      n for n in node.body if isinstance(n, Definition) and n.name == part
    )
  return scope, node


class _WithoutProse(ast.NodeTransformer):
  """Takes docstrings out."""

  def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
    return None if isinstance(node.value, ast.Constant) else node


def shape(text: str, name: str) -> str:
  """The body of a definition, '' for a whole module, whatever its names are.

  Attributes, named arguments and builtins are not names of its own.
  """
  node = copy.deepcopy(_find(_parsed(text), name)[1] if name else _parsed(text))
  body = _WithoutProse().visit(ast.Module(body=node.body, type_ignores=[]))
  named = {name: name for name in dir(builtins)}
  return re.sub(
    r"(?<!keyword\()\b(id|arg|name)='(\w+)'",
    lambda m: f'{m[1]}={named.setdefault(m[2], str(len(named)))}',
    ast.dump(body),
  )


def stub(text: str, names: Iterable[str]) -> str:
  """Replaces bodies by `raise NotImplementedError`; docstrings stay.

  Raises:
    CannotEdit: a body begins on the line of its signature, or is missing.
  """
  tree, lines = _parsed(text), text.split('\n')
  for name in sorted(names, key=lambda n: -_find(tree, n)[1].lineno):
    start, stop, indent = _body(text, name)
    lines[start - 1 : stop] = [indent + _STUB]
  return _checked('\n'.join(lines))


def _body(text: str, name: str) -> tuple[int, int, str]:
  """First and last line of a body below its docstring, and its indentation."""
  _, node = _find(_parsed(text), name)
  lines = text.split('\n')
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
  return start, _stop(node, lines), indent


def body(text: str, name: str) -> str:
  """Returns the lines of a body, without its docstring and indentation.

  Raises:
    CannotEdit: as for `stub`.
  """
  start, stop, _ = _body(text, name)
  return textwrap.dedent('\n'.join(text.split('\n')[start - 1 : stop]))


def fill(text: str, name: str, new: str) -> str:
  """Replaces a body by lines as `body` returns them; the docstring stays.

  Raises:
    CannotEdit: as for `stub`, or the module would not compile.
  """
  start, stop, indent = _body(text, name)
  new = textwrap.dedent(new.strip('\n'))
  lines = text.split('\n')
  lines[start - 1 : stop] = textwrap.indent(new, indent).split('\n')
  return _checked('\n'.join(lines))


def around(text: str, name: str, count: int) -> str:
  """Returns a definition without its body, with `count` lines on each side.

  Raises:
    CannotEdit: as for `stub`.
  """
  start, stop, indent = _body(text, name)
  lines = text.split('\n')
  first, _ = _span(_find(_parsed(text), name)[1], lines)
  above = lines[max(0, first - 1 - count) : start - 1]
  below = lines[stop : stop + count]
  return '\n'.join([*above, indent + _STUB, *below]).strip('\n')


def remove(text: str, names: Iterable[str]) -> str:
  """Removes definitions; a class that becomes empty gets a `pass`.

  Raises:
    CannotEdit: the remaining code does not compile.
  """
  tree, lines = _parsed(text), text.split('\n')
  names = sorted(names, key=lambda n: -_find(tree, n)[1].lineno)
  num_removed: dict[int, int] = collections.defaultdict(int)
  for name in names:
    scope, node = _find(tree, name)
    start, stop = _span(node, lines)
    while stop < len(lines) and not lines[stop].strip():
      stop += 1
    after = lines[stop:]
    num_removed[id(scope)] += 1
    filler = []
    if num_removed[id(scope)] == len(scope.body) and scope is not tree:
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
    raise CannotEdit(f'The edited module does not compile: {error}.') from error
  return text


def repair(
  texts: Mapping[str, str],
  modules: Mapping[str, str],
  gone: Mapping[str, Collection[str]],
) -> tuple[dict[str, str], dict[str, set[str]]]:
  """Takes deleted names out of `__all__` and out of import lists.

  A module that re-exported a deleted name has lost it too, and so have the
  modules that import it from there.

  Args:
    texts: text of each remaining module of the package, by path.
    modules: dotted name of each module, removed ones included, by path.
    gone: deleted top-level names of each edited module, or `EVERYTHING`.

  Returns:
    The changed texts, and all names that each module has lost.
  """
  lost = {path: set(gone.get(path, ())) for path in (*texts, *gone)}
  by_module = {modules[path]: names for path, names in lost.items()}
  dropped: dict[str, list[tuple[ast.stmt, list[ast.alias]]]] = {}
  changed = True
  while changed:
    changed = False
    for path, text in texts.items():
      dropped[path] = []
      for node in _imports(text):
        aliases, names = _lost_imports(node, path, modules, by_module)
        if aliases:
          dropped[path].append((node, aliases))
        if not names <= lost[path] and node in _parsed(text).body:
          lost[path] |= names
          changed = True
  edited = {
    path: _repaired(text, dropped[path], lost[path])
    for path, text in texts.items()
  }
  return (
    {path: text for path, text in edited.items() if text != texts[path]},
    {path: names for path, names in lost.items() if names},
  )


def _lost_imports(
  node: ast.Import | ast.ImportFrom,
  path: str,
  modules: Mapping[str, str],
  lost: Mapping[str, Collection[str]],
) -> tuple[list[ast.alias], set[str]]:
  """The parts of an import that fail, and the names that it no longer binds.

  Args:
    node: import statement.
    path: path of the module that holds it.
    modules: dotted name of each module, by path.
    lost: lost names of each module, by its dotted name.
  """
  if isinstance(node, ast.Import):
    aliases = [a for a in node.names if EVERYTHING in lost.get(a.name, ())]
    return aliases, {a.asname for a in aliases if a.asname}
  target = node.module or ''
  if node.level:
    # A package is the parent of its modules; a module lies in its parent.
    up = node.level - path.endswith('__init__.py')
    parts = modules[path].split('.')
    target = '.'.join([*parts[: len(parts) - up], *filter(None, [target])])
  names = lost.get(target, ())
  if node.names[0].name == EVERYTHING:
    aliases = node.names if EVERYTHING in names else []
    return aliases, {n for n in names if n[0] != '_' and n != EVERYTHING}
  aliases = [
    a
    for a in node.names
    if {a.name, EVERYTHING} & {*names}
    or EVERYTHING in lost.get(f'{target}.{a.name}', ())
  ]
  return aliases, {a.asname or a.name for a in aliases}


def _repaired(text: str, dropped, lost: set[str]) -> str:
  """Takes dropped imports, and lost names in `__all__`, out of a text."""
  edits: list[tuple[int, int, list[str]]] = []
  for node, aliases in dropped:
    kept = [a for a in node.names if a not in aliases]
    indent = ' ' * node.col_offset
    if kept:
      shorter = copy.copy(node)
      shorter.names = kept
      new = [indent + ast.unparse(shorter)]
    else:
      new = [f'{indent}pass'] if indent else []
    edits.append((node.lineno, node.end_lineno or node.lineno, new))
  if lost:
    edits += _exports(_parsed(text), lost)
  lines = text.split('\n')
  for start, stop, new in sorted(edits, reverse=True):
    lines[start - 1 : stop] = new
  return _checked('\n'.join(lines)) if edits else text


def _exports(tree: ast.Module, lost: set[str]):
  """Yields edits (start, stop, lines) that take names out of `__all__`."""
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
    if len(kept) < len(value.elts):
      items = [f'    {ast.unparse(e)},' for e in kept]
      left, right = '[]' if isinstance(value, ast.List) else '()'
      sign = '+=' if isinstance(node, ast.AugAssign) else '='
      lines = [f'__all__ {sign} {left}', *items, right]
      yield node.lineno, node.end_lineno or node.lineno, lines
