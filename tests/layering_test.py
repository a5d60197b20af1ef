"""The source keeps to the floors and forms of STYLE.md, read from its AST."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / 'composer_jax'

FLOORS = (
  ('core',),
  ('parallel', 'kernels', 'telemetry', 'sandbox', 'text'),
  ('models', 'optim', 'data', 'tasks', 'delta'),
  ('checkpoint', 'rollout', 'agent'),
  ('train', 'serve'),
  ('rl',),
  ('pipeline', 'plan'),
)
LEVEL = {name: i for i, names in enumerate(FLOORS) for name in names}
MAX_LINES = 400


def sources() -> list[pathlib.Path]:
  return sorted(PACKAGE.rglob('*.py'))


def name_of(path: pathlib.Path) -> str:
  return str(path.relative_to(ROOT))


def imports(tree: ast.AST) -> list[tuple[int, str]]:
  """Returns (line, dotted name) of all imports, those in functions too.

  `from a import b` counts as `a.b`, which is what it imports if b is a module.
  """
  found = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found += [(node.lineno, alias.name) for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = '.' * node.level + (node.module or '')
      found += [(node.lineno, f'{base}.{a.name}') for a in node.names]
  return found


def floor_violations(package: str, tree: ast.AST) -> list[str]:
  """Returns a line for each import that `package` may not make."""
  found = []
  for line, name in imports(tree):
    parts = name.split('.')
    if name.startswith('.'):
      found.append(f'{line}: relative import of {name}')
    elif parts[0] in ('experiments', 'configs', 'tests', 'benchmarks'):
      found.append(f'{line}: {name} is outside the package')
    elif parts[0] == 'composer_jax':
      other = parts[1] if len(parts) > 1 else ''
      if other not in LEVEL:
        found.append(f'{line}: {name} names no package of FLOORS')
      elif other != package and LEVEL[other] >= LEVEL[package]:
        found.append(f'{line}: {package} imports {other}, not a lower floor')
  return found


def token_shifts(tree: ast.AST) -> list[int]:
  """Returns the lines that write tokens[:, 1:] or tokens[:, :-1]."""
  lines = []
  for node in ast.walk(tree):
    if not isinstance(node, ast.Subscript):
      continue
    if 'token' not in ast.unparse(node.value).lower():
      continue
    index = ast.unparse(node.slice).replace(' ', '').strip('()')
    if index.endswith((':,1:', ':,:-1', '...,1:', '...,:-1')):
      lines.append(node.lineno)
  return lines


@pytest.fixture(scope='module')
def trees() -> dict[pathlib.Path, ast.Module]:
  return {path: ast.parse(path.read_bytes()) for path in sources()}


def test_every_package_is_on_a_floor():
  found = {p.name for p in PACKAGE.iterdir() if (p / '__init__.py').is_file()}
  assert found <= set(LEVEL)


def test_packages_import_only_lower_floors(trees):
  violations = [
    f'{name_of(path)}:{violation}'
    for path, tree in trees.items()
    if path.parent != PACKAGE
    for violation in floor_violations(path.relative_to(PACKAGE).parts[0], tree)
  ]
  assert not violations, '\n'.join(violations)


@pytest.mark.parametrize(
  'source, count',
  [
    ('from composer_jax.core import files', 0),
    ('from composer_jax.models import router', 0),
    ('from composer_jax.corpus import build as corpus', 1),
    ('import composer_jax.rl.step', 1),
    ('def f():\n  from composer_jax.train import loop', 1),
    ('from composer_jax import agent', 1),
    ('from . import router', 1),
    ('from composer_jax.helpers import thing', 1),
    ('from experiments import composer', 1),
  ],
)
def test_violations_are_seen(source, count):
  assert len(floor_violations('models', ast.parse(source))) == count


def test_init_files_hold_a_docstring_and_nothing_else(trees):
  for path, tree in trees.items():
    if path.name == '__init__.py':
      assert ast.get_docstring(tree) and len(tree.body) == 1, name_of(path)


def test_modules_have_docstrings_and_stay_short(trees):
  for path, tree in trees.items():
    assert ast.get_docstring(tree), f'{name_of(path)} has no docstring'
    lines = path.read_text().count('\n')
    assert lines <= MAX_LINES, f'{name_of(path)} has {lines} lines'


def test_tokens_are_shifted_in_one_place_only(trees):
  shifts = {name_of(p): token_shifts(t) for p, t in trees.items()}
  shifts.pop('composer_jax/models/head.py', None)
  assert {p: lines for p, lines in shifts.items() if lines} == {}


def test_shifts_are_seen():
  source = 'a = tokens_BT[:, 1:]\nb = batch.tokens_BT[..., :-1]\nc = x[:, 1:]'
  assert token_shifts(ast.parse(source)) == [1, 2]


def test_tasks_and_agent_parse_in_one_place():
  """Python 3.11 fails with a SystemError where threads parse at once."""
  found = [
    name_of(path)
    for package in ('tasks', 'agent')
    for path in sorted((PACKAGE / package).rglob('*.py'))
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == 'ast.parse'
  ]
  assert found == ['composer_jax/tasks/source.py']
