"""What a workspace differs from its image by, taken, told and put back.

Standard library only: runs inside the sandbox, on trees that untrusted code
arranged and that nothing changes meanwhile.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import stat
import struct

from composer_jax.sandbox.inside import beneath

_MAGIC = b'composer-box-1\n'
_KINDS = ('file', 'folder', 'link', 'pipe')
_MOST_TIME = 1 << 62


@dataclasses.dataclass(frozen=True)
class Tree:
  """A workspace.

  Attributes:
    top: the folder that programs see.
    lower: the image below it; None for an empty one.
    upper: what overlayfs keeps of the difference; None where `top` is a copy.
    opaque: the attribute by which overlayfs marks a folder that hides the one
      of the image; programs can set all others.
    owner: uid and gid of its files; None for those of this process.
    most_bytes: what it can hold.
  """

  top: str
  lower: str | None
  upper: str | None
  owner: int | None
  most_bytes: int
  opaque: str = ''


@dataclasses.dataclass(frozen=True)
class Difference:
  """Removed paths of the image, topmost ones, and what is there anew."""

  removed: list[str]
  present: dict[str, os.stat_result]


def copy_image(source: str, target: str, owner: int | None) -> int:
  """Copies a folder of regular files, folders and links.

  Returns:
    The bytes that it takes, in whole pages.

  Raises:
    RefusedError: for anything else in it.
  """
  os.mkdir(target, 0o755)
  if owner is not None:
    os.chown(target, owner, owner)
  pages = 1
  for path, status in beneath.walk(source):
    pages += 1 + -(-status.st_size // 4096)
    here, there = os.path.join(source, path), os.path.join(target, path)
    kind = beneath.kind_of(status.st_mode)
    if kind == 'folder':
      if not beneath.is_short(path):
        raise beneath.RefusedError(f'{path[:80]!r}... of the image is too deep')
      os.mkdir(there, 0o755)
    elif kind == 'file':
      shutil.copyfile(here, there)
      os.chmod(there, 0o755 if status.st_mode & 0o111 else 0o644)
    elif kind == 'link':
      os.symlink(os.readlink(here), there)
    else:
      raise beneath.RefusedError(f'{path!r} of the image is a {kind}')
    if owner is not None:
      os.chown(there, owner, owner, follow_symlinks=False)
    if kind == 'file':
      os.utime(there, ns=(status.st_mtime_ns, status.st_mtime_ns))
  return pages * 4096


def difference(tree: Tree) -> Difference:
  if tree.upper is not None and tree.lower is not None:
    return _of_overlay(tree.upper, tree.lower, tree.opaque)
  return _of_copy(tree)


def _of_overlay(upper: str, lower: str, opaque: str) -> Difference:
  removed, present = [], {}
  hidden: list[str] = []  # folders whose part of the image is out of sight
  for path, status in beneath.walk(upper):
    below = None
    if not any(path.startswith(f'{folder}/') for folder in hidden):
      below = _status(lower, path)
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
      if below:
        removed.append(path)
      continue
    present[path] = status
    is_folder = stat.S_ISDIR(status.st_mode)
    if is_folder and not below:
      hidden.append(path)
    elif below and (
      stat.S_IFMT(below.st_mode) != stat.S_IFMT(status.st_mode)
      or (is_folder and _has(os.path.join(upper, path), opaque))
    ):
      removed.append(path)
      hidden.append(path)
  return Difference(removed, present)


def _has(path: str, attribute: str) -> bool:
  with contextlib.suppress(OSError):
    return os.getxattr(path, attribute) == b'y'
  return False


def _status(top: str | None, path: str) -> os.stat_result | None:
  if top is None:
    return None
  try:
    return os.lstat(os.path.join(top, path))
  except (FileNotFoundError, NotADirectoryError):
    return None


def _of_copy(tree: Tree) -> Difference:
  before = dict(beneath.walk(tree.lower)) if tree.lower else {}
  after = dict(beneath.walk(tree.top))
  removed, present = [], {}
  gone: set[str] = set()
  for path, status in before.items():
    now = after.get(path)
    if now and stat.S_IFMT(now.st_mode) == stat.S_IFMT(status.st_mode):
      continue
    gone.add(path)
    if os.path.dirname(path) not in gone:
      removed.append(path)
  for path, status in after.items():
    if path in gone or path not in before or _differs(tree, path, status):
      present[path] = status
  return Difference(removed, present)


def _differs(tree: Tree, path: str, status: os.stat_result) -> bool:
  """Whether what is there has another content or mode than in the image."""
  below = _status(tree.lower, path)
  if not below or stat.S_IFMT(below.st_mode) != stat.S_IFMT(status.st_mode):
    return True
  assert tree.lower
  if below.st_mode != status.st_mode:
    return True
  here, there = os.path.join(tree.top, path), os.path.join(tree.lower, path)
  kind = beneath.kind_of(status.st_mode)
  if kind == 'link':
    return os.readlink(here) != os.readlink(there)
  if kind != 'file':
    return kind != 'folder'
  if below.st_size != status.st_size:
    return True
  # By content, each time: filecmp remembers by times, which programs can set.
  with open(here, 'rb') as one, open(there, 'rb') as other:
    while piece := one.read(1 << 16):
      if piece != other.read(1 << 16):
        return True
  return False


def changes(tree: Tree) -> dict[str, str]:
  """path -> 'added', 'changed', 'removed' or 'special'."""
  found = difference(tree)
  told = {}
  for path in found.removed:
    assert tree.lower
    whole = os.lstat(os.path.join(tree.lower, path))
    gone = [(path, whole)]
    if stat.S_ISDIR(whole.st_mode):
      gone += beneath.walk(tree.lower, path)
    for inner, status in gone:
      if not stat.S_ISDIR(status.st_mode):
        told[inner] = 'removed'
  for path, status in found.present.items():
    kind = beneath.kind_of(status.st_mode)
    if not beneath.is_text(path):
      told[os.fsencode(path).decode('utf-8', 'backslashreplace')] = 'special'
    elif kind == 'folder':
      if not beneath.is_short(path):
        told[path] = 'special'
    elif not _differs(tree, path, status):
      told.pop(path, None)
    elif kind != 'file':
      told[path] = 'special'
    else:
      below = _status(tree.lower, path)
      known = below and stat.S_ISREG(below.st_mode)
      told[path] = 'changed' if known else 'added'
  return dict(sorted(told.items()))


def pack(tree: Tree) -> bytes:
  """The difference as bytes.

  Raises:
    RefusedError: when sparse files would make it larger than the workspace.
  """
  found = difference(tree)
  entries, blobs, total = [], [], 0
  for path, status in found.present.items():
    kind = beneath.kind_of(status.st_mode)
    extra: str | int = ''
    if kind == 'device':
      continue  # sockets: nobody listens any more
    if kind == 'link':
      extra = os.readlink(os.path.join(tree.top, path))
    elif kind == 'file':
      left = tree.most_bytes - total
      blobs.append(beneath.read(tree.top, path, left, one_name=False))
      extra = len(blobs[-1])
      total += extra
    mode = stat.S_IMODE(status.st_mode)
    entries.append([path, kind, mode, status.st_mtime_ns, extra])
  text = json.dumps({'removed': found.removed, 'entries': entries}).encode()
  return b''.join([_MAGIC, struct.pack('!Q', len(text)), text, *blobs])


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """What `pack` wrote, with every type and size checked."""

  removed: list[str]
  entries: list[list]
  content: memoryview


def parse(data: bytes) -> Snapshot:
  """Reads what `pack` wrote; it may have been anywhere since.

  Raises:
    RefusedError: for anything else.
  """
  start = len(_MAGIC) + 8
  if data[: len(_MAGIC)] != _MAGIC or len(data) < start:
    raise beneath.RefusedError('these bytes are no snapshot of a box')
  (size,) = struct.unpack('!Q', data[start - 8 : start])
  content = memoryview(data)[start + size :]
  try:
    header = json.loads(data[start : start + size])
    removed, entries = header['removed'], header['entries']
    lengths = [_length(*entry) for entry in entries]
    is_right = all(type(path) is str for path in removed)
  except (KeyError, TypeError, ValueError, RecursionError) as error:
    raise beneath.RefusedError(f'a damaged snapshot: {error}') from error
  if not is_right or sum(lengths) != len(content):
    raise beneath.RefusedError('a damaged snapshot: its parts do not fit')
  return Snapshot(removed, entries, content)


def _length(path, kind, mode, time_ns, extra) -> int:
  """Bytes that an entry has in the content; a ValueError for a wrong one."""
  length = extra if kind == 'file' else 0
  if not (
    type(path) is str
    and kind in _KINDS
    and type(mode) is int
    and 0 <= mode <= 0o7777
    and type(time_ns) is int
    and abs(time_ns) < _MOST_TIME
    and type(length) is int
    and length >= 0
    and (kind == 'file' or type(extra) is str)
  ):
    raise ValueError(f'entry {str(path)[:80]!r} is not as they are written')
  return length


def unpack(tree: Tree, snapshot: Snapshot) -> None:
  """Applies a difference to a workspace that is its image.

  Raises:
    RefusedError: for what does not fit the image or the workspace.
  """
  for path in snapshot.removed:
    _remove(tree, path)
  position = 0
  for path, kind, mode, _, extra in snapshot.entries:
    blob = b''
    if kind == 'file':
      blob = snapshot.content[position : position + extra]
      position += extra
    _make(tree, path, kind, mode, extra, blob)
  # Last, and inner ones first: each making changes the time of its folder.
  for path, kind, mode, time_ns, _ in reversed(snapshot.entries):
    with beneath.parent_of(tree.top, path) as (folder, name):
      if kind == 'folder':
        _set_mode(folder, name, mode)
      times = (time_ns, time_ns)
      os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)


def _set_mode(parent: int, name: str, mode: int) -> None:
  """Of a folder; a link of that name leads nowhere."""
  descriptor = os.open(name, beneath.FOLDER, dir_fd=parent)
  try:
    os.fchmod(descriptor, mode & 0o1777)
  finally:
    os.close(descriptor)


def _remove(tree: Tree, path: str) -> None:
  with beneath.parent_of(tree.top, path) as (folder, name):
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
      shutil.rmtree(name, dir_fd=folder)
    else:
      os.unlink(name, dir_fd=folder)


def _make(tree, path, kind, mode, extra, blob) -> None:
  if kind == 'file':
    beneath.write(tree.top, path, blob, tree.owner, mode)
    return
  with beneath.parent_of(tree.top, path) as (folder, name):
    if kind == 'folder':
      with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=folder)
    elif kind == 'link':
      with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
      os.symlink(extra, name, dir_fd=folder)
    elif kind == 'pipe':
      os.mkfifo(name, dir_fd=folder)
      os.chmod(name, mode & 0o777, dir_fd=folder)  # whatever the umask
    beneath.give(tree.owner, name, folder)
