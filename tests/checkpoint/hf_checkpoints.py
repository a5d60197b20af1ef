"""Writes small random Hugging Face checkpoints, with the safetensors library.

Values are any bit pattern of their dtype: NaNs with payloads, infinities, -0
and subnormal numbers among them.
"""

import json
import pathlib

import ml_dtypes
import numpy as np
import safetensors.numpy

from composer_jax.checkpoint import hf_config, hf_io, hf_names

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)


def table_of(fields, layout='per_expert'):
  config, family, prefix = hf_config.from_hf(fields)
  return hf_names.tensors(config, family, expert_layout=layout, prefix=prefix)


def tensors(fields, dtype=BFLOAT16, *, layout='per_expert', seed=0):
  """Returns {name: array} of a model, of random bits."""
  rng = np.random.default_rng(seed)
  return {
    name: random_bits(rng, tensor.shape, dtype)
    for name, tensor in table_of(fields, layout).items()
  }


def random_bits(rng, shape, dtype=BFLOAT16):
  count = int(np.prod(shape)) * dtype.itemsize
  return np.frombuffer(rng.bytes(count), dtype).reshape(shape)


def write(folder, fields, arrays, *, num_files=1):
  """Writes config.json and the arrays, in files of about equal number."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps(fields, indent=2))
  names, places = list(arrays), {}
  for i in range(num_files):
    file = f'model-{i + 1:05}-of-{num_files:05}.safetensors'
    if num_files == 1:
      file = hf_io.SINGLE
    group = {name: arrays[name] for name in names[i::num_files]}
    safetensors.numpy.save_file(group, folder / file, {'format': 'pt'})
    places.update(dict.fromkeys(group, file))
  if num_files > 1:
    write_index(folder, places)
  return folder


def write_index(folder, places):
  fields = {'metadata': {'total_size': 0}, 'weight_map': places}
  (folder / hf_io.INDEX).write_text(json.dumps(fields, indent=2) + '\n')


def bits(array):
  array = np.ascontiguousarray(array)
  return array.view(f'u{array.dtype.itemsize}')


def expected(table, arrays):
  """Returns {array of ours: values} by the table, one block at a time."""
  found = {}
  for name, tensor in table.items():
    for part in tensor.parts:
      block = hf_names.block(part, arrays[name])
      found.setdefault(part.array, []).append((part.index, block))
  return found
