"""Calls the untrusted function and writes its results as JSON.

The program of `base.Sandbox.call`, in the untrusted process, which may forge
every byte of the result, but never sees an expected value. Standard library
only.
"""

import contextlib
import importlib
import json
import os
import resource
import sys
from typing import Any

CALL = 'call'  # the program's name in a warm command
_MAX_DEPTH = 32
_MAX_TEXT = 500
_MAX_INTEGER_BITS = 4096


def main() -> None:
  """Imports the function, calls it and writes the results; never returns."""
  request = json.load(sys.stdin)
  code = 1
  try:
    # An error of one call, where the sandbox's own limit would end them all.
    _bound(request['memory_bytes'])
    function, failure = _load(request)
    outcomes = [
      failure or _outcome(function, arguments)
      for arguments in request['arguments']
    ]
    with open(3, 'wb') as file:
      file.write(json.dumps(outcomes).encode())
    code = 0
  except SystemExit as error:
    print(f'SystemExit at import: {error.code}', file=sys.stderr)
  finally:
    try:
      sys.stdout.flush()
      sys.stderr.flush()
    finally:
      os._exit(code)


def _bound(memory_bytes: int) -> None:
  # A lower limit may hold, and macOS refuses the call.
  with contextlib.suppress(OSError, ValueError):
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _load(request: dict) -> tuple[Any, list | None]:
  for name in request['names']:
    # A file of the workspace takes precedence over a module already loaded.
    top = name.split('/')[0].removesuffix('.py')
    sys.modules.pop(top, None)
  sys.path.insert(0, os.getcwd())
  sys.dont_write_bytecode = True  # nobody would read it
  importlib.invalidate_caches()
  try:
    module = importlib.import_module(request['module'])
    return getattr(module, request['function']), None
  except SystemExit:
    raise
  # Every exception here is raised by untrusted code and is its result, even a
  # KeyboardInterrupt or a class of its own.
  except BaseException as error:  # noqa: BLE001
    return None, ['raised', describe(error)]


def _outcome(function, arguments: list) -> list:
  try:
    return ['ok', plain(function(*arguments))]
  # A SystemExit of the function too: the next arguments are called as well.
  except BaseException as error:  # noqa: BLE001
    return ['raised', describe(error)]


def describe(error: BaseException) -> str:
  try:
    text = f'{type(error).__name__}: {error}'
  # The error's class is untrusted code as well, and its __str__ may raise.
  except BaseException:  # noqa: BLE001
    text = type(error).__name__
  return text[:_MAX_TEXT].encode('utf-8', 'replace').decode()


def plain(value: Any, depth: int = 0) -> Any:
  """Returns the value if JSON represents it exactly; subclasses are refused."""
  kind = type(value)
  if depth > _MAX_DEPTH:
    raise ValueError(f'result is nested deeper than {_MAX_DEPTH}')
  if value is None or kind is bool:
    return value
  if kind is int:
    if value.bit_length() > _MAX_INTEGER_BITS:
      raise ValueError(f'result holds over {_MAX_INTEGER_BITS} bits of integer')
    return value
  if kind is str:
    value.encode()  # lone surrogates are no text
    return value
  if kind is float:
    if value - value != 0:
      raise ValueError(f'result holds {value}, which JSON does not have')
    return value
  if kind is list:
    return [plain(item, depth + 1) for item in value]
  if kind is dict and all(type(key) is str for key in value):
    return {plain(key): plain(item, depth + 1) for key, item in value.items()}
  raise TypeError(f'result holds a {kind.__name__}, which JSON does not have')
