"""Reads the tensors of a checkpoint as values, whatever scheme they have.

Plain tensors, DeepSeek's fp8 with block scales and Kimi's int4 in groups have
one interface: a name, a shape, a dtype, and any range of elements. Any other
scheme is refused by name before anything is read.
"""

import functools
from collections.abc import Container
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from composer_jax.hf.architecture import keys
from composer_jax.hf.tensors import files

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INT4_PER_WORD = 8
_INT4_GROUP = 32

# Dtype of tensors that cannot be read as values, only carried along.
UNKNOWN = np.dtype(np.void)


class ReadableTensor(Protocol):
  """A tensor with the values that the model computes with."""

  @property
  def shape(self) -> tuple[int, ...]: ...

  @property
  def dtype(self) -> np.dtype: ...

  @property
  def raws(self) -> tuple[files.Raw, ...]:
    """Stored tensors that it is made from, the weight first."""
    ...

  def read(self, start: int, stop: int) -> np.ndarray:
    """Returns elements `start:stop`, flat."""
    ...


class Plain:
  """A tensor stored as it is, in a dtype that may be UNKNOWN."""

  def __init__(self, folder: files.Folder, raw: files.Raw):
    self._folder = folder
    self.raws = (raw,)
    self.shape = raw.shape
    self.dtype: np.dtype = files.DTYPES.get(raw.dtype, UNKNOWN)

  def read(self, start: int, stop: int) -> np.ndarray:
    return self._folder.read(self.raws[0], start, stop)


class _Matrix:
  """A quantised matrix, which is read in whole rows."""

  shape: tuple[int, ...]
  dtype = _BFLOAT16

  def read(self, start: int, stop: int) -> np.ndarray:
    columns = self.shape[1]
    first, last = start // columns, -(-stop // columns)
    rows = self._rows(first, last).astype(_BFLOAT16).reshape(-1)
    return rows[start - first * columns : stop - first * columns]

  def _rows(self, first: int, last: int) -> np.ndarray:
    """Returns float32 rows `first:last`."""
    raise NotImplementedError


class Fp8(_Matrix):
  """float8_e4m3fn codes times a float32 scale per block of a matrix.

  The arithmetic is that of DeepSeek-V3's `weight_dequant`: the float32 product,
  rounded to bfloat16; blocks at the right and lower edge may be cut.
  """

  def __init__(self, folder, codes: files.Raw, scales: files.Raw, block):
    self._folder, self._block = folder, block
    self.raws, self.shape = (codes, scales), codes.shape
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

  def _rows(self, first: int, last: int) -> np.ndarray:
    columns, (height, width) = self.shape[1], self._block
    codes = self._folder.read(self.raws[0], first * columns, last * columns)
    values = _fp8_values()[codes.view(np.uint8)].reshape(-1, columns)
    across = self.raws[1].shape[1]
    top, bottom = first // height, -(-last // height)
    scales = self._folder.read(self.raws[1], top * across, bottom * across)
    for row, scale in enumerate(scales.reshape(-1, across), start=top):
      rows = slice(max(row * height - first, 0), (row + 1) * height - first)
      values[rows] *= np.repeat(scale, width)[:columns]
    return values


@functools.cache
def _fp8_values() -> np.ndarray:
  codes = np.arange(256, dtype=np.uint8)
  return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


class Int4(_Matrix):
  """Eight 4-bit integers a word, times a bfloat16 scale per group of a row.

  The arithmetic is that of compressed-tensors' symmetric 'pack-quantized':
  (code - 8) times scale, rounded to bfloat16.
  """

  def __init__(self, folder, packed: files.Raw, scales: files.Raw, shape):
    self._folder = folder
    self.raws = (packed, scales, shape)
    if shape.dtype not in ('I32', 'I64') or shape.shape != (2,):
      raise ValueError(
        f'{shape.name} in {shape.file} is {shape.dtype} of shape '
        f'{shape.shape}; it must be two integers, rows and columns.'
      )
    rows, columns = (int(n) for n in folder.read(shape, 0, 2))
    self.shape = (rows, columns)
    if columns % _INT4_GROUP:
      raise ValueError(
        f'{packed.name} in {packed.file} has {columns} columns, which groups '
        f'of {_INT4_GROUP} do not divide.'
      )
    for raw, dtype, width in (
      (packed, 'I32', columns // _INT4_PER_WORD),
      (scales, 'BF16', columns // _INT4_GROUP),
    ):
      if (raw.dtype, raw.shape) != (dtype, (rows, width)):
        raise ValueError(
          f'{raw.name} in {raw.file} is {raw.dtype} of shape {raw.shape}; a '
          f'matrix of shape {self.shape} in groups of {_INT4_GROUP} needs '
          f'{dtype} of shape {(rows, width)}.'
        )

  def _rows(self, first: int, last: int) -> np.ndarray:
    columns = self.shape[1]
    words, groups = columns // _INT4_PER_WORD, columns // _INT4_GROUP
    packed = self._folder.read(self.raws[0], first * words, last * words)
    # Files are little-endian, and so are these bytes on any host.
    codes = _int4_values()[packed.view(np.uint8)].reshape(-1, _INT4_GROUP)
    scales = self._folder.read(self.raws[1], first * groups, last * groups)
    return (codes * scales.astype(np.float32)[:, None]).reshape(-1, columns)


@functools.cache
def _int4_values() -> np.ndarray:
  """Returns the two values of each byte, that of the low half first."""
  codes = np.arange(256, dtype=np.uint8)
  pairs = np.stack([codes & 15, codes >> 4], axis=-1)
  return pairs.astype(np.float32) - 8


def _refuse(rule: str, value: Any) -> ValueError:
  return ValueError(
    f'config.json: quantization_config.{rule} is {value!r}, which is not read; '
    'known are DeepSeek fp8 (quant_method fp8, fmt e4m3, weight_block_size, '
    "dynamic activations) and compressed-tensors 'pack-quantized' of symmetric "
    '4-bit integers in groups of 32. Convert the checkpoint to bfloat16 first.'
  )


def _require(
  fields: dict[str, Any], allowed: dict[str, tuple], at: str
) -> None:
  """Raises unless each key has an allowed value; an absent key is the first."""
  for key, values in allowed.items():
    if fields.get(key, values[0]) not in values:
      raise _refuse(f'{at}{key}', fields[key])


def scheme(config: dict[str, Any]) -> tuple[str, Any] | None:
  """Returns ('fp8', block), ('int4', group) or, for plain weights, None.

  The block is the rows and columns that share a scale, the group the columns.
  """
  nested = config.get('text_config')
  text = nested if isinstance(nested, dict) else {}
  fields = config.get('quantization_config', text.get('quantization_config'))
  if fields is None:
    return None
  if not isinstance(fields, dict):
    raise _refuse('quant_method', fields)
  method = fields.get('quant_method')
  if method == 'fp8':
    _require(fields, {'fmt': ('e4m3',), 'activation_scheme': ('dynamic',)}, '')
    block = fields.get('weight_block_size')
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(isinstance(n, int) and n > 0 for n in block):
      raise _refuse('weight_block_size', block)
    return 'fp8', (block[0], block[1])
  if method == 'compressed-tensors':
    _check_int4(fields)
    return 'int4', _INT4_GROUP
  raise _refuse('quant_method', method)


def _check_int4(fields: dict[str, Any]) -> None:
  allowed = {
    'format': ('pack-quantized',),
    'kv_cache_scheme': (None,),
    'quantization_status': ('compressed',),
    'sparsity_config': (None, {}),
    'transform_config': (None, {}),
  }
  _require(fields, allowed, '')
  groups = fields.get('config_groups')
  if not isinstance(groups, dict) or len(groups) != 1:
    raise _refuse('config_groups', groups)
  name = next(iter(groups))
  group = keys.take(groups, name, dict)
  at = f'config_groups.{name}.'
  allowed = {
    'input_activations': (None,),
    'output_activations': (None,),
    'format': (None, 'pack-quantized'),
    'targets': (['Linear'],),
  }
  _require(group, allowed, at)
  weights = keys.take(group, 'weights', dict, {})
  allowed = {
    'num_bits': (4,),
    'type': ('int',),
    'symmetric': (True,),
    'strategy': ('group',),
    'group_size': (_INT4_GROUP,),
    # Ordering by activation permutes the columns unless it is 'weight'; that is
    # refused too, since it has not been compared with the reference.
    'actorder': (None, False),
    'dynamic': (False,),
  }
  # compressed-tensors has other defaults for some of these.
  _require(
    {'num_bits': None, 'group_size': None} | weights, allowed, f'{at}weights.'
  )


def tensors(
  folder: files.Folder, config: dict[str, Any], wanted: Container[str]
) -> dict[str, ReadableTensor]:
  """Returns the tensors of a checkpoint, scales folded into their weights.

  A tensor is quantised if its scales lie beside it, whatever modules the config
  excepts.

  Args:
    folder: files of the checkpoint.
    config: parsed config.json.
    wanted: names of the tensors to be read; all others stay as stored.

  Raises:
    ValueError: the scheme or a stored tensor cannot be read; names it.
  """
  kind, block = scheme(config) or (None, None)
  raws, result, scales = folder.tensors, {}, set()
  for name, raw in raws.items():
    whole = name.removesuffix('_packed')
    tensor: ReadableTensor = Plain(folder, raw)
    if whole not in wanted:
      pass
    elif kind == 'fp8' and raw.dtype == 'F8_E4M3':
      scale = _beside(raws, raw, f'{name}_scale_inv')
      tensor = Fp8(folder, raw, scale, block)
    elif kind == 'int4' and whole != name:
      scale = _beside(raws, raw, f'{whole}_scale')
      shape = _beside(raws, raw, f'{whole}_shape')
      tensor, name = Int4(folder, raw, scale, shape), whole
    result[name] = tensor
    scales.update(other.name for other in tensor.raws[1:])
  return {name: tensor for name, tensor in result.items() if name not in scales}


def _beside(raws: dict[str, files.Raw], raw: files.Raw, name: str) -> files.Raw:
  if name not in raws:
    raise ValueError(
      f'{raw.name} in {raw.file} is quantised and its {name} is missing.'
    )
  return raws[name]
