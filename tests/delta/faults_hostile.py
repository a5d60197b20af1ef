"""Bundles of a publisher that has the key and lies.

Hashes and the signature fit, so what is tested are the checks behind them: a
receiver refuses, or holds weights that really hash to the identity it reports.
"""

import dataclasses
import hashlib

import numpy as np

from composer_jax.delta.format import identity
from composer_jax.delta.format import identity as grids
from composer_jax.delta.format import manifest as manifests
from tests.delta import faults, faults_damage, identities

NASTY = [
  None, True, -1, 0, 1, 2, 3, 7, 2**31, 2**32 - 1, 2**53, 2**62, 2**63 - 1,
  2**63, 10**400, 1.5, float('nan'), float('inf'), '', 'key', 'delta', 'run',
  'a' * 64, 'a' * 63, 'float32', 'bfloat16', '\u0661' * 64, '\ud800', '../..',
  'x' * 5000, [], [[]], [[0]], [1, 2, 3], ['a', 'b', 'c'], {}, {'a': 1},
]  # fmt: skip


def lie(world, rng, counts):
  """One signed lie; the receiver refuses it or has what it says."""
  store = world.store
  store.files, store.noise, world.now = dict(world.files), None, 0.0
  name = rng.choice(sorted(world.receivers, key=str))
  receiver = world.receiver(*name)
  head = world.head
  pointer = dataclasses.asdict(head) | {'sequence': head.sequence + 1}
  how = rng.choice(sorted(_LIES))
  _LIES[how](world, rng, pointer)
  _sign(world, pointer)
  before = receiver.held
  verdict = _check(world, receiver, before, receiver.poll())
  counts[how] += 1
  counts[f'{how}: {verdict}'] += 1
  counts['injected'] += 1
  _check_goes_on(world, receiver)


def _sign(world, fields):
  body = identity.canonical_json(fields)
  signature = faults.KEY.sign(b'CDB5P' + body)
  line = b'CDB5P ' + signature.hex().encode() + b'\n'
  world.store.files[faults.LATEST] = line + body


def _check(world, receiver, before, update):
  if update is None:
    assert receiver.held is before
    assert receiver.problem is not None or before is not None
    return 'refused'
  if faults.named(update) in world.published:
    return faults.check(world, receiver, before, update)
  # Weights nobody published, but those that were signed.
  tensors = update.tensors.values()
  if any(t.numbers.size < t.grid.num_chunks for t in tensors):
    for tensor in tensors:
      for at, number in enumerate(tensor.numbers):
        found = identity.hash_chunk(tensor.chunk(number))
        assert found == tensor.posts[at].tobytes()
  else:
    assert identities.target_id(update.arrays()) == update.target_id
  return 'served'


def _check_goes_on(world, receiver):
  """The true publisher points again, later than the liar."""
  seen = receiver._seen
  if seen is not None and max(seen.sequence, seen.rewinds) >= 2**63 - 2:
    return  # Nothing is later; whoever has the key can end a run.
  store = world.store
  store.files = dict(world.files)
  later = dataclasses.asdict(world.head)
  if seen is not None:
    later['sequence'] = max(seen.sequence, later['sequence']) + 1
    later['rewinds'] = seen.rewinds + 1
  _sign(world, later)
  before = receiver.held
  faults.check(world, receiver, before, receiver.poll())
  assert receiver.problem is None, receiver.problem
  assert faults.named(receiver.held) == faults.named(world.head)


def _put(world, data):
  name = hashlib.sha256(data).hexdigest()
  world.store.files[f'objects/{name}'] = bytes(data)
  return name


def _read(world, name):
  return world.files[f'objects/{name}']


_parse, _join = faults_damage.parse, faults_damage.join


def _a_manifest(world, rng):
  """The head's single delta, or a keyframe of the head."""
  links = {world.head.head.manifest}
  if world.head.keyframe.version == world.head.version:
    links.add(world.head.keyframe.manifest)
  return rng.choice(sorted(links))


def _replace(world, rng, old, data, pointer):
  """Leads to other bytes in place of a manifest of the head."""
  link = [world.head.version, _put(world, data), len(data)]
  is_key = old == world.head.keyframe.manifest
  if old == world.head.head.manifest or rng.random() < 0.7:
    # A keyframe as the head, which everyone takes.
    pointer['head'] = link
  if is_key:
    pointer['keyframe'] = link


def _num_chunks(shape):
  return grids.of(tuple(shape)).num_chunks


def _fit_root(header, table):
  """Makes target_id what the tables say, as far as they can be read."""
  nodes, at = {}, 0
  for name, dtype, shape in header['tensors']:
    count = _num_chunks(shape)
    posts = table['post'][at : at + count].tobytes()
    nodes[name] = identity.tensor_node(name, dtype, shape, posts)
    at += count
  header['target_id'] = identity.root(nodes)


def _table(world, rng, pointer):
  """Rows are exchanged, or fields of one row get another value."""
  old = _a_manifest(world, rng)
  header, table = _parse(_read(world, old))
  row = rng.randrange(len(table))
  field = rng.choice(table.dtype.names)
  if rng.random() < 0.5:
    other = rng.randrange(len(table))
    fields = rng.choice([[field], ['length', 'pack', 'codec']])
    for field in fields:
      table[field][[row, other]] = table[field][[other, row]]
  elif field == 'post':
    table[field][row] = rng.randrange(256)
  else:
    value = rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 255, 2**16, 2**32 - 1])
    table[field][row] = value % (256 if field == 'codec' else 2**32)
  if rng.random() < 0.5:
    _fit_root(header, table)
    if rng.random() < 0.5:
      pointer['target_id'] = header['target_id']
  _replace(world, rng, old, _join(header, table), pointer)


def _header(world, rng, pointer):
  old = _a_manifest(world, rng)
  header, table = _parse(_read(world, old))
  _spoil(header, rng)
  _replace(world, rng, old, _join(header, table), pointer)


def _spoil(fields, rng):
  """Some value in it, however deep, becomes a nasty one."""
  place, key = fields, rng.choice(sorted(fields))
  while isinstance(place[key], list | dict) and place[key]:
    if rng.random() < 0.2:
      break
    place = place[key]
    keys = sorted(place) if isinstance(place, dict) else range(len(place))
    key = rng.choice(keys)
  if rng.random() < 0.1:
    del place[key]
  else:
    place[key] = rng.choice(NASTY)


def _bytes(world, rng, pointer):
  old = _a_manifest(world, rng)
  how = rng.choice(sorted(faults_damage.BYTES))
  data = faults_damage.BYTES[how](_read(world, old), rng)
  _replace(world, rng, old, data, pointer)


def _pointer(world, rng, pointer):
  _spoil(pointer, rng)


def _blob(world, rng, pointer):
  """Changes a blob under hashes that fit: the decoder gets to see it."""
  old = _a_manifest(world, rng)
  header, table = _parse(_read(world, old))
  packs = [bytearray(_read(world, name)) for name, _ in header['packs']]
  places, _ = manifests.place(table, len(packs))
  rows = np.flatnonzero(table['length'])
  if not rows.size:
    return
  for row in rng.sample(rows.tolist(), rng.randrange(1, 1 + min(3, rows.size))):
    start, length = int(places[row]), int(table['length'][row])
    pack = packs[table['pack'][row]]
    bad = faults_damage.BYTES[rng.choice(['flip', 'zero', 'shuffle'])](
      bytes(pack[start : start + length]), rng
    )
    if rng.random() < 0.2:
      bad = rng.randbytes(length)
    pack[start : start + length] = bad.ljust(length, b'\0')[:length]
    if rng.random() < 0.2:
      table['codec'][row] = rng.randrange(1, 7)
  header['packs'] = [[_put(world, pack), len(pack)] for pack in packs]
  _replace(world, rng, old, _join(header, table), pointer)


def _exchange(world, rng, pointer):
  """Two boxes stand in each other's place, blobs and hashes and all."""
  keyframe = world.head.keyframe
  if keyframe.version == world.head.version:
    old = keyframe.manifest
    pointer['head'] = keyframe
  else:
    old = _a_manifest(world, rng)
  header, table = _parse(_read(world, old))
  packs = [_read(world, name) for name, _ in header['packs']]
  places, _ = manifests.place(table, len(packs))
  ends = np.cumsum(
    [0, *(_num_chunks(shape) for *_, shape in header['tensors'])]
  )
  # Most often of one tensor: others are told apart by their sizes.
  pairs = [(a, a + 1) for a in range(len(table) - 1) if a + 1 not in ends]
  pairs = [pair for pair in pairs if table['length'][[*pair]].all()]
  if not pairs:
    return
  order = np.arange(len(table))
  a, b = rng.choice(pairs)
  if rng.random() < 0.2:
    a, b = rng.choice(pairs)[0], rng.choice(pairs)[1]
  order[[a, b]] = order[[b, a]]
  blobs = [
    packs[table['pack'][row]][places[row] :][: table['length'][row]]
    for row in order
    if table['length'][row]
  ]
  table = table[order]
  table['pack'][table['length'] > 0] = 0
  pack = b''.join(blobs)
  header['packs'] = [[_put(world, pack), len(pack)]]
  if rng.random() < 0.5:
    _fit_root(header, table)
  _replace(world, rng, old, _join(header, table), pointer)


_LIES = {
  'table': _table,
  'header': _header,
  'bytes': _bytes,
  'pointer': _pointer,
  'blob': _blob,
  'exchange': _exchange,
}
