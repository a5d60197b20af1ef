"""Plain orbax checkpoints of weights: what bundles are made of and become.

Orbax notices no flipped bit in the values (80 of 80 were restored), so what is
written here is read again and compared.
"""

import math
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from composer_jax.delta import identity, weights_held
from composer_jax.train.checkpoints import manager

# What tensorstore has no code for.
_REFUSED = ('uint4',)


def write(named: dict[str, np.ndarray], folder: pathlib.Path | str) -> None:
  """Writes a checkpoint of nested dictionaries, which orbax alone reads.

  Arrays without elements are left out, since orbax refuses them.

  Args:
    named: arrays by '/'-joined names.
    folder: absent, or empty.

  Raises:
    ValueError: the folder is not empty, or orbax cannot hold such a tree.
  """
  folder = pathlib.Path(folder).absolute()
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(
      f'{folder} is not empty; a checkpoint is written into a folder of its '
      'own. Name another.'
    )
  nested = _nested(named)
  saver = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
  with saver, manager.one_at_a_time:
    # The folder may be there, empty.
    saver.save(folder, args=ocp.args.PyTreeSave(nested), force=True)


def read(folder: pathlib.Path | str) -> Any:
  """Reads any checkpoint of one tree as numpy arrays; nothing is verified."""
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    folder = pathlib.Path(folder).absolute()
    return _restore(reader, folder, reader.metadata(folder).item_metadata.tree)


def verify(folder: pathlib.Path | str, held: weights_held.Held) -> None:
  """Raises ValueError unless what `write` wrote holds these whole weights.

  One tensor after another, so that no second copy of all is in memory.
  """
  folder = pathlib.Path(folder).absolute()
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    for name, array in held.arrays().items():
      if not array.size:
        continue
      like = _nested({name: array})
      (found,) = jax.tree.leaves(_restore(reader, folder, like))
      same = (found.dtype, found.shape) == (array.dtype, array.shape)
      bits = identity.flat_bits
      if not same or not np.array_equal(bits(found), bits(array)):
        raise ValueError(
          f'{folder}: {name} is not what was written; the disk is damaged. '
          'Write to another one.'
        )


def _restore(reader: ocp.Checkpointer, folder: pathlib.Path, like: Any) -> Any:
  arguments = jax.tree.map(
    lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like
  )
  return reader.restore(
    folder,
    args=ocp.args.PyTreeRestore(
      like, restore_args=arguments, partial_restore=True
    ),
  )


def _nested(named: dict[str, np.ndarray]) -> dict[str, Any]:
  """Returns nested dictionaries of the arrays that have elements."""
  nested: dict[str, Any] = {}
  folders: dict[str, str] = {}
  for name, leaf in named.items():
    if not math.prod(leaf.shape):
      continue
    if str(leaf.dtype) in _REFUSED:
      raise ValueError(
        f'{name} is {leaf.dtype}, which orbax cannot write; follow the bundles '
        'instead.'
      )
    # As orbax joins keys.
    folder = name.replace('/', '.')
    if folder in folders:
      raise ValueError(
        f'{name!r} and {folders[folder]!r} would both lie in the folder '
        f'{folder!r} of an orbax checkpoint; rename one.'
      )
    folders[folder] = name
    *path, last = name.split('/')
    place = nested
    for key in path:
      place = place.setdefault(key, {})
      if not isinstance(place, dict):
        break
    if not isinstance(place, dict) or last in place:
      raise ValueError(
        f'{name!r} lies inside another leaf of the tree, which an orbax '
        'checkpoint cannot hold; rename one.'
      )
    place[last] = leaf
  return nested
