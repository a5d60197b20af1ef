"""Casts among float32, bfloat16 and float16; a round trip keeps all bits.

Values are rounded to nearest even. A NaN keeps its sign and the upper bits of
its payload, which numpy and ml_dtypes drop: a half that was cast to float32
must come back as it was.
"""

import ml_dtypes
import numpy as np

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT16 = np.dtype(np.float16)
_FLOAT32 = np.dtype(np.float32)


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Returns the values in another dtype; the same array if it is the same."""
  if values.dtype == dtype:
    return values
  with np.errstate(over='ignore', invalid='ignore'):
    result = values.astype(dtype)
    nan = np.isnan(values)
  if nan.any():
    bits = result.view(f'u{result.itemsize}')
    bits[nan] = _from_float32(_to_float32(values[nan]), result.dtype)
  return result


def overflows(values: np.ndarray, result: np.ndarray) -> bool:
  """Returns true if the cast made an infinity of a finite value."""
  if values.dtype == result.dtype:
    return False
  with np.errstate(invalid='ignore'):  # ml_dtypes warns of some NaNs.
    return bool((np.isinf(result) & ~np.isinf(values)).any())


def _to_float32(nans: np.ndarray) -> np.ndarray:
  """Returns the bits of NaNs as float32."""
  bits = nans.view(f'u{nans.itemsize}').astype(np.uint32)
  if nans.dtype == _FLOAT32:
    return bits
  if nans.dtype == _BFLOAT16:
    return bits << 16
  assert nans.dtype == _FLOAT16
  return (bits & 0x8000) << 16 | 0x7F800000 | (bits & 0x3FF) << 13


def _from_float32(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Returns NaNs of a dtype; a payload without any bit left becomes quiet."""
  if dtype == _FLOAT32:
    return bits
  if dtype == _BFLOAT16:
    return np.where(bits & 0x7F0000, bits >> 16, bits >> 16 | 0x40)
  assert dtype == _FLOAT16
  payload = bits >> 13 & 0x3FF
  payload = np.where(payload, payload, 0x200)
  return bits >> 16 & 0x8000 | 0x7C00 | payload
