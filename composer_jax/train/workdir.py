"""Binds each workdir to one configuration."""

import json
import os
import pathlib
from typing import Any

from composer_jax.core import files

CONFIG = 'config.json'


def claim(
  workdir: str | os.PathLike,
  config: dict[str, Any],
  *,
  ignored: tuple[str, ...] = (),
) -> None:
  """Binds a workdir to a configuration, or checks that it is bound to it.

  `config` has JSON values. `ignored` are dotted keys, or their prefixes, that
  may differ between runs.

  Raises:
    ValueError: the workdir belongs to another configuration; names every
      differing key with both values.
  """
  path = pathlib.Path(workdir) / CONFIG
  # Through JSON, so that tuples compare equal to what was read back.
  wanted = files.flatten(json.loads(json.dumps(config)))
  if not path.exists():
    files.write_json(path, config)
    return
  there = files.flatten(files.read_json(path))
  differing = [
    f'{key} is {there.get(key, "absent")!r} there and '
    f'{wanted.get(key, "absent")!r} now'
    for key in sorted(there | wanted)
    if (key in there, there.get(key)) != (key in wanted, wanted.get(key))
    and not any(key == i or key.startswith(i + '.') for i in ignored)
  ]
  if differing:
    raise ValueError(
      f'Workdir {workdir} belongs to another configuration: '
      f'{"; ".join(differing)}. Choose another --workdir, or delete this one '
      'to start over.'
    )
