"""Lists of sources with the hash of each, so that figures can be repeated.

A list is a text file `NAME.sources`: a source a line, optionally followed by
`sha256=...`, comments after '#'. A source whose content differs from its hash
is refused by name.
"""

import os
import pathlib
import re
from collections.abc import Sequence

from composer_jax.core import files
from composer_jax.corpus import sources as sources_lib


def read(sources: Sequence[str]) -> dict[str, str | None]:
  """Returns {source: required SHA-256 or None}, in order.

  An entry that ends in `.sources` is the path of a list.
  """
  if isinstance(sources, str):
    raise ValueError(f'sources must be a list of strings, not {sources!r}.')
  if not sources:
    raise ValueError("No sources; name at least one, such as 'stdlib'.")
  pins: dict[str, str | None] = {}
  for name in sources:
    if not name.endswith('.sources'):
      pins[name] = None
      continue
    path = pathlib.Path(name).expanduser()
    if not path.is_file():
      raise ValueError(f'The list of sources {name!r} does not exist.')
    for line in path.read_text().splitlines():
      words = line.split('#')[0].split()
      if not words:
        continue
      if len(words) > 2 or not all(
        re.fullmatch('sha256=[0-9a-f]{64}', w) for w in words[1:]
      ):
        raise ValueError(
          f"{name}: {line!r} must read 'SOURCE' or 'SOURCE sha256=HEX'."
        )
      pins[words[0]] = words[1][7:] if words[1:] else None
  return pins


def write(
  sources: Sequence[str],
  path: str | os.PathLike,
  archives: str | os.PathLike | None = None,
) -> None:
  """Writes a list of sources with the hash each has on this machine."""
  lines = ['# SOURCE sha256=HASH of all its Python files, or of the archive']
  for name in sources:
    source = sources_lib.find(name, archives)
    note = f'  # {source.version}' if source.version else ''
    lines.append(f'{name} sha256={source.sha256()}{note}')
  files.write_atomic(path, ('\n'.join(lines) + '\n').encode())


def check(source: sources_lib.Source, pinned: str | None) -> None:
  """Refuses a source whose content is not what its pin says."""
  if pinned is not None and source.sha256() != pinned:
    raise ValueError(
      f'Source {source.name!r} (here: version {source.version or "unknown"}) '
      f'has SHA-256 {source.sha256()}; the list requires {pinned}. Use the '
      'pinned version, or drop its sha256 to train on what is here.'
    )
