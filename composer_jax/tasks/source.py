"""Surgery on the source text of one function, and its normal form."""

import ast
import textwrap
import threading

INDENT = '    '

# Python 3.11 counts the depth of the tree that it builds in a place that all
# threads share; parsing in several at once fails with a SystemError
# (python/cpython#106905). Episodes parse in threads.
_PARSING = threading.Lock()


def find(tree: ast.Module, function: str) -> ast.FunctionDef | None:
  """The top-level function of that name, or None."""
  for node in tree.body:
    if isinstance(node, ast.FunctionDef) and node.name == function:
      return node
  return None


def parse(text: str) -> ast.Module:
  """Parses text that a policy wrote.

  Raises:
    ValueError: for everything the parser may refuse, too deep nesting and null
      bytes included, with a one-line reason.
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

  `break` outside a loop parses, and fails when the module is imported.

  Raises:
    ValueError: as `parse`, and for what does not compile.
  """
  tree = parse(text)
  try:
    compile(tree, '<module>', 'exec', dont_inherit=True)
  except SyntaxError as error:
    raise ValueError(error.msg) from error
  except (MemoryError, RecursionError) as error:
    raise ValueError('too deeply nested') from error
  return tree


def replace_body(text: str, function: str, body: str) -> str:
  """Gives a function another body; signature and docstring stay.

  The body is parsed on its own first, so that an open bracket or quote in it
  cannot swallow what follows the function: nothing outside the body can change.

  Args:
    text: a module that parses, each function's body on lines of its own.
    function: a top-level function of it.
    body: statements at any common indentation.

  Raises:
    LookupError: no such function.
    ValueError: the body is empty or does not parse.
  """
  node = find(parse(text), function)
  if node is None:
    raise LookupError(function)
  # The parser ends lines at \r too; `splitlines` at more characters than it.
  body = body.replace('\r\n', '\n').replace('\r', '\n').expandtabs(4)
  body = textwrap.dedent(body).strip('\n')
  indented = '\n'.join(
    INDENT + line if line.strip() else line for line in body.split('\n')
  )
  # `pass` holds the body to the indentation it will have in the file.
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
  """Replaces bound names by their order of binding."""

  def __init__(self, names: dict[str, str]):
    self.names = names

  def visit_Name(self, node: ast.Name) -> ast.Name:
    return ast.Name(id=self.names.get(node.id, node.id), ctx=node.ctx)


def normal_form(function: ast.FunctionDef) -> str:
  """The function's statements up to the names it binds; docstring left out.

  Bound are positional parameters and what a statement or comprehension assigns,
  one name being one variable in all scopes. That suits bodies without inner
  functions and classes: a lambda's parameter keeps its name, so two bodies with
  one may share a form and differ. Of the signature only the order of positional
  parameters counts; decorators and defaults do not.

  Raises:
    ValueError: nested too deeply to be compared.
  """
  bound = [argument.arg for argument in function.args.args]
  bound += [
    node.id
    for node in ast.walk(function)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
  ]
  # No identifier, so that no free name can be taken for a bound one.
  names = {name: f'<{i}>' for i, name in enumerate(dict.fromkeys(bound))}
  has_doc = ast.get_docstring(function, clean=False) is not None
  renamer = _Renamer(names)
  try:
    dumps = [ast.dump(renamer.visit(x)) for x in function.body[has_doc:]]
  except RecursionError as error:
    raise ValueError('too deeply nested') from error
  return '\n'.join(dumps)


def normal_body(body: str, argument: str) -> str:
  """`normal_form` of a function with this body; ValueError if there is none."""
  body = textwrap.indent(textwrap.dedent(body), INDENT)
  text = f'def f({argument}):\n{body}\n'
  function = parse(text).body[0]
  assert isinstance(function, ast.FunctionDef)
  return normal_form(function)
