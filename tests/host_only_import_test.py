"""Sandboxes, tools and receivers start fast: their modules never import jax."""

import ast
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent

# STYLE.md, section 1. A folder stands for all modules in it.
HOST_ONLY = (
  'core/group_bytes.py',
  'core/records.py',
  'core/routes',
  'core/files.py',
  'core/processes.py',
  'fleet',
  'telemetry',
  'sandbox',
  'text',
  'tasks',
  'delta',
  'agent',
  'corpus/build.py',
  'data/packing.py',
)

# Parts of these packages that train, place or sample, and need jax; and those
# that stand in Harbor's own runner and beside verifiers.
WITH_JAX = (
  'composer_jax.tasks.harbor.provider',
  'composer_jax.tasks.verifiers.env_server',
  'composer_jax.tasks.practice',
  'composer_jax.delta.checkpoints',
  'composer_jax.delta.commands',
  'composer_jax.delta.publisher',
  'composer_jax.delta.transport',
  'composer_jax.delta.subscriber',
)

# Runs inside the sandbox, where no package is installed: it may import the
# standard library and its own modules only.
INSIDE = ROOT / 'composer_jax' / 'sandbox' / 'inside'

_PROGRAM = """
import importlib, sys
for name in sys.argv[1:]:
  importlib.import_module(name)
  heavy = [m for m in ('jax', 'jaxlib', 'flax', 'grain') if m in sys.modules]
  if heavy:
    sys.exit(f'{name} imports {heavy[0]}')
"""


def modules() -> list[str]:
  names = []
  for entry in HOST_ONLY:
    path = ROOT / 'composer_jax' / entry
    for file in [path] if path.suffix else sorted(path.rglob('*.py')):
      if file.is_file():
        parts = file.relative_to(ROOT).with_suffix('').parts
        names.append('.'.join(parts).removesuffix('.__init__'))
  return [name for name in names if not name.startswith(WITH_JAX)]


def run_imports(names) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-c', _PROGRAM, *names],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_host_only_modules_do_not_import_jax():
  names = modules()
  assert 'composer_jax.telemetry.writer' in names
  result = run_imports(names)
  assert result.returncode == 0, result.stderr


def test_an_import_of_jax_is_seen():
  result = run_imports(['composer_jax.core.files', 'composer_jax.core.trees'])
  assert result.returncode != 0
  assert 'composer_jax.core.trees imports jax' in result.stderr


def test_what_runs_inside_the_sandbox_needs_only_the_standard_library():
  scripts = sorted(INSIDE.glob('*.py'))
  own_modules = {f'composer_jax.sandbox.inside.{path.stem}' for path in scripts}
  for path in scripts:
    for node in ast.walk(ast.parse(path.read_bytes())):
      names = []
      if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
      elif isinstance(node, ast.ImportFrom):
        names = [f'{node.module}.{alias.name}' for alias in node.names]
      for name in names:
        allowed = (
          name.split('.')[0] in sys.stdlib_module_names or name in own_modules
        )
        assert allowed, f'{path.name}:{node.lineno} imports {name}'
