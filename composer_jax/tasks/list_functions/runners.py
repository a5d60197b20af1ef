"""Ways to call a function of a task's package, one of which executes nothing.

A sandbox (`composer_jax.sandbox`) is a `seams.Runner` and the only one that may
execute what a policy wrote. The two here serve where that does not arise:
trusted text of our own generators, and machines that refuse isolation.
"""

import contextlib
import dataclasses
import json
import logging
import time
import types
from typing import Any

from composer_jax.core import seams
from composer_jax.tasks import source
from composer_jax.tasks.list_functions import compositions

_RAISED = (
    ArithmeticError, LookupError, NameError, TypeError, ValueError,
    NotImplementedError,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalResult:
  """Of the runners of this module, which never fail to run."""

  level: str
  value: list
  wall_s: float
  status: str = 'ok'
  error: str = ''


def call(
  runner: seams.Runner,
  files: dict[str, str],
  module: str,
  function: str,
  arguments: list[list],
) -> seams.RunResult:
  """`runner.call`, tried once more after a failure of the infrastructure."""
  result = runner.call(files, module, function, arguments)
  if result.status == 'infrastructure':
    logging.warning(
      '%s sandbox failed, retrying: %s', result.level, result.error
    )
    result = runner.call(files, module, function, arguments)
  return result


class _LocalRunner:
  """What the runners of this process share: text in, outcomes timed."""

  level: str

  def call(
    self,
    files: dict[str, str],
    module: str,
    function: str,
    arguments: list[list],
  ) -> seams.RunResult:
    start = time.monotonic()
    text = files[module.replace('.', '/') + '.py']
    outcomes = self._outcomes(text, module, function, arguments)
    return LocalResult(
      level=self.level, value=outcomes, wall_s=time.monotonic() - start
    )

  def _outcomes(
    self, text: str, module: str, function: str, arguments: list[list]
  ) -> list[list]:
    raise NotImplementedError


class TrustedRunner(_LocalRunner):
  """Executes in this process. Only for text that this package generated.

  Nothing is limited: a policy's text must never come here.
  """

  level = 'trusted'

  def _outcomes(self, text, module, function, arguments) -> list[list]:
    namespace = types.ModuleType(module).__dict__
    try:
      exec(compile(text, module, 'exec', dont_inherit=True), namespace)
    except SyntaxError as error:
      return [['raised', f'SyntaxError: {error.msg}']] * len(arguments)
    return [self._call(namespace[function], args) for args in arguments]

  def _call(self, function: Any, args: list) -> list:
    try:
      # A round trip, so that no call sees what an earlier one changed.
      return ['ok', function(*json.loads(json.dumps(args)))]
    except _RAISED as error:
      return ['raised', f'{type(error).__name__}: {error}']


class StaticRunner(_LocalRunner):
  """Executes nothing: knows the functions of `compositions` by their form.

  A body equal to a composition's up to bound names has that composition's
  meaning, which is computed from the composition. Any other body is 'raised
  NotRecognised', even if it is right, and so is every body in a module that
  does not compile: stricter than a sandbox. It looks at bodies alone, which is
  all that `source.replace_body` changes; what another function does when it is
  called is not asked.
  """

  level = 'static'

  def _outcomes(self, text, module, function, arguments) -> list[list]:
    composition = None
    with contextlib.suppress(ValueError):
      if node := source.find(source.check(text), function):
        composition = compositions.recognise(source.normal_form(node))
    if composition is None:
      return [['raised', 'NotRecognised']] * len(arguments)
    return [['ok', composition.evaluate(*args)] for args in arguments]
