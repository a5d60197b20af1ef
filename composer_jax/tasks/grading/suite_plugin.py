"""Runs pytest inside a box and reports each test to the host.

The text of this file is the program (`python -I -c TEXT`): where it runs the
package does not exist. Its configuration comes on standard input, which is
read once and closed, its reports go to descriptor 3.

It shares the process with the code under test. Whoever owns a process can
make it say anything, so what is reported here is evidence and no proof: the
key only keeps out what does not look for it. `tasks.grading.solution` says what
is done about the rest.
"""

import fnmatch
import hashlib
import hmac
import json
import os
import random
import struct
import sys
import threading
import time
import types
import zlib

_FLUSH_S = 0.5
_FLUSH_EVENTS = 2000
_MAX_ERROR = 2000
_MOST_CALLS = 40  # whose inputs are kept, of each function
# Options whose value is the next argument, and may be a path.
_WITH_VALUE = frozenset({
  '-o', '-k', '-m', '-p', '-W', '--override-ini', '--ignore', '--ignore-glob',
  '--deselect', '--confcutdir', '--basetemp', '--import-mode',
})  # fmt: skip


class SignedReport:
  """Frames of signed, compressed JSON on a descriptor that no child inherits.

  The descriptor is moved away from 3, so that a child of the tests or a stray
  write to small descriptors does not end up in the report.
  """

  def __init__(self, key: bytes):
    import fcntl

    low = 64 + random.randrange(100)
    self._descriptor = fcntl.fcntl(3, fcntl.F_DUPFD_CLOEXEC, low)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 3)
    os.close(nowhere)
    self._mac = hmac.new(key, digestmod=hashlib.sha256)
    self._events: list = []
    self._last = time.monotonic()
    self._pid = os.getpid()

  def add(self, *event) -> None:
    if os.getpid() != self._pid:
      return  # a fork of a test that went on as pytest
    self._events.append(event)
    late = time.monotonic() - self._last > _FLUSH_S
    if late or len(self._events) >= _FLUSH_EVENTS:
      self.flush()

  def flush(self) -> None:
    data = zlib.compress(json.dumps(self._events).encode(), 1)
    self._events = []
    self._last = time.monotonic()
    # The tag covers all frames so far: none can be left out or repeated.
    self._mac.update(data)
    frame = struct.pack('!I', len(data)) + self._mac.digest() + data
    view = memoryview(frame)
    while view:
      view = view[os.write(self._descriptor, view) :]


class Tracer:
  """Which functions of some folders each test enters, and with what.

  Attributes:
    entered: `path:qualified name` since the last `take`.
    inputs: [path, name, which object a method is called of or None, encoded
      arguments without it, whether a recorded function ran in it] of calls
      that tests make of the folders' functions, and of recorded functions
      called by others; see `tasks.grading.plain`.
  """

  def __init__(self, root: str, config: dict, encode):
    self._prefix = root + os.sep
    self._patterns = config['folders']
    self._record = [tuple(target) for target in config['record']]
    self._encode = encode
    self._codes: dict = {}
    self._seen: dict = {}
    self._objects: dict = {}
    self._entry: list | None = None  # the input of a test's last call
    self.entered: set = set()
    self.inputs: list = []

  def start(self) -> None:
    threading.settrace(self)
    sys.settrace(self)

  def stop(self) -> None:
    sys.settrace(None)
    threading.settrace(None)

  def take(self) -> list:
    entered, self.entered = self.entered, set()
    return sorted(entered)

  def __call__(self, frame, event, argument):
    del event, argument
    name, is_recorded, _ = self._about(frame.f_code)
    if name is None:
      return None
    self.entered.add(name)
    if self._record:
      caller = frame.f_back
      is_entry = caller is not None and self._about(caller.f_code)[2]
      if is_entry:
        self._entry = None
      if is_entry or is_recorded:
        self._input(frame, name, is_entry)
      # What runs now was called by the last call of a test.
      if is_recorded and self._entry is not None:
        self._entry[4] = True
    return None  # calls only, no lines

  def _about(self, code) -> tuple:
    """Name in the folders or None, if it is recorded, if it is a test's."""
    try:
      return self._codes[code]
    except KeyError:
      found = self._codes[code] = self._look(code)
      return found

  def _look(self, code) -> tuple:
    path = os.path.realpath(code.co_filename)
    if not path.startswith(self._prefix):
      return None, False, False
    path = path[len(self._prefix) :].replace(os.sep, '/')
    symbol = code.co_qualname
    is_recorded = any(
      path == where and (not what or f'{symbol}.'.startswith(f'{what}.'))
      for where, what in self._record
    )
    for pattern in self._patterns:
      inside = pattern == '.' or path.startswith(pattern.rstrip('/') + '/')
      if inside or fnmatch.fnmatch(path, pattern):
        return f'{path}:{symbol}', is_recorded, False
    return None, False, True

  def _input(self, frame, name: str, is_entry: bool) -> None:
    count = self._seen[name] = self._seen.get(name, 0) + 1
    code = frame.f_code
    # CO_OPTIMIZED: a function, not the body of a class. What is defined in a
    # function cannot be called by name.
    if count > _MOST_CALLS or not code.co_flags & 1 or '<' in name:
      return
    path, _, symbol = name.partition(':')
    first = code.co_varnames[:1] if '.' in symbol else ()
    if first == ('self',) and not is_entry:
      return  # of an object in the middle of something
    bound = first in (('self',), ('cls',))
    sys.settrace(None)  # encoding may call the code that is traced
    try:
      call = self._encode(*self._arguments(frame.f_locals, code, int(bound)))
    except Exception:  # noqa: BLE001  (arguments of any class: not recorded)
      return
    finally:
      sys.settrace(self)
    of = self._object(frame, symbol) if first == ('self',) else None
    self.inputs.append([path, symbol, of, call, not is_entry])
    if is_entry:
      self._entry = self.inputs[-1]

  def _object(self, frame, symbol: str) -> str:
    key = id(frame.f_locals['self'])
    if symbol.endswith('.__init__') or key not in self._objects:
      self._objects[key] = f'{len(self.inputs)}'  # an id is used again
    return self._objects[key]

  def _arguments(self, values: dict, code, first: int) -> tuple[list, dict]:
    names, count = code.co_varnames, code.co_argcount
    positional = [values[n] for n in names[first:count]]
    keywords = names[count : count + code.co_kwonlyargcount]
    named = {n: values[n] for n in keywords}
    count += code.co_kwonlyargcount
    if code.co_flags & 4:  # *args
      positional += values[names[count]]
      count += 1
    if code.co_flags & 8:  # **kwargs
      named.update(values[names[count]])
    return positional, named


class Plugin:
  """Selects and orders tests, and reports them."""

  def __init__(self, report: SignedReport, config: dict, tracer: Tracer | None):
    self._report = report
    self._ids = set(config['ids'] or ())
    self._selects = config['ids'] is not None
    self._order_seed = config['order_seed']
    self._tracer = tracer

  def pytest_collection_modifyitems(self, session, config, items):
    del session
    self._report.add('collected', [item.nodeid for item in items])
    if self._selects:
      rest = [item for item in items if not self._wants(item.nodeid)]
      if rest:
        config.hook.pytest_deselected(items=rest)
        items[:] = [item for item in items if self._wants(item.nodeid)]
    if self._order_seed is not None:
      random.Random(self._order_seed).shuffle(items)
    self._trace('')  # imports

  def _wants(self, node: str) -> bool:
    return node in self._ids or node.partition('[')[0] in self._ids

  def pytest_collectreport(self, report):
    if not report.passed:
      outcome = 'skipped' if report.skipped else 'error'
      text = str(report.longrepr)[-_MAX_ERROR:]
      self._report.add('collect', report.nodeid, outcome, text)

  def pytest_runtest_logreport(self, report):
    expected = hasattr(report, 'wasxfail')
    self._report.add(
      'test', report.nodeid, report.when, report.outcome, expected
    )

  def pytest_runtest_logfinish(self, nodeid, location):
    del location
    self._report.add('finish', nodeid)
    self._trace(nodeid)

  def _trace(self, node: str) -> None:
    if self._tracer is not None:
      self._report.add('trace', node, self._tracer.take())


def without_places(arguments: list) -> list:
  """Leaves out files and folders to collect: the tests name theirs."""
  return [
    argument
    for argument, before in zip(arguments, ['', *arguments])
    if before in _WITH_VALUE or not os.path.exists(argument)
  ]


def load(name: str, text: str) -> types.ModuleType:
  """A module of the host's, from its text; not importable by others."""
  module = types.ModuleType(name)
  exec(compile(text, f'<{name}>', 'exec'), module.__dict__)
  return module


def main() -> None:
  config = json.loads(sys.stdin.buffer.read())
  report = SignedReport(bytes.fromhex(config.pop('key')))
  root = os.path.realpath(os.getcwd())
  sys.dont_write_bytecode = True
  for name in ('PYTEST_ADDOPTS', 'PYTEST_PLUGINS'):
    os.environ.pop(name, None)
  os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'
  import pytest

  # After the import of pytest: no file of the workspace can stand in for it.
  sys.path[:0] = [
    os.path.normpath(os.path.join(root, f)) for f in config['source_roots']
  ]
  tracer = None
  if config['trace'] is not None:
    plain = load('plain', config['plain'])
    plain.PACKAGES.update(config['trace']['packages'])
    tracer = Tracer(root, config['trace'], plain.encode_call)
    tracer.start()
  files = [f for f in config['files'] if os.path.exists(f)]
  arguments = config['arguments']
  if files:
    arguments = without_places(arguments)
  code: int | str = 5
  try:
    if files or config['ids'] is None:
      plugin = Plugin(report, config, tracer)
      code = int(
        pytest.main(
            ['-p', 'no:cacheprovider', '-c', os.devnull, '--rootdir', root,
             '--continue-on-collection-errors', *arguments, *files],
            plugins=[plugin],
        )
      )  # fmt: skip
  except BaseException as error:  # noqa: BLE001  (of any class: it is reported)
    code = type(error).__name__
  if tracer is not None:
    tracer.stop()
    report.add('inputs', tracer.inputs)
  report.add('end', code)
  report.flush()
  sys.stdout.flush()
  sys.stderr.flush()
  # Threads and exit handlers of the code under test have no turn any more.
  os._exit(0)


if __name__ == '__main__':
  main()
