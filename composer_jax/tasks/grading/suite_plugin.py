"""Runs pytest inside a box and reports each test to the host.

The text of this file is the program (`python -I -c TEXT`): where it runs,
composer_jax does not exist. Its configuration comes on standard input, its
reports go to descriptor 3.

It shares the process with the code under test, which can therefore forge every
report: the key keeps out only code that does not look for it. Reports are
evidence and no proof; `tasks.grading.solution` says how forging is made
unprofitable.
"""

import hashlib
import hmac
import json
import math
import os
import random
import resource
import struct
import sys
import threading
import time
import types
import zlib

_FLUSH_S = 0.5
_FLUSH_ITEMS = 20_000  # the host bounds a frame, and all of them
_MAX_INPUTS, _MAX_ASKED = 100_000, 1000
_MAX_ERROR = 2000
_MAX_CALLS = 40  # of each function, whose inputs are kept
_MAX_SIZE = 4000  # of a call's arguments


class SignedReport:
  """Writes frames of signed, compressed JSON.

  The descriptor is moved away from 3 and no child inherits it, so that neither
  a child nor a stray write to a small descriptor ends up in the report.
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
    self._items = 0
    self._last = time.monotonic()
    self._pid = os.getpid()

  def add(self, *event) -> None:
    if os.getpid() != self._pid:
      return  # a fork made by a test, which goes on as pytest
    self._events.append(event)
    self._items += 6 + (len(event[-1]) if isinstance(event[-1], list) else 0)
    late = time.monotonic() - self._last > _FLUSH_S
    if late or self._items >= _FLUSH_ITEMS:
      self.flush()

  def flush(self) -> None:
    data = zlib.compress(json.dumps(self._events).encode(), 1)
    self._events, self._items = [], 0
    self._last = time.monotonic()
    # The tag covers all frames so far: none can be left out or repeated.
    self._mac.update(data)
    view = memoryview(struct.pack('!I', len(data)) + self._mac.digest() + data)
    while view:
      view = view[os.write(self._descriptor, view) :]


class Tracer:
  """Records which functions of some folders are entered, and with what.

  Attributes:
    entered: numbers of the functions entered since the last `take`.
    names: functions ('path:qualified name') by number.
    inputs: calls that tests make of functions in the folders, and other calls
      of recorded functions, each as [path, qualified name, id of a method's
      object or None, arguments encoded by `tasks.grading.plain`, true if a
      recorded function ran during it, digest of the object if it is the first
      of the arguments, else ''].
  """

  def __init__(self, root: str, config: dict, plain: types.ModuleType):
    self._prefix = root + os.sep
    self._folders = config['folders']
    self._record = config['record']
    self._tests = set(config['tests'])
    self._plain = plain
    self._codes: dict = {}
    self._starts: dict = {}
    self._seen: dict = {}
    self._objects: dict = {}
    self._entry: list | None = None  # the input of a test's last call
    self.entered: set = set()
    self.names: dict = {}
    self._num_inputs = 0
    self.inputs: list = []

  def start(self) -> None:
    threading.settrace(self)
    sys.settrace(self)

  def stop(self) -> None:
    sys.settrace(None)
    threading.settrace(None)
    self._forget()

  def take(self) -> list:
    entered, self.entered = self.entered, set()
    return sorted(entered)

  def __call__(self, frame, event, argument):
    del event, argument
    name, is_recorded, _ = self._about(frame.f_code)
    if name is None:
      return None
    self.entered.add(self.names.setdefault(name, len(self.names)))
    if self._record:
      caller = frame.f_back
      is_entry = caller is not None and self._about(caller.f_code)[2]
      if is_entry:
        self._forget()
      if is_entry or is_recorded:
        self._input(frame, name, is_entry)
      # What runs now was called by the last call of a test.
      if is_recorded and self._entry is not None:
        self._entry[4] = True
    return None  # calls only, no lines

  def _forget(self) -> None:
    """Drops a test's call that reached nothing, unless it is part of a past."""
    match self._entry:
      case [_, _, of, _, False, state] if of is None or state:
        if self.inputs[-1] is self._entry:
          self._num_inputs -= _size(self.inputs.pop()[3])
    self._entry = None

  def _about(self, code) -> tuple:
    """Name of a function in the folders or None; is it recorded, a test's?"""
    if code not in self._codes:
      self._codes[code] = self._look_up(code)
    return self._codes[code]

  def _look_up(self, code) -> tuple:
    path = os.path.realpath(code.co_filename)
    if not path.startswith(self._prefix):
      return None, False, False
    path = path[len(self._prefix) :].replace(os.sep, '/')
    symbol = code.co_qualname
    if path in self._tests or not any(
      f'{path}/'.startswith(f'{f}/') for f in self._folders
    ):
      return None, False, True
    is_recorded = any(
      path == file and (not name or f'{symbol}.'.startswith(f'{name}.'))
      for file, name in self._record
    )
    return f'{path}:{symbol}', is_recorded, False

  def _input(self, frame, name: str, is_entry: bool) -> None:
    count = self._seen[name] = self._seen.get(name, 0) + 1
    code = frame.f_code
    self._note_made(frame.f_locals, code)
    # CO_OPTIMIZED marks a function, not the body of a class. A function defined
    # in a function ('<locals>') cannot be called by name.
    if count > _MAX_CALLS or not code.co_flags & 1 or '<' in name:
      return
    # A generator goes on in the same frame, with other values.
    if self._starts.setdefault(code, frame.f_lasti) != frame.f_lasti:
      return
    path, _, symbol = name.partition(':')
    first = code.co_varnames[:1] if '.' in symbol else ()
    values, skipped = frame.f_locals, int(first == ('cls',))
    of = self._object(values['self']) if first == ('self',) else None
    sys.settrace(None)  # encoding may call the code that is traced
    try:
      # An object of a deleted class is made by its past.
      has_past = of is not None and id(values['self']) in self._plain.MADE
      call = None
      if not has_past:
        call = self._call(*self._arguments(values, code, skipped))
      state = ''
      if call is not None and of is not None:
        held = json.dumps(self._call([values['self']], {}))
        state = hashlib.sha256(held.encode()).hexdigest()[:16]
      # In the middle of another call, the past of an object says too little.
      elif of is not None and is_entry:
        call = self._call(*self._arguments(values, code, 1))
    finally:
      sys.settrace(self)
    if call is None:
      return
    size = _size(call)
    if size > _MAX_SIZE or self._num_inputs + size > _MAX_INPUTS:
      return
    self._num_inputs += size
    self.inputs.append([path, symbol, of, call, not is_entry, state])
    if is_entry:
      self._entry = self.inputs[-1]

  def _note_made(self, values: dict, code) -> None:
    made = values.get('self')
    if code.co_name == '__init__' and self._plain.is_deleted(type(made)):
      positional, named = self._arguments(values, code, 1)
      if not named:
        self._plain.MADE[id(made)] = made, tuple(positional)

  def _object(self, value) -> str:
    # Kept, since ids of dead objects return.
    number, _ = self._objects.setdefault(id(value), (len(self._objects), value))
    return f'{number}'

  def _call(self, positional: list, named: dict) -> list | None:
    """The encoded arguments; None if they have no encoding."""
    try:
      return self._plain.encode_call(positional, named, self._plain.Objects())
    except Exception:  # noqa: BLE001  (arguments of any class may fail)
      return None

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


def _size(call: list) -> int:
  """Number of values, and what long texts count as."""
  text = json.dumps(call)
  return 8 + max(sum(map(text.count, ',[{')), len(text) // 20)


class Plugin:
  """Selects and orders tests, and reports them."""

  def __init__(self, report: SignedReport, config: dict, tracer, stand_ins):
    self._report = report
    self._stand_ins = stand_ins
    self._ids = config['ids']
    self._order_seed = config['order_seed']
    self._tracer = tracer
    self._num_names = 0

  def pytest_collection_modifyitems(self, session, config, items):
    del session
    self._report.add('collected', [item.nodeid for item in items])
    if self._ids is not None:
      ids = set(self._ids)
      wanted = [
        item
        for item in items
        if {item.nodeid, item.nodeid.partition('[')[0]} & ids
      ]
      config.hook.pytest_deselected(items=[*(set(items) - set(wanted))])
      items[:] = wanted
    if self._order_seed is not None:
      random.Random(self._order_seed).shuffle(items)
    self._trace('')  # imports

  def pytest_collectreport(self, report):
    if not report.passed:
      outcome = 'skipped' if report.skipped else 'error'
      text = str(report.longrepr)[-_MAX_ERROR:]
      text = text.encode('utf-8', 'replace').decode()
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
    if self._stand_ins is not None and self._stand_ins.was_used:
      self._report.add('trace', nodeid, [0])
      self._stand_ins.was_used = False

  def _trace(self, node: str) -> None:
    if self._tracer is not None:
      numbers, names = self._tracer.take(), list(self._tracer.names)
      self._report.add('names', names[self._num_names :])
      self._num_names = len(names)
      self._report.add('trace', node, numbers)


def _module(name: str, text: str) -> types.ModuleType:
  module = types.ModuleType(name)
  exec(compile(text, f'<{name}>', 'exec'), module.__dict__)
  return module


def _limit(seconds: float) -> None:
  """Lowers the limit on processor time: SIGXCPU, and a second later SIGKILL."""
  soft, (_, most) = math.ceil(seconds), resource.getrlimit(resource.RLIMIT_CPU)
  if most == resource.RLIM_INFINITY or soft < most:
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))


def main() -> None:
  config = json.loads(sys.stdin.buffer.read())
  if config['cpu_s']:
    _limit(config['cpu_s'])
  report = SignedReport(bytes.fromhex(config.pop('key')))
  root = os.path.realpath(os.getcwd())
  sys.dont_write_bytecode = True
  for name in ('PYTEST_ADDOPTS', 'PYTEST_PLUGINS'):
    os.environ.pop(name, None)
  os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'
  import pytest

  # After the import of pytest: no file of the workspace can replace it.
  sys.path[:0] = [
    os.path.normpath(os.path.join(root, f)) for f in config['source_roots']
  ]
  tracer, stand_ins = None, None
  plain = _module('plain', config['plain'])
  if replaced := config['stand_ins']:
    packages = [module.partition('.')[0] for module, _ in replaced['functions']]
    plain.PACKAGES.update(packages)
    program = _module('stand_ins', replaced['program'])
    stand_ins = program.StandIns(plain, replaced['answers'])
    stand_ins.install(replaced['functions'], packages)
    report.add('names', ['stand-in'])
  if config['trace'] is not None:
    tops = map(os.path.basename, config['trace']['folders'])
    plain.PACKAGES.update(top.removesuffix('.py') for top in tops)
    plain.DELETED.update(map(tuple, config['trace']['deleted']))
    tracer = Tracer(root, config['trace'], plain)
    tracer.start()
  files = [f for f in config['files'] if os.path.exists(f)]
  code: int | str = 5
  try:
    if files or config['ids'] is None:
      plugin = Plugin(report, config, tracer, stand_ins)
      code = int(
        pytest.main(
            ['-p', 'no:cacheprovider', '-c', os.devnull, '--rootdir', root,
             '--continue-on-collection-errors', '--assert=plain',
             *config['arguments'], *files],
            plugins=[plugin],
        )
      )  # fmt: skip
  except BaseException as error:  # noqa: BLE001  (reported, whatever it is)
    code = type(error).__name__
  if tracer is not None:
    tracer.stop()
    report.add('inputs', tracer.inputs)
  if stand_ins is not None:
    report.add('inputs', list(stand_ins.asked.values())[:_MAX_ASKED])
  report.add('end', code)
  report.flush()
  sys.stdout.flush()
  sys.stderr.flush()
  # Ends threads and skips exit handlers of the code under test.
  os._exit(0)


if __name__ == '__main__':
  main()
