"""A chat endpoint in a thread that fails in every way of real ones."""

import contextlib
import dataclasses
import http.server
import json
import threading
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class Reply:
  """One HTTP answer.

  Attributes:
    body: JSON value, or bytes to send as they are.
    events: values of a stream's events in place of a body; bytes as they are.
    breaks: True to end the connection before all of it is sent.
  """

  body: Any = None
  status: int = 200
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  events: list | None = None
  breaks: bool = False


class Clock:
  """Time that passes only while somebody sleeps."""

  def __init__(self):
    self.now, self.waits, self._lock = 1000.0, [], threading.Lock()

  def monotonic(self):
    return self.now

  def sleep(self, seconds):
    with self._lock:
      self.waits.append(seconds)
      self.now += seconds


def said(text=None, finish='stop', calls=(), usage=None, **fields):
  """Returns a chat completion; each call is (id, name, arguments)."""
  made = [
    {'id': i, 'type': 'function', 'function': {'name': n, 'arguments': a}}
    for i, n, a in calls
  ]
  message = {'role': 'assistant', 'content': text, **fields}
  if made:
    message['tool_calls'] = made
  choice = {'index': 0, 'message': message, 'finish_reason': finish}
  return {'choices': [choice], 'usage': usage}


def streamed(completion, size=3):
  """Returns the events of a completion, its texts in pieces."""
  (choice,) = completion['choices']
  message = dict(choice['message'])
  deltas = [{'role': 'assistant', 'content': ''}]
  for place, call in enumerate(message.pop('tool_calls', ())):
    function = call['function']
    head = {'id': call['id'], 'type': 'function', 'index': place}
    named = {'name': function['name'], 'arguments': ''}
    deltas.append({'tool_calls': [head | {'function': named}]})
    deltas += [
      {'tool_calls': [{'index': place, 'function': {'arguments': piece}}]}
      for piece in _pieces(function['arguments'], size)
    ]
  for name, text in message.items():
    if name != 'role' and isinstance(text, str):
      deltas += [{name: piece} for piece in _pieces(text, size)]
  events = [{'choices': [{'index': 0, 'delta': d}]} for d in deltas]
  last = {'index': 0, 'delta': {}, 'finish_reason': choice['finish_reason']}
  events.append({'choices': [last]})
  events.append({'choices': [], 'usage': completion['usage']})
  return [*events, b'[DONE]']


def _pieces(text, size):
  return [text[i : i + size] for i in range(0, len(text), size)]


@contextlib.contextmanager
def serving(reply):
  """Serves `reply(body) -> Reply`; yields the URL and (headers, body) seen."""
  seen = []

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      size = int(self.headers['content-length'])
      body = json.loads(self.rfile.read(size))
      seen.append((self.headers, body))
      self._send(reply(body))

    def _send(self, made):
      data, kind = made.body, 'application/json'
      if made.events is not None:
        kind = 'text/event-stream'
        data = b''.join(b'data: %s\n\n' % _bytes(e) for e in made.events)
      elif data is None and made.breaks:
        self.close_connection = True
        self.connection.close()
        return
      data = _bytes(data)
      self.send_response(made.status)
      self.send_header('content-type', kind)
      self.send_header('content-length', str(len(data) + 9 * made.breaks))
      for name, value in made.headers.items():
        self.send_header(name, value)
      self.end_headers()
      self.wfile.write(data)
      self.close_connection = True

    def log_message(self, *arguments):
      del arguments

  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
  thread = threading.Thread(target=server.serve_forever, args=(0.01,))
  thread.start()
  try:
    yield f'http://127.0.0.1:{server.server_port}/v1', seen
  finally:
    server.shutdown()
    thread.join()
    server.server_close()


def _bytes(value):
  return value if isinstance(value, bytes) else json.dumps(value).encode()


def in_turn(*replies):
  """Returns a function that gives each reply once; values become bodies."""
  left = [r if isinstance(r, Reply) else Reply(r) for r in replies]
  return lambda body: left.pop(0)
