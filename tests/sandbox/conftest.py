"""Sandboxes that tests share, one per level, and functions that call them."""

import dataclasses

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open

LIMITS = base.Limits(
    wall_s=10.0, cpu_s=5.0, memory_bytes=256 << 20, processes=8,
    file_bytes=1 << 20, output_bytes=1 << 16,
)  # fmt: skip
# The machine of the tests may be busy: only what must hang gets little time.
SHORT = dataclasses.replace(LIMITS, wall_s=0.4)


def open_or_skip(level, size=1, limits=LIMITS):
  """Opens the level, or skips with the reason why it does not work here."""
  try:
    return sandbox_open.open_sandbox(
      level, limits, allow_unsafe=True, size=size
    )
  except ValueError as error:
    pytest.skip(f'no namespaces: {error}')


@pytest.fixture(scope='session')
def opened():
  sandboxes = {}
  yield sandboxes
  for sandbox in sandboxes.values():
    sandbox.close()


@pytest.fixture(params=base.LEVELS)
def sandbox(request, opened):
  if request.param not in opened:
    opened[request.param] = open_or_skip(request.param)
  return opened[request.param]


@pytest.fixture(params=base.LEVELS)
def run_short(request):
  """Like `run`, with a wall limit that is reached soon."""
  with open_or_skip(request.param, limits=SHORT) as sandbox:
    yield runner(sandbox)


@pytest.fixture(params=base.LEVELS[:1])
def isolated(request, opened):
  """A sandbox of the level that isolates."""
  if request.param not in opened:
    opened[request.param] = open_or_skip(request.param)
  return opened[request.param]


@pytest.fixture(scope='session')
def images(tmp_path_factory):
  """A folder with one image: `repository`."""
  top = tmp_path_factory.mktemp('images')
  files = {
      'module.py': 'def f(x):\n  return x + 1\n', 'run.sh': 'echo ran\n',
      'deep/a.txt': 'a', 'deep/b.txt': 'b', 'deep/er/c.txt': 'c',
      'test_module.py': 'import module\n\n\ndef test_f():\n'
      '  assert module.f(1) == 2\n',
  }  # fmt: skip
  for name, text in files.items():
    path = top / 'repository' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  (top / 'repository' / 'run.sh').chmod(0o755)
  (top / 'repository' / 'link').symlink_to('module.py')
  return top


def open_boxes(level, images, **more):
  """A sandbox whose boxes can begin as `repository` and import pytest."""
  try:
    return sandbox_open.open_sandbox(
        level, LIMITS, allow_unsafe=True, images=images, packages=('pytest',),
        **more,
    )  # fmt: skip
  except ValueError as error:
    pytest.skip(f'no namespaces: {error}')


@pytest.fixture(scope='session')
def opened_boxes():
  sandboxes = {}
  yield sandboxes
  for sandbox in sandboxes.values():
    sandbox.close()


@pytest.fixture(scope='session')
def boxes_of(opened_boxes, images):
  """Level -> the sandbox of boxes that all tests share."""

  def boxes_of(level):
    if level not in opened_boxes:
      opened_boxes[level] = open_boxes(level, images)
    return opened_boxes[level]

  return boxes_of


@pytest.fixture(params=base.LEVELS)
def box_sandbox(request, boxes_of):
  return boxes_of(request.param)


@pytest.fixture
def box(box_sandbox):
  with box_sandbox.open('repository') as box:
    yield box


@pytest.fixture
def run(sandbox):
  return runner(sandbox)


@pytest.fixture
def run_isolated(isolated):
  return runner(isolated)


def runner(sandbox):
  """Calls `f()` of a module with this text; returns value or whole result."""

  def run(text, *arguments, whole=False):
    result = sandbox.call({'m.py': text}, 'm', 'f', [list(arguments)])
    if whole:
      return result
    assert result.status == 'ok', result
    outcome, value = result.value[0]
    assert outcome == 'ok', result
    return value

  return run
