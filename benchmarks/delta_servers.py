"""Web servers in front of a store of bundles: an origin and two caches.

For `delta_world` and the tests of following over HTTP. `Origin` counts what it
sends, `Cache` is the least that an HTTP cache can be, and `Nginx` is the server
of configs/delta/nginx.conf.
"""

import contextlib
import http.server
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

CONFIG = pathlib.Path(__file__).parents[1] / 'configs' / 'delta' / 'nginx.conf'
_RANGE = re.compile(r'bytes=(\d+)-(\d*)')
# Damage: makes other bytes of those that a cache has kept.
Change = Callable[[bytes], bytes]


class _Server:
  """Answers GET and HEAD from threads; a context manager.

  Attributes:
    port: port on which the server listens.
    url: address of the server, without a slash at its end.
  """

  def __init__(self):
    answer = self.answer

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def do_GET(self):
        status, headers, body = answer(self.path, self.headers)
        self.send_response(status)
        for name, value in headers.items():
          self.send_header(name, value)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        if self.command == 'GET':
          self.wfile.write(body)

      do_HEAD = do_GET

      def log_message(self, format, *args):
        pass

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    # One that is closed while others keep a connection to it does not wait.
    self._server.daemon_threads = True
    self.port = self._server.server_port
    self.url = f'http://127.0.0.1:{self.port}'

  def answer(self, path, headers) -> tuple[int, dict[str, str], bytes]:
    raise NotImplementedError

  def __enter__(self):
    threading.Thread(
      target=self._server.serve_forever, args=(0.01,), daemon=True
    ).start()
    return self

  def __exit__(self, *_):
    self._server.shutdown()
    self._server.server_close()


class Origin(_Server):
  """Serves the files of a folder, with ranges and ETags by their times.

  Attributes:
    asked: (path, bytes sent) of each request for a file that is there.
    before: function of a path, called before each request is answered.
  """

  def __init__(self, folder):
    self.asked: list[tuple[str, int]] = []
    self.before: Callable[[str], object] = lambda path: None
    self._folder = pathlib.Path(folder)
    super().__init__()

  def answer(self, path, headers):
    self.before(path)
    try:
      file = self._folder / path.lstrip('/')
      data, tag = file.read_bytes(), f'"{file.stat().st_mtime_ns}"'
    except OSError:
      return 404, {}, b''
    status, more = 200, {'ETag': tag}
    asked = _RANGE.fullmatch(headers.get('Range', ''))
    if asked and data:
      length, start = len(data), int(asked[1])
      if start >= length:
        return 416, {'Content-Range': f'bytes */{length}'}, b''
      stop = min(length, int(asked[2]) + 1) if asked[2] else length
      status, data = 206, data[start:stop]
      more['Content-Range'] = f'bytes {start}-{stop - 1}/{length}'
    self.asked.append((path, len(data)))
    return status, more, data


class Cache(_Server):
  """Keeps each answer of an origin about an object, by path and range."""

  def __init__(self, origin: str):
    self._origin = origin
    self._kept: dict[tuple[str, str], tuple] = {}
    super().__init__()

  def answer(self, path, headers):
    key = path, headers.get('Range', '')
    if headers.get('Cache-Control') == 'no-cache':
      self._kept.pop(key, None)
    if key not in self._kept:
      answer = self._fetch(*key)
      if answer[0] >= 300 or not path.startswith('/objects/'):
        return answer
      self._kept[key] = answer
    return self._kept[key]

  def _fetch(self, path, asked):
    headers = {'Range': asked} if asked else {}
    request = urllib.request.Request(self._origin + path, headers=headers)
    try:
      with urllib.request.urlopen(request) as reply:
        content_range = reply.headers.get('Content-Range')
        more = {'Content-Range': content_range} if content_range else {}
        return reply.status, more, reply.read()
    except urllib.error.HTTPError as error:
      return error.code, {}, b''

  def damage(self, change: Change) -> None:
    for key, (status, headers, body) in self._kept.items():
      self._kept[key] = status, headers, change(body)


class Nginx:
  """nginx as configs/delta has it, before an origin; a context manager.

  Attributes:
    port: port on which the server listens.
    url: address of the server, without a slash at its end.
  """

  def __init__(self, origin: str, changes: Mapping[str, str] | None = None):
    """Prepares a server in a folder of its own.

    Args:
      origin: URL of the origin, without a slash at its end.
      changes: new text by the text of the config that it replaces.
    """
    with socket.socket() as free:
      free.bind(('127.0.0.1', 0))
      self.port = free.getsockname()[1]
    self.url = f'http://127.0.0.1:{self.port}'
    changes = {
      'http://127.0.0.1:8764': origin,
      'listen 8765;': f'listen 127.0.0.1:{self.port};',
      **(changes or {}),
    }
    self._text = CONFIG.read_text()
    for old, new in changes.items():
      assert old in self._text, f'{CONFIG} has no {old!r}'
      self._text = self._text.replace(old, new)
    self._stack = contextlib.ExitStack()

  def __enter__(self):
    with self._stack as stack:
      # Not of pytest's, which only its own user may enter: nginx that root
      # starts works as another.
      self.folder = pathlib.Path(
        stack.enter_context(tempfile.TemporaryDirectory())
      )
      self.folder.chmod(0o755)
      config = self.folder / 'nginx.conf'
      config.write_text(self._text)
      process = subprocess.Popen(
        ['nginx', '-e', 'stderr', '-p', self.folder, '-c', config],
        stdout=subprocess.DEVNULL,
        stderr=(self.folder / 'log').open('wb'),
      )
      stack.callback(process.wait, 20)
      stack.callback(process.terminate)
      give_up = time.monotonic() + 20
      while True:
        with contextlib.suppress(OSError):
          socket.create_connection(('127.0.0.1', self.port)).close()
          break
        if process.poll() is not None or time.monotonic() > give_up:
          raise RuntimeError((self.folder / 'log').read_text())
        time.sleep(0.01)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *_):
    self._stack.close()

  def files(self) -> list[pathlib.Path]:
    """Returns the files in which nginx keeps objects."""
    paths = (self.folder / 'objects').rglob('*')
    return [path for path in paths if path.is_file()]

  def damage(self, change: Change) -> None:
    for path in self.files():
      data = path.read_bytes()
      # A head of nginx's own and the origin's, and then the bytes.
      at = data.index(b'\r\n\r\n', data.index(b'\nKEY: ')) + 4
      with path.open('rb+') as file:
        body = change(data[at:])
        file.seek(at)
        file.write(body)
        file.truncate(at + len(body))


def has_nginx() -> bool:
  return shutil.which('nginx') is not None
