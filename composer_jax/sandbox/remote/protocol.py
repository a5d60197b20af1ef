"""A sandbox behind messages: the server, and the client that asks it.

`RemoteSandbox` checks types and bounds of all answers, because untrusted code
may have taken over the machine of the server. Standard library only: the guest
has nothing else.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_jax.sandbox import base, results
from composer_jax.sandbox.remote import messages

_QUICK_S = 30.0
# Methods of a box that answer to any message; the others have cases.
_OF_BOX = ('read', 'write', 'remove', 'files', 'changes')
_CHANGES = ('added', 'changed', 'removed', 'special')
_ERRORS = {
  'refused': base.FileRefused,
  'value': ValueError,
  'lost': base.SandboxLost,
}

Message = messages.Message


class SandboxServer:
  """Answers messages on behalf of a sandbox, from any thread."""

  def __init__(self, sandbox: base.Sandbox):
    self._sandbox = sandbox
    self._boxes: dict[int, base.Box] = {}
    self._serials = itertools.count(1)

  def answer(self, header: dict, parts: tuple[bytes, ...]) -> Message:
    try:
      return self._answer(header, parts)
    except base.FileRefused as error:
      kind, reason = 'refused', error
    except ValueError as error:
      kind, reason = 'value', error
    except (base.SandboxLost, OSError) as error:
      kind, reason = 'lost', error
    return {'error': kind, 'reason': str(reason)[:2000]}, ()

  def close(self) -> None:
    for box in list(self._boxes.values()):
      box.close()
    self._boxes.clear()

  def _answer(self, header: dict, parts: tuple[bytes, ...]) -> Message:
    match header['do']:
      case 'about':
        about = self._sandbox.about
        return {'level': self._sandbox.level, 'about': about}, ()
      case 'open':
        changes = dict.fromkeys(header['removed'])
        changes.update(zip(header['written'], parts, strict=True))
        return self._keep(self._sandbox.open(header['image'], changes))
      case 'close':
        if box := self._boxes.pop(header['box'], None):
          box.close()
        return {}, ()
    if header['box'] not in self._boxes:
      raise ValueError(f'box {header["box"]} is closed.')
    return self._of_box(self._boxes[header['box']], header, parts)

  def _of_box(
    self, box: base.Box, header: dict, parts: tuple[bytes, ...]
  ) -> Message:
    if header['do'] == 'run':
      result = box.run(base.Command(**header['command'], stdin=parts[0]))
      fields = dataclasses.asdict(result)
      return fields, (fields.pop('report'),)
    assert header['do'] in _OF_BOX, header['do']
    value = getattr(box, header['do'])(*header['arguments'], *parts)
    return ({}, (value,)) if type(value) is bytes else ({'value': value}, ())

  def _keep(self, box: base.Box) -> Message:
    serial = next(self._serials)
    self._boxes[serial] = box
    return {'box': serial}, ()


def serve(
  read: Callable[[int], bytes],
  send: Callable[[bytes], None],
  sandbox: base.Sandbox,
  *,
  size: int,
  extra: Mapping[str, Callable[[dict], dict]] | None = None,
) -> None:
  """Answers the messages of a stream until it ends.

  Consumes: messages with an 'id'.
  Waits for: the stream.
  Woken by: a message; the end of the stream, upon which it closes the boxes.
  Produces: an answer with the same id, in the order in which they are ready.

  Args:
    read: function that reads bytes of the stream, fewer only at its end.
    send: function that writes all bytes to the stream.
    sandbox: sandbox that carries out the requests.
    size: number of messages that are worked on at a time.
    extra: name -> function for further requests.
  """
  server, sending = SandboxServer(sandbox), threading.Lock()

  def answer(header, parts):
    identity = header.pop('id')
    try:
      if extra and header['do'] in extra:
        reply, out = extra[header['do']](header), ()
      else:
        reply, out = server.answer(header, parts)
    # Nobody would see an exception in this thread: the asking side must.
    except Exception as error:  # noqa: BLE001
      reply, out = {'error': 'lost', 'reason': repr(error)[:2000]}, ()
    try:
      data = messages.encode({**reply, 'id': identity}, out)
    except ValueError as error:  # more than a message holds
      reply = {'error': 'refused', 'reason': str(error), 'id': identity}
      data = messages.encode(reply)
    with sending:
      send(data)

  with concurrent.futures.ThreadPoolExecutor(size) as threads:
    with contextlib.suppress(EOFError, OSError):
      while True:
        threads.submit(answer, *messages.decode(read))
  server.close()


class RemoteSandbox(base.Sandbox):
  """A sandbox at the other end of a transport.

  When it is lost, `call` and `run` return 'infrastructure', and everything else
  raises `base.SandboxLost`.
  """

  def __init__(
    self,
    transport: messages.Transport,
    limits: base.Limits,
    *,
    level: str | None = None,
    size: int = 1,
    grace_s: float = 30.0,
    on_close: Callable[[], None] | None = None,
  ):
    """Asks the other side for its level and features.

    Args:
      transport: carrier of messages.
      limits: limits of the other side.
      level: level to report; None for the one that the other side states.
      size: calls at a time; further ones wait here before their time counts.
      grace_s: seconds to wait for the first answer, and beyond wall limits.
      on_close: called at the end, to end the other side.
    """
    self._transport, self.limits = transport, limits
    self._grace_s, self._on_close = grace_s, on_close
    self._slots = threading.BoundedSemaphore(size)
    header, _ = self.ask({'do': 'about'}, (), grace_s)
    self.about = _typed(header, 'about', dict)
    inner = _typed(header, 'level', str)
    if inner not in base.LEVELS + base.OUTER_LEVELS:
      raise base.SandboxLost(f'unknown level {inner[:40]!r}')
    self.level = level or inner

  def ask(
    self, header: dict, parts: Sequence[bytes] = (), timeout_s: float = _QUICK_S
  ) -> Message:
    """Returns the answer; raises the other side's error, or `SandboxLost`."""
    reply, out = self._transport.ask(header, parts, timeout_s)
    if (kind := reply.get('error')) in _ERRORS and 'status' not in reply:
      raise _ERRORS[kind](_clean(str(reply.get('reason'))))
    return reply, out

  def timed(self, header: dict, parts: Sequence[bytes], wall_s: float):
    """Asks for a run, whose time begins when it has a slot."""
    with self._slots:
      return self.ask(header, parts, wall_s + self._grace_s)

  def open(
    self, image: str, changes: Mapping[str, bytes | None] | None = None
  ) -> 'RemoteBox':
    changes = changes or {}
    written = {k: bytes(v) for k, v in changes.items() if v is not None}
    header = {
        'do': 'open', 'image': image, 'written': list(written),
        'removed': [k for k, v in changes.items() if v is None],
    }  # fmt: skip
    reply, _ = self.timed(header, list(written.values()), _QUICK_S)
    return RemoteBox(self, self.limits, _typed(reply, 'box', int))

  def close(self) -> None:
    self._transport.close()
    if self._on_close:
      self._on_close()


class RemoteBox(base.Closing):
  """A box at the other end; see `base.Box`."""

  def __init__(self, sandbox: RemoteSandbox, limits: base.Limits, serial: int):
    self.level = sandbox.level
    self._sandbox, self._limits, self._serial = sandbox, limits, serial
    self._closed = False

  def _ask(self, do: str, *arguments: Any, parts: Sequence[bytes] = ()):
    # Not `ask`: copying a large workspace takes long on a slow machine.
    header = {'do': do, 'box': self._serial, 'arguments': arguments}
    return self._sandbox.timed(header, parts, _QUICK_S)

  def run(self, command: base.Command) -> base.CommandResult:
    fields = dataclasses.asdict(command)
    parts = (fields.pop('stdin'),)
    header = {'do': 'run', 'box': self._serial, 'command': fields}
    wall_s = min(self._limits.wall_s, command.wall_s or math.inf)
    try:
      reply, out = self._sandbox.timed(header, parts, wall_s)
      return self._result(reply, out)
    except base.SandboxLost as error:
      return base.CommandResult(
        level=self.level, status='infrastructure', error=str(error)
      )

  def _result(self, reply, parts) -> base.CommandResult:
    status, code = _typed(reply, 'status', str), reply.get('exit_code')
    if status not in base.STATUSES or type(code) not in (int, type(None)):
      raise base.SandboxLost(f'no result: {status[:40]!r}, {str(code)[:40]!r}')
    cap = self._limits.output_bytes
    return base.CommandResult(
        level=self.level, status=status, exit_code=code,
        output=_clean(_typed(reply, 'output', str), cap),
        truncated=_typed(reply, 'truncated', bool),
        report=_only(parts)[:cap], error=_clean(_typed(reply, 'error', str)),
        wall_s=_seconds(reply),
    )  # fmt: skip

  def read(self, path: str, max_bytes: int) -> bytes:
    data = _only(self._ask('read', path, max_bytes)[1])
    if len(data) > max_bytes:
      raise base.FileRefused(f'{path!r} holds more than {max_bytes} bytes')
    return data

  def write(self, path: str, data: bytes) -> None:
    self._ask('write', path, parts=(data,))

  def remove(self, path: str) -> None:
    self._ask('remove', path)

  def files(self, folder: str = '.') -> tuple[str, ...]:
    return tuple(_texts(_typed(self._ask('files', folder)[0], 'value', list)))

  def changes(self) -> dict[str, str]:
    changes = _typed(self._ask('changes')[0], 'value', dict)
    if not set(_texts(list(changes.values()))) <= set(_CHANGES):
      raise base.SandboxLost(f'the answer has changes not in {_CHANGES}')
    return changes

  def close(self) -> None:
    if not self._closed:
      self._closed = True
      with contextlib.suppress(base.SandboxLost):
        self._ask('close')


def _typed(reply: dict, name: str, kind: type) -> Any:
  value = reply.get(name)
  if type(value) is not kind:
    raise base.SandboxLost(
      f'the answer has a {type(value).__name__} for {name!r}, not '
      f'{kind.__name__}'
    )
  return value


def _texts(values: list) -> list[str]:
  if not all(type(value) is str for value in values):
    raise base.SandboxLost('the answer lists something else than text')
  return values


def _clean(text: str, max_chars: int = 2000) -> str:
  # JSON can spell lone surrogates, and the guest need not have cleaned it.
  return results.clean(text[:max_chars].encode('utf-8', 'replace'))


def _only(parts: tuple[bytes, ...]) -> bytes:
  if len(parts) != 1:
    raise base.SandboxLost(f'the answer has {len(parts)} parts, not one')
  return parts[0]


def _seconds(reply: dict) -> float:
  value = reply.get('wall_s')
  if not isinstance(value, int | float) or not 0 <= value < math.inf:
    raise base.SandboxLost(f'wall_s ({str(value)[:40]}) is no duration')
  return float(value)
