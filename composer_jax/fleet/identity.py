"""What all processes of a trainer must agree in, known without jax."""

import hashlib
import importlib.metadata
import json
import pathlib
import sys
from typing import Any

from composer_jax.core import files

_ROOT = pathlib.Path(__file__).parent.parent
# Fields that may differ between hosts: where their files lie.
_OWN = ('config.initial', 'config.tasks.folder')


def of(config: dict[str, Any], program: str) -> dict[str, Any]:
  """Returns {what: value} of a program's code, versions and config."""
  digest = hashlib.sha256()
  for path in sorted(_ROOT.rglob('*.py')):
    digest.update(path.relative_to(_ROOT).as_posix().encode())
    digest.update(hashlib.sha256(path.read_bytes()).digest())
  values = files.flatten(json.loads(json.dumps(config)), 'config')
  return {
    'code': digest.hexdigest()[:12],
    'python': '.'.join(map(str, sys.version_info[:2])),
    'jax': importlib.metadata.version('jax'),
    'program': program,
    **{name: v for name, v in values.items() if name not in _OWN},
  }


def check(own: dict[str, Any], first: dict[str, Any], host: int) -> None:
  """Raises a ValueError that names what differs from the first host."""
  differing = [
    f'{name} is {first.get(name, "absent")!r} on host 0 and '
    f'{own.get(name, "absent")!r} on host {host}'
    for name in sorted(own | first)
    if own.get(name) != first.get(name)
  ]
  if differing:
    raise ValueError(
      f'Host {host} may not join: {"; ".join(differing)}. Start all hosts with '
      'one checkout and one command.'
    )
