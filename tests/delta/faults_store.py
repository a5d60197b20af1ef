"""A store in a dictionary, to be damaged at will."""

from composer_jax.delta.store import folder as folders
from composer_jax.delta.store import objects as stores


class _Backend:
  """Keys and values; see `folder.Backend`."""

  is_writable = True

  def __init__(self, store):
    self.store = store

  def read(self, key, start, stop, *, fresh=False):
    self.store.asked.add(key)
    if key not in self.store.files:
      raise FileNotFoundError(2, 'the store does not hold it', key)
    data = self.store.files[key][start:stop]
    return self.store.noise(key, data) if self.store.noise else data

  def put(self, key, data):
    self.store.files[key] = bytes(data)

  def read_tagged(self, key, most=4096):
    if key not in self.store.files:
      return None
    return self.read(key, 0, most + 1), self.store.files[key].hex()

  def swap(self, key, data, tag, most=4096):
    del most
    found = self.store.files.get(key)
    if (None if found is None else found.hex()) != tag:
      raise folders.Conflict('another value')
    self.store.files[key] = bytes(data)
    self.store.moves.append(bytes(data))
    return data.hex()

  def find(self, folder):
    return {k: len(data) for k, data in self.store.files.items() if folder in k}

  def delete(self, keys, older_than_s):
    return [key for key in keys if self.store.files.pop(key, None) is not None]


class Store(stores.Store):
  """A store whose content is `files`.

  Attributes:
    files: by key.
    moves: all pointers it ever had.
    asked: keys that were read.
    noise: what becomes of what is read on its way, None for nothing.
  """

  def __init__(self, files=()):
    super().__init__('faults')
    self.files, self.moves, self.asked = dict(files), [], set()
    self.noise = None
    self._backend = _Backend(self)
