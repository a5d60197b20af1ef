"""Writes small random Hugging Face checkpoints, with the safetensors library.

Values are any finite bit pattern of their dtype, -0 and subnormal numbers
among them.
"""

import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

from composer_jax.hf.architecture import config as hf_config
from composer_jax.hf.tensors import files
from composer_jax.hf.tensors import names as hf_names
from tests.hf import views

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)

# A matrix of the DeepSeek of `tests.hf.tiny`, and tensors it does not model.
GATE = 'model.layers.2.mlp.experts.7.gate_proj.weight'
EXTRA = {
  'model.layers.3.eh_proj.weight': np.ones((2, 3), np.float32),
  'model.layers.3.mlp.weight': np.ones((2, 2), ml_dtypes.float8_e4m3fn),
  'vision_tower.patch.weight': np.arange(6, dtype=np.int32),
}


def table_of(fields):
  config, family, prefix = hf_config.from_hf(fields)
  return hf_names.tensors(config, family, prefix=prefix)


def tensors(fields, dtype=BFLOAT16, *, seed=0):
  """Returns {name: array} of a model, with random bits."""
  rng = np.random.default_rng(seed)
  return {
    name: random_bits(rng, tensor.shape, dtype)
    for name, tensor in table_of(fields).items()
  }


def random_bits(rng, shape, dtype=BFLOAT16):
  count = int(np.prod(shape)) * dtype.itemsize
  values = np.frombuffer(rng.bytes(count), dtype).reshape(shape)
  if dtype.kind in 'iu':
    return values
  with np.errstate(invalid='ignore'):  # of NaNs that signal
    return np.where(np.isfinite(values), values, dtype.type(-0.0))


def write(folder, fields, arrays, *, num_files=1):
  """Writes config.json and the arrays, in files of about equal number."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps(fields, indent=2))
  names, places = list(arrays), {}
  for i in range(num_files):
    file = f'model-{i + 1:05}-of-{num_files:05}.safetensors'
    if num_files == 1:
      file = files.SINGLE
    group = {name: arrays[name] for name in names[i::num_files]}
    safetensors.numpy.save_file(group, folder / file, {'format': 'pt'})
    places.update(dict.fromkeys(group, file))
  if num_files > 1:
    write_index(folder, places)
  return folder


def write_index(folder, places):
  fields = {'metadata': {'total_size': 0}, 'weight_map': places}
  (folder / files.INDEX).write_text(json.dumps(fields, indent=2) + '\n')


def bits(array):
  array = np.ascontiguousarray(array)
  return array.view(f'u{array.dtype.itemsize}')


def expected(table, arrays):
  """Returns {array: [(index, block)]} that the table calls for."""
  blocks = {}
  for name, tensor in table.items():
    for part in tensor.parts:
      block = views.block(part, arrays[name])
      blocks.setdefault(part.array, []).append((part.index, block))
  return blocks


def like(shapes, dtype, sharding=None):
  single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {
    name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or single)
    for name, shape in shapes.items()
  }


def check_blocks(variables, table, arrays):
  for name, blocks in expected(table, arrays).items():
    for index, block in blocks:
      np.testing.assert_array_equal(
        bits(np.asarray(variables[name])[index]),
        bits(block),
        err_msg=name,
      )


def content(folder):
  """Returns all bytes but those of orbax's own records, which have times."""
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file()
    and 'METADATA' not in path.name
    and path.name != 'commit_success.txt'
  }
