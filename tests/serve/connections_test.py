"""Connections have a number, and heads of requests a time to come in."""

import socket
import time
from urllib import parse

from tests.serve import scripted

GET = b'GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n'


def _connect(server):
  address = parse.urlsplit(server.url)
  return socket.create_connection((address.hostname, address.port), timeout=20)


def _rest(sock):
  """Returns what comes until the other side closes."""
  parts = []
  while part := sock.recv(1 << 16):
    parts.append(part)
  return b''.join(parts)


def test_a_head_that_does_not_come_closes_its_connection(serve, tokenizer):
  server = serve(lambda _: [tokenizer.END], limits={'head_timeout_s': 0.3})
  with _connect(server) as silent, _connect(server) as slow:
    # A byte now and then does not prolong the time.
    for byte in GET[:6]:
      slow.sendall(bytes([byte]))
      time.sleep(0.02)
    assert _rest(slow) == b'' and _rest(silent) == b''


def test_the_time_counts_for_every_request_of_a_connection(serve, tokenizer):
  server = serve(lambda _: [tokenizer.END], limits={'head_timeout_s': 1})
  with _connect(server) as sock:
    for _ in range(3):
      sock.sendall(GET[:9])
      time.sleep(0.4)
      sock.sendall(GET[9:])
      assert sock.recv(1 << 16).startswith(b'HTTP/1.1 200')
    sock.sendall(GET[:9])
    assert _rest(sock) == b''


def test_the_time_of_an_answer_is_not_that_of_a_head(serve, client, tokenizer):
  server = serve(lambda _: [tokenizer.END], limits={'head_timeout_s': 0.2})
  server.engine.go.clear()
  with client(server) as made:
    stream = made.completions.create(model='tiny', prompt='x', stream=True)
    time.sleep(0.5)
    server.engine.go.set()
    assert [c.choices[0].finish_reason for c in stream] == ['stop']


def test_connections_beyond_the_number_are_refused(serve, tokenizer):
  server = serve(lambda _: [tokenizer.END], limits={'max_connections': 2})
  with _connect(server) as one, _connect(server) as two:
    one.sendall(GET)
    two.sendall(GET)
    assert one.recv(1 << 16).startswith(b'HTTP/1.1 200')
    assert two.recv(1 << 16).startswith(b'HTTP/1.1 200')
    with _connect(server) as three:
      refusal = _rest(three)
    assert refusal.startswith(b'HTTP/1.1 503')
    assert b'too_many_connections' in refusal
    one.sendall(GET)
    assert one.recv(1 << 16).startswith(b'HTTP/1.1 200')
  scripted.wait_for(lambda: not server.server.server_state.connections)
  with _connect(server) as again:
    again.sendall(GET)
    assert again.recv(1 << 16).startswith(b'HTTP/1.1 200')
