"""Calls functions of a package inside a box and reports what they gave.

The text of this file is the program, as in `tasks.grading.suite_plugin`. The
process never holds an expected value, so code that forges a report can only
guess.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import types
from typing import Any

# Limits on processor time. What sleeps may take ten times as long.
_IMPORT_S = 20.0
_WALL = 10.0


class _TooSlow(BaseException):
  """Not an Exception: the called code shall not catch it by accident."""


def _alarm(number, frame):
  del number, frame
  raise _TooSlow


def _limit(seconds: float) -> None:
  """Has the program interrupted after processor seconds; 0 ends a limit."""
  signal.setitimer(signal.ITIMER_PROF, seconds)
  signal.setitimer(signal.ITIMER_REAL, _WALL * seconds)


def _resolve(module: str, symbol: str) -> Any:
  """The function, or one of this name in the top-level package; or None."""
  for place in (module, module.split('.')[0]):
    try:
      value = importlib.import_module(place)
      for name in symbol.split('.'):
        value = getattr(value, name)
      return value
    except (ImportError, AttributeError):
      continue
  return None


def call(plain: types.ModuleType, request: list, opaque: list) -> list:
  """Makes one call.

  Returns:
    ['ok', result, arguments if the call changed any, and as they were],
    ['raised', class name, arguments of the error if they are plain, names of
    the classes above its own] or ['missing'].
  """
  module, symbol, past, arguments = request
  try:
    function = _resolve(module, symbol)
    if function is None:
      return ['missing']
    if past is not None:
      owner, _, name = symbol.rpartition('.')
      function = getattr(_object(plain, _resolve(module, owner), past), name)
    for maker in ('fget', 'func'):  # of a property, and of one that is kept
      if not callable(function):
        function = getattr(function, maker, function)
    positional, named = plain.decode_call(arguments)
    before = _seen(plain, positional, opaque)
    result = function(*positional, **named)
    encoded = plain.encode_result(result, opaque)
    after = _seen(plain, positional, opaque)
    seen = [after, before] if after != before else [None]
    return ['ok', encoded, *seen]
  except (Exception, SystemExit, _TooSlow) as error:  # noqa: BLE001
    name, *above = plain.classes_of(error)
    return ['raised', name, _arguments(plain, error), above]


def _arguments(plain: types.ModuleType, error: BaseException) -> list | None:
  try:
    return [plain.encode(value, exact=False) for value in error.args]
  except Exception:  # noqa: BLE001  (the error's class is unknown code)
    return None


def _seen(plain: types.ModuleType, values: list, opaque: list) -> list:
  return [plain.encode_result(v, opaque, draws=False) for v in values]


def _object(plain: types.ModuleType, owner, past: list):
  """A new object on which the past calls have been repeated."""
  arguments, before = past
  positional, named = plain.decode_call(arguments)
  made = owner(*positional, **named)
  for name, arguments in before:
    with contextlib.suppress(Exception):  # tests provoke errors, too
      positional, named = plain.decode_call(arguments)
      getattr(made, name)(*positional, **named)
  return made


def main() -> None:
  config = json.loads(sys.stdin.buffer.read())
  sys.dont_write_bytecode = True
  root = os.path.realpath(os.getcwd())
  sys.path[:0] = [
    os.path.normpath(os.path.join(root, f)) for f in config['source_roots']
  ]
  plain = types.ModuleType('plain')
  exec(compile(config['plain'], '<plain>', 'exec'), plain.__dict__)
  plain.PACKAGES.update(config['packages'])
  # An error of one call, where the sandbox's own limit would end them all.
  with contextlib.suppress(OSError, ValueError):
    resource.setrlimit(resource.RLIMIT_AS, (config['memory_bytes'],) * 2)
  outcomes = []
  signal.signal(signal.SIGALRM, _alarm)
  signal.signal(signal.SIGPROF, _alarm)
  # So that the time of imports is not that of a call.
  _limit(_IMPORT_S)
  with contextlib.suppress(Exception, SystemExit, _TooSlow):
    for module in {request[0] for request, _ in config['calls']}:
      _resolve(module, '__name__')
  _limit(0)
  end = time.process_time() + config['calls_s']
  last = time.monotonic() + _WALL * config['calls_s']
  for request, seconds in config['calls']:
    begin, outcome = time.process_time(), ['raised', 'TimeoutError', None]
    if begin < end and time.monotonic() < last:
      _limit(seconds)
      with contextlib.suppress(_TooSlow):
        outcome = call(plain, request, config['opaque'])
        _limit(0)
    text = json.dumps([outcome, time.process_time() - begin])
    if len(text) > config['most']:  # the host bounds them all
      text = '[["raised", "TooLarge", null], 0.0]'
    outcomes.append(text)
  data = memoryview(f'[{",".join(outcomes)}]'.encode())
  while data:
    data = data[os.write(3, data) :]
  os._exit(0)


if __name__ == '__main__':
  main()
