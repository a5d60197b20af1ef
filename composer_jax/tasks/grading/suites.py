"""Runs a package's tests by pytest in a box and returns their outcomes.

Outcomes come over a channel of their own, never from what the tests print or
leave in files: `tasks.grading.suite_plugin` reports them from inside.
Configuration of the workspace (pytest.ini, pyproject.toml, setup.cfg) and
installed plugins are not loaded. conftest.py files are, so a grader puts those
of the tests' owner into the box.
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
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.sandbox import base, results

# From best to worst: the outcome of a test is the worst of its phases.
OUTCOMES = ('passed', 'xpassed', 'xfailed', 'skipped', 'failed', 'error')
_EXPECTED = {'skipped': 'xfailed', 'passed': 'xpassed'}
_MAX_FRAME = 16 << 20
# Wall time of a limit on processor time: on a busy machine, or of what sleeps.
WALL = 5.0
_HEADER = struct.Struct('!I32s')
_FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
  """Functions to watch while tests run, which makes them several times slower.

  Attributes:
    folders: folders and files of the workspace whose functions are watched.
    record: functions and classes (path, qualified name; '' for a whole file).
      If there are any, calls that tests make of the folders are kept with their
      arguments, and marked if one of these ran during them.
    tests: files within the folders whose functions are tests.
    deleted: classes (module, qualified name; '' for all of a module) whose
      instances are not taken apart to be built again elsewhere.
  """

  folders: tuple[str, ...]
  record: tuple[tuple[str, str], ...] = ()
  tests: tuple[str, ...] = ()
  deleted: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SuiteResult:
  """Results of one run of pytest.

  Attributes:
    outcomes: one of `OUTCOMES` by node id, for tests that ran to their end; a
      file that cannot be collected counts by its own id as 'error'.
    status: 'ok' (pytest ended by itself, whatever failed), 'stopped' (pytest
      gave up: interrupted, wrong arguments), 'exit' (the process ended before
      pytest did), 'timeout', 'killed', 'forged' (something else wrote to the
      report) or 'infrastructure'.
    collected: node ids found, before the selection.
    wall_s: wall time in seconds.
    output: text that the tests and pytest printed.
    error: one line of explanation if the status is not 'ok'.
    errors: message by node id of what could not be collected.
    entered: functions ('path:qualified name') that each traced test entered, by
      node id; those of '' ran during imports. With stand-ins, whether any of
      them answered the test.
    inputs: recorded calls; see `suite_plugin.Tracer`. With stand-ins, calls to
      which there was no answer.
    level: isolation that produced the results.
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
    """Number of these tests that passed; one without an outcome did not."""
    return sum(self.outcomes.get(i) == 'passed' for i in ids)


def plain_program() -> str:
  return (_FOLDER / 'plain.py').read_text()


def command(code: str, hash_seed: int) -> base.Command:
  """Executes code in a waiting interpreter, or in a new one with a seed."""
  if not hash_seed:
    return base.Command(argv=('-c', code), warm=True)
  # Like -I, which would ignore the seed; the environment holds nothing else.
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
  cpu_s: float | None = None,
  trace: Trace | None = None,
  stand_ins: Mapping[str, Any] | None = None,
  hash_seed: int = 0,
) -> SuiteResult:
  """Runs pytest in the box's workspace.

  Args:
    box: box to run in; nothing that its code does makes this raise.
    arguments: arguments of pytest, beside those that keep the workspace's own
      configuration out and leave asserts as they are (rewriting them for better
      messages takes most of the time of a short run).
    ids: node ids of the tests to run, one without parameters standing for all
      parameters; () for all tests that pytest finds.
    source_roots: folders of the workspace that tests import from.
    order_seed: seed of a random order of the tests; None for pytest's order.
    cpu_s: processor seconds of the process, if fewer than the sandbox's; None
      for these. What sleeps may take `WALL` times as long.
    trace: functions to watch; None for none.
    stand_ins: functions to replace by stand-ins ([module, name] each) and their
      answers by the JSON of a call; None for none.
    hash_seed: seed of string hashes; 0 is that of the waiting interpreter,
      which starts faster. Another shows which tests depend on hashes.
  """
  key = secrets.token_bytes(32)
  files = dict.fromkeys(i.partition('::')[0] for i in ids)
  config = {
      'key': key.hex(), 'arguments': list(arguments), 'ids': list(ids) or None,
      'files': list(files), 'source_roots': list(source_roots),
      'order_seed': order_seed, 'cpu_s': cpu_s,
      'trace': None if trace is None else dataclasses.asdict(trace),
      'stand_ins': stand_ins and {
          **stand_ins, 'program': (_FOLDER / 'stand_ins.py').read_text()
      },
      'plain': plain_program() if trace or stand_ins else '',
  }  # fmt: skip
  program = (_FOLDER / 'suite_plugin.py').read_text()
  result = box.run(
    dataclasses.replace(
      command(program, hash_seed),
      stdin=json.dumps(config).encode(),
      wall_s=cpu_s and WALL * cpu_s,
    )
  )
  return _result(result, *_events(result.report, key))


def run_fresh(
  sandbox: base.Sandbox,
  image: str,
  changes: Mapping[str, bytes | None],
  name: str,
  **options: Any,
) -> SuiteResult:
  """`run` in a box of its own, once more if the sandbox fails.

  Raises:
    base.SandboxLost: it failed twice, which says nothing about the code.
  """
  for _ in range(2):
    with contextlib.closing(sandbox.open(image, changes)) as box:
      result = run(box, **options)
    if result.status != 'infrastructure':
      return result
    logging.warning('Tests of %s: %s.', name, result.error)
  raise base.SandboxLost(result.error)


def _events(report: bytes, key: bytes) -> tuple[list[list], bool]:
  """Returns the signed events, and true if the report holds nothing else.

  Half a frame at the end is no forgery: the process may have ended while it
  wrote, or the report was larger than the sandbox keeps.
  """
  mac = hmac.new(key, digestmod=hashlib.sha256)
  events: list[list] = []
  start, size, items = _HEADER.size, 0, 0
  while start <= len(report):
    length, tag = _HEADER.unpack_from(report, start - _HEADER.size)
    data = report[start : start + length]
    if len(data) < length:
      return events, length < _MAX_FRAME
    mac.update(data)
    if not hmac.compare_digest(tag, mac.digest()):
      return events, False
    # Code that found the key can sign anything.
    try:
      text = results.inflate(data)
      size, items = size + len(text), items + results.num_items(text)
      if items > 2 * results.MAX_ITEMS or size > 2 * results.MAX_BYTES:
        return events, False
      batch = results.read_json(text)
    except ValueError:
      return events, False
    if not isinstance(batch, list) or not all(map(_is_event, batch)):
      return events, False
    events += batch
    start += length + _HEADER.size
  ended = [i for i, event in enumerate(events) if event[0] == 'end']
  return events, ended in ([], [len(events) - 1])


def _is_event(event: Any) -> bool:
  """True for what the plugin writes, whatever its values mean."""
  match event:
    case ['end', int() | str()] | ['inputs', list()]:
      return True
    case ['collected' | 'names', list(names)]:
      return all(type(name) is str for name in names)
    case ['trace', str(), list(numbers)]:
      return all(type(number) is int for number in numbers)
    case ['collect', str(), str(), str()] | ['finish', str()]:
      return True
    case ['test', str(), str(), str() as outcome, bool()]:
      return outcome in OUTCOMES
  return False


def _result(
  result: base.CommandResult, events: list[list], is_intact: bool
) -> SuiteResult:
  outcomes: dict[str, str] = {}
  errors: dict[str, str] = {}
  entered: dict[str, tuple[str, ...]] = {}
  lists: dict[str, tuple] = {'collected': (), 'inputs': ()}
  worst: dict[str, str] = {}
  names: list[str] = []
  end: Any = None
  for event in events:
    match event:
      case 'collect', node, outcome, text:
        if outcome == 'error':
          outcomes[node], errors[node] = 'error', text
      case 'test', node, when, outcome, is_expected:
        if is_expected:
          outcome = _EXPECTED.get(outcome, outcome)
        elif outcome == 'failed' and when != 'call':
          outcome = 'error'
        phases = worst.get(node, 'passed'), outcome
        worst[node] = max(phases, key=OUTCOMES.index)
      case 'finish', node:
        # Without a phase that reported, nothing ran.
        if node in worst:
          outcomes[node] = worst[node]
      case 'names', more:
        names += more
      case 'trace', node, numbers:
        if any(not 0 <= number < len(names) for number in numbers):
          is_intact = False
        else:
          entered[node] = tuple(names[number] for number in numbers)
      case ('collected' | 'inputs') as kind, content:
        lists[kind] = tuple(content)
      case 'end', end:
        pass
  status, error = _status(result, end, is_intact)
  return SuiteResult(
      status=status, error=error, wall_s=result.wall_s, output=result.output,
      level=result.level, outcomes=outcomes, errors=errors, entered=entered,
      **lists,
  )  # fmt: skip


def _status(
  result: base.CommandResult, end: Any, is_intact: bool
) -> tuple[str, str]:
  """The status of a run and its explanation.

  Args:
    result: result of the process.
    end: exit code of pytest, or class of an exception; None without one.
    is_intact: true if only the plugin wrote to the report.
  """
  if result.status != 'ok':
    return result.status, result.error or result.status
  if not is_intact:
    return 'forged', 'the report holds what its key did not sign'
  if end is None:
    size = len(result.report)
    cut = f'; its report of {size} bytes may be cut off (output_bytes)'
    return 'exit', (
      f'the process ended with {result.exit_code} before pytest'
      + (cut if size else '')
    )
  # Some tests failed (1), or there were none (5): both are results.
  if end in (0, 1, 5):
    return 'ok', ''
  reasons = {2: 'it was interrupted', 3: 'an error of its own', 4: 'arguments'}
  reason = reasons.get(end, end) if isinstance(end, int) else end
  return 'stopped', f'pytest gave up: {reason}'
