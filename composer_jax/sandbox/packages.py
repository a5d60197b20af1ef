"""Gathers installed distributions into a folder that sandboxes can import from.

They are copied, because the project's environment holds more than a program may
see, and the copies are cached, because compiling them takes seconds.
"""

import compileall
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import py_compile
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence

_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*')


def gather(names: Sequence[str]) -> pathlib.Path:
  """Returns a folder with these distributions and all their dependencies.

  Raises:
    ValueError: a distribution is missing or cannot be copied.
  """
  distributions = _closure(names)
  versions = sorted(f'{name}=={x.version}' for name, x in distributions.items())
  tag = f'{sys.implementation.cache_tag}\n' + '\n'.join(versions)
  digest = hashlib.sha256(tag.encode()).hexdigest()[:20]
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  target = pathlib.Path(home, 'composer_jax', 'sandbox-packages', digest)
  if target.is_dir():
    return target
  logging.info('Gathering %s for sandboxes.', ', '.join(versions))
  target.parent.mkdir(parents=True, exist_ok=True)
  aside = pathlib.Path(tempfile.mkdtemp(prefix='.new-', dir=target.parent))
  aside.chmod(0o755)
  try:
    for name, distribution in distributions.items():
      _copy(name, distribution, aside)
    # Unchecked: the folder is read-only where it is used, and does not keep
    # the times of files.
    compileall.compile_dir(
        aside, quiet=2,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip
    try:
      aside.rename(target)
    except OSError:
      if not target.is_dir():  # else another process was faster
        raise
  finally:
    shutil.rmtree(aside, ignore_errors=True)
  return target


def _closure(
  names: Sequence[str],
) -> dict[str, importlib.metadata.Distribution]:
  distributions: dict[str, importlib.metadata.Distribution] = {}
  pending = [(name, '') for name in names]
  while pending:
    name, needed_by = pending.pop()
    key = re.sub(r'[-_.]+', '-', name).lower()
    if key in distributions:
      continue
    distribution = _installed(name)
    if distribution is None:
      reason = f', which {needed_by} needs' if needed_by else ''
      raise ValueError(
        f'no distribution {name!r}{reason} is installed; install it with pip '
        'into the environment that opens the sandbox.'
      )
    distributions[key] = distribution
    for requirement in distribution.requires or ():
      text, _, marker = requirement.partition(';')
      match = _NAME.match(text.strip())
      if not match or 'extra' in marker:
        continue
      # Markers choose by platform and version: pip installed what applies.
      if marker and not _installed(match[0]):
        continue
      pending.append((match[0], name))
  return distributions


def _installed(name: str) -> importlib.metadata.Distribution | None:
  try:
    return importlib.metadata.distribution(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _copy(
  name: str, distribution: importlib.metadata.Distribution, target: pathlib.Path
) -> None:
  if '"editable": true' in (distribution.read_text('direct_url.json') or ''):
    raise ValueError(
      f'distribution {name!r} is installed in editable mode; install it '
      'without -e to use it in a sandbox.'
    )
  for file in distribution.files or ():
    # Scripts lie beside site-packages, and bytecode is compiled anew.
    if '..' in file.parts or file.is_absolute() or '__pycache__' in file.parts:
      continue
    source = pathlib.Path(str(file.locate()))
    if source.is_file():
      copy = target / file
      copy.parent.mkdir(parents=True, exist_ok=True)
      shutil.copyfile(source, copy)
      copy.chmod(0o644)
