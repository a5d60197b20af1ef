"""Numbered checkpoints of one stage, by orbax and with hashes.

A checkpoint is a tree of arrays and a JSON value (the data iterator's state).
Orbax writes in the background, under a temporary name, so that a killed process
leaves whole checkpoints only. It does not notice damaged tensor data, hence a
BLAKE3 hash of every block, verified at restore. Trees are stored as flat
{name: array}, independent of the classes of an optimizer.
"""

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import blake3
import jax
import orbax.checkpoint as ocp

from composer_jax.core import trees
from composer_jax.train.checkpoints import hashes

# Held while a process begins a save. Orbax numbers saves by one counter of the
# process; two threads that begin at the same time read each other's number,
# wait five minutes for folders made under another number, and fail.
#
# Several processes must begin their saves in one order: they let each save
# finish (`wait`) before they begin the next.
one_at_a_time = threading.Lock()

STATE = 'state'
_DATA = 'data'
HASHES = 'hashes'

# Free bytes required beyond the arrays, for metadata and rounding.
_DISK_MARGIN = 4 * 2**20

# Errors that orbax raises for damaged metadata.
_READ_ERRORS = (OSError, ValueError, LookupError, AttributeError, TypeError)
# System errors for missing files; others, such as too many open files, do not
# mean that a checkpoint is damaged.
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)


class DamagedCheckpoint(ValueError):
  """A checkpoint that cannot be read or is not what was written."""


def _texts(stored: Any) -> dict[str, str]:
  """Returns the strings of a JSON item, which may be damaged."""
  items = stored.items() if isinstance(stored, dict) else ()
  return {name: value for name, value in items if isinstance(value, str)}


def _digest(text: str) -> str:
  return blake3.blake3(text.encode()).hexdigest()


def side_items(arrays: dict[str, Any], data: Any) -> dict[str, Any]:
  """Returns orbax's arguments that save everything but the arrays.

  `arrays` is {name: {'shape', 'dtype', 'shards': {bounds: BLAKE3}}}.
  """
  text = json.dumps(data, sort_keys=True)
  record = json.dumps({'arrays': arrays, 'data': _digest(text)})
  return {
    _DATA: ocp.args.JsonSave({'text': text}),
    HASHES: ocp.args.JsonSave({'text': record, 'blake3': _digest(record)}),
  }


def full_disk(error: BaseException) -> int | None:
  """Returns the errno of an error for lack of disk space, else None."""
  number = _errno(error)
  return number if number in (errno.ENOSPC, errno.EDQUOT) else None


def _errno(error: BaseException) -> int | None:
  """Returns the errno, which tensorstore's ValueErrors have in their text."""
  if isinstance(error, OSError):
    return error.errno
  number = re.search(r"os_error_code='(\d+)'", str(error))
  return int(number[1]) if number else None


def _check_readable(folder: pathlib.Path) -> None:
  """Raises an OSError for an unreadable file, which orbax treats as absent."""

  def refuse(error: OSError) -> None:
    raise error

  for parent, _, names in os.walk(folder, onerror=refuse):
    for name in names:
      with open(os.path.join(parent, name), 'rb') as file:
        file.read(1)


def _brief(error: BaseException) -> str:
  """Shortens tensorstore's page-long messages to their start."""
  first_line = (str(error).splitlines() or [''])[0]
  return f'{type(error).__name__}: {first_line[:160]}'


class Checkpoints:
  """Checkpoints of one stage in one directory, numbered by step."""

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    keep: int | None,
    fallback: str = 'the start of the stage',
  ):
    """Opens a directory and deletes partial checkpoints of killed processes.

    Args:
      keep: number of newest checkpoints that are kept; None opens the directory
        for reading only and changes nothing.
      fallback: words for the state from which a run resumes without one.
    """
    self.directory = pathlib.Path(directory).absolute()
    self._fallback = fallback
    self._is_reader = keep is None
    self._writing: int | None = None
    # Orbax's own read_only warns of every directory.
    options = ocp.CheckpointManagerOptions(create=False)
    if keep is not None:
      self.directory.mkdir(parents=True, exist_ok=True)
      options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, cleanup_tmp_directories=True
      )
    self._manager = ocp.CheckpointManager(self.directory, options=options)

  def steps(self) -> list[int]:
    """Returns the steps of whole checkpoints, ascending."""
    return sorted(self._manager.all_steps())

  def latest_step(self) -> int | None:
    return max(self.steps(), default=None)

  def save(
    self,
    step: int,
    tree: Any,
    data: Any = None,
    *,
    chunk_bytes: int | None = None,
  ) -> None:
    """Starts writing a checkpoint; returns when the arrays may be donated.

    Args:
      step: number of finished steps; must be above the latest.
      data: any JSON value.
      chunk_bytes: size of the parts that can be read alone; None is a shard.

    Raises:
      OSError: too little disk space, or the previous checkpoint could not be
        written. Earlier checkpoints are untouched.
    """
    assert not self._is_reader, self.directory
    self.wait()
    flat = trees.flatten_names(tree)
    self._check_space(step, sum(int(a.nbytes) for a in flat.values()))
    own = {name: hashes.record(array) for name, array in flat.items()}
    arrays = hashes.joined(own)
    chunks = {name: ocp.SaveArgs(chunk_byte_size=chunk_bytes) for name in flat}
    items = side_items(arrays, data)
    items[STATE] = ocp.args.StandardSave(flat, save_args=chunks)
    self._writing = step
    with self._full_disks_explained(), one_at_a_time:
      self._manager.save(step, args=ocp.args.Composite(**items), force=True)

  def wait(self) -> None:
    """Waits for the checkpoint being written, if any, or raises an OSError."""
    with self._full_disks_explained():
      self._manager.wait_until_finished()
    self._writing = None

  def restore(self, step: int, like: Any) -> tuple[Any, Any]:
    """Reads and verifies a checkpoint.

    Returns:
      The tree, placed like `like`, and the JSON value.

    Raises:
      DamagedCheckpoint: a part is missing or has changed.
      ValueError: the checkpoint has other arrays than `like`.
      OSError: files cannot be read, although they may be whole.
    """
    flat = trees.flatten_names(like)
    record = self.record(step)
    self._check_same(step, record['arrays'], flat)
    targets = {
      name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
      for name, a in flat.items()
    }
    wanted = {STATE: ocp.args.StandardRestore(targets)}
    items = self._read(step, wanted | {_DATA: ocp.args.JsonRestore()})
    changed = [
      name
      for name, array in items[STATE].items()
      if not hashes.matches(array, record['arrays'][name]['shards'])
    ]
    if changed:
      raise self._damaged(step, f'the content of {changed[0]} has changed')
    text = _texts(items[_DATA]).get('text', '')
    if _digest(text) != record['data']:
      raise self._damaged(step, 'the data state has changed')
    tree = trees.map_names(lambda name, _: items[STATE][name], like)
    return tree, json.loads(text)

  def record(self, step: int) -> dict[str, Any]:
    """Reads the hashes of a checkpoint (see `side_items`), not its arrays."""
    read = self._read(step, {HASHES: ocp.args.JsonRestore()})
    stored = _texts(read[HASHES])
    if _digest(stored.get('text', '')) != stored.get('blake3'):
      raise self._damaged(step, 'its table of hashes has changed')
    return json.loads(stored['text'])

  def close(self) -> None:
    """Waits for the current save and releases the threads."""
    self.wait()
    self._manager.close()

  def _read(self, step: int, items: dict[str, Any]) -> Any:
    try:
      return self._manager.restore(step, args=ocp.args.Composite(**items))
    except Exception as error:
      # Orbax wraps what tensorstore could not read in a bare Exception.
      is_wrapped = type(error) is Exception
      if not is_wrapped and not isinstance(error, _READ_ERRORS):
        raise
      # Errors that JAX raises are about arguments, not files.
      *_, (frame, _) = traceback.walk_tb(error.__traceback__)
      module = frame.f_globals.get('__name__', '')
      if module.startswith(('jax', 'composer_jax')):
        raise
      reason = error.__cause__ if is_wrapped and error.__cause__ else error
      number = _errno(reason)
      if number is not None and number not in _GONE:
        raise OSError(
          number,
          f'Checkpoint of step {step} cannot be read ({os.strerror(number)}), '
          'which does not mean that it is damaged',
          str(self.directory / str(step)),
        ) from error
      _check_readable(self.directory / str(step))
      raise self._damaged(step, _brief(reason)) from error

  def _damaged(self, step: int, detail: str) -> DamagedCheckpoint:
    path = self.directory / str(step)
    earlier = [s for s in self.steps() if s < step]
    resume = f'step {earlier[-1]}' if earlier else self._fallback
    return DamagedCheckpoint(
      f'Checkpoint of step {step} in {path} is damaged ({detail}). Delete '
      f'that folder and run the same command: it continues from {resume}.'
    )

  def _check_same(
    self, step: int, record: dict[str, Any], flat: dict[str, Any]
  ) -> None:
    """Raises a ValueError unless names, shapes and dtypes equal `flat`'s."""
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
    """Raises an OSError if a checkpoint would not fit on the disk."""
    free = shutil.disk_usage(self.directory).free
    if free < num_bytes + _DISK_MARGIN:
      raise OSError(
        errno.ENOSPC,
        f'Checkpoint of step {step} needs {num_bytes + _DISK_MARGIN} bytes, '
        f'{free} are free; {self._cure()}',
        str(self.directory),
      )

  @contextlib.contextmanager
  def _full_disks_explained(self) -> Iterator[None]:
    """Raises an OSError with the cure for errors of a full disk."""
    try:
      yield
    # Tensorstore reports a full disk as a ValueError that ends in the reason.
    except (OSError, ValueError, RuntimeError) as error:
      number = full_disk(error)
      if number is None:
        raise
      raise OSError(
        number,
        f'Checkpoint of step {self._writing} could not be written '
        f'({os.strerror(number)}); {self._cure()}',
        str(self.directory),
      ) from error

  def _cure(self) -> str:
    return (
      f'checkpoints of steps {self.steps()} are intact. Free space and run the '
      'same command, or choose another --workdir'
    )
