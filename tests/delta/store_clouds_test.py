"""Stores of Google Cloud and Azure before the least that answers like them.

The services themselves were never met here.
"""

import email.utils
import http.server
import re
import threading

import pytest

from composer_jax.delta.store import objects as store


class _Cloud(http.server.BaseHTTPRequestHandler):
  """Keeps (generation, bytes) by path; writes under the conditions of both."""

  protocol_version = 'HTTP/1.1'
  kept: dict[str, tuple[int, bytes]]
  lose_next: list[bool]

  def _answer(self, status, body=b'', headers=()):
    generation, data = self.kept.get(self.path, (0, b''))
    self.send_response(status)
    self.send_header('ETag', f'"{generation}"')
    self.send_header('x-goog-generation', str(generation))
    self.send_header('Last-Modified', email.utils.formatdate(usegmt=True))
    is_head = self.command == 'HEAD'
    self.send_header('Content-Length', str(len(data if is_head else body)))
    for header in headers:
      self.send_header(*header)
    self.end_headers()
    self.wfile.write(body)

  def do_PUT(self):
    body = self.rfile.read(int(self.headers['Content-Length']))
    found = self.kept.get(self.path, (0, b''))[0]
    wanted = self.headers.get('x-goog-if-generation-match', str(found))
    tag = self.headers.get('If-Match', f'"{found}"')
    is_refused = wanted != str(found) or tag != f'"{found}"'
    if is_refused or (self.headers.get('If-None-Match') == '*' and found):
      return self._answer(412)
    self.kept[self.path] = found + 1, body
    if self.lose_next and self.lose_next.pop():
      self.close_connection = True
      return None
    return self._answer(201)

  def do_HEAD(self):
    self._answer(200 if self.path in self.kept else 404)

  def do_GET(self):
    if self.path not in self.kept:
      return self._answer(404, b'<Code>NoSuchKey</Code>')
    data = self.kept[self.path][1]
    asked = re.fullmatch(r'bytes=(\d+)-(\d+)', self.headers['Range'] or '')
    if asked is None:
      return self._answer(200, data)
    start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
    span = f'bytes {start}-{stop - 1}/{len(data)}'
    return self._answer(206, data[start:stop], [('Content-Range', span)])

  def log_message(self, *args):
    pass


@pytest.fixture(params=['gs', 'az'])
def cloud(request, monkeypatch):
  handler = type('Cloud', (_Cloud,), {'kept': {}, 'lose_next': []})
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
    server.daemon_threads = True
    threading.Thread(
      target=server.serve_forever, args=(0.01,), daemon=True
    ).start()
    address = f'http://127.0.0.1:{server.server_port}'
    for name, value in {
      'GOOGLE_BASE_URL': address,
      'GOOGLE_BEARER_TOKEN': 'token',
      'AZURE_STORAGE_ACCOUNT_NAME': 'account',
      'AZURE_STORAGE_ENDPOINT': address,
      'AZURE_SKIP_SIGNATURE': 'true',
    }.items():
      monkeypatch.setenv(name, value)
    yield f'{request.param}://bucket/runs/one', handler
    server.shutdown()


def test_objects_and_pointers_go_through_other_clouds(cloud):
  place = store.Store(cloud[0])
  name = place.put(b'content')
  assert place.get(name) == b'content'
  with pytest.raises(FileNotFoundError):
    place.get('0' * 64)
  assert place.read_pointer('run') is None
  first = place.move_pointer('run', b'first', None)
  second = place.move_pointer('run', b'second', first)
  assert place.read_pointer('run') == (b'second', second)
  for tag in None, first:
    with pytest.raises(store.Conflict, match='Two must not publish'):
      place.move_pointer('run', b'third', tag)
  assert place.read_pointer('run') == (b'second', second)


def test_an_account_that_is_not_named_is_asked_for(monkeypatch):
  monkeypatch.delenv('AZURE_STORAGE_ACCOUNT_NAME', raising=False)
  with pytest.raises(
    ValueError, match='Account must be specified.*environment'
  ):
    store.Store('az://container/run')
