"""Exports: the variables of finished stages, for the next one.

An export has the float32 masters and the selection bias, and exists if and only
if its stage is finished.
"""

import contextlib
import os
import pathlib
from typing import Any

from composer_jax.train.checkpoints import manager

# Size of the parts of an array that a conversion to other formats reads.
_CHUNK_BYTES = 2**28


def _open(
  workdir: str | os.PathLike, stage: str, *, keep: int | None = None
) -> contextlib.closing[manager.Checkpoints]:
  """Opens an export, for reading only if `keep` is None."""
  exports = manager.Checkpoints(
    pathlib.Path(workdir) / 'exports' / stage,
    keep=keep,
    fallback=f'the last checkpoint of the stage, in checkpoints/{stage}',
  )
  return contextlib.closing(exports)


def save(
  workdir: str | os.PathLike, stage: str, step: int, variables: Any
) -> None:
  """Writes an export and waits until it is whole."""
  with _open(workdir, stage, keep=1) as exports:
    exports.save(step, variables, chunk_bytes=_CHUNK_BYTES)


def finished_step(workdir: str | os.PathLike, stage: str) -> int | None:
  """Returns the last step of a finished stage, None when it is not."""
  with _open(workdir, stage) as exports:
    return exports.latest_step()


def load(workdir: str | os.PathLike, stage: str, like: Any) -> Any:
  """Returns the variables of a finished stage, placed as `like` says.

  Raises:
    ValueError: the stage is not finished, or holds other arrays.
    manager.DamagedCheckpoint: the export is damaged.
  """
  with _open(workdir, stage) as exports:
    step = exports.latest_step()
    if step is None:
      raise ValueError(
        f'Stage {stage!r} of {workdir} is not finished; run it to its end.'
      )
    return exports.restore(step, like)[0]
