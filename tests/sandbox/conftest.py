"""One sandbox per level for all tests, and what they ask of it."""

import pytest

from composer_jax.sandbox import base, open as sandbox_open

LIMITS = base.Limits(
    wall_s=0.6, cpu_s=5.0, memory_bytes=256 << 20, processes=8,
    file_bytes=1 << 20, output_bytes=1 << 16,
)  # fmt: skip


@pytest.fixture(scope='session', params=base.LEVELS)
def sandbox(request):
  """Every level that works here; the skip names what the others lack."""
  try:
    opened = sandbox_open.open_sandbox(request.param, LIMITS, allow_unsafe=True)
  except ValueError as error:
    pytest.skip(str(error))
  yield opened
  opened.close()


@pytest.fixture
def isolated(sandbox):
  if sandbox.level == 'rlimits':
    pytest.skip('rlimits isolates nothing; that is why it is refused')
  return sandbox


@pytest.fixture
def run(sandbox):
  return _runner(sandbox)


@pytest.fixture
def run_isolated(isolated):
  return _runner(isolated)


def _runner(sandbox):
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
