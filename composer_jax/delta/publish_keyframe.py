"""Keyframes that are checkpoints: written to a folder, kept as objects.

Every process writes its part of the checkpoint into one folder, looks whether
what is there is what it published, and makes objects of some of the files.
"""

import contextlib
import pathlib
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator

from composer_jax.delta import publish_parts, publish_share
from composer_jax.delta import store as stores

WriteFull = Callable[[pathlib.Path], None]


@contextlib.contextmanager
def folder(
  store: stores.Store, team: publish_parts.Team
) -> Iterator[pathlib.Path]:
  """Yields an empty folder that all processes can write to, and removes it."""
  if store.root is not None:
    # `delete` sweeps up what a killed publisher left of this name.
    name = f'.{team.label}.{secrets.token_hex(8)}.tmp'
    parent = store.root / 'keyframes' / name
    parent.mkdir(parents=True)
  elif team.count == 1:
    parent = pathlib.Path(tempfile.mkdtemp(prefix='keyframe-'))
  else:
    raise ValueError(
      f'{store.url} is no directory that the {team.count} processes share, so '
      "they cannot write a checkpoint into it; publish keyframes as 'packed'."
    )
  try:
    yield parent / 'checkpoint'
  finally:
    shutil.rmtree(parent, ignore_errors=True)


def upload(
  store: stores.Store, source: pathlib.Path, team: publish_parts.Team
) -> tuple[publish_share.File, ...]:
  """Makes objects of this process's part of the files; they leave the folder.

  Raises:
    ValueError: nothing was written.
  """
  found = []
  for path in sorted(source.rglob('*')):
    relative = path.relative_to(source).as_posix()
    # Chosen by name and not by place: others take files away meanwhile.
    is_mine = zlib.crc32(relative.encode()) % team.count == team.process
    if is_mine and path.is_file():
      name, length = store.put_file(path, give=True)
      found.append((relative, name, length))
  if not found and team.count == 1:
    raise ValueError(f'{source}: write_full wrote no files there.')
  return tuple(found)
