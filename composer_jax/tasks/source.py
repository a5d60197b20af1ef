"""Parsing, replacing and comparing the body of one function."""

import ast
import textwrap
import threading
from typing import Any

INDENT = '    '

# Python 3.11's parser has a depth counter that all threads share, and fails
# with a SystemError when threads, such as those of episodes, parse at once
# (python/cpython#106905).
_PARSING = threading.Lock()


def find(tree: ast.Module, function: str) -> ast.FunctionDef | None:
  """Returns the top-level function of that name, or None."""
  for node in tree.body:
    if isinstance(node, ast.FunctionDef) and node.name == function:
      return node
  return None


def parse(text: str) -> ast.Module:
  """Parses text that a policy wrote.

  Raises:
    ValueError: the parser refuses the text, for a syntax error, too deep
      nesting or a null byte; gives a one-line reason.
  """
  try:
    with _PARSING:
      return ast.parse(text)
  except SyntaxError as error:
    raise ValueError(error.msg) from error
  except (MemoryError, RecursionError, UnicodeError) as error:
    raise ValueError('too deeply nested or not text') from error


def check(text: str) -> ast.Module:
  """Parses and compiles a whole module; nothing is executed.

  Some faults, such as `break` outside a loop, only compiling shows.

  Raises:
    ValueError: the text does not parse or does not compile.
  """
  tree = parse(text)
  try:
    compile(tree, '<module>', 'exec', dont_inherit=True)
  except SyntaxError as error:
    raise ValueError(error.msg) from error
  except (MemoryError, RecursionError) as error:
    raise ValueError('too deeply nested') from error
  return tree


def literal(node: ast.AST) -> tuple[Any] | None:
  """Returns the value of a literal, in a tuple; None for other expressions."""
  try:
    return (ast.literal_eval(node),)
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return None


def replace_body(text: str, function: str, body: str) -> str:
  """Gives a function another body; signature and docstring stay.

  The body is parsed on its own first, so that an open bracket or quote in it
  cannot swallow the code after the function: nothing outside the body changes.

  Args:
    text: module that parses, each function's body on lines of its own.
    function: name of a top-level function of the module.
    body: statements at any common indentation.

  Raises:
    LookupError: the module has no such function.
    ValueError: the body is empty or does not parse.
  """
  node = find(parse(text), function)
  if node is None:
    raise LookupError(function)
  # The parser ends lines at \r too, and `splitlines` at still more characters.
  body = body.replace('\r\n', '\n').replace('\r', '\n').expandtabs(4)
  body = textwrap.dedent(body).strip('\n')
  indented = '\n'.join(
    INDENT + line if line.strip() else line for line in body.split('\n')
  )
  # After `pass` the body must have the indentation that it gets in the file.
  alone = parse(f'def f():\n{INDENT}pass\n{indented}\n').body
  if len(alone) != 1 or not isinstance(alone[0], ast.FunctionDef):
    raise ValueError('the body leaves its function')
  if len(alone[0].body) < 2:
    raise ValueError('the body has no statement')
  lines = text.split('\n')
  start = node.body[0].lineno - 1
  if ast.get_docstring(node, clean=False) is not None:
    start = node.body[0].end_lineno or start
  return '\n'.join([*lines[:start], indented, *lines[node.end_lineno :]])


class _Renamer(ast.NodeTransformer):
  """Replaces names by a table."""

  def __init__(self, names: dict[str, str]):
    self.names = names

  def visit_Name(self, node: ast.Name) -> ast.Name:
    return ast.Name(id=self.names.get(node.id, node.id), ctx=node.ctx)


def normal_form(function: ast.FunctionDef) -> str:
  """Returns a function's statements with the names it binds numbered.

  Bound names are the positional parameters and those that a statement or
  comprehension assigns, one variable per name in all scopes. That suits bodies
  without inner functions: a lambda's parameter keeps its name, so two different
  bodies with a lambda may share a form. Docstring, decorators and defaults do
  not count.

  Raises:
    ValueError: the function is nested too deeply to be compared.
  """
  bound = [argument.arg for argument in function.args.args]
  bound += [
    node.id
    for node in ast.walk(function)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
  ]
  # No identifier, so that no free name can be taken for a bound one.
  renamer = _Renamer({n: f'<{i}>' for i, n in enumerate(dict.fromkeys(bound))})
  has_doc = ast.get_docstring(function, clean=False) is not None
  try:
    dumps = [ast.dump(renamer.visit(x)) for x in function.body[has_doc:]]
  except RecursionError as error:
    raise ValueError('too deeply nested') from error
  return '\n'.join(dumps)


def normal_body(body: str, argument: str) -> str:
  """Returns the `normal_form` of a function of one argument with this body."""
  body = textwrap.indent(textwrap.dedent(body), INDENT)
  text = f'def f({argument}):\n{body}\n'
  function = parse(text).body[0]
  assert isinstance(function, ast.FunctionDef)
  return normal_form(function)
