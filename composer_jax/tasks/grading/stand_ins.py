"""Functions that answer from a table, in the place of those of a solution.

The text of this file runs inside boxes, as that of `tasks.grading.plain` does:
the tests of a task run against the original package, whose deleted functions
are replaced by these. Their answers are the values that a process of the
solution gave (`tasks.grading.outside`), so no code of the solution runs beside
the tests.
"""

import builtins
import functools
import importlib
import json
import sys
import types
from typing import Any


class Unanswered(BaseException):
  """Ends a test; not an Exception, so that no test catches it by accident."""


class StandIns:
  """The functions, and the calls to which they have no answer yet.

  Attributes:
    asked: calls without an answer by key, as `inputs.Recorded`.
    was_used: true once a function answered.
  """

  def __init__(self, plain: types.ModuleType, answers: dict):
    self._plain, self._answers = plain, answers
    self.asked: dict[str, list] = {}
    self.was_used = False

  def install(self, functions: list, packages: list) -> None:
    """Replaces the functions [module, name] under all their names."""
    for module, name in functions:
      try:
        real = getattr(importlib.import_module(module), name, None)
      except ImportError:
        continue
      if not callable(real) or isinstance(real, type):
        continue
      made = self._make(module, name, real)
      for place in list(sys.modules.values()):
        if getattr(place, '__name__', '').partition('.')[0] in packages:
          for alias, value in list(vars(place).items()):
            if value is real:
              setattr(place, alias, made)

  def _make(self, module: str, name: str, real: Any) -> Any:
    @functools.wraps(real)
    def stand_in(*positional, **named):
      try:
        given = self._plain.encode_call(list(positional), named)
      except ValueError as error:  # not by value
        raise Unanswered from error
      call = [module, name, None, given]
      key = json.dumps(call)
      if key not in self._answers:
        self.asked[key] = call
        raise Unanswered
      self.was_used = True
      return self._give(self._answers[key], positional, given[0], module)

    return stand_in

  def _give(
    self, outcome: list, positional: tuple, given: list, module: str
  ) -> Any:
    """Does what the solution did: returns, changes arguments, or raises."""
    match outcome:
      case ['ok', value, after, *_]:
        for argument, old, new in zip(positional, given, after or given):
          if old != new:
            self._change(argument, self._plain.decode_result(new))
        return self._plain.decode_result(value)
      case ['raised', str(name), arguments, *above]:
        top = sys.modules.get(module.partition('.')[0])
        places = (builtins, sys.modules.get(module), top)
        names = [name, *(above[0] if above else ())]
        kinds = [getattr(place, n, None) for n in names for place in places]
        kind = next((k for k in kinds if _is_error(k)), None)
        if kind is None:
          raise Unanswered
        raise kind(*map(self._plain.decode_result, arguments or []))
    raise Unanswered

  def _change(self, argument: Any, value: Any) -> None:
    if isinstance(argument, list | bytearray):
      argument[:] = value
    elif isinstance(argument, dict | set):
      argument.clear()
      argument.update(value)
    else:
      raise Unanswered


def _is_error(kind: Any) -> bool:
  return isinstance(kind, type) and issubclass(kind, Exception)
