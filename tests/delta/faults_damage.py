"""What may befall a store, the way to it and a receiver, drawn at random.

Whoever damages here has no key: pointers are only those that were signed once.
Everything else may be made up, names included. `rng` is a `random.Random`, of
hypothesis or not.
"""

import collections
import dataclasses
import hashlib
import json

import numpy as np
import zstandard

from composer_jax.delta.format import identity
from composer_jax.delta.format import manifest as manifests
from tests.delta import faults


def _flip(data, rng):
  if not data:
    return b'\1'
  bad, at = bytearray(data), rng.randrange(len(data))
  bad[at] ^= 1 << rng.randrange(8)
  return bytes(bad)


def _cut(data, rng):
  return data[: rng.randrange(len(data))] if data else b'\0'


def _grow(data, rng):
  more = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
  return rng.choice([data + more, more + data, data + data])


def _zero(data, rng):
  start = rng.randrange(len(data) + 1)
  stop = min(len(data), start + rng.randrange(1, 64))
  return data[:start] + bytes(stop - start) + data[stop:]


def _shuffle(data, rng):
  """Exchanges two runs of bytes of one length."""
  length = rng.randrange(1, max(2, len(data) // 3))
  spare = len(data) - 2 * length
  if spare < 0:
    return data[::-1]
  a = rng.randrange(spare + 1)
  b = a + length + rng.randrange(spare - a + 1)
  return b''.join(
    [
      data[:a],
      data[b : b + length],
      data[a + length : b],
      data[a : a + length],
      data[b + length :],
    ]
  )


BYTES = {
  'flip': _flip,
  'cut': _cut,
  'grow': _grow,
  'zero': _zero,
  'shuffle': _shuffle,
}


def _pick(world, rng, name):
  """Most often a file that this receiver needs."""
  files = world.store.files
  needed = [key for key in world.needs[name] if key in files]
  if needed and rng.random() < 0.7:
    return rng.choice(needed)
  return rng.choice(sorted(files))


def damage_bytes(world, rng, name):
  """Changes the bytes of a file in place."""
  files = world.store.files
  key, how = _pick(world, rng, name), rng.choice(sorted(BYTES))
  files[key] = BYTES[how](files[key], rng)
  return how


def _several(rng, keys):
  return rng.sample(keys, min(len(keys), rng.randrange(2, 3 + len(keys))))


def lose(world, rng, name):
  files = world.store.files
  if rng.random() < 0.8:
    del files[_pick(world, rng, name)]
    return 'lose'
  for key in _several(rng, sorted(files)):
    del files[key]
  return 'lose many'


def swap(world, rng, name):
  """Two files stand in each other's place."""
  files = world.store.files
  a, b = _pick(world, rng, name), rng.choice(sorted(files))
  files[a], files[b] = files[b], files[a]
  return 'swap'


def foreign(world, rng, name):
  """A file of another run, of a fork or of another key's run, in its place."""
  files = world.store.files
  files[_pick(world, rng, name)] = world.others[
    rng.choice(sorted(world.others))
  ]
  return 'foreign'


def replay(world, rng, name):
  world.store.files[faults.LATEST] = rng.choice(world.moves)
  return 'replay'


def mix(world, rng, name):
  """A whole other run comes instead."""
  return bring(world, rng.choice(['fork', 'other', 'enemy']))


def bring(world, chosen):
  """A fork under the same key, another run of it, or one of other hands."""
  files = world.store.files
  for key, data in world.others.items():
    label, _, path = key.partition(':')
    if label == chosen:
      files[faults.LATEST if path.startswith('refs') else path] = data
  return chosen


def expire(world, rng, name):
  world.now = faults.EXPIRES_S + rng.choice([0.5, 1, 1e9])
  return 'expire'


def make_up(world, rng, name):
  """Hostile bundles under names that fit, or under those that are asked for."""
  files = world.store.files
  head = world.head
  name = head.head.manifest
  header, table = parse(world.files[f'objects/{name}'])
  if rng.random() < 0.5:
    remix(table, rng)
  else:
    other = rng.choice(sorted(k for k in files if k.startswith('objects/')))
    if header['previous'] is not None:
      header['previous'][1] = other.removeprefix('objects/')
  data = join(header, table)
  files[f'objects/{hashlib.sha256(data).hexdigest()}'] = data
  if rng.random() < 0.7:
    files[f'objects/{name}'] = data
  return 'make up'


def remix(table, rng):
  """Changes rows of a manifest's chunk table; nothing in it is recomputed."""
  rows = len(table)
  a, b = rng.randrange(rows), rng.randrange(rows)
  fields = rng.choice([['post'], ['codec'], ['pack', 'length', 'codec'], None])
  for field in fields or table.dtype.names:
    table[field][[a, b]] = table[field][[b, a]]


_COLUMNS = manifests.CHUNK.names[:-1]


def parse(data):
  """Header and table of a manifest, unchecked."""
  head, frame = np.frombuffer(data, '<u4', 2, 5).tolist()
  text = zstandard.ZstdDecompressor().decompress(data[13 : 13 + frame])
  posts = np.frombuffer(data[13 + frame :], np.uint8).reshape(-1, 16)
  planes = np.frombuffer(text, np.uint8, offset=head).reshape(9, -1)
  table = np.zeros(len(posts), manifests.CHUNK)
  table['post'] = posts
  rows = np.ascontiguousarray(planes.T).view(
    np.dtype([manifests.CHUNK.descr[n] for n in range(3)])
  )
  for name in _COLUMNS:
    table[name] = rows[name][:, 0]
  return json.loads(text[:head]), table


def join(header, table):
  """Undoes `parse`; `header` may be bytes."""
  head = header
  if not isinstance(header, bytes):
    head = identity.canonical_json(header)
  bits = [np.ascontiguousarray(table[name]) for name in _COLUMNS]
  planes = b''.join(
    column.view(np.uint8).reshape(len(table), column.itemsize).T.tobytes()
    for column in bits
  )
  frame = zstandard.ZstdCompressor(level=9).compress(head + planes)
  lengths = np.array([len(head), len(frame)], '<u4').tobytes()
  return b'CDB5\n' + lengths + frame + table['post'].tobytes()


def noise(world, rng, name):
  """The way to the store is bad for the next requests, or for all."""
  how = rng.choice([*sorted(BYTES), 'away', 'denied', 'late'])
  left = rng.choice([1, 1, 2, 3, 10**6])
  at = rng.randrange(6)
  seen = collections.Counter()

  def befall(key, data):
    seen['all'] += 1
    if not at < seen['all'] <= at + left:
      return data
    if how == 'away':
      raise ConnectionError(f'{key}: connection lost')
    if how == 'denied':
      raise PermissionError(13, 'denied', key)
    if how == 'late':
      raise TimeoutError(f'{key}: too late')
    return BYTES[how](data, rng)

  world.store.noise = befall
  return f'noise {how}'


def rot(receiver, rng):
  """A bit of the held weights changes in memory."""
  held = receiver.held
  if held is None:
    return 'nothing held'
  tensors = dict(held.tensors)
  name = rng.choice([n for n in tensors if tensors[n].buffer.size])
  buffer = tensors[name].buffer.copy()
  buffer.view(np.uint8)[rng.randrange(buffer.nbytes)] ^= 1 << rng.randrange(8)
  tensors[name] = dataclasses.replace(tensors[name], buffer=buffer)
  receiver.held = dataclasses.replace(held, tensors=tensors)
  return 'rot'


# Most often what is done to files.
FAULTS = [
  *[damage_bytes] * 10,
  *[lose] * 2,
  *[swap] * 2,
  foreign,
  *[replay] * 2,
  *[mix] * 2,
  expire,
  *[make_up] * 2,
  *[noise] * 3,
]


def run_case(world, rng, counts):
  """Damages, polls, checks, repairs, checks; counts what was injected."""
  store = world.store
  store.files, store.noise, world.now = dict(world.files), None, 0.0
  name = rng.choice(sorted(world.receivers, key=str))
  receiver = world.receiver(*name)
  done = [] if rng.random() < 0.9 else [rot(receiver, rng)]
  for _ in range(rng.choice([1, 1, 1, 2, 3])):
    if store.files:
      done.append(rng.choice(FAULTS)(world, rng, name))
  before, store.asked = receiver.held, set()
  update = receiver.poll()
  counts[faults.check(world, receiver, before, update)] += 1
  if update is not None:
    assert world.now <= faults.EXPIRES_S, 'an expired pointer was believed'
    # Nobody rewound the run.
    assert before is None or update.version >= before.version, 'led back'
  # Of the files that it read, some were not what they should be.
  counts['met'] += any(
    store.files.get(key) != world.files.get(key) for key in store.asked
  )
  counts['injected'] += len(done)
  counts.update(done)
  faults.check_recovers(world, receiver)
