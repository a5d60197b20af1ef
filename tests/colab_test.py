"""Every notebook runs from a fresh kernel, is saved clean and defines nothing.

The kernel is this test's interpreter, named by a kernel spec in a temporary
folder: the test needs no kernel registered on the machine and ignores those
that are.
"""

import ast
import json
import os
import pathlib
import sys

import nbclient
import nbformat
import pytest
from jupyter_client import kernelspec, manager

from tests import conftest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / 'experiments' / 'colab').glob('*.ipynb'))

# Compiling for the first time, on a busy machine.
_CELL_TIMEOUT_S = 600

each_notebook = pytest.mark.parametrize(
  'path', NOTEBOOKS, ids=lambda path: path.name
)


def read(path: pathlib.Path) -> nbformat.NotebookNode:
  return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list:
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


@pytest.fixture
def kernels(tmp_path, monkeypatch):
  """A kernel manager that knows this interpreter and no other."""
  folder = tmp_path / 'kernels' / 'here'
  folder.mkdir(parents=True)
  spec = {
    'argv': [sys.executable, '-m', 'ipykernel_launcher', '-f']
    + ['{connection_file}'],
    'display_name': 'here',
    'language': 'python',
  }
  (folder / 'kernel.json').write_text(json.dumps(spec))
  for name in ('JUPYTER_RUNTIME_DIR', 'JUPYTER_CONFIG_DIR', 'IPYTHONDIR'):
    monkeypatch.setenv(name, str(tmp_path / name.lower()))
  monkeypatch.setenv('MPLBACKEND', 'agg')
  # A notebook has one device.
  quickly = ' '.join(f'{k}={v}' for k, v in conftest.COMPILING.items())
  monkeypatch.setenv('XLA_FLAGS', quickly)
  path = os.environ.get('PYTHONPATH', '')
  monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(ROOT), path]))
  specs = kernelspec.KernelSpecManager(
    kernel_dirs=[str(folder.parent)], ensure_native_kernel=False
  )
  return manager.AsyncKernelManager(
    kernel_name='here', kernel_spec_manager=specs
  )


def test_there_are_notebooks():
  assert ROOT / 'experiments' / 'colab' / 'first_loop.ipynb' in NOTEBOOKS


# Compiling takes half a minute, and the e2e tests run the same loop.
@pytest.mark.slow
@each_notebook
def test_runs_without_an_error(path, kernels, tmp_path):
  notebook = read(path)
  client = nbclient.NotebookClient(
    notebook,
    km=kernels,
    timeout=_CELL_TIMEOUT_S,
    resources={'metadata': {'path': str(tmp_path)}},
  )
  client.execute()
  outputs = [o for cell in code_cells(notebook) for o in cell.outputs]
  assert not [o for o in outputs if o.output_type == 'error']
  assert any(o.output_type == 'stream' for o in outputs)
  assert all(cell.execution_count for cell in code_cells(notebook))


@each_notebook
def test_is_saved_without_outputs(path):
  for cell in code_cells(read(path)):
    assert not cell.outputs and cell.execution_count is None, cell.id


@each_notebook
def test_defines_nothing(path):
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
  for cell in code_cells(read(path)):
    tree = ast.parse(cell.source)
    definitions = [n for n in ast.walk(tree) if isinstance(n, kinds)]
    assert not definitions, (
      f'{path.name} defines {definitions[0].name}; move it to the library.'
    )
