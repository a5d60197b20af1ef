"""Differences between a workspace and its image: found, packed and applied.

Standard library only: runs inside the sandbox, on trees that untrusted code
filled and that nothing changes meanwhile.
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
    top: folder that programs see.
    lower: folder of the image; None for an empty image.
    upper: folder where overlayfs keeps the difference; None where `top` is a
      copy of the image.
    owner: uid and gid of its files; None for those of this process.
    most_bytes: bytes that it can hold.
    opaque: attribute by which overlayfs marks a folder that hides the one of
      the image; programs cannot set it.
  """

  top: str
  lower: str | None
  upper: str | None
  owner: int | None
  most_bytes: int
  opaque: str = ''


@dataclasses.dataclass(frozen=True)
class Difference:
  """Difference of a workspace to its image.

  Attributes:
    removed: topmost paths of the image that are gone.
    present: path -> status of what is new or may have changed.
  """

  removed: list[str]
  present: dict[str, os.stat_result]


def copy_image(source: str, target: str, owner: int | None) -> int:
  """Copies a folder; returns its size in bytes, in whole pages.

  Raises:
    RefusedError: it has something else than regular files, folders and links.
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
  hidden: list[str] = []  # folders that hide the image's part below them
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
    current = after.get(path)
    if current and stat.S_IFMT(current.st_mode) == stat.S_IFMT(status.st_mode):
      continue
    gone.add(path)
    if os.path.dirname(path) not in gone:
      removed.append(path)
  for path, status in after.items():
    if path in gone or path not in before or _differs(tree, path, status):
      present[path] = status
  return Difference(removed, present)


def _differs(tree: Tree, path: str, status: os.stat_result) -> bool:
  """Returns true if the content or mode differs from the image's."""
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
  # Not filecmp, which trusts times, and programs can set those.
  with open(here, 'rb') as file, open(there, 'rb') as original:
    while piece := file.read(1 << 16):
      if piece != original.read(1 << 16):
        return True
  return False


def changes(tree: Tree) -> dict[str, str]:
  """Returns path -> 'added', 'changed', 'removed' or 'special'."""
  diff = difference(tree)
  kinds = {}
  for path in diff.removed:
    assert tree.lower
    top = os.lstat(os.path.join(tree.lower, path))
    gone = [(path, top)]
    if stat.S_ISDIR(top.st_mode):
      gone += beneath.walk(tree.lower, path)
    for inner, status in gone:
      if not stat.S_ISDIR(status.st_mode):
        kinds[inner] = 'removed'
  for path, status in diff.present.items():
    kind = beneath.kind_of(status.st_mode)
    if not beneath.is_text(path):
      kinds[os.fsencode(path).decode('utf-8', 'backslashreplace')] = 'special'
    elif kind == 'folder':
      if not beneath.is_short(path):
        kinds[path] = 'special'
    elif not _differs(tree, path, status):
      kinds.pop(path, None)
    elif kind != 'file':
      kinds[path] = 'special'
    else:
      below = _status(tree.lower, path)
      is_known = below and stat.S_ISREG(below.st_mode)
      kinds[path] = 'changed' if is_known else 'added'
  return dict(sorted(kinds.items()))


def pack(tree: Tree) -> bytes:
  """Returns the difference as bytes.

  Raises:
    RefusedError: sparse files would make it larger than the workspace.
  """
  diff = difference(tree)
  entries, blobs, total = [], [], 0
  for path, status in diff.present.items():
    kind = beneath.kind_of(status.st_mode)
    extra: str | int = ''
    if kind == 'device':
      continue  # a socket, whose listener is dead
    if kind == 'link':
      extra = os.readlink(os.path.join(tree.top, path))
    elif kind == 'file':
      most_bytes = tree.most_bytes - total
      blobs.append(beneath.read(tree.top, path, most_bytes, one_name=False))
      extra = len(blobs[-1])
      total += extra
    mode = stat.S_IMODE(status.st_mode)
    entries.append([path, kind, mode, status.st_mtime_ns, extra])
  text = json.dumps({'removed': diff.removed, 'entries': entries}).encode()
  return b''.join([_MAGIC, struct.pack('!Q', len(text)), text, *blobs])


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """A difference that `pack` wrote, with every type and size checked."""

  removed: list[str]
  entries: list[list]
  content: memoryview


def parse(data: bytes) -> Snapshot:
  """Reads bytes that may come from `pack`; RefusedError for all others."""
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
  """Returns an entry's size in the content; ValueError for a malformed one."""
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
    raise ValueError(f'entry {str(path)[:80]!r} is malformed')
  return length


def unpack(tree: Tree, snapshot: Snapshot) -> None:
  """Applies a difference to a workspace that equals its image.

  Raises:
    RefusedError: the difference does not fit the image or the workspace.
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
  # Last, and inner entries first: making an entry changes its folder's time.
  for path, kind, mode, time_ns, _ in reversed(snapshot.entries):
    with beneath.parent_of(tree.top, path) as (folder, name):
      if kind == 'folder':
        _set_mode(folder, name, mode)
      times = (time_ns, time_ns)
      os.utime(name, ns=times, dir_fd=folder, follow_symlinks=False)


def _set_mode(parent: int, name: str, mode: int) -> None:
  """Sets the mode of a folder; a link of that name is not followed."""
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
      os.chmod(name, mode & 0o777, dir_fd=folder)  # mkfifo obeys the umask
    beneath.give(tree.owner, name, folder)
