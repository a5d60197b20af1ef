"""Runners without a sandbox: for trusted code, and for none at all.

Only a sandbox (`composer_jax.sandbox`) may execute what a policy wrote. The two
`seams.Runner`s here serve for text that this package generated, and on machines
without isolation.
"""

import contextlib
import dataclasses
import json
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
  """The result of a runner that never fails to run."""

  level: str
  value: list
  wall_s: float
  status: str = 'ok'
  error: str = ''


class _LocalRunner:
  """A runner in this process; measures the time of `_outcomes`."""

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
    outcomes = self._outcomes(text, function, arguments)
    return LocalResult(
      level=self.level, value=outcomes, wall_s=time.monotonic() - start
    )

  def _outcomes(
    self, text: str, function: str, arguments: list[list]
  ) -> list[list]:
    raise NotImplementedError


class TrustedRunner(_LocalRunner):
  """Executes text that this package generated, in this process.

  Nothing is limited: a policy's text must never come here.
  """

  level = 'trusted'

  def _outcomes(self, text, function, arguments) -> list[list]:
    namespace = types.ModuleType('trusted').__dict__
    try:
      exec(compile(text, '<trusted>', 'exec', dont_inherit=True), namespace)
    except SyntaxError as error:
      return [['raised', f'SyntaxError: {error.msg}']] * len(arguments)
    return [self._call(namespace[function], args) for args in arguments]

  def _call(self, function: Any, args: list) -> list:
    try:
      # A copy, so that no call sees what an earlier one changed.
      return ['ok', function(*json.loads(json.dumps(args)))]
    except _RAISED as error:
      return ['raised', f'{type(error).__name__}: {error}']


class StaticRunner(_LocalRunner):
  """Executes nothing: recognises the functions of `compositions` by form.

  A body that equals a composition's up to bound names gets the answers of that
  composition. Any other body gets 'raised NotRecognised', even a right one, and
  so does every body of a module that does not compile. Other functions of the
  module are not looked at: `source.replace_body` changes bodies alone.
  """

  level = 'static'

  def _outcomes(self, text, function, arguments) -> list[list]:
    composition = None
    with contextlib.suppress(ValueError):
      if node := source.find(source.check(text), function):
        composition = compositions.recognise(source.normal_form(node))
    if composition is None:
      return [['raised', 'NotRecognised']] * len(arguments)
    return [['ok', composition.evaluate(*args)] for args in arguments]
