"""Notebooks are committed with outputs, run afresh, and define nothing.

The kernel is this test's interpreter, named by a kernel spec in a temporary
folder: the test needs no kernel registered on the machine and ignores those
that are.

  ./run.sh test tests/colab_test.py --slow --save-outputs

runs all notebooks and writes their new outputs into them.
"""

import ast
import base64
import json
import os
import pathlib
import re
import struct
import sys

import nbclient
import nbformat
import pytest
from jupyter_client import kernelspec, manager

from tests import conftest

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / 'experiments' / 'colab'
NOTEBOOKS = sorted(FOLDER.glob('*.ipynb'))

CODE_CELLS = 15
FILE_BYTES = 300_000
IMAGE_PIXELS = 1600  # of the longer side

# Compiled as users' programs are, since programs of two meshes give equal bits.
PROMISE_BITS = ('muon_plan',)

# Compiling for the first time, on a busy machine.
_CELL_TIMEOUT_S = 600

each_notebook = pytest.mark.parametrize(
  'path', NOTEBOOKS, ids=lambda path: path.stem
)


def read(path: pathlib.Path) -> nbformat.NotebookNode:
  return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list:
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def outputs(notebook: nbformat.NotebookNode) -> list:
  return [output for cell in code_cells(notebook) for output in cell.outputs]


def text(notebook: nbformat.NotebookNode) -> str:
  """What the cells print, in order."""
  streams = [o for o in outputs(notebook) if o.output_type == 'stream']
  return ''.join(o.text for o in streams if o.name == 'stdout')


def images(notebook: nbformat.NotebookNode) -> list[bytes]:
  data = [o.get('data', {}).get('image/png') for o in outputs(notebook)]
  return [base64.b64decode(png) for png in data if png]


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
  # Pictures become outputs, as they do for a reader.
  monkeypatch.setenv('MPLBACKEND', 'module://matplotlib_inline.backend_inline')
  # One device, as a notebook finds it.
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


@pytest.fixture
def execute(kernels, tmp_path, monkeypatch, pytestconfig):
  """Runs the notebook of a path; writes its outputs back if asked to."""

  def run(path: pathlib.Path) -> nbformat.NotebookNode:
    if path.stem in PROMISE_BITS:
      monkeypatch.setenv('XLA_FLAGS', '')
    notebook = read(path)
    metadata = json.loads(json.dumps(notebook.metadata))
    nbclient.NotebookClient(
      notebook,
      km=kernels,
      timeout=_CELL_TIMEOUT_S,
      record_timing=False,
      coalesce_streams=True,
      resources={'metadata': {'path': str(tmp_path)}},
    ).execute()
    # Execution adds the version of Python.
    notebook.metadata = nbformat.from_dict(metadata)
    if pytestconfig.getoption('--save-outputs'):
      nbformat.write(notebook, path)
    return notebook

  return run


def masked(text: str) -> str:
  """Text without what rounding may change: numbers with a fraction."""
  return re.sub(r'-?\d+\.\d+(e[-+]\d+)?|\d+e[-+]\d+', '#', text)


def number(pattern: str, text: str) -> float:
  """The number in the only group of a pattern, which occurs once."""
  (match,) = re.findall(pattern, text, re.M)
  return float(match.replace(',', ''))


def check_first_loop(text: str) -> None:
  assert number(r'largest difference (\S+) nats', text) < 1e-3
  replayed = number(r'trainer\), replayed *: (\S+) nats', text)
  assert replayed < number(r'trainer\), routed afresh *: (\S+) nats', text)
  assert 'version 4: delta' in text and 'still serves version 4' in text


def check_muon_plan(text: str) -> None:
  # Twelve attention matrices and 48 of experts divide by eight, two do not.
  modes = re.findall(r'^ +\d+ +\d+ x +\d+ (\w+) +(\d+)', text, re.M)
  assert modes == [('owner', '12'), ('redundant', '2'), ('local', '48')]
  # Each owner of a device is counted, and replicas repeat two matrices.
  (owned,) = re.findall(r'^62 matrices; devices own \[(.*)\]', text, re.M)
  assert sum(map(int, owned.split(', '))) == 62 + 2
  assert 1 <= number(r'a device, (\S+) of an even share', text) < 1.5
  of_program = dict(re.findall(r'^  (\w+) +\{.*\} sum (\d+)', text, re.M))
  assert of_program['planned'] == of_program['compiled']
  assert int(of_program['optax']) > 10 * int(of_program['compiled'])
  assert number(r'8 parameters of Muon, (\d+) differ', text) == 0
  for name, low, high in (('polar_express', 0.86, 1.13), ('keller', 0, 1.21)):
    (after,) = re.findall(rf'^{name} .* -> (\S+) to (\S+)', text, re.M)
    assert low < float(after[0]) < float(after[1]) < high
  shares = re.findall(
    r'^ *(\d+) matrices: (\w+) .* (\S+) of an even', text, re.M
  )
  for count, mode, share in shares:
    # Half as many matrices as owners, or fewer, are shared.
    assert mode == ('gram_sharded' if int(count) <= 4 else 'owner')
    if mode == 'owner':
      assert float(share) == round(-(-int(count) // 8) * 8 / int(count), 2)
  assert len(shares) == 6
  assert 'dimension 2 (1001) must divide by' in text


def check_replay_by_token(text: str) -> None:
  row = r'^{} +{} +(\S+) +(\S+)$'.format
  (same,) = re.findall(row('float32', 'replayed'), text, re.M)
  (replayed,) = re.findall(row('bfloat16', 'replayed'), text, re.M)
  (afresh,) = re.findall(row('bfloat16', 'routed afresh'), text, re.M)
  # Rounding of one dtype, of two, and other experts.
  assert float(same[1]) < 1e-4 < float(replayed[1])
  assert 4 * float(replayed[0]) < float(afresh[0])
  # Only routes that differ are listed.
  differing = re.findall(r'(\[\d, \d\]) (\[\d, \d\])  \|', text)
  assert differing and all(a != b for a, b in differing)
  stale = re.findall(r'^ +(\d) +(\S+) +(\S+) +(\S+)%$', text, re.M)
  assert [int(line[0]) for line in stale] == list(range(1, 9))
  assert float(stale[0][1]) < float(stale[-1][1])
  assert float(stale[0][3]) > float(stale[-1][3])
  kept = number(r'^keep .* latter (\S+)$', text)
  assert number(r'^refresh .* latter (\S+)$', text) < 1e-9 < kept
  verdicts = re.findall(r': (passes|refused)$', text, re.M)
  assert verdicts == ['passes', 'refused', 'refused', 'refused']


def check_bundle(text: str) -> None:
  assert "bit for bit: {'down': True, 'up': True}" in text
  assert "by ('key 0', 'delta 0-1')" in text and 'decoded: True' in text
  # The packs and the manifest are all of the delta.
  (whole,) = re.findall(r'^version 1: delta +(\d+) bytes', text, re.M)
  (listed,) = re.findall(r'^manifest: (\d+) bytes', text, re.M)
  packs = re.findall(r"\('\w+', (\d+)\)", text)
  assert int(whole) == int(listed) + sum(map(int, packs))
  assert 'new weights: None' in text and 'cannot be rebuilt: down' in text


CHECKS = {
  'bundle': check_bundle,
  'first_loop': check_first_loop,
  'muon_plan': check_muon_plan,
  'replay_by_token': check_replay_by_token,
}


def check(name: str, notebook: nbformat.NotebookNode) -> None:
  """Checks what a notebook shows, executed now or when it was committed."""
  assert all(cell.execution_count for cell in code_cells(notebook))
  assert {o.output_type for o in outputs(notebook)} <= {
    'stream',
    'display_data',
  }
  assert images(notebook)
  CHECKS[name](text(notebook))


def test_there_are_notebooks():
  assert {path.stem for path in NOTEBOOKS} == set(CHECKS)


@pytest.mark.slow
def test_muon_plan_shows_what_is_committed(execute):
  """About ten seconds on a quiet core, most of them compiling."""
  path = FOLDER / 'muon_plan.ipynb'
  committed = read(path)
  executed = execute(path)
  check(path.stem, executed)
  # The plan is the same on every machine.
  assert masked(text(executed)) == masked(text(committed))


@pytest.mark.slow
@each_notebook
def test_runs_and_shows_its_laws(path, execute):
  check(path.stem, execute(path))


@each_notebook
def test_is_committed_with_outputs(path):
  notebook = read(path)
  check(path.stem, notebook)
  counts = [cell.execution_count for cell in code_cells(notebook)]
  assert counts == list(range(1, len(counts) + 1))
  assert not any(o.get('name') == 'stderr' for o in outputs(notebook))


@each_notebook
def test_is_small_and_names_no_machine(path):
  assert path.stat().st_size < FILE_BYTES
  notebook = read(path)
  assert len(code_cells(notebook)) <= CODE_CELLS
  for png in images(notebook):
    assert max(struct.unpack('>II', png[16:24])) <= IMAGE_PIXELS
  own = [str(ROOT), sys.prefix, 'site-packages', 'Traceback']
  for place in (*own, '/tmp/', '/home/', '/root/', '/Users/', '/var/'):
    assert place not in text(notebook), place


@each_notebook
def test_uses_public_names_alone(path):
  for cell in code_cells(read(path)):
    for node in ast.walk(ast.parse(cell.source)):
      names = []
      if isinstance(node, ast.ImportFrom | ast.Import):
        names = [part for a in node.names for part in a.name.split('.')]
      elif isinstance(node, ast.Attribute):
        names = [node.attr]
      assert not [n for n in names if n.startswith('_')], ast.unparse(node)


@each_notebook
def test_defines_nothing(path):
  kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
  for cell in code_cells(read(path)):
    tree = ast.parse(cell.source)
    definitions = [n for n in ast.walk(tree) if isinstance(n, kinds)]
    assert not definitions, (
      f'{path.name} defines {definitions[0].name}; move it to the library.'
    )
