"""Calls of single functions, each in a box of its own.

What a call adds to a box: the program `inside.runner`, and a check of what
comes out of it.
"""

import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from composer_jax.sandbox import base, results
from composer_jax.sandbox.inside import runner

MAX_REQUEST = 16 << 20


class CallingSandbox(base.Closing):
  """A sandbox that makes calls in the boxes that it opens.

  Attributes:
    limits: limits of each call and program.
  """

  level: str
  about: dict[str, Any]
  limits: base.Limits

  def open(
    self, image: str, changes: Mapping[str, bytes | None] | None = None
  ) -> base.Box:
    raise NotImplementedError

  def call(
    self, files: dict[str, str], module: str, function: str, arguments: list
  ) -> base.Result:
    """See `base.Sandbox`; once more if the sandbox fails."""
    request = json.dumps({
        'names': list(files), 'module': module, 'function': function,
        'arguments': [list(each) for each in arguments],
        'memory_bytes': self.limits.memory_bytes,
    }).encode()  # fmt: skip
    if len(request) > MAX_REQUEST:
      raise ValueError(
        f'the request has {len(request)} bytes; {MAX_REQUEST} are allowed: '
        'send less in arguments.'
      )
    contents = {name: text.encode() for name, text in files.items()}
    command = base.Command(argv=(runner.CALL,), warm=True, stdin=request)
    reason = ''
    for attempt in range(2):
      try:
        with contextlib.closing(self.open('', contents)) as box:
          ending = box.run(command)
        if ending.status != 'infrastructure':
          return self._result(ending, len(arguments))
        reason = ending.error
      except base.SandboxLost as error:
        reason = str(error)
      logging.warning(
        'A sandbox failed (%s), attempt %d of 2.', reason, attempt + 1
      )
    return base.Result(level=self.level, status='infrastructure', error=reason)

  def _result(self, ending: base.CommandResult, num_calls: int) -> base.Result:
    status, value, error = ending.status, None, ending.error
    if status == 'ok':
      try:
        if len(ending.report) == self.limits.output_bytes:
          raise ValueError(f'the result fills {len(ending.report)} bytes')
        value = results.parse(ending.report, num_calls)
      except ValueError as reason:
        status, error = 'exit', f'exit code {ending.exit_code}: {reason}'
    return base.Result(
        level=ending.level, status=status, value=value, error=error,
        stdout=ending.output, wall_s=ending.wall_s,
    )  # fmt: skip
