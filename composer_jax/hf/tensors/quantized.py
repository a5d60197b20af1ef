"""Tensors of a checkpoint as values, whatever scheme they are stored in.

Plain tensors, DeepSeek's fp8 with block scales and Kimi's int4 in groups look
alike from outside: a name, a shape, a dtype, and any range of elements. A
scheme that is not one of these is refused by name before anything is read.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Container
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from composer_jax.hf.architecture import keys
from composer_jax.hf.tensors import files

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INT4_PER_WORD = 8


# The dtype of what cannot be read as values, only carried along.
UNKNOWN = np.dtype(np.void)


class ReadableTensor(Protocol):
  """A tensor as a model has it."""

  @property
  def shape(self) -> tuple[int, ...]: ...

  @property
  def dtype(self) -> np.dtype: ...

  @property
  def raws(self) -> tuple[files.Raw, ...]:
    """The stored tensors that it is made from, the main one first."""
    ...

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns elements `start:stop`, flat."""
    ...


class Plain:
  """Stored as it is, in a dtype that may be UNKNOWN."""

  def __init__(self, folder: files.Folder, raw: files.Raw):
    self._folder = folder
    self.raws = (raw,)
    self.shape = raw.shape
    self.dtype: np.dtype = files.DTYPES.get(raw.dtype, UNKNOWN)

  def read(self, start: int, stop: int) -> np.ndarray:
    return self._folder.read(self.raws[0], start, stop)


class Fp8:
  """Codes of float8_e4m3fn times a float32 scale per block of a matrix.

  As DeepSeek-V3's `weight_dequant` does it: the float32 product, rounded to
  bfloat16; blocks at the right and lower edge may be cut.
  """

  def __init__(self, folder, codes: files.Raw, scales: files.Raw, block):
    self._folder, self._block = folder, block
    self.raws = (codes, scales)
    self.shape, self.dtype = codes.shape, _BFLOAT16
    if len(codes.shape) != 2:
      raise ValueError(
        f'{codes.name} in {codes.file} has shape {codes.shape}; fp8 with block '
        'scales is read for matrices only.'
      )
    want = tuple(-(-n // b) for n, b in zip(codes.shape, block, strict=True))
    if scales.shape != want or scales.dtype != 'F32':
      raise ValueError(
        f'{scales.name} in {scales.file} is {scales.dtype} of shape '
        f'{scales.shape}; {codes.name} of shape {codes.shape} in blocks of '
        f'{block} needs F32 of shape {want}.'
      )

  def read(self, start: int, stop: int) -> np.ndarray:
    columns = self.shape[1]
    first, last = start // columns, -(-stop // columns)
    codes = self._folder.read(self.raws[0], first * columns, last * columns)
    values = _fp8_values()[codes.view(np.uint8)].reshape(-1, columns)
    height, width = self._block
    across = self.raws[1].shape[1]
    top, bottom = first // height, -(-last // height)
    scales = self._folder.read(self.raws[1], top * across, bottom * across)
    for row, scale in enumerate(scales.reshape(-1, across), start=top):
      rows = slice(max(row * height - first, 0), (row + 1) * height - first)
      values[rows] *= np.repeat(scale, width)[:columns]
    rounded = values.astype(_BFLOAT16).reshape(-1)
    return rounded[start - first * columns : stop - first * columns]


@functools.cache
def _fp8_values() -> np.ndarray:
  codes = np.arange(256, dtype=np.uint8)
  return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


class Int4:
  """Eight 4-bit integers a word, times a bfloat16 scale per group of a row.

  As compressed-tensors' 'pack-quantized' does it, symmetric: (code - 8) times
  scale, rounded to bfloat16.
  """

  def __init__(self, folder, packed, scales, sizes: files.Raw, group: int):
    self._folder, self._group = folder, group
    self.raws = (packed, scales, sizes)
    rows, columns = self.shape = _read_shape(folder, sizes)
    self.dtype, shape = _BFLOAT16, self.shape
    wants = (
      (packed, 'I32', (rows, -(-columns // _INT4_PER_WORD))),
      (scales, 'BF16', (rows, columns // group)),
    )
    if columns % group:
      raise ValueError(
        f'{packed.name} in {packed.file} has {columns} columns, which groups '
        f'of {group} do not divide.'
      )
    for raw, dtype, want in wants:
      if (raw.dtype, raw.shape) != (dtype, want):
        raise ValueError(
          f'{raw.name} in {raw.file} is {raw.dtype} of shape {raw.shape}; a '
          f'matrix of shape {shape} in groups of {group} needs {dtype} of '
          f'shape {want}.'
        )

  def read(self, start: int, stop: int) -> np.ndarray:
    columns = self.shape[1]
    first, last = start // columns, -(-stop // columns)
    words = self.raws[0].shape[1]
    packed = self._folder.read(self.raws[0], first * words, last * words)
    # Bytes are in the order of the file, little-endian, whatever the host's.
    codes = _int4_values()[packed.view(np.uint8).reshape(last - first, -1)]
    values = codes.reshape(last - first, -1)[:, :columns]
    groups = columns // self._group
    scales = self._folder.read(self.raws[1], first * groups, last * groups)
    values = (
      values.reshape(-1, self._group) * scales.astype(np.float32)[:, None]
    )
    rounded = values.astype(_BFLOAT16).reshape(-1)
    return rounded[start - first * columns : stop - first * columns]


@functools.cache
def _int4_values() -> np.ndarray:
  """Returns the two values of each byte, the low half first."""
  codes = np.arange(256, dtype=np.uint8)
  pairs = np.stack([codes & 15, codes >> 4], axis=-1)
  return pairs.astype(np.float32) - 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
  """How the weights of some modules are stored."""

  kind: str  # 'fp8' or 'int4'
  block: tuple[int, int]  # rows and columns that share a scale
  plain: tuple[str, ...]  # patterns of modules that are not quantised


def _refuse(rule: str, value: Any) -> ValueError:
  return ValueError(
    f'config.json: quantization_config.{rule} is {value!r}, which is not read; '
    'known are DeepSeek fp8 (quant_method fp8, fmt e4m3, weight_block_size, '
    "dynamic activations) and compressed-tensors 'pack-quantized' of symmetric "
    '4-bit integers in groups of 32. Convert the checkpoint to bfloat16 first.'
  )


def _require(fields: dict[str, Any], wanted: dict[str, tuple], at: str) -> None:
  for key, known in wanted.items():
    if fields.get(key, known[0]) not in known:
      raise _refuse(f'{at}{key}', fields[key])


def scheme(config: dict[str, Any]) -> Scheme | None:
  """Returns the scheme that a config.json names; None for plain weights."""
  nested = config.get('text_config')
  text = nested if isinstance(nested, dict) else {}
  fields = config.get('quantization_config', text.get('quantization_config'))
  if fields is None:
    return None
  if not isinstance(fields, dict):
    raise _refuse('quant_method', fields)
  method = fields.get('quant_method')
  if method == 'fp8':
    return _fp8_scheme(fields)
  if method == 'compressed-tensors':
    return _int4_scheme(fields)
  raise _refuse('quant_method', method)


def _fp8_scheme(fields: dict[str, Any]) -> Scheme:
  _require(fields, {'fmt': ('e4m3',), 'activation_scheme': ('dynamic',)}, '')
  block = fields.get('weight_block_size')
  is_pair = isinstance(block, list) and len(block) == 2
  if not is_pair or not all(isinstance(n, int) and n > 0 for n in block):
    raise _refuse('weight_block_size', block)
  plain = tuple(keys.take_list(fields, 'modules_to_not_convert', str))
  return Scheme(kind='fp8', block=(block[0], block[1]), plain=plain)


def _int4_scheme(fields: dict[str, Any]) -> Scheme:
  _require(
    fields,
    {
      'format': ('pack-quantized',),
      'kv_cache_scheme': (None,),
      'quantization_status': ('compressed',),
      'sparsity_config': (None, {}),
      'transform_config': (None, {}),
    },
    '',
  )
  groups = fields.get('config_groups')
  if not isinstance(groups, dict) or len(groups) != 1:
    raise _refuse('config_groups', groups)
  name = next(iter(groups))
  group = keys.take(groups, name, dict)
  at = f'config_groups.{name}.'
  _require(
    group,
    {
      'input_activations': (None,),
      'output_activations': (None,),
      'format': (None, 'pack-quantized'),
      'targets': (['Linear'],),
    },
    at,
  )
  weights = keys.take(group, 'weights', dict, {})
  wanted = {
    'num_bits': 4,
    'type': 'int',
    'symmetric': True,
    'strategy': 'group',
    'group_size': 32,
  }
  for key, value in wanted.items():
    if weights.get(key) != value:
      raise _refuse(f'{at}weights.{key}', weights.get(key))
  # Ordering by activation permutes the columns unless it is 'weight'; that one
  # is refused too, since nothing here has been compared with it.
  unordered = {'actorder': (None, False), 'dynamic': (False,)}
  _require(weights, unordered, f'{at}weights.')
  plain = tuple(keys.take_list(fields, 'ignore', str))
  for pattern in plain:
    try:
      re.compile(pattern[3:] if pattern.startswith('re:') else '')
    except re.error as error:
      raise _refuse('ignore', pattern) from error
  return Scheme(kind='int4', block=(1, 32), plain=plain)


def _is_plain(found: Scheme, module: str) -> bool:
  if found.kind == 'int4':
    return any(
      re.match(p[3:], module) if p.startswith('re:') else p == module
      for p in found.plain
    )
  # A module stands for all below it, as transformers reads the list.
  dotted = f'.{module}.'
  return any(f'.{p}.' in dotted for p in found.plain)


def _check_allowed(found: Scheme, raw: files.Raw, module: str) -> None:
  if _is_plain(found, module):
    raise ValueError(
      f'{raw.name} in {raw.file} is quantised, but quantization_config of '
      f'config.json excepts {module}.'
    )


def tensors(
  folder: files.Folder, config: dict[str, Any], wanted: Container[str]
) -> dict[str, ReadableTensor]:
  """Returns the tensors of a checkpoint, scales folded into their weights.

  Args:
    folder: of the files.
    config: the parsed config.json.
    wanted: names of tensors that will be read; any others stay as stored.

  Raises:
    ValueError: a scheme or a stored tensor that cannot be read, by name.
  """
  found = scheme(config)
  raws, result, used = folder.tensors, {}, set()
  for name, raw in raws.items():
    whole = name.removesuffix('_packed')
    tensor: ReadableTensor = Plain(folder, raw)
    if found is None or whole not in wanted:
      pass
    elif found.kind == 'fp8' and raw.dtype == 'F8_E4M3':
      scales = _beside(raws, raw, f'{name}_scale_inv')
      tensor = Fp8(folder, raw, scales, found.block)
    elif found.kind == 'int4' and whole != name:
      sizes = _beside(raws, raw, f'{whole}_shape')
      scales = _beside(raws, raw, f'{whole}_scale')
      tensor = Int4(folder, raw, scales, sizes, found.block[1])
    if found is not None and len(tensor.raws) > 1:
      _check_allowed(found, raw, whole.rpartition('.')[0])
      name = whole
    result[name] = tensor
    used.update(other.name for other in tensor.raws[1:])
  return {name: tensor for name, tensor in result.items() if name not in used}


def _beside(raws: dict[str, files.Raw], raw: files.Raw, name: str) -> files.Raw:
  if name not in raws:
    raise ValueError(
      f'{raw.name} in {raw.file} is quantised and its {name} is missing.'
    )
  return raws[name]


def _read_shape(folder: files.Folder, raw: files.Raw) -> tuple[int, ...]:
  if raw.dtype not in ('I32', 'I64') or raw.shape != (2,):
    raise ValueError(
      f'{raw.name} in {raw.file} is {raw.dtype} of shape {raw.shape}; two '
      'integers, rows and columns, are wanted.'
    )
  return tuple(int(n) for n in folder.read(raw, 0, math.prod(raw.shape)))
