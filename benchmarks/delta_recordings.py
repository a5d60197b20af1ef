"""Recordings of training: policies on disk, step by step.

`experiments.studies.delta.record` writes them; benchmarks and its study read.

Each case is a folder: policy_<step>.npz of its last steps, masters_<step>.npz
of the last two, and about.json, which is written last. Imports no jax.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from composer_jax.core import files

_ABOUT = 'about.json'


def finished(folder: pathlib.Path) -> bool:
  return (folder / _ABOUT).exists()


def names(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders of the finished cases in a folder."""
  return sorted(path.parent for path in folder.glob(f'*/{_ABOUT}'))


def finish(folder: pathlib.Path, about: Mapping[str, Any]) -> None:
  text = json.dumps(about, indent=1)
  files.write_atomic(folder / _ABOUT, text.encode())


def about(folder: pathlib.Path) -> dict[str, Any]:
  return files.read_json(folder / _ABOUT)


def save(
  folder: pathlib.Path, kind: str, step: int, arrays: dict[str, np.ndarray]
) -> None:
  """Saves the bits as integers, since numpy's format has no bfloat16."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f'{kind}_{step:04d}.npz'
  part = path.with_suffix('.part')
  bits: dict[str, Any] = {
    n: a.view(f'u{a.dtype.itemsize}') for n, a in arrays.items()
  }
  with part.open('wb') as file:
    np.savez(file, **bits)
  part.rename(path)


def load(
  folder: pathlib.Path, kind: str, dtypes: Mapping[str, str]
) -> list[dict[str, np.ndarray]]:
  """Returns a dictionary of arrays a step, in order, with the named dtypes."""
  policies = []
  for path in sorted(folder.glob(f'{kind}_*.npz')):
    with np.load(path) as data:
      policies.append({n: data[n].view(np.dtype(d)) for n, d in dtypes.items()})
  return policies
