"""Serialises finished groups of rollouts, from rollout workers to the trainer.

The format is an `.npz` without pickles: a JSON header, routes as packed tapes
(`core.routes.codec`) and compressed arrays. Equal groups give equal bytes.
"""

import dataclasses
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from composer_jax.core import records, turns
from composer_jax.core.routes import codec

_ARRAYS = ('tokens_T', 'loss_mask_T', 'logprobs_T', *records.VERSIONS)
_ROUTES = 'routes'


def _routes_to_bytes(expert_ids_TMA: np.ndarray) -> bytes:
  """Packs the routes of a trajectory.

  A record does not have the model's number of experts, so the smallest that
  fits the ids is taken. MoE layers are numbered from 0.
  """
  _, num_layers, num_active = expert_ids_TMA.shape
  ids = expert_ids_TMA[expert_ids_TMA != records.NO_ROUTE]
  scheme = codec.RouteScheme(
    num_experts=max(num_active, int(ids.max(initial=0)) + 1),
    num_active=num_active,
    layers=tuple(range(num_layers)),
  )
  return codec.encode(expert_ids_TMA, scheme)


def _plain(value: Any) -> Any:
  """Converts a value that JSON does not know."""
  if isinstance(value, np.ndarray):
    return value.tolist()
  if isinstance(value, Mapping):
    return dict(value)
  return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def to_bytes(group: records.Group) -> bytes:
  """Serialises a group.

  Raises:
    ValueError: routes that no router makes, by trajectory, token and layer.
  """
  arrays: dict[str, np.ndarray] = {}
  rollouts = []
  for r in group.rollouts:
    for i, t in enumerate(r.trajectories):
      for name in _ARRAYS:
        arrays[f'{r.member}/{i}/{name}'] = getattr(t, name)
      try:
        routes = _routes_to_bytes(t.expert_ids_TMA)
      except ValueError as error:
        raise ValueError(
          f'Group {group.group}, member {r.member}, trajectory {i}: {error}'
        ) from error
      arrays[f'{r.member}/{i}/{_ROUTES}'] = np.frombuffer(routes, np.uint8)
    header = {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}
    del header['trajectories']
    header['temperatures'] = [t.temperature for t in r.trajectories]
    rollouts.append(header)
  # As pairs, since keys of a JSON object are strings.
  pairs = None if group.policies is None else sorted(group.policies.items())
  header = {'group': group.group, 'task_id': group.task_id, 'policies': pairs}
  text = json.dumps(header | {'rollouts': rollouts}, default=_plain)
  arrays['header'] = np.frombuffer(text.encode(), np.uint8)
  whole = io.BytesIO()
  with zipfile.ZipFile(whole, 'w') as archive:
    for name, array in arrays.items():
      part = io.BytesIO()
      np.save(part, array, allow_pickle=False)
      # Packed routes would not get smaller.
      packed = name.endswith(f'/{_ROUTES}')
      # ZipInfo has a constant date, so that equal groups are equal bytes.
      archive.writestr(
        zipfile.ZipInfo(f'{name}.npy'),
        part.getvalue(),
        zipfile.ZIP_STORED if packed else zipfile.ZIP_DEFLATED,
      )
  return whole.getvalue()


def from_bytes(data: bytes) -> records.Group:
  """Rebuilds what `to_bytes` wrote; every record is checked again."""
  with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
    header = json.loads(arrays['header'].tobytes())
    rollouts = []
    for fields in header['rollouts']:
      trajectories = []
      for i, temperature in enumerate(fields.pop('temperatures')):
        name = f'{fields["member"]}/{i}'
        tape = codec.decode(arrays[f'{name}/{_ROUTES}'].tobytes())
        trajectories.append(
          records.Trajectory(
            temperature=temperature,
            expert_ids_TMA=tape.ids_TMA,
            **{field: arrays[f'{name}/{field}'] for field in _ARRAYS},
          )
        )
      fields['verdict'] = records.Verdict(**fields['verdict'])
      fields['tools'] = tuple(fields['tools'])
      fields['flags'] = tuple(fields['flags'])
      fields['turns'] = tuple(turns.Turn(**t) for t in fields['turns'])
      for hint in fields['hints']:
        hint['tokens_T'] = np.asarray(hint['tokens_T'], np.int32)
      fields['hints'] = tuple(turns.Hint(**h) for h in fields['hints'])
      fields['trajectories'] = tuple(trajectories)
      rollouts.append(records.Rollout(**fields))
  pairs = header['policies']
  return records.Group(
    group=header['group'],
    task_id=header['task_id'],
    rollouts=tuple(rollouts),
    policies=None if pairs is None else dict(pairs),
  )
