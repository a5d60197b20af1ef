"""Serialises finished groups of rollouts, from rollout workers to the trainer.

The format is an `.npz` without pickles: a JSON header, routes as packed tapes
(`core.routes.codec`) and compressed arrays. Equal groups give equal bytes.
"""

import dataclasses
import io
import json
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from composer_jax.core import records, turns
from composer_jax.core.routes import codec

_ARRAYS = ('tokens_T', 'loss_mask_T', 'logprobs_T', *records.VERSIONS)
ROUTES = 'routes'


def routes_to_bytes(expert_ids_TMA: np.ndarray) -> bytes:
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
        routes = routes_to_bytes(t.expert_ids_TMA)
      except ValueError as error:
        raise ValueError(
          f'Group {group.group}, member {r.member}, trajectory {i}: {error}'
        ) from error
      arrays[f'{r.member}/{i}/{ROUTES}'] = np.frombuffer(routes, np.uint8)
    header = {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}
    del header['trajectories']
    header['temperatures'] = [t.temperature for t in r.trajectories]
    rollouts.append(header)
  # As pairs, since keys of a JSON object are strings.
  pairs = None if group.policies is None else sorted(group.policies.items())
  header = {'group': group.group, 'task_id': group.task_id, 'policies': pairs}
  return pack(header | {'rollouts': rollouts}, arrays)


def pack(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
  """Serialises a header and arrays; those named `ROUTES` are packed already."""
  text = json.dumps(header, default=_plain)
  whole = io.BytesIO()
  with zipfile.ZipFile(whole, 'w') as archive:
    encoded = np.frombuffer(text.encode(), np.uint8)
    for name, array in (arrays | {'header': encoded}).items():
      part = io.BytesIO()
      np.save(part, array, allow_pickle=False)
      # Packed routes would not get smaller.
      packed = name.endswith(f'/{ROUTES}')
      # ZipInfo has a constant date, so that equal groups are equal bytes.
      archive.writestr(
        zipfile.ZipInfo(f'{name}.npy'),
        part.getvalue(),
        zipfile.ZIP_STORED if packed else zipfile.ZIP_DEFLATED,
      )
  return whole.getvalue()


# What zip, zlib, npy and missing fields raise for damaged or hostile bytes.
_DAMAGE = (
  *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, LookupError),
  *(NotImplementedError, RuntimeError, TypeError, AttributeError),
  *(OverflowError, tokenize.TokenError, MemoryError, SyntaxError),
)
_MAX_BYTES = 1 << 32
_PLAIN: dict[Any, tuple[type, ...]] = {
  bool: (bool,),
  int: (int,),
  float: (float, int),
  str: (str,),
  int | None: (int, type(None)),
  float | None: (float, int, type(None)),
}


def from_bytes(data: bytes, max_bytes: int = _MAX_BYTES) -> records.Group:
  """Rebuilds what `to_bytes` wrote, whoever sent it.

  Every record is checked again; nothing that is read is executed.

  Args:
    max_bytes: most bytes that may be unpacked, before anything is.

  Raises:
    ValueError: it is damaged, too large, or not of a group.
  """
  return guarded(_group, data, max_bytes)


def guarded(make: Callable[..., Any], data: bytes, max_bytes: int) -> Any:
  """Returns `make(header, arrays, max_bytes)` of what `pack` wrote.

  Raises:
    ValueError: it is damaged, too large, or `make` finds a fault.
  """
  try:
    arrays = _arrays(data, max_bytes)
    header = json.loads(arrays.pop('header').tobytes())
    return make(header, arrays, max_bytes)
  except _DAMAGE as error:
    raise ValueError(f'it cannot be read: {error!r:.300}') from error


def _arrays(data: bytes, max_bytes: int) -> dict[str, np.ndarray]:
  arrays = {}
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    parts = archive.infolist()
    size = sum(part.file_size for part in parts)
    if size > max_bytes:
      raise ValueError(
        f'it has {size} bytes unpacked; at most {max_bytes} may.'
      )
    for part in parts:
      if part.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f'{part.filename!r:.100} is compressed otherwise.')
      with archive.open(part) as file:
        # With a length: without one, all that a stream holds is unpacked.
        content = io.BytesIO(file.read(part.file_size))
      if np.lib.format.read_magic(content) != (1, 0):
        raise ValueError(f'{part.filename!r:.100} is of another npy version.')
      header = np.lib.format.read_array_header_1_0(content)
      shape, is_fortran, dtype = header
      values = content.read()
      if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f'{part.filename!r:.100} has not the bytes it states.')
      order = 'F' if is_fortran else 'C'
      array = np.frombuffer(values, dtype).reshape(shape, order=order)
      arrays[part.filename.removesuffix('.npy')] = array.copy()
  return arrays


def _made(cls: Any, fields: dict[str, Any]) -> Any:
  """Makes a record of JSON, of which plain fields must have their types."""
  for field in dataclasses.fields(cls):
    kinds: Any = _PLAIN.get(field.type)
    value = fields.get(field.name, None if kinds is None else kinds[0]())
    values = value if field.type == tuple[str, ...] else ()
    is_right = kinds is None or type(value) in kinds
    is_right = is_right and all(type(v) is str for v in values)
    if type(value) in (int, float):
      is_right = is_right and abs(value) < 2**53  # And no NaN.
    if not is_right:
      raise ValueError(
        f'{cls.__name__}.{field.name} must be {field.type}, not {value!r:.99}.'
      )
  return cls(**fields)


def _group(
  header: dict[str, Any], arrays: dict[str, np.ndarray], max_bytes: int
) -> records.Group:
  rollouts, left = [], max_bytes
  members = [fields['member'] for fields in header['rollouts']]
  # Before any tape is unpacked, of which one could serve many.
  if len(set(members)) < len(members):
    raise ValueError(f'it holds a member twice: {members!r:.99}.')
  for fields in header['rollouts']:
    trajectories = []
    for i, temperature in enumerate(fields.pop('temperatures')):
      name = f'{fields["member"]}/{i}'
      tape = codec.decode(arrays[f'{name}/{ROUTES}'].tobytes(), left)
      left -= tape.ids_TMA.nbytes
      trajectory = {field: arrays[f'{name}/{field}'] for field in _ARRAYS}
      trajectory |= {'temperature': temperature, 'expert_ids_TMA': tape.ids_TMA}
      trajectories.append(_made(records.Trajectory, trajectory))
    terms = fields['reward_terms']
    values = terms.values()
    if not all(type(v) in (int, float) and abs(v) < 2**53 for v in values):
      raise ValueError(f'reward_terms must be numbers, not {terms!r:.99}.')
    fields['verdict'] = _made(records.Verdict, fields['verdict'])
    fields['tools'] = tuple(fields['tools'])
    fields['flags'] = tuple(fields['flags'])
    fields['turns'] = tuple(_made(turns.Turn, t) for t in fields['turns'])
    for hint in fields['hints']:
      hint['tokens_T'] = np.asarray(hint['tokens_T'], np.int32)
    fields['hints'] = tuple(_made(turns.Hint, h) for h in fields['hints'])
    fields['trajectories'] = tuple(trajectories)
    rollouts.append(_made(records.Rollout, fields))
  pairs = header['policies']
  return records.Group(
    group=header['group'],
    task_id=header['task_id'],
    rollouts=tuple(rollouts),
    policies=None if pairs is None else dict(pairs),
  )
