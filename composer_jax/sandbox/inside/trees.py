"""Differences between a workspace and its image.

Standard library only: runs inside the sandbox, on trees that untrusted code
filled and that nothing changes meanwhile.
"""

import contextlib
import dataclasses
import os
import shutil
import stat

from composer_jax.sandbox.inside import beneath


@dataclasses.dataclass(frozen=True)
class Tree:
  """A workspace.

  Attributes:
    top: folder that programs see.
    lower: folder of the image; None for an empty image.
    upper: folder where overlayfs keeps the difference; None where `top` is a
      copy of the image.
    owner: uid and gid of its files; None for those of this process.
    opaque: attribute by which overlayfs marks a folder that hides the one of
      the image; programs cannot set it.
  """

  top: str
  lower: str | None
  upper: str | None
  owner: int | None
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
  # Folders that hide the image's part below them, and those in them.
  hidden: set[str] = set()
  for path, status in beneath.walk(upper):
    is_hidden = os.path.dirname(path) in hidden
    below = None if is_hidden else _status(lower, path)
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
      if below:
        removed.append(path)
      continue
    present[path] = status
    is_folder = stat.S_ISDIR(status.st_mode)
    if is_folder and not below:
      hidden.add(path)
    elif below and (
      stat.S_IFMT(below.st_mode) != stat.S_IFMT(status.st_mode)
      or (is_folder and _has(os.path.join(upper, path), opaque))
    ):
      removed.append(path)
      hidden.add(path)
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
