"""Checkpoints on disk: what bundles are made of and become.

What runs of ours wrote is verified while it is read; of any other orbax
checkpoint there is nothing to verify it by: orbax notices no flipped bit in the
values (80 of 80 were restored).
"""

import collections
import contextlib
import math
import os
import pathlib
import re
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from composer_jax.core import trees
from composer_jax.hf.tensors import stored as hf_stored
from composer_jax.telemetry import progress
from composer_jax.train.checkpoints import manager

# The folder of an orbax checkpoint, under the names that its savers give it.
_ITEMS = ('', 'default', manager.STATE)
_TREE = '_METADATA'

# What tensorstore has no code for.
_REFUSED = ('uint4',)


def write(named: dict[str, np.ndarray], folder: pathlib.Path | str) -> None:
  """Writes a checkpoint of nested dictionaries, which orbax alone reads.

  Arrays without elements are left out, since orbax refuses them.
  """
  folder = pathlib.Path(folder).absolute()
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(f'{folder} is not empty; name another folder.')
  nested = _nested(named)
  saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
  with saver, manager.one_at_a_time:
    # The folder may be there, empty.
    saver.save(folder, args=ocp.args.PyTreeSave(nested), force=True)


def read_plain(folder: pathlib.Path | str) -> Any:
  """Reads any checkpoint of one tree as numpy arrays; nothing is verified."""
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    folder = pathlib.Path(folder).absolute()
    like = reader.metadata(folder).item_metadata.tree
    arguments = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like
    )
    return reader.restore(
      folder, args=ocp.args.PyTreeRestore(like, restore_args=arguments)
    )


def _nested(named: dict[str, np.ndarray]) -> dict[str, Any]:
  """Returns nested dictionaries of the arrays that have elements."""
  named = {name: leaf for name, leaf in named.items() if math.prod(leaf.shape)}
  # As orbax joins keys.
  folders = collections.Counter(name.replace('/', '.') for name in named)
  inner = {n[: mark.start()] for n in named for mark in re.finditer('/', n)}
  nested: dict[str, Any] = {}
  for name, leaf in named.items():
    if str(leaf.dtype) in _REFUSED:
      raise ValueError(
        f'{name} is {leaf.dtype}, which orbax cannot write; follow the bundles '
        'instead.'
      )
    if folders[name.replace('/', '.')] > 1 or name in inner:
      raise ValueError(
        f'{name!r} would lie in the folder of another leaf in an orbax '
        'checkpoint, which joins keys with "."; rename one.'
      )
    *path, last = name.split('/')
    place = nested
    for key in path:
      place = place.setdefault(key, {})
    place[last] = leaf
  return nested


def read(source: str) -> dict[str, np.ndarray]:
  """Returns the weights of a checkpoint, whole.

  Those of our runs, which hold float32 masters, are read as the policy is
  served, in bfloat16; others as they are.

  Args:
    source: WORKDIR:STAGE for what a finished stage exported; a folder of
      numbered checkpoints for the latest; one of them; or any orbax checkpoint.
  """
  folder = _find(source)
  if not (folder / manager.STATE).is_dir() or not folder.name.isdecimal():
    return _named_plain(folder)
  arrays = _read_ours(folder)
  if {'params', 'opt_state'} <= {name.partition('/')[0] for name in arrays}:
    # A train state, which holds more than the model.
    named = {re.sub('^heads/', 'mtp/', n): a for n, a in arrays.items()}
    kept = '(mtp/)?(params/|selection_bias)'
    arrays = {n: a for n, a in named.items() if re.match(kept, n)}
  # As `decoder.policy`, whose selection bias stays float32.
  return {
    name: array.astype(ml_dtypes.bfloat16)
    if re.match('(mtp/)?params/', name) and array.dtype == np.float32
    else array
    for name, array in arrays.items()
  }


def check_local(what: str, path: str | os.PathLike) -> None:
  """Refuses a URL, which would become a folder of that name."""
  if '://' in os.fspath(path):
    raise ValueError(
      f'--{what} is {path}; it must lie in a file system of this machine.'
    )


def _find(source: str) -> pathlib.Path:
  """Returns the folder of one checkpoint."""
  check_local('source', source)
  path = pathlib.Path(source)
  workdir, mark, stage = source.rpartition(':')
  if mark and not path.exists():
    path = pathlib.Path(workdir) / 'exports' / stage
    if not path.is_dir():
      known = sorted(p.name for p in path.parent.glob('*') if p.is_dir())
      raise ValueError(
        f'{source}: stage {stage!r} of {workdir} has no export; finished are '
        f'{known}. Run it to its end, or name another.'
      )
  steps = [p for p in path.glob('*') if p.is_dir() and p.name.isdecimal()]
  for folder in (path, *sorted(steps, key=lambda p: int(p.name))[-1:]):
    if (folder / manager.STATE / _TREE).is_file() and (
      folder / manager.HASHES
    ).is_dir():
      return folder.absolute()
    for item in _ITEMS:
      if (folder / item / _TREE).is_file():
        return (folder / item).absolute()
  raise ValueError(
    f'{source} holds no orbax checkpoint. Name the folder of one, a folder of '
    'numbered ones, or WORKDIR:STAGE for the export of a run.'
  )


def _read_ours(folder: pathlib.Path) -> dict[str, np.ndarray]:
  checkpoints = manager.Checkpoints(folder.parent, keep=None)
  with contextlib.closing(checkpoints):
    stored = hf_stored.Stored(checkpoints, int(folder.name))
    arrays = {}
    with progress.Progress('read', len(stored.shapes)) as bar:
      for name, shape in stored.shapes.items():
        stored.verify(name)
        arrays[name] = stored.read(name, tuple((0, n) for n in shape))
        bar.update(len(arrays))
  return arrays


def _named_plain(folder: pathlib.Path) -> dict[str, np.ndarray]:
  try:
    tree = read_plain(folder)
  # What orbax raises for damage: see `manager`.
  except (LookupError, AttributeError, TypeError) as error:
    raise ValueError(f'{folder} is damaged: {error}') from error
  found = trees.flatten_names(tree)
  if len(found) != len(jax.tree.leaves(tree)):
    raise ValueError(
      f"{folder}: two leaves of the tree have the same '/'-joined name."
    )
  return {name: np.asarray(leaf) for name, leaf in found.items()}
