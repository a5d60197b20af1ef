"""Shows a trajectory by token: both log-probabilities, routes, versions."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from composer_jax.core import group_bytes, records

_HEAD = (
  '    at  token  s  recorded   trainer      diff  policy context consumed'
  '  differ  routes by layer'
)


def _routes(ids_MA: np.ndarray) -> str:
  if (ids_MA == records.NO_ROUTE).any():
    return '-'
  return ' '.join('+'.join(map(str, ids_A)) for ids_A in ids_MA.tolist())


def lines(arrays: Mapping[str, Any]) -> Iterator[str]:
  """Yields a line for each token; arrays are those of `gate.explain.evidence`.

  Without `train_logprobs_T` the columns of the trainer are empty.
  """
  train_T = arrays.get('train_logprobs_T')
  yield f'temperature {float(arrays["temperature"]):g}'
  yield _HEAD
  for t, token in enumerate(arrays['tokens_T'].tolist()):
    recorded = float(arrays['logprobs_T'][t])
    is_sampled = bool(arrays['loss_mask_T'][t])
    cells = f'{recorded:>9.5f}' if is_sampled else ' ' * 9
    compared = train_T is not None and bool(arrays['compared_T'][t])
    if train_T is not None and compared:
      trained = float(train_T[t])
      cells += f' {trained:>9.5f} {trained - recorded:>9.1e}'
    else:
      cells += ' ' * 20
    versions = ' '.join(
      f'{int(arrays[name][t]):>{width}}'
      for name, width in zip(records.VERSIONS, (7, 7, 8), strict=True)
    )
    differ = int(arrays['differing_T'][t]) if 'differing_T' in arrays else 0
    yield (
      f'{t:>6} {token:>6} {"*" if is_sampled else " ":>2} {cells} {versions} '
      f'{differ or "":>7}  {_routes(arrays["expert_ids_TMA"][t])}'
    )


def of_file(path: pathlib.Path) -> Iterator[str]:
  """Yields the lines of a run's `stopped.npz`, or of an upload of a group.

  A group's file has no log-probabilities of a trainer.
  """
  with np.load(path, allow_pickle=False) as stored:
    arrays = dict(stored)
  if 'header' not in arrays:
    yield from lines(arrays)
    return
  group = group_bytes.from_bytes(path.read_bytes())
  for rollout in group.rollouts:
    for i, t in enumerate(rollout.trajectories):
      yield f'group {group.group}, member {rollout.member}, window {i}'
      yield from lines({name: getattr(t, name) for name in t.__slots__})
