"""Gives every test process 8 emulated CPU devices and one shared XLA cache.

A test may skip only for a reason in ALLOWED_SKIPS, which names what a machine
can lack. Every skip is printed at the end, and any other skip fails the run, so
that no test stops running unnoticed.

On a machine with a GPU, `JAX_PLATFORMS=cpu,cuda ./run.sh test` also runs the
tests that need one.
"""

import gc
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
CACHE_BYTES = 2 << 30

# Allowed beginnings of a skip's reason.
ALLOWED_SKIPS = (
  'no GPU',
  'no QEMU',
  'no libtpu',
  'no java',
  'no nginx',
)
# Allowed on a system that cannot isolate processes. Linux normally can, so
# these need --no-isolation there.
ALLOWED_WITHOUT_ISOLATION = ('no namespaces',)

XLA_FLAGS = {
  '--xla_force_host_platform_device_count': '8',
  # On two busy cores a collective of eight devices may wait for minutes.
  '--xla_cpu_collective_call_terminate_timeout_seconds': '600',
  '--xla_cpu_collective_call_warn_stuck_timeout_seconds': '120',
  # Eight devices are enough threads for the cores.
  '--xla_cpu_multi_thread_eigen': 'false',
  # Two test processes use both cores; compiling a program in pieces only costs.
  '--xla_cpu_parallel_codegen_split_count': '1',
}


# Compiling is most of the cost of tests, and these options halve it. They
# change the order of a few roundings, so users' runs do without them.
COMPILING = {'--xla_backend_optimization_level': '0'}
_JAXLIB = importlib.metadata.version('jaxlib')
if tuple(map(int, _JAXLIB.split('.')[:2])) < (0, 11):
  # Later versions of XLA always do this and have no such flag.
  COMPILING['--xla_cpu_use_fusion_emitters'] = 'false'


def _cpu_name() -> str:
  """Names the instruction set: compiled code must not move to a lesser CPU."""
  try:
    text = pathlib.Path('/proc/cpuinfo').read_text()
  except OSError:
    return platform.platform() + platform.processor()
  return ''.join(
    re.findall(r'^(?:flags|Features|model name).*$', text, re.M)[:2]
  )


def _cache_folder() -> pathlib.Path:
  key = _JAXLIB + _cpu_name()
  return ROOT / '.xla_cache' / hashlib.sha256(key.encode()).hexdigest()[:12]


def _set_environment() -> None:
  """Runs before anything imports jax; child processes inherit it."""
  flags = os.environ.get('XLA_FLAGS', '').split()
  user_flags = {flag.partition('=')[0] for flag in flags}
  test_flags = XLA_FLAGS | COMPILING
  flags += [f'{k}={v}' for k, v in test_flags.items() if k not in user_flags]
  os.environ['XLA_FLAGS'] = ' '.join(flags)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_cache_folder()))
  # Finding the source lines of programs would take an eighth of a warm run.
  os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.2')
  os.environ.setdefault('MPLBACKEND', 'agg')
  # A test reads XLA's warnings about rematerialisation.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '1')


_set_environment()


def sweep_cache(folder: pathlib.Path, max_bytes: int) -> int:
  """Removes damaged entries, and the oldest ones beyond `max_bytes`.

  JAX writes entries in place, so a killed process leaves half an entry. JAX
  warns of it in every run and compiles again, and never replaces it.

  Returns:
    The number of files removed.
  """
  import zstandard

  removed = total = 0
  entries = [(p.stat().st_mtime, p) for p in folder.glob('*-cache')]
  for _, path in sorted(entries, reverse=True):
    data = path.read_bytes()
    total += len(data)
    try:
      zstandard.ZstdDecompressor().decompress(data)
      keep = total <= max_bytes
    except zstandard.ZstdError:
      keep = False
    if not keep:
      path.unlink(missing_ok=True)
      removed += 1
  return removed


def pytest_addoption(parser):
  parser.addoption(
    '--slow', action='store_true', help='also run the tests marked slow'
  )
  parser.addoption(
    '--save-outputs',
    action='store_true',
    help='write the outputs of notebooks that run into their files',
  )
  parser.addoption(
    '--no-isolation',
    action='store_true',
    help='let tests skip that need namespaces',
  )


def _is_worker(config) -> bool:
  return hasattr(config, 'workerinput')


def pytest_configure(config):
  if not _is_worker(config):
    folder = pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR'])
    if folder.is_dir():
      sweep_cache(folder, CACHE_BYTES)


def pytest_collection_modifyitems(config, items):
  """Leaves slow tests out unless asked for, and runs the longest first."""
  slow = [i for i in items if i.get_closest_marker('slow')]
  if slow and not config.getoption('--slow'):
    config.hook.pytest_deselected(items=slow)
    items[:] = [i for i in items if not i.get_closest_marker('slow')]
  # A long file that starts last would leave the other core idle. bad_input is
  # the exception, since it waits for the job that another file runs.
  items.sort(key=lambda i: '/e2e/' not in i.nodeid or 'bad_input' in i.nodeid)


def pytest_collection_finish():
  # Traced programs are many small objects: searched less often, they cost 9 %
  # less.
  gc.set_threshold(50_000, 20, 100)
  gc.collect()
  gc.freeze()


@pytest.fixture(scope='module', autouse=True)
def old_objects_are_not_searched():
  """Freezes traced programs: a million objects, most of which live to the end.

  A garbage collection that walks through all of them takes seconds.
  """
  yield
  gc.freeze()


def _skips(config) -> list[tuple[str, str]]:
  """Returns (place, reason) of every skip of the run."""
  reporter = config.pluginmanager.get_plugin('terminalreporter')
  skips = []
  for report in reporter.stats.get('skipped', []) if reporter else []:
    if hasattr(report, 'wasxfail'):
      continue
    longrepr = report.longrepr
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    skips.append((report.nodeid, reason.removeprefix('Skipped: ')))
  return skips


def _allowed(config) -> tuple[str, ...]:
  without = config.getoption('--no-isolation') or sys.platform != 'linux'
  return ALLOWED_SKIPS + (ALLOWED_WITHOUT_ISOLATION if without else ())


def _forbidden(skips, allowed) -> list[tuple[str, str]]:
  return [s for s in skips if not s[1].startswith(allowed)]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
  if _is_worker(session.config) or exitstatus != pytest.ExitCode.OK:
    return
  if _forbidden(_skips(session.config), _allowed(session.config)):
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
  skips = _skips(config)
  if not skips:
    return
  terminalreporter.section('tests that did not run')
  for place, reason in skips:
    terminalreporter.write_line(f'{place}: {reason}')
  allowed = _allowed(config)
  for place, reason in _forbidden(skips, allowed):
    terminalreporter.write_line(
      f'FAILED {place}: skipped because {reason!r}; a reason must begin with '
      f'one of {", ".join(map(repr, allowed))} (--no-isolation lets tests '
      'skip that need namespaces).',
      red=True,
    )
