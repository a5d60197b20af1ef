"""A new policy in another process: by a bundle, and by JAX's own transfer.

  python -m benchmarks.transfer [--quick]

Ours is a subscriber that fetches, verifies and places a delta of which 5 % of
the weights changed, out of a folder; the peer is `jax.experimental.transfer`,
which moves all weights over a socket and verifies nothing. Both end with arrays
on the device of the receiver. The sender is a process of its own on the other
core; the wall clock counts, so that the machine must be quiet.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import interleaved

_SHAPES = {'kernel': (8, 2048, 2048), 'table': (4096, 2048)}


def _tree(version: int) -> dict[str, Any]:
  import jax
  import ml_dtypes
  import numpy as np

  tree = {}
  for name, shape in _SHAPES.items():
    values = np.random.default_rng(0).normal(0, 0.02, shape)
    for step in range(version):
      moved = np.random.default_rng(step).random(shape) < 0.05
      values *= 1 + 0.01 * moved
    tree[name] = jax.device_put(values.astype(ml_dtypes.bfloat16))
  return jax.block_until_ready(tree)


def _server() -> Any:
  import jax
  from jax.experimental import transfer

  client = jax.local_devices()[0].client
  return transfer.start_transfer_server(client, '127.0.0.1:0', ['127.0.0.1:0'])


def _send(root: pathlib.Path, rounds: int) -> None:
  """For each line that comes, publishes a version and offers it to a pull."""
  from composer_jax.delta import publisher

  server = _server()
  with publisher.Publisher(root / 'store', root / 'key') as ours:
    print(server.address(), flush=True)
    for version in range(rounds + 1):
      sys.stdin.readline()
      tree = _tree(version)
      server.await_pull(version, list(tree.values()))
      ours.publish(tree, version)
      ours.wait()
      print('published', flush=True)
    sys.stdin.readline()


def _receive(root: pathlib.Path, rounds: int) -> None:
  import jax
  import numpy as np

  from composer_jax.delta import subscriber

  command = [sys.executable, '-m', 'benchmarks.transfer', f'--send={root}']
  sender = subprocess.Popen(
    [*command, f'--rounds={rounds}'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert sender.stdin is not None and sender.stdout is not None
  server, address = _server(), sender.stdout.readline().strip()
  like = _tree(0)
  gigabytes = sum(x.nbytes for x in like.values()) / 1e9
  rates: tuple[list[float], list[float]] = ([], [])

  def publish() -> None:
    sender.stdin.write('next\n')
    sender.stdin.flush()
    assert sender.stdout.readline().strip() == 'published'

  publish()  # The key now exists, and the first bundle, a keyframe.
  connection = server.connect(address)
  ours = subscriber.Subscriber(root / 'store', root / 'key', like)
  for version in range(rounds + 1):
    if version:
      publish()
    begun = time.perf_counter()
    tree = jax.block_until_ready(ours.poll())
    between = time.perf_counter()
    specs = [
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
      for x in like.values()
    ]
    moved = jax.block_until_ready(connection.pull(version, specs))
    ended = time.perf_counter()
    for a, b in zip(tree.values(), moved, strict=True):
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if version:  # The first is a keyframe.
      rates[0].append(gigabytes / (between - begun))
      rates[1].append(gigabytes / (ended - between))
  sender.stdin.write('end\n')
  sender.stdin.close()
  sender.wait()
  interleaved.report(
    'transfer',
    f'a policy of {1000 * gigabytes:.0f} MB in another process, 5 % changed',
    rates,
    against='jax.experimental.transfer',
    limit=None,
    goal='none',
    met=lambda ours, ratio: True,
    unit='GB/s of weights',
  )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--quick', action='store_true', help='two rounds')
  parser.add_argument('--send', type=pathlib.Path, help=argparse.SUPPRESS)
  parser.add_argument('--rounds', type=int, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.send:
    _send(args.send, args.rounds)
    return
  interleaved.set_allocator()
  with tempfile.TemporaryDirectory() as folder:
    _receive(pathlib.Path(folder), 2 if args.quick else 7)


if __name__ == '__main__':
  main()
