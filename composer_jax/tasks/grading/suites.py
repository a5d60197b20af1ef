"""Runs a package's tests by pytest in a box, and says what became of each.

Results come over a channel of their own, never from what the tests print or
leave in files: `tasks.grading.suite_plugin` reports from inside. Configuration
of the workspace (pytest.ini, pyproject.toml, setup.cfg) is not read, installed
plugins are not loaded; conftest.py files are, so whoever grades puts those of
the tests' owner in the box.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import pathlib
import secrets
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.sandbox import base

# Best last: a test's outcome is the worst of what its phases reported.
OUTCOMES = ('passed', 'xpassed', 'xfailed', 'skipped', 'failed', 'error')
STATUSES = (
  'ok', 'stopped', 'exit', 'timeout', 'killed', 'forged', 'infrastructure',
)  # fmt: skip
_EXPECTED = {'skipped': 'xfailed', 'passed': 'xpassed'}
_WRONG = (TypeError, ValueError, KeyError, IndexError)
_MAX_EVENTS, _MAX_FRAME = 256 << 20, 16 << 20
_HEADER = struct.Struct('!I32s')
_FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
  """What to watch while tests run, which makes them several times slower.

  Attributes:
    folders: of the workspace, or patterns of files: functions of these.
    packages: whose functions and classes may be told by name.
    record: (path, qualified name) of functions and classes: with any, calls
      that tests make of the folders are kept with their arguments, and it is
      told during which of them something of these ran; '' for all of a file.
  """

  folders: tuple[str, ...]
  packages: tuple[str, ...] = ()
  record: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SuiteResult:
  """What one run of pytest gave.

  Attributes:
    outcomes: node id -> one of `OUTCOMES`, of tests that ran to their end; a
      file that cannot be collected is there by its own id, as 'error'.
    status: 'ok' (pytest ended by itself, whatever failed), 'stopped' (pytest
      gave up: interrupted, wrong arguments), 'exit' (the process ended before
      pytest did), 'timeout', 'killed', 'forged' (somebody else wrote to the
      report) or 'infrastructure'.
    collected: node ids found, before `ids` selected among them.
    error: one line where the status is not 'ok'.
    errors: node id -> why it could not be collected.
    entered: node id -> `path:function` that ran during it ('' stands for
      the imports), when traced.
    inputs: [path, function, which object it is a method of or None, encoded
      arguments, whether something recorded ran] of calls.
  """

  outcomes: Mapping[str, str]
  status: str
  collected: tuple[str, ...]
  wall_s: float
  output: str
  error: str
  errors: Mapping[str, str] = dataclasses.field(default_factory=dict)
  entered: Mapping[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict
  )
  inputs: tuple[Any, ...] = ()
  level: str = ''

  def passed(self, ids: Sequence[str]) -> int:
    """How many of these passed; one without an outcome did not."""
    return sum(self.outcomes.get(i) == 'passed' for i in ids)


def program() -> str:
  """The text that runs inside; what a box needs beside it is pytest."""
  return (_FOLDER / 'suite_plugin.py').read_text()


def plain_program() -> str:
  return (_FOLDER / 'plain.py').read_text()


def command(code: str, hash_seed: int) -> base.Command:
  """Executes code in the interpreter that waits, or one of other hashes."""
  if not hash_seed:
    return base.Command(argv=('-c', code), warm=True)
  # As -I, but for the seed; the sandbox's environment holds nothing else.
  return base.Command(
    argv=('python', '-s', '-P', '-c', code),
    environment={'PYTHONHASHSEED': str(hash_seed)},
  )


def run(
  box: base.Box,
  *,
  arguments: Sequence[str] = (),
  ids: Sequence[str] = (),
  source_roots: Sequence[str] = ('.',),
  order_seed: int | None = None,
  wall_s: float | None = None,
  trace: Trace | None = None,
  hash_seed: int = 0,
) -> SuiteResult:
  """Runs pytest in the box's workspace.

  Args:
    arguments: of pytest, beside those that keep the workspace's own
      configuration out.
    ids: of the tests to run, one without parameters standing for all of that
      function; () for all that pytest finds.
    source_roots: folders of the workspace that tests import from.
    order_seed: shuffles all tests.
    wall_s: wall limit below the sandbox's.
    hash_seed: of strings. With 0 the interpreter that waits with pytest
      imported, which has this one, is forked; another shows what depends on
      the order of sets.

  Returns:
    Never raises for what the code in the box does.
  """
  key = secrets.token_bytes(32)
  files = dict.fromkeys(i.partition('::')[0] for i in ids)
  config = {
      'key': key.hex(), 'arguments': list(arguments), 'ids': list(ids) or None,
      'files': list(files), 'source_roots': list(source_roots),
      'order_seed': order_seed,
      'trace': None if trace is None else dataclasses.asdict(trace),
      'plain': plain_program() if trace is not None else '',
  }  # fmt: skip
  result = box.run(
    dataclasses.replace(
      command(program(), hash_seed),
      stdin=json.dumps(config).encode(),
      wall_s=wall_s,
    )
  )
  events, intact = _events(result.report, key)
  return _result(result, events, intact)


def run_fresh(
  sandbox: base.Sandbox,
  image: str,
  changes: Mapping[str, bytes | None],
  name: str,
  **options: Any,
) -> SuiteResult:
  """`run` in a box of its own, once more where the sandbox failed.

  Raises:
    base.SandboxLost: it failed twice, which says nothing of the code.
  """
  for _ in range(2):
    with contextlib.closing(sandbox.open(image, changes)) as box:
      result = run(box, **options)
    if result.status != 'infrastructure':
      return result
    logging.warning('Tests of %s: %s.', name, result.error)
  raise base.SandboxLost(result.error)


def _events(report: bytes, key: bytes) -> tuple[list[list], bool]:
  """The signed events, and whether nothing else is in the report.

  Half a frame at the end is no forgery, if it can be one: the process ended
  while it wrote, or the report was larger than the sandbox keeps.
  """
  mac = hmac.new(key, digestmod=hashlib.sha256)
  events: list[list] = []
  at, size = 0, 0
  while at + _HEADER.size <= len(report):
    length, tag = _HEADER.unpack_from(report, at)
    data = report[at + _HEADER.size : at + _HEADER.size + length]
    if len(data) < length:
      return events, length < _MAX_FRAME
    mac.update(data)
    if not hmac.compare_digest(tag, mac.digest()):
      return events, False
    inflater = zlib.decompressobj()
    try:
      text = inflater.decompress(data, _MAX_EVENTS - size)
      size += len(text)
      if inflater.unconsumed_tail:
        return events, False
      events += json.loads(text)
    except (zlib.error, ValueError, RecursionError):
      return events, False
    at += _HEADER.size + length
  ended = [i for i, event in enumerate(events) if event[0] == 'end']
  return events, ended in ([], [len(events) - 1])


class _Outcomes:
  """What the events of a run say; the fields are those of `SuiteResult`."""

  def __init__(self):
    self.fields: dict[str, Any] = {
        'outcomes': {}, 'errors': {}, 'collected': (), 'entered': {},
        'inputs': (),
    }  # fmt: skip
    self.end: Any = None
    self._worst: dict[str, str] = {}

  def add(self, kind: str, *content: Any) -> None:
    """Takes one event; any of `_WRONG` for what the plugin does not write."""
    outcomes = self.fields['outcomes']
    match kind:
      case 'collect':
        node, outcome, text = content
        if outcome == 'error':
          outcomes[node], self.fields['errors'][node] = 'error', text
      case 'test':
        node, when, outcome, expected = content
        if expected:
          outcome = _EXPECTED.get(outcome, outcome)
        elif outcome == 'failed' and when != 'call':
          outcome = 'error'
        worst = self._worst.get(node, 'passed')
        self._worst[node] = max(worst, outcome, key=OUTCOMES.index)
      case 'finish':
        (node,) = content
        # Without a phase that reported, nothing ran.
        if node in self._worst:
          outcomes[node] = self._worst[node]
      case 'trace':
        node, names = content
        self.fields['entered'][node] = tuple(names)
      case 'collected' | 'inputs':
        self.fields[kind] = tuple(content[0])
      case 'end':
        self.end = content[0]
      case _:
        raise KeyError(kind)


def _result(
  result: base.CommandResult, events: list[list], intact: bool
) -> SuiteResult:
  tests = _Outcomes()
  try:
    for event in events:
      tests.add(*event)
  except _WRONG:
    intact = False  # signed, and yet not what the plugin writes
  status, error = _status(result, tests.end, intact)
  return SuiteResult(
      status=status, error=error, wall_s=result.wall_s, output=result.output,
      level=result.level, **tests.fields,
  )  # fmt: skip


def _status(
  result: base.CommandResult, end: Any, intact: bool
) -> tuple[str, str]:
  if result.status != 'ok':
    return result.status, result.error or result.status
  if not intact:
    return 'forged', 'the report holds what its key did not sign'
  if end is None:
    size = len(result.report)
    cut = f'; its report of {size} bytes may be cut off (output_bytes)'
    return 'exit', (
      f'the process ended with {result.exit_code} before pytest'
      + (cut if size else '')
    )
  # Some failed, none were found: both are results.
  if end in (0, 1, 5):
    return 'ok', ''
  reasons = {2: 'it was interrupted', 3: 'an error of its own', 4: 'arguments'}
  reason = reasons.get(end, end) if isinstance(end, int) else end
  return 'stopped', f'pytest gave up: {reason}'
