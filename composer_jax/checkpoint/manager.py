"""Numbered checkpoints of one stage: orbax underneath, our own hashes on top.

A checkpoint is a tree of arrays plus a JSON value (the data iterator's state).
Orbax writes in the background, under a temporary name, so that a process
killed at any moment leaves whole checkpoints only; it does not notice a flipped
bit in tensor data, hence a BLAKE3 hash of every array, verified at restore.
Trees are stored as flat {name: array}: a change of optimizer class does not
make a checkpoint unreadable, a change of shape is named.
"""

import errno
import json
import os
import pathlib
import shutil
from typing import Any

import blake3
import jax
import numpy as np
import orbax.checkpoint as ocp

from composer_jax.core import trees

_STATE = 'state'
_DATA = 'data'
_HASHES = 'hashes'

# Free bytes asked for beyond the arrays themselves: metadata, and the file
# system's own rounding.
_DISK_MARGIN = 4 * 2**20


# What orbax's parsing of damaged metadata has been seen to raise.
_READ_ERRORS = (OSError, ValueError, LookupError, AttributeError, TypeError)


class DamagedCheckpoint(ValueError):
  """A checkpoint that cannot be read or is not what was written."""


def _slices_name(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
  """Names a shard by its global bounds: '0:4,8:16'; '' for a scalar."""
  bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
  return ','.join(f'{start}:{stop}' for start, stop in bounds)


def _hash(block: np.ndarray) -> str:
  return blake3.blake3(np.ascontiguousarray(block).data.cast('B')).hexdigest()


def _digest(text: str) -> str:
  return blake3.blake3(text.encode()).hexdigest()


def _record(array: jax.Array) -> dict[str, Any]:
  """Describes an array: shape, dtype, and a hash of each shard held here."""
  return {
    'shape': list(array.shape),
    'dtype': str(array.dtype),
    'shards': {
      _slices_name(shard.index, array.shape): _hash(_bytes(shard.data))
      for shard in array.addressable_shards
      if shard.replica_id == 0
    },
  }


def _bytes(array: Any) -> np.ndarray:
  """Views as bytes what has no plain buffer: scalars and bfloat16."""
  return np.atleast_1d(np.ascontiguousarray(np.asarray(array))).view(np.uint8)


def _matches(array: jax.Array, shards: dict[str, str]) -> bool:
  """Verifies every recorded shard that this process can see.

  The mesh may differ from the one that wrote, so recorded bounds are cut out of
  the whole array where it is addressable; elsewhere only shards of equal bounds
  can be compared.
  """
  if array.is_fully_addressable:
    whole = np.asarray(array)
    for name, expected in shards.items():
      bounds = [b.split(':') for b in name.split(',') if b]
      block = whole[tuple(slice(int(a), int(b)) for a, b in bounds)]
      if _hash(_bytes(block)) != expected:
        return False
    return True
  return all(
    shards.get(_slices_name(s.index, array.shape), h) == h
    for s in array.addressable_shards
    for h in (_hash(_bytes(s.data)),)
  )


def _brief(error: BaseException) -> str:
  """Shortens tensorstore's page-long messages to their start."""
  first_line = (str(error).splitlines() or [''])[0]
  return f'{type(error).__name__}: {first_line[:160]}'


class Checkpoints:
  """Checkpoints of one stage in one directory, numbered by step."""

  def __init__(self, directory: str | os.PathLike, *, keep: int):
    """Opens a directory, sweeping what a killed process left half-written.

    Args:
      directory: made when missing.
      keep: newest checkpoints kept.
    """
    self.directory = pathlib.Path(directory).absolute()
    self.directory.mkdir(parents=True, exist_ok=True)
    self._writing: int | None = None
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
      ),
    )

  def steps(self) -> list[int]:
    """Returns the steps of whole checkpoints, ascending."""
    return sorted(self._manager.all_steps())

  def latest_step(self) -> int | None:
    return max(self.steps(), default=None)

  def save(self, step: int, tree: Any, data: Any = None) -> None:
    """Starts writing a checkpoint; returns when the arrays may be donated.

    Args:
      step: number of finished steps; must be above the latest.
      tree: arrays.
      data: any JSON value.

    Raises:
      OSError: too little space for this one, or the previous one failed to be
        written. Earlier checkpoints are untouched.
    """
    self.wait()
    flat = trees.flatten_names(tree)
    self._check_space(step, sum(int(a.nbytes) for a in flat.values()))
    hashes = {name: _record(array) for name, array in flat.items()}
    text = json.dumps(data, sort_keys=True)
    record = json.dumps({'arrays': hashes, 'data': _digest(text)})
    self._writing = step
    try:
      self._manager.save(
        step,
        args=ocp.args.Composite(
          **{
            _STATE: ocp.args.StandardSave(flat),
            _DATA: ocp.args.JsonSave({'text': text}),
            _HASHES: ocp.args.JsonSave(
              {'text': record, 'blake3': _digest(record)}
            ),
          }
        ),
        force=True,
      )
    except (OSError, ValueError, RuntimeError) as error:
      raise self._write_error(error) from error

  def wait(self) -> None:
    """Waits for the checkpoint being written, if any.

    Raises:
      OSError: it could not be written.
    """
    try:
      self._manager.wait_until_finished()
    except (OSError, ValueError, RuntimeError) as error:
      raise self._write_error(error) from error
    self._writing = None

  def restore(self, step: int, like: Any) -> tuple[Any, Any]:
    """Reads and verifies a checkpoint.

    Args:
      step: one of `steps()`.
      like: tree of `jax.ShapeDtypeStruct` with shardings, or of arrays.

    Returns:
      The tree, placed as `like` says, and the JSON value.

    Raises:
      DamagedCheckpoint: unreadable, or a hash differs.
      ValueError: it holds other arrays than `like`.
    """
    flat = trees.flatten_names(like)
    stored = self._read(step, **{_HASHES: ocp.args.JsonRestore()})[_HASHES]
    if _digest(stored.get('text', '')) != stored.get('blake3'):
      raise self._damaged(step, 'its table of hashes has changed')
    record = json.loads(stored['text'])
    self._check_same(step, record['arrays'], flat)
    targets = {
      name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
      for name, a in flat.items()
    }
    items = self._read(
      step,
      **{
        _STATE: ocp.args.StandardRestore(targets),
        _DATA: ocp.args.JsonRestore(),
      },
    )
    for name, array in items[_STATE].items():
      if not _matches(array, record['arrays'][name]['shards']):
        raise self._damaged(step, f'the content of {name} has changed')
    text = items[_DATA].get('text', '')
    if _digest(text) != record['data']:
      raise self._damaged(step, 'the data state has changed')
    leaves = [items[_STATE][name] for name in flat]
    tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return tree, json.loads(text)

  def close(self) -> None:
    """Waits for the write under way and releases the threads."""
    self.wait()
    self._manager.close()

  def _read(self, step: int, **items: Any) -> Any:
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:
      # Orbax wraps what tensorstore could not read in a bare Exception.
      is_wrapped = type(error) is Exception
      if not is_wrapped and not isinstance(error, _READ_ERRORS):
        raise
      reason = error.__cause__ if is_wrapped and error.__cause__ else error
      raise self._damaged(step, _brief(reason)) from error

  def _damaged(self, step: int, detail: str) -> DamagedCheckpoint:
    path = self.directory / str(step)
    earlier = [s for s in self.steps() if s < step]
    resume = f'step {earlier[-1]}' if earlier else 'the start of the stage'
    return DamagedCheckpoint(
      f'Checkpoint of step {step} in {path} is damaged ({detail}). Delete '
      f'that folder and run the same command: it continues from {resume}.'
    )

  def _check_same(
    self, step: int, record: dict[str, Any], flat: dict[str, Any]
  ) -> None:
    """Raises unless names, shapes and dtypes are those of `flat`."""
    have = {n: (tuple(r['shape']), r['dtype']) for n, r in record.items()}
    want = {n: (tuple(a.shape), str(a.dtype)) for n, a in flat.items()}
    differing = sorted(n for n in have | want if have.get(n) != want.get(n))
    if differing:
      name = differing[0]
      raise ValueError(
        f'Checkpoint of step {step} in {self.directory} holds other arrays '
        f'than this configuration: {len(differing)} differ, the first is '
        f'{name} ({have.get(name)} in the checkpoint, {want.get(name)} '
        'wanted). Use the configuration that wrote it or another --workdir.'
      )

  def _check_space(self, step: int, num_bytes: int) -> None:
    """Raises before anything is written if it cannot fit."""
    free = shutil.disk_usage(self.directory).free
    if free < num_bytes + _DISK_MARGIN:
      raise OSError(
        errno.ENOSPC,
        f'Checkpoint of step {step} needs {num_bytes + _DISK_MARGIN} bytes, '
        f'{free} are free; checkpoints of steps {self.steps()} are intact. '
        'Free space and run the same command, or choose another --workdir',
        str(self.directory),
      )

  def _write_error(self, error: Exception) -> OSError:
    # Tensorstore reports a full disk as a ValueError that ends in the reason.
    is_full = 'No space left' in str(error)
    number = errno.ENOSPC if is_full else getattr(error, 'errno', errno.EIO)
    reason = os.strerror(errno.ENOSPC) if is_full else _brief(error)
    return OSError(
      number,
      f'Checkpoint of step {self._writing} could not be written ({reason}); '
      f'checkpoints of steps {self.steps()} are intact. Free space and run '
      'the same command, or choose another --workdir',
      str(self.directory),
    )
