"""Keyframes: weights as a plain orbax checkpoint that guards itself.

Orbax alone reads one back into the tree that was written. It notices no flipped
bit in the values (80 of 80 were restored), which is why each of its files is an
object of the store, named by its sha256, and each box of its tensors is hashed
in the manifest: what receivers take was verified twice.

It is zarr without OCDBT, one file for a chunk: `delta.orbax_files` finds the
files that a part of a tensor needs and reads them without orbax and jax. Each
process writes the shards that it holds, and nothing is gathered.
"""

import contextlib
import logging
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from composer_jax.core import trees
from composer_jax.delta import identity, orbax_files, weights_held
from composer_jax.train.checkpoints import manager

# The most that a file holds before compression, and so what a reader of a part
# may have to fetch in vain. 2**24 makes 64 thousand files of a terabyte.
CHUNK_BYTES = 2**24

# What tensorstore has no code for.
_REFUSED = ('uint4',)


def write(
  tree: Any, *, chunk_bytes: int = CHUNK_BYTES
) -> Callable[[pathlib.Path], None]:
  """Returns what `Publisher.publish(write_full=)` calls to write a keyframe.

  The arrays are read when it is called: they must not be donated until then.
  Arrays without elements are left out, since orbax refuses them; they are in
  the manifest, where all there is to say about them is their shape.

  Args:
    tree: of jax or numpy arrays.
    chunk_bytes: of a file, before compression.

  Raises:
    ValueError: two leaves would lie in the same folder.
  """
  nested = _nested(trees.flatten_names(tree))

  def write_full(folder: pathlib.Path) -> None:
    """Writes into a folder that is absent or empty; collective."""
    folder = pathlib.Path(folder).absolute()
    if folder.exists() and any(folder.iterdir()):
      raise ValueError(
        f'{folder} is not empty; a keyframe is written into a folder of its '
        'own. Name another.'
      )
    # Naming the processes makes orbax wait at barriers of the coordination
    # service, which threads may do while others compute; collectives of the
    # devices would meet those of the training step.
    several = jax.process_count() > 1
    processes = set(range(jax.process_count())) if several else None
    options = ocp.options.MultiprocessingOptions(active_processes=processes)
    handler = ocp.PyTreeCheckpointHandler(
      use_ocdbt=False, use_zarr3=False, multiprocessing_options=options
    )
    arguments = jax.tree.map(
      lambda _: ocp.SaveArgs(chunk_byte_size=chunk_bytes), nested
    )
    checkpointer = ocp.Checkpointer(handler, multiprocessing_options=options)
    with _quiet(), checkpointer as saver, manager.one_at_a_time:
      saver.save(
        folder,
        args=ocp.args.PyTreeSave(nested, save_args=arguments),
        force=True,  # The folder may be there, empty.
      )

  return write_full


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Drops orbax's warning that without OCDBT it has nothing to merge."""

  def is_wanted(record: logging.LogRecord) -> bool:
    return 'Skipping merge of OCDBT' not in str(record.msg)

  logger = logging.getLogger('absl')
  logger.addFilter(is_wanted)
  try:
    yield
  finally:
    logger.removeFilter(is_wanted)


def read(folder: pathlib.Path | str, like: Any = None) -> Any:
  """Reads a checkpoint as plain orbax does: nothing is verified.

  Args:
    folder: what `write` wrote, or any checkpoint of one tree.
    like: tree of `jax.ShapeDtypeStruct` with shardings; None reads numpy
      arrays into nested dictionaries.
  """
  folder = pathlib.Path(folder).absolute()
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
    if like is None:
      stored = reader.metadata(folder).item_metadata.tree
      restore = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), stored
      )
      return reader.restore(
        folder, args=ocp.args.PyTreeRestore(restore_args=restore)
      )
    return reader.restore(
      folder,
      args=ocp.args.PyTreeRestore(
        like, restore_args=ocp.checkpoint_utils.construct_restore_args(like)
      ),
    )


def verify(folder: pathlib.Path | str, held: weights_held.Held) -> None:
  """Raises ValueError unless what `write` wrote holds these whole weights."""
  written = orbax_files.open_folder(folder)
  for name, tensor in held.tensors.items():
    for number in range(tensor.grid.num_boxes):
      values = written.read(
        name, tensor.buffer.dtype, tensor.shape, tensor.grid.box(number)
      )
      if identity.hash_box(values) != tensor.posts[number].tobytes():
        raise ValueError(
          f'{folder}: {name} (box {number}) is not what was written; the disk '
          'is damaged. Write to another one.'
        )


def _nested(named: dict[str, Any]) -> dict[str, Any]:
  """Returns nested dictionaries of the leaves that have elements."""
  nested: dict[str, Any] = {}
  folders: dict[str, str] = {}
  for name, leaf in named.items():
    leaf = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    if not math.prod(leaf.shape):
      continue
    if str(leaf.dtype) in _REFUSED:
      raise ValueError(
        f'{name} is {leaf.dtype}, which orbax cannot write; publish keyframes '
        "as 'packed'."
      )
    folder = orbax_files.folder_of(name)
    if folder in folders:
      raise ValueError(
        f'{name!r} and {folders[folder]!r} would both lie in the folder '
        f'{folder!r} of an orbax checkpoint; rename one, or publish keyframes '
        "as 'packed'."
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
        "checkpoint cannot hold; rename one, or publish keyframes as 'packed'."
      )
    place[last] = leaf
  return nested
