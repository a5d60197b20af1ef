"""Kills real processes between any two requests to an S3 server.

  python -m tests.delta.faults_s3 STEP FIRST

One child serves moto; others are forked for each point, from a process that
never had another thread. The server counts their requests and kills them before
it does one, or when it was done, so that its answer is lost. The last line of
output is JSON: the points, and how many of them had moved the pointer.
"""

import json
import logging
import mmap
import os
import signal
import struct
import sys
import time

from composer_jax.delta import follower as followers
from composer_jax.delta.format import manifest as manifests
from composer_jax.delta.store import objects as stores
from tests.delta import faults, faults_crash, s3_server

KIND = 'floats'
# A process and after how many points it is to be killed, for the server.
_VICTIM, _PAIR = mmap.mmap(-1, 16), struct.Struct('qq')


def _store(number):
  return stores.Store(
    f's3://{s3_server.BUCKET}/{number}',
    options={'retry_config': {'max_retries': 1}},
  )


def _publisher(number):
  return faults.publisher_of(_store(number), keyframe_every=2)


def _publish(publisher, version):
  publisher.publish(faults.blocks(faults.weights(KIND, version)), version)


def _kill():
  """Every request is two points: before it is done, and after."""
  process, left = _PAIR.unpack(_VICTIM[:])
  if not process:
    return False
  _VICTIM[:] = _PAIR.pack(process if left > 1 else 0, left - 1)
  if left == 1:
    os.kill(process, signal.SIGKILL)
  return left == 1


def _crash(number):
  publisher = _publisher(number)
  for version in range(2):
    _publish(publisher, version)
  _VICTIM[:] = _PAIR.pack(os.getpid(), number)
  _publish(publisher, 2)  # A delta, then a skip and a keyframe.
  _VICTIM[:] = _PAIR.pack(0, 0)
  os._exit(faults_crash._NO_MORE)


def _look(number, path):
  reader = followers.Follower(
    _store(number), faults.RUN, faults.KEY, threads=2, now=lambda: 0.0
  )
  update = reader.poll()
  assert update is not None, reader.problem
  committed = update.version
  assert committed in (1, 2)
  _assert_exact(update)
  publisher = _publisher(number)
  for version in (2, 3):
    _publish(publisher, version)
  publisher.gc(1)
  update = reader.poll()
  assert update is not None and update.version == 3, reader.problem
  _assert_exact(update)
  joiner = followers.Follower(
    _store(number), faults.RUN, faults.KEY, threads=2, now=lambda: 0.0
  )
  _assert_exact(joiner.poll())
  with open(path, 'w') as file:
    json.dump(committed, file)


def _assert_exact(update):
  wanted = faults.weights(KIND, update.version)
  found = update.arrays()
  for name, array in wanted.items():
    assert found[name].tobytes() == array.tobytes(), name


def _serve(write):
  with s3_server.run() as server:
    server.kill = _kill
    os.write(write, f'{server.port}\n'.encode())
    signal.pause()


def main():
  step, first = map(int, sys.argv[1:3])
  logging.disable(logging.CRITICAL)
  assert manifests.FORMAT
  with faults.small_chunks():
    faults.build(KIND, versions=3)
    read, write = os.pipe()
    server = os.fork()
    if not server:
      _serve(write)
    try:
      with os.fdopen(read) as file:
        port = int(file.readline())
      os.environ.update(
        AWS_ENDPOINT_URL=f'http://127.0.0.1:{port}',
        AWS_ACCESS_KEY_ID='test',
        AWS_SECRET_ACCESS_KEY='test',
        AWS_DEFAULT_REGION='us-east-1',
        AWS_CONFIG_FILE='/dev/null',
        AWS_SHARED_CREDENTIALS_FILE='/dev/null',
      )
      committed, at = [], first
      path = os.path.join(sys.argv[3], 'committed')
      while True:
        number = at
        code = faults_crash.child(lambda: _crash(number))  # noqa: B023
        assert code in (-signal.SIGKILL, faults_crash._NO_MORE), (at, code)
        assert faults_crash.child(lambda: _look(number, path)) == 0, at  # noqa: B023
        with open(path) as file:
          committed.append(json.load(file))
        if code != -signal.SIGKILL:
          break
        at += step
      assert committed == sorted(committed), committed
      print(json.dumps([len(committed) - 1, committed.count(2) - 1]))
    finally:
      os.kill(server, signal.SIGKILL)
      os.waitpid(server, 0)


if __name__ == '__main__':
  begun = time.monotonic()
  main()
  print(f'{time.monotonic() - begun:.1f} s', file=sys.stderr)
