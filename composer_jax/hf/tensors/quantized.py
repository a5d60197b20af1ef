"""Reads the tensors of a checkpoint as values, whatever scheme they have.

Plain tensors, DeepSeek's fp8 with block scales and Kimi's int4 in groups have
one interface: a name, a shape, a dtype, and any range of elements. Any other
scheme is refused by name before anything is read.
"""

import dataclasses
import functools
from collections.abc import Callable, Container
from typing import Any

import ml_dtypes
import numpy as np

from composer_jax.hf.architecture import keys
from composer_jax.hf.tensors import files

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_INT4_PER_WORD = 8
_INT4_GROUP = 32

# Dtype of tensors that cannot be read as values, only carried along.
UNKNOWN = np.dtype(np.void)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReadableTensor:
  """A tensor with the values that the model computes with.

  Attributes:
    dtype: dtype of the values; UNKNOWN if they cannot be read.
    raws: stored tensors that it is made from, the weight first.
    read: function of (start, stop) that returns those elements, flat.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  raws: tuple[files.Raw, ...]
  read: Callable[[int, int], np.ndarray]


def _matrix(
  shape: tuple[int, ...],
  raws: tuple[files.Raw, ...],
  rows: Callable[[int, int], np.ndarray],
) -> ReadableTensor:
  """Makes a bfloat16 matrix from a function that returns float32 rows."""

  def read(start: int, stop: int) -> np.ndarray:
    columns = shape[1]
    first, last = start // columns, -(-stop // columns)
    values = rows(first, last).astype(_BFLOAT16).reshape(-1)
    return values[start - first * columns : stop - first * columns]

  return ReadableTensor(shape=shape, dtype=_BFLOAT16, raws=raws, read=read)


def _fp8(
  folder: files.Folder,
  codes: files.Raw,
  scales: files.Raw,
  block: tuple[int, int],
) -> ReadableTensor:
  """Reads float8_e4m3fn codes times a float32 scale per block of a matrix.

  The arithmetic is that of DeepSeek-V3's `weight_dequant`: the float32 product,
  rounded to bfloat16; blocks at the right and lower edge may be cut.
  """
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
  columns, across, (height, width) = codes.shape[1], want[1], block

  def rows(first: int, last: int) -> np.ndarray:
    stored = folder.read(codes, first * columns, last * columns)
    values = _fp8_values()[stored.view(np.uint8)].reshape(-1, columns)
    top, bottom = first // height, -(-last // height)
    factors = folder.read(scales, top * across, bottom * across)
    for row, scale in enumerate(factors.reshape(-1, across), start=top):
      band = slice(max(row * height - first, 0), (row + 1) * height - first)
      values[band] *= np.repeat(scale, width)[:columns]
    return values

  return _matrix(codes.shape, (codes, scales), rows)


@functools.cache
def _fp8_values() -> np.ndarray:
  codes = np.arange(256, dtype=np.uint8)
  return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _int4(
  folder: files.Folder, packed: files.Raw, scales: files.Raw, sizes: files.Raw
) -> ReadableTensor:
  """Reads 4-bit integers, eight a word, times a bfloat16 scale per group.

  The arithmetic is that of compressed-tensors' symmetric 'pack-quantized':
  (code - 8) times scale, rounded to bfloat16.
  """
  if sizes.dtype not in ('I32', 'I64') or sizes.shape != (2,):
    raise ValueError(
      f'{sizes.name} in {sizes.file} is {sizes.dtype} of shape {sizes.shape}; '
      'it must be two integers, rows and columns.'
    )
  height, columns = (int(n) for n in folder.read(sizes, 0, 2))
  if columns % _INT4_GROUP:
    raise ValueError(
      f'{packed.name} in {packed.file} has {columns} columns, which groups of '
      f'{_INT4_GROUP} do not divide.'
    )
  words, groups = columns // _INT4_PER_WORD, columns // _INT4_GROUP
  for raw, dtype, width in ((packed, 'I32', words), (scales, 'BF16', groups)):
    if (raw.dtype, raw.shape) != (dtype, (height, width)):
      raise ValueError(
        f'{raw.name} in {raw.file} is {raw.dtype} of shape {raw.shape}; a '
        f'matrix of shape {(height, columns)} in groups of {_INT4_GROUP} needs '
        f'{dtype} of shape {(height, width)}.'
      )

  def rows(first: int, last: int) -> np.ndarray:
    stored = folder.read(packed, first * words, last * words)
    # Files are little-endian, and so are these bytes on any host.
    codes = _int4_values()[stored.view(np.uint8)].reshape(-1, _INT4_GROUP)
    factors = folder.read(scales, first * groups, last * groups)
    values = codes * factors.astype(np.float32)[:, None]
    return values.reshape(-1, columns)

  return _matrix((height, columns), (packed, scales, sizes), rows)


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
  """Raises unless every value is allowed; an absent key has the first one."""
  for key, values in allowed.items():
    if fields.get(key, values[0]) not in values:
      raise _refuse(f'{at}{key}', fields[key])


def scheme(config: dict[str, Any]) -> tuple[str, tuple[int, int]] | None:
  """Returns 'fp8' or 'int4' and a scale's block; None for plain weights."""
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
    return 'int4', (1, _INT4_GROUP)
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
  excepts. Tensors that are not wanted stay as stored.
  """
  kind, block = scheme(config) or ('', (1, 1))
  raws, result, scales = folder.tensors, {}, set()
  for name, raw in raws.items():
    whole = name.removesuffix('_packed')
    tensor = ReadableTensor(
      shape=raw.shape,
      dtype=files.DTYPES.get(raw.dtype, UNKNOWN),
      raws=(raw,),
      read=functools.partial(folder.read, raw),
    )
    if whole not in wanted:
      pass
    elif kind == 'fp8' and raw.dtype == 'F8_E4M3':
      scale = _beside(raws, raw, f'{name}_scale_inv')
      tensor = _fp8(folder, raw, scale, block)
    elif kind == 'int4' and whole != name:
      scale = _beside(raws, raw, f'{whole}_scale')
      shape = _beside(raws, raw, f'{whole}_shape')
      tensor, name = _int4(folder, raw, scale, shape), whole
    result[name] = tensor
    scales.update(other.name for other in tensor.raws[1:])
  return {name: tensor for name, tensor in result.items() if name not in scales}


def _beside(raws: dict[str, files.Raw], raw: files.Raw, name: str) -> files.Raw:
  if name not in raws:
    raise ValueError(
      f'{raw.name} in {raw.file} is quantised and its {name} is missing.'
    )
  return raws[name]
