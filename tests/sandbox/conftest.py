"""One sandbox per level for all tests, and what they ask of it."""

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
  """Opens the level; the reason of a skip says what it lacks here."""
  try:
    return sandbox_open.open_sandbox(
      level, limits, allow_unsafe=True, size=size
    )
  except ValueError as error:
    pytest.skip(f'no {"bwrap" if level == "bwrap" else "namespaces"}: {error}')


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


@pytest.fixture(params=base.LEVELS[:2])
def isolated(request, opened):
  """The levels that promise more than limits."""
  if request.param not in opened:
    opened[request.param] = open_or_skip(request.param)
  return opened[request.param]


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
