"""Which import a run began from, wherever its folder lies."""

import contextlib
import json
import os
import pathlib

from composer_jax.core import files
from composer_jax.hf import importing
from composer_jax.hf.text import tokenizer


def of(folder: str | os.PathLike) -> str:
  """SHA-256 of all that a run depends on: model, weights, texts.

  Of the weights it reads the hashes that lie beside them. The same checkpoint
  imported again is the same.
  """
  folder = pathlib.Path(folder)
  names = (importing.MODEL, tokenizer.SOURCE, tokenizer.CONFIG)
  paths = [folder / name for name in names]
  paths += [p for p in importing.copied(folder) if p.suffix == '.jinja']
  with contextlib.closing(importing.open_weights(folder)) as weights:
    arrays = weights.record(0)['arrays']
  texts = {
    str(path.relative_to(folder)): files.sha256(path.read_bytes())
    for path in paths
    if path.exists()
  }
  return files.sha256(json.dumps([arrays, texts], sort_keys=True).encode())


def check(
  folder: str | os.PathLike, identity: str, workdir: str | os.PathLike
) -> None:
  """Raises a ValueError unless what a run began from still lies there."""
  is_there = (pathlib.Path(folder) / importing.RECORD).is_file()
  if is_there and of(folder) == identity:
    return
  problem = 'another one or has changed' if is_there else 'not there'
  raise ValueError(
    f'The run in {workdir} began from the import {folder}, which is {problem}. '
    'Put it back, or, where it has been moved to DIR, start the run once more '
    'with --config=configs/composer/imported.py:DIR: that notes the place and '
    'repeats no finished stage.'
  )
