"""Imports hold the table's blocks, appear whole, and never hold an array."""

import contextlib
import json
import os
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.hf import importing
from composer_jax.hf.tensors import blocks, files
from composer_jax.train.checkpoints import manager
from tests.hf import checkpoints as hf_checkpoints
from tests.hf import tiny
from tests.hf.tensors import quantized_test

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DEEPSEEK = tiny.MODELS['deepseek_v3']
QWEN = tiny.MODELS['qwen3_moe']


@pytest.fixture(scope='module')
def imported(tmp_path_factory):
  """A source in two files, its import and its tensors."""
  root = tmp_path_factory.mktemp('import')
  arrays = hf_checkpoints.tensors(DEEPSEEK)
  source = hf_checkpoints.write(root / 'hf', DEEPSEEK, arrays, num_files=2)
  importing.convert(source, root / 'ours')
  return source, root / 'ours', arrays


@pytest.mark.parametrize(
  'model, dtype',
  [
    ('qwen3_moe', hf_checkpoints.FLOAT16),
    ('qwen3_moe_dense', hf_checkpoints.FLOAT32),
    ('olmoe', hf_checkpoints.BFLOAT16),
  ],
)
def test_arrays_are_the_blocks_of_the_table(tmp_path, model, dtype):
  fields = tiny.MODELS[model]
  arrays = hf_checkpoints.tensors(fields, dtype)
  source = hf_checkpoints.write(tmp_path / 'hf', fields, arrays)
  importing.convert(source, tmp_path / 'ours')
  table = hf_checkpoints.table_of(fields)
  like = hf_checkpoints.like(blocks.shapes(table), dtype)
  restored = importing.load_variables(tmp_path / 'ours', like)
  hf_checkpoints.check_blocks(restored, table, arrays)


def test_an_import_is_a_checkpoint_of_step_0(imported):
  _, ours, arrays = imported
  table = hf_checkpoints.table_of(DEEPSEEK)
  checkpoints = manager.Checkpoints(ours / 'weights', keep=1)
  assert checkpoints.steps() == [0]
  like = hf_checkpoints.like(blocks.shapes(table), ml_dtypes.bfloat16)
  restored, _ = checkpoints.restore(0, like)
  hf_checkpoints.check_blocks(restored, table, arrays)
  checkpoints.close()


def test_pieces_of_any_size_make_the_same_arrays(tmp_path, monkeypatch):
  """41 rows are cut by sevens: the last chunk is padded."""
  monkeypatch.setattr(blocks, 'PIECE_BYTES', 500)
  fields = DEEPSEEK | {'vocab_size': 41}
  arrays = hf_checkpoints.tensors(fields)
  source = hf_checkpoints.write(tmp_path / 'hf', fields, arrays)
  importing.convert(source, tmp_path / 'ours')
  with contextlib.closing(importing.open_weights(tmp_path / 'ours')) as weights:
    record = weights.record(0)['arrays']
  ends = [name.split(',')[1] for name in record['params/unembedding']['shards']]
  assert ends == ['0:7', '7:14', '14:21', '21:28', '28:35', '35:41']
  table = hf_checkpoints.table_of(fields)
  like = hf_checkpoints.like(blocks.shapes(table), ml_dtypes.bfloat16)
  hf_checkpoints.check_blocks(
    importing.load_variables(tmp_path / 'ours', like), table, arrays
  )


def test_masters_come_from_any_dtype_and_mixtures_are_float32(tmp_path):
  arrays = hf_checkpoints.tensors(QWEN)
  name = 'model.layers.1.mlp.experts.3.up_proj.weight'
  arrays[name] = np.ones_like(arrays[name], np.float16)
  source = hf_checkpoints.write(tmp_path / 'hf', QWEN, arrays)
  importing.convert(source, tmp_path / 'ours')
  with contextlib.closing(importing.open_weights(tmp_path / 'ours')) as weights:
    dtypes = {n: a['dtype'] for n, a in weights.record(0)['arrays'].items()}
  assert {n for n, d in dtypes.items() if d != 'bfloat16'} == {
    'params/moe_layers/moe/gate_up'
  }
  assert dtypes['params/moe_layers/moe/gate_up'] == 'float32'


def test_a_changed_weight_is_noticed(tmp_path, imported):
  _, ours, _ = imported
  shutil.copytree(ours, tmp_path / 'ours')
  state = tmp_path / 'ours' / 'weights' / '0' / 'state'
  chunk = state / 'params' / 'moe_layers' / 'moe' / 'down' / '1.3.0.0'
  data = bytearray(chunk.read_bytes())
  data[7] ^= 16
  chunk.write_bytes(data)
  table = hf_checkpoints.table_of(DEEPSEEK)
  shapes = blocks.shapes(table)
  # Shards: the whole array, one for each expert, several for each chunk.
  for spec in (P(), P(None, 'x'), P(None, None, None, 'x')):
    mesh = jax.make_mesh((8,), ('x',))
    like = hf_checkpoints.like(shapes, np.float32)
    like['params/moe_layers/moe/down'] = jax.ShapeDtypeStruct(
      shapes['params/moe_layers/moe/down'],
      np.float32,
      sharding=NamedSharding(mesh, spec),
    )
    with pytest.raises(manager.DamagedCheckpoint, match='moe/down has changed'):
      importing.load_variables(tmp_path / 'ours', like)


def test_unmodelled_tensors_are_carried(tmp_path, capsys):
  arrays = hf_checkpoints.tensors(DEEPSEEK) | hf_checkpoints.EXTRA
  source = hf_checkpoints.write(tmp_path / 'hf', DEEPSEEK, arrays, num_files=2)
  importing.convert(source, tmp_path / 'ours')
  shown = capsys.readouterr().out
  for group in ('model.layers.3.* (2 tensors)', 'vision_tower.* (1 tensors)'):
    assert f'carried along unchanged: {group}' in shown
  record = json.loads((tmp_path / 'ours' / 'hf.json').read_text())
  assert set(record['carried']) == hf_checkpoints.EXTRA.keys()
  folder = tmp_path / 'ours' / 'carried'
  with files.Folder(folder, os.listdir(folder)) as carried:
    assert carried.tensors.keys() == hf_checkpoints.EXTRA.keys()
    for name, array in hf_checkpoints.EXTRA.items():
      raw = carried.tensors[name]
      values = carried.read(raw, 0, array.size)
      assert values.dtype == array.dtype
      np.testing.assert_array_equal(values, array.reshape(-1))


GATE = hf_checkpoints.GATE
NORM = 'model.norm.weight'


def _set(**new):
  return lambda fields, arrays: (fields | new, arrays)


def _with(name, array):
  return lambda fields, arrays: (fields, arrays | {name: array})


def _without(name):
  return lambda fields, arrays: (
    fields,
    {n: a for n, a in arrays.items() if n != name},
  )


def _quantised(**new):
  fields = quantized_test.INT4 | new
  return _set(quantization_config=fields)


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda _, arrays: ([1], arrays), 'config.json: it holds a list; it must'),
    (_set(mlp_only_layers=5), "config.json: 'mlp_only_layers' is 5; .* of int"),
    (_set(mlp_only_layers=['a']), "'mlp_only_layers' is .* a list of int"),
    (_set(layer_types=5), "'layer_types' is 5; it must be a list of str"),
    (_set(layer_types='full_attention'), "'layer_types' is 'full.* of str"),
    (_set(layer_types=[{}]), "'layer_types' is .* a list of str"),
    (_set(rope_scaling={'rope_type': ['x']}), "'rope_type' is .* must be str"),
    (_set(rope_theta=10**400), "config.json: 'rope_theta' is .* finite"),
    (_quantised(config_groups={'g': 5}), "'g' is 5; it must be dict"),
    (
      _quantised(config_groups={'g': {'weights': [4]}}),
      "'weights' is .4.; it must be dict",
    ),
  ],
)
def test_malformed_configs_are_named(tmp_path, change, message):
  fields, _ = change(QWEN, {})
  hf_checkpoints.write(tmp_path / 'hf', fields, {})
  with pytest.raises(ValueError, match=message) as error:
    importing.convert(tmp_path / 'hf', tmp_path / 'ours')
  assert str(tmp_path / 'hf') in str(error.value)


@pytest.mark.parametrize('name', ['model.json', 'hf.json'])
def test_files_named_as_ours_are_refused(tmp_path, name):
  source = hf_checkpoints.write(
    tmp_path / 'hf', QWEN, hf_checkpoints.tensors(QWEN)
  )
  (source / name).touch()
  with pytest.raises(ValueError, match=f'{name} has a name that import'):
    importing.convert(source, tmp_path / 'ours')
  assert os.listdir(tmp_path) == ['hf']


@pytest.mark.parametrize(
  'change, message',
  [
    (
      _without(GATE),
      f'lacks 1 tensors .* the first is {GATE}',
    ),
    (
      lambda fields, arrays: (
        fields,
        {n: a for n, a in arrays.items() if '.experts.' not in n}
        | {'model.layers.1.mlp.experts.gate_up_proj': np.zeros((8, 24, 32))},
      ),
      'first is .*experts.0.* stacked .* save_original_format=True',
    ),
    (_set(num_hidden_layers=4), 'lacks .* the first is model.layers.3'),
    (_set(num_hidden_layers=2), r'model.safetensors holds model.layers.2'),
    (_set(n_routed_experts=4, n_group=2), 'holds model.layers.1.mlp.experts.4'),
    (_set(hidden_size=16), r'has shape .* config.json calls for \(.*16'),
    (_set(model_type='gpt9'), "config.json: model_type 'gpt9' is not"),
    (
      _set(rope_scaling={'rope_type': 'spiral', 'factor': 2.0}),
      "config.json: .*rope.*'spiral'",
    ),
    (_set(quantization_config={'quant_method': 'awq'}), "config.json: .*'awq'"),
    (
      _with(GATE, np.zeros((12, 31), np.float32)),
      rf'{GATE} in .*model.safetensors has shape \(12, 31\); .* \(12, 32\)',
    ),
    (
      _with(NORM, np.zeros(32, np.int32)),
      f'{NORM} in .*model.safetensors is I32; weights are read as BF16, F16',
    ),
    (
      _with(GATE, np.zeros((12, 32), ml_dtypes.float8_e4m3fn)),
      f'{GATE} in .*model.safetensors is F8_E4M3',
    ),
    (
      _with('model.layers.0.self_attn.q_a_proj.bias', np.zeros(16)),
      'model.safetensors holds model.layers.0.self_attn.q_a_proj.bias',
    ),
    (
      _with(f'{GATE}_scale_inv', np.zeros((1, 1), np.float32)),
      f'holds {GATE}_scale_inv',
    ),
  ],
)
def test_contradictions_are_named_before_anything_is_written(
  tmp_path, change, message
):
  fields, arrays = change(DEEPSEEK, hf_checkpoints.tensors(DEEPSEEK))
  source = hf_checkpoints.write(tmp_path / 'hf', fields, arrays)
  with pytest.raises(ValueError, match=message) as error:
    importing.convert(source, tmp_path / 'ours')
  assert str(source) in str(error.value)
  assert os.listdir(tmp_path) == ['hf']


def test_a_destination_that_exists_or_is_too_small_is_refused(
  tmp_path, imported, monkeypatch
):
  source, ours, _ = imported
  with pytest.raises(ValueError, match='ours exists; choose another --out'):
    importing.convert(source, ours)
  usage = shutil.disk_usage(tmp_path)._replace(free=1000)
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage)
  with pytest.raises(OSError, match='needs .* bytes more and 1000 are free'):
    importing.convert(source, tmp_path / 'deep' / 'new')
  assert not os.listdir(tmp_path)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', ['BFLOAT16', 'FLOAT16', 'FLOAT32'])
def test_weights_that_are_not_finite_are_refused_by_name(
  tmp_path, monkeypatch, dtype, bad
):
  monkeypatch.setattr(blocks, 'PIECE_BYTES', 500)  # read in several pieces
  arrays = hf_checkpoints.tensors(DEEPSEEK, getattr(hf_checkpoints, dtype))
  arrays[hf_checkpoints.GATE] = arrays[hf_checkpoints.GATE].copy()
  arrays[hf_checkpoints.GATE][-1, -2] = bad
  source = hf_checkpoints.write(tmp_path / 'hf', DEEPSEEK, arrays)
  place = arrays[hf_checkpoints.GATE].size - 2
  words = (
    f'Element {place} of {hf_checkpoints.GATE}, in .*safetensors, is {bad}'
  )
  with pytest.raises(ValueError, match=words):
    importing.convert(source, tmp_path / 'ours')
  assert not (tmp_path / 'ours').exists()


def test_quantised_weights_become_bfloat16(tmp_path):
  fields = DEEPSEEK | {'quantization_config': quantized_test.FP8}
  arrays = hf_checkpoints.tensors(DEEPSEEK)
  codes = np.arange(12 * 32, dtype=np.uint8).reshape(12, 32) % 127
  arrays[GATE] = codes.view(ml_dtypes.float8_e4m3fn)
  scale = np.full((1, 1), 0.37, np.float32)
  arrays[f'{GATE}_scale_inv'] = scale
  source = hf_checkpoints.write(tmp_path / 'hf', fields, arrays)
  importing.convert(source, tmp_path / 'ours')
  product = arrays[GATE].astype(np.float32) * scale
  arrays[GATE] = product.astype(ml_dtypes.bfloat16)
  table = hf_checkpoints.table_of(DEEPSEEK)
  like = hf_checkpoints.like(blocks.shapes(table), ml_dtypes.bfloat16)
  hf_checkpoints.check_blocks(
    importing.load_variables(tmp_path / 'ours', like), table, arrays
  )
