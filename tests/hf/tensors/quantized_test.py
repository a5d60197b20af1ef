"""Quantised tensors are, bit for bit, what the schemes' own code makes."""

import copy

import ml_dtypes
import numpy as np
import pytest

from composer_jax.hf.tensors import files, quantized
from tests.hf import checkpoints

FP8 = {
  'quant_method': 'fp8',
  'fmt': 'e4m3',
  'activation_scheme': 'dynamic',
  'weight_block_size': [128, 128],
  'modules_to_not_convert': ['lm_head', 'mlp.gate'],
}
INT4 = {
  'quant_method': 'compressed-tensors',
  'format': 'pack-quantized',
  'quantization_status': 'compressed',
  'kv_cache_scheme': None,
  'ignore': ['lm_head', 're:.*self_attn.*'],
  'config_groups': {
    'group_0': {
      'targets': ['Linear'],
      'input_activations': None,
      'output_activations': None,
      'weights': {
        'num_bits': 4,
        'type': 'int',
        'symmetric': True,
        'strategy': 'group',
        'group_size': 32,
        'actorder': None,
        'dynamic': False,
      },
    }
  },
}


def _open(tmp_path, quantization, arrays, wanted):
  checkpoints.write(tmp_path / 'x', {}, arrays)
  folder = files.Folder(tmp_path / 'x')
  config = {'quantization_config': quantization}
  return quantized.tensors(folder, config, wanted)


def _fp8(rng, rows, columns):
  codes = checkpoints.random_bits(
    rng, (rows, columns), np.dtype(ml_dtypes.float8_e4m3fn)
  )
  shape = (-(-rows // 128), -(-columns // 128))
  return codes, rng.lognormal(-7, 1, shape).astype(np.float32)


def _check_ranges(tensor, expected):
  """Checks that any range is that part of the whole, whose bits are given.

  Which NaN a NaN becomes depends on torch's vector width; no weight is one.
  """
  columns = tensor.shape[1]
  size = tensor.shape[0] * columns
  late = tensor.shape[0] // 2 * columns
  ranges = ((0, size), (columns * 3, size - columns), (5, 6 + columns))
  ranges += ((late, size), (late - 1, late + 1))
  for start, stop in ranges:
    values = tensor.read(start, stop)
    reference = expected.reshape(-1)[start:stop]
    assert values.dtype == checkpoints.BFLOAT16
    np.testing.assert_array_equal(
      _one_nan(values.view(np.uint16)), _one_nan(reference)
    )


def _one_nan(bits):
  return np.where(bits & 0x7FFF > 0x7F80, np.uint16(0x7FC0), bits)


def _torch_bits(tensor):
  import torch

  return tensor.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize('shape', [(256, 384), (300, 200), (128, 64), (7, 129)])
def test_fp8_is_deepseeks_weight_dequant(tmp_path, shape):
  import torch

  codes, scales = _fp8(np.random.default_rng(0), *shape)
  arrays = {'m.weight': codes, 'm.weight_scale_inv': scales}
  tensors = _open(tmp_path, FP8, arrays, {'m.weight'})
  assert list(tensors) == ['m.weight']
  # DeepSeek-V3's kernel: x.to(float32) * s, per block, into bfloat16.
  x = torch.from_numpy(codes.view(np.uint8).copy()).view(torch.float8_e4m3fn)
  s = torch.from_numpy(scales).repeat_interleave(128, 0)
  s = s.repeat_interleave(128, 1)[: shape[0], : shape[1]]
  expected = _torch_bits((x.float() * s).bfloat16())
  _check_ranges(tensors['m.weight'], expected)


def test_fp8_is_transformers_dequantisation(tmp_path):
  import torch
  from transformers.integrations import finegrained_fp8

  codes, scales = _fp8(np.random.default_rng(1), 256, 384)
  arrays = {'m.weight': codes, 'm.weight_scale_inv': scales}
  tensors = _open(tmp_path, FP8, arrays, {'m.weight'})
  reference = finegrained_fp8.Fp8Dequantize(None)._dequantize_one(
    torch.from_numpy(codes.view(np.uint8).copy()).view(torch.float8_e4m3fn),
    torch.from_numpy(scales),
    torch.bfloat16,
  )
  _check_ranges(tensors['m.weight'], _torch_bits(reference))


def _int4(rng, rows, columns):
  """Packed words of any bits, and the tensors beside them."""
  packed = checkpoints.random_bits(
    rng, (rows, columns // 8), np.dtype(np.int32)
  )
  scales = rng.lognormal(-5, 2, (rows, columns // 32)) * rng.choice([-1, 1])
  return {
    'm.weight_packed': packed,
    'm.weight_scale': scales.astype(ml_dtypes.bfloat16),
    'm.weight_shape': np.array([rows, columns], np.int32),
  }


@pytest.mark.parametrize('shape', [(16, 64), (5, 96)])
def test_int4_is_compressed_tensors_decompression(tmp_path, shape):
  import torch
  from compressed_tensors import quantization
  from compressed_tensors.compressors import pack_quantized

  arrays = _int4(np.random.default_rng(2), *shape)
  tensors = _open(tmp_path, INT4, arrays, {'m.weight'})
  assert list(tensors) == ['m.weight']
  scale = torch.from_numpy(arrays['m.weight_scale'].view(np.int16))
  reference = pack_quantized.PackedQuantizationCompressor.decompress(
    {
      'weight_packed': torch.from_numpy(arrays['m.weight_packed'].copy()),
      'weight_scale': scale.view(torch.bfloat16),
      'weight_shape': torch.tensor(shape),
    },
    quantization.QuantizationScheme(**INT4['config_groups']['group_0']),
  )['weight']
  assert tuple(reference.shape) == shape
  _check_ranges(tensors['m.weight'], _torch_bits(reference))


def test_tensors_that_are_not_wanted_stay_as_stored(tmp_path):
  arrays = _int4(np.random.default_rng(2), 4, 32)
  tensors = _open(tmp_path, INT4, arrays, ())
  assert tensors.keys() == arrays.keys()


def test_no_quantisation_is_no_scheme():
  assert quantized.scheme({'model_type': 'x'}) is None


@pytest.mark.parametrize('base', [FP8, INT4])
def test_kimis_nested_config_is_found(base):
  config = {'text_config': {'quantization_config': base}}
  assert quantized.scheme(config) is not None


def _changed(base, path, value):
  config = copy.deepcopy(base)
  inner = config
  *keys, last = path.split('.')
  for key in keys:
    inner = inner[key]
  inner[last] = value
  return config


_WEIGHTS = 'config_groups.group_0.weights'


@pytest.mark.parametrize(
  'base, path, value',
  [
    (FP8, 'quant_method', 'gptq'),
    (FP8, 'quant_method', None),
    (FP8, 'fmt', 'e5m2'),
    (FP8, 'activation_scheme', 'static'),
    (FP8, 'weight_block_size', None),
    (FP8, 'weight_block_size', [128]),
    (INT4, 'format', 'nvfp4-pack-quantized'),
    (INT4, 'kv_cache_scheme', {'num_bits': 8}),
    (INT4, 'quantization_status', 'frozen'),
    (INT4, 'config_groups.group_0.input_activations', {'num_bits': 8}),
    (INT4, 'config_groups.group_0.targets', ['re:.*experts.*']),
    (INT4, f'{_WEIGHTS}.num_bits', 8),
    (INT4, f'{_WEIGHTS}.type', 'float'),
    (INT4, f'{_WEIGHTS}.symmetric', False),
    (INT4, f'{_WEIGHTS}.strategy', 'channel'),
    (INT4, f'{_WEIGHTS}.group_size', 128),
    (INT4, f'{_WEIGHTS}.actorder', 'group'),
    (INT4, f'{_WEIGHTS}.dynamic', True),
  ],
)
def test_other_schemes_are_refused_by_name(base, path, value):
  config = {'quantization_config': _changed(base, path, value)}
  with pytest.raises(ValueError) as error:
    quantized.scheme(config)
  assert f'quantization_config.{path} is {value!r}' in str(error.value)


def test_two_groups_of_modules_are_refused():
  group = INT4['config_groups']['group_0']
  config = INT4 | {'config_groups': {'group_0': group, 'group_1': group}}
  with pytest.raises(ValueError, match='quantization_config.config_groups is'):
    quantized.scheme({'quantization_config': config})


def _without(arrays, name):
  return {k: v for k, v in arrays.items() if k != name}


RNG = np.random.default_rng(3)
CODES, SCALES = _fp8(RNG, 130, 32)
FP8_ARRAYS = {'m.weight': CODES, 'm.weight_scale_inv': SCALES}
INT4_ARRAYS = _int4(RNG, 4, 64)


@pytest.mark.parametrize(
  'quantization, arrays, message',
  [
    (
      FP8,
      _without(FP8_ARRAYS, 'm.weight_scale_inv'),
      'm.weight in model.safetensors is quantised and its m.weight_scale_inv',
    ),
    (
      FP8,
      FP8_ARRAYS | {'m.weight_scale_inv': SCALES[:1]},
      r'm.weight_scale_inv in .* is F32 of shape \(1, 1\).*shape \(2, 1\)',
    ),
    (FP8, {'m.weight': CODES[None]} | {'m.weight_scale_inv': SCALES}, 'matri'),
    (
      INT4,
      _without(INT4_ARRAYS, 'm.weight_scale'),
      'm.weight_packed in .* its m.weight_scale is missing',
    ),
    (
      INT4,
      _without(INT4_ARRAYS, 'm.weight_shape'),
      'm.weight_packed in .* its m.weight_shape is missing',
    ),
    (
      INT4,
      INT4_ARRAYS | {'m.weight_shape': np.array([4, 72], np.int32)},
      'm.weight_packed in .* 72 columns, which groups of 32 do not divide',
    ),
    (
      INT4,
      INT4_ARRAYS | {'m.weight_shape': np.array([5, 64], np.int32)},
      r'm.weight_packed in .* I32 of shape \(4, 8\).* shape \(5, 8\)',
    ),
  ],
)
def test_tensors_that_do_not_fit_are_named(
  tmp_path, quantization, arrays, message
):
  wanted = {n.removesuffix('_packed') for n in arrays}
  with pytest.raises(ValueError, match=message):
    _open(tmp_path, quantization, arrays, wanted)
