"""A directory of write-once objects and one pointer for each run.

  objects/<blake3>     never changed: manifests and packs of blobs
  refs/<run>/latest    the pointer, replaced last and atomically

Objects are named by what they hold, so any mirror may serve them and writing
one twice is harmless. The pointer is sealed by a hash of its own; a signature
belongs in `seal` and `unseal` and nowhere else.
"""

import dataclasses
import logging
import os
import pathlib
import re

from composer_jax.core import files
from composer_jax.delta import bundle

MAX_POINTER_BYTES = 4096
MAX_MANIFEST_BYTES = 64 * 2**20

_RUN_ID = re.compile('[A-Za-z0-9][A-Za-z0-9._-]{0,127}')
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
  """Names the latest version of a run.

  Attributes:
    run_id: of the run it belongs to.
    sequence: grows by one whenever the pointer moves, also backwards.
    rewinds: how often the run was rewound; the version falls only with it.
    version: of the policy.
    target_id: identity of its weights.
    manifest: hash of its manifest.
  """

  run_id: str
  sequence: int
  rewinds: int
  version: int
  target_id: str
  manifest: str


def seal(pointer: Pointer) -> bytes:
  body = dataclasses.asdict(pointer)
  seal_hash = bundle.digest(bundle.canonical_json(body))
  return bundle.canonical_json({'body': body, 'hash': seal_hash})


def unseal(data: bytes, run_id: str) -> Pointer:
  """Checks what `seal` wrote; ValueError when anything in it was changed."""
  value = bundle.parse_canonical(data)
  if not isinstance(value, dict) or value.keys() != {'body', 'hash'}:
    raise ValueError('not a pointer')
  found = bundle.digest(bundle.canonical_json(value['body']))
  if found != value['hash']:
    raise ValueError(f'its content hashes to {found}, not {value["hash"]}')
  try:
    pointer = Pointer(**value['body'])
  except TypeError as error:
    raise ValueError(f'its fields are wrong ({error})') from error
  if pointer.run_id != run_id:
    raise ValueError(f'it belongs to run {pointer.run_id!r}, not {run_id!r}')
  return pointer


class Store:
  """Reads and writes one directory; several processes may hold one each."""

  def __init__(self, root: str | os.PathLike):
    self.root = pathlib.Path(root)
    self.objects = self.root / 'objects'

  def put(self, data: bytes) -> str:
    """Writes an object, or leaves an intact one alone; returns its hash."""
    name = bundle.digest(data)
    path = self.objects / name
    # A damaged object is replaced: publishing again is how a store heals.
    if not path.exists() or path.read_bytes() != data:
      files.write_atomic(path, data)
    return name

  def manifest(self, name: str) -> bundle.Manifest:
    """Reads a manifest, verified before it is parsed.

    Raises:
      FileNotFoundError: there is none.
      ValueError: the file is damaged; the message names it.
    """
    path = self.objects / name
    size = path.stat().st_size
    if size > MAX_MANIFEST_BYTES:
      raise ValueError(
        f'{path}: a manifest of {size} bytes exceeds {MAX_MANIFEST_BYTES}.'
      )
    data = path.read_bytes()
    if bundle.digest(data) != name:
      raise ValueError(f'{path}: the manifest is damaged, its hash is wrong.')
    try:
      return bundle.Manifest.from_bytes(data)
    except ValueError as error:
      raise ValueError(f'{path}: {error}') from error

  def pack(self, name: str, length: int) -> bytes:
    """Reads an object of known length; its blobs are verified by the reader."""
    path = self.objects / name
    size = path.stat().st_size
    if size != length:
      raise ValueError(
        f'{path}: has {size} bytes where its manifest says {length}.'
      )
    return path.read_bytes()

  def pointer_path(self, run_id: str) -> pathlib.Path:
    if not _RUN_ID.fullmatch(run_id):
      raise ValueError(
        f'run_id {run_id!r} must be 1 to 128 letters, digits, ".", "_" or '
        '"-", and begin with a letter or digit.'
      )
    return self.root / 'refs' / run_id / 'latest'

  def pointer(self, run_id: str) -> Pointer | None:
    """Returns the run's pointer, None when nothing was published."""
    path = self.pointer_path(run_id)
    try:
      with open(path, 'rb') as file:
        data = file.read(MAX_POINTER_BYTES + 1)
    except FileNotFoundError:
      return None
    if len(data) > MAX_POINTER_BYTES:
      raise ValueError(f'{path}: a pointer exceeds {MAX_POINTER_BYTES} bytes.')
    try:
      return unseal(data, run_id)
    except ValueError as error:
      raise ValueError(
        f'{path}: the pointer is damaged: {error}. The next publish writes a '
        'new one; if no publisher runs, start the trainer again.'
      ) from error

  def move_pointer(self, pointer: Pointer) -> None:
    files.write_atomic(self.pointer_path(pointer.run_id), seal(pointer))

  def run_ids(self) -> list[str]:
    return sorted(p.parent.name for p in self.root.glob('refs/*/latest'))

  def delete_except(self, names: set[str]) -> int:
    """Deletes other objects and torn temporary files; returns bytes freed."""
    freed = 0
    for path in self.objects.iterdir():
      if path.name not in names:
        freed += path.stat().st_size
        path.unlink()
    _log.info('%s: freed %d bytes', self.root, freed)
    return freed
