"""A real S3 server on a free port of this machine, which fails when told to."""

import contextlib
import datetime
import socket
import threading
from collections.abc import Iterator

import pytest
from moto.moto_server import werkzeug_app
from moto.s3 import models
from werkzeug import serving

BUCKET = 'bucket'


class _Quiet(werkzeug_app.MotoRequestHandler):
  """Speaks HTTP/1.0: no connection outlives its request, nor the server."""

  def log(self, type, message, *args):
    pass


class Server:
  """moto behind a gate that answers the next requests badly.

  Attributes:
    trouble: what befalls the next requests, in order: a status to answer with,
      'drop' (the connection is lost before), 'lose' (it is done and the answer
      lost), 'cut' (half of the answer) or 'ok'.
    seen: method and path of each request, with bytes that it carried.
    minds_conditions: without, If-Match and If-None-Match are not passed on.
    kill: called before and after each request is done; true if it has killed
      who asked.
  """

  def __init__(self):
    self.trouble = []
    self.seen = []
    self.minds_conditions = True
    self.kill = lambda: False
    self._moto = werkzeug_app.DomainDispatcherApplication(
      werkzeug_app.create_backend_app
    )
    # moto looks and writes in two steps; S3 promises one.
    self._lock = threading.Lock()
    self._server = None
    self.port = 0
    self.start()

  def start(self):
    self._server = serving.make_server(
      '127.0.0.1', self.port, self._gate, True, request_handler=_Quiet
    )
    self.port = self._server.server_port
    threading.Thread(
      target=self._server.serve_forever, args=(0.01,), daemon=True
    ).start()

  def stop(self):
    self._server.shutdown()
    self._server.server_close()

  def count(self, method, part=''):
    return sum(m == method and part in path for m, path, _ in self.seen)

  def _gate(self, environ, start_response):
    body = environ['wsgi.input'].read(int(environ.get('CONTENT_LENGTH') or 0))
    environ['wsgi.input'] = _Body(body)
    with self._lock:
      query = environ.get('QUERY_STRING', '')
      path = environ['PATH_INFO'] + (f'?{query}' if query else '')
      self.seen.append((environ['REQUEST_METHOD'], path, len(body)))
      trouble = self.trouble.pop(0) if self.trouble else 'ok'
      if isinstance(trouble, int):
        start_response(f'{trouble} Trouble', [('Content-Length', '0')])
        return [b'']
      if trouble == 'drop' or self.kill():
        self._hang_up(environ)
      if not self.minds_conditions:
        environ.pop('HTTP_IF_MATCH', None)
        environ.pop('HTTP_IF_NONE_MATCH', None)
      answer = b''.join(self._moto(environ, start_response))
      if trouble == 'lose' or self.kill():
        self._hang_up(environ)
      return [answer[: len(answer) // 2] if trouble == 'cut' else answer]

  def _hang_up(self, environ):
    environ['werkzeug.socket'].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError

  def bucket(self):
    return models.s3_backends['123456789012']['aws'].buckets[BUCKET]

  def age(self, seconds):
    """Makes everything in the bucket that much older."""
    for key in self.bucket().keys.values():
      key.last_modified -= datetime.timedelta(seconds=seconds)


class _Body:
  def __init__(self, data):
    self.data = data

  def read(self, size=-1):
    size = len(self.data) if size is None or size < 0 else size
    found, self.data = self.data[:size], self.data[size:]
    return found


@contextlib.contextmanager
def run() -> Iterator[Server]:
  """Runs a server, with an empty bucket, that this process's S3 clients use."""
  server = Server()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{server.port}')
    patch.setenv('AWS_ACCESS_KEY_ID', 'test')
    patch.setenv('AWS_SECRET_ACCESS_KEY', 'test')
    patch.setenv('AWS_DEFAULT_REGION', 'us-east-1')
    patch.setenv('AWS_CONFIG_FILE', '/dev/null')
    patch.setenv('AWS_SHARED_CREDENTIALS_FILE', '/dev/null')
    models.s3_backends.reset()  # of another module of this process
    models.s3_backends['123456789012']['aws'].create_bucket(BUCKET, 'us-east-1')
    yield server
  server.stop()
