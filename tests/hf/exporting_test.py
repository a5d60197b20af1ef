"""What goes out is what came in, byte for byte, or what was asked for."""

import dataclasses
import filecmp
import json
import os
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from composer_jax.core import files
from composer_jax.hf import exporting, imported, importing
from composer_jax.hf.architecture import config as hf_config
from composer_jax.hf.tensors import blocks
from composer_jax.hf.tensors import files as hf_io
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.train.checkpoints import manager
from tests.hf import checkpoints, tiny
from tests.hf.tensors.quantized_test import FP8, INT4

DEEPSEEK = tiny.MODELS['deepseek_v3']
EXTRA, GATE = checkpoints.EXTRA, checkpoints.GATE
QWEN = tiny.MODELS['qwen3_moe']
TOKENIZER = {'tokenizer.json': '{"version": "1.0"}\n', 'merges.txt': 'a b\n'}


def _round_trip(tmp_path, fields, arrays, *, num_files=1, **options):
  source = checkpoints.write(
    tmp_path / 'hf', fields, arrays, num_files=num_files
  )
  for name, text in TOKENIZER.items():
    (source / name).write_text(text)
  importing.convert(source, tmp_path / 'ours')
  origin = exporting.of_import(tmp_path / 'ours')
  exporting.write(origin, tmp_path / 'back', **options)
  return source, tmp_path / 'back'


def _same_folders(one, other):
  names = sorted(os.listdir(one))
  assert sorted(os.listdir(other)) == names
  equal, *_ = filecmp.cmpfiles(one, other, names, shallow=False)
  assert equal == names


def _load(folder):
  tensors = {}
  for path in folder.glob('*.safetensors'):
    tensors.update(safetensors.numpy.load_file(path))
  return tensors


@pytest.mark.parametrize(
  'model, dtype, num_files',
  [
    ('deepseek_v3', checkpoints.BFLOAT16, 3),
    ('qwen3_moe', checkpoints.FLOAT16, 1),
    ('qwen3_moe_dense', checkpoints.FLOAT32, 2),
    ('olmoe', checkpoints.BFLOAT16, 1),
  ],
)
def test_there_and_back_every_file_is_the_same(
  tmp_path, model, dtype, num_files
):
  """Any finite bits: -0 and subnormal numbers, too."""
  fields = tiny.MODELS[model]
  arrays = checkpoints.tensors(fields, dtype)
  _same_folders(*_round_trip(tmp_path, fields, arrays, num_files=num_files))


def test_mixed_dtypes_and_carried_tensors_come_back_as_they_were(tmp_path):
  """One array has tensors of bfloat16, one of float16 and one of float32."""
  arrays = checkpoints.tensors(DEEPSEEK) | EXTRA
  rng = np.random.default_rng(1)
  for expert, dtype in ((3, np.float16), (5, np.float32)):
    name = f'model.layers.1.mlp.experts.{expert}.up_proj.weight'
    arrays[name] = rng.normal(size=arrays[name].shape).astype(dtype)
  _same_folders(*_round_trip(tmp_path, DEEPSEEK, arrays, num_files=2))


def test_headers_and_indices_of_any_writer_come_back(tmp_path):
  """Spaces, escapes, no padding, other ends of lines."""
  source = checkpoints.write(
    tmp_path / 'hf', QWEN, checkpoints.tensors(QWEN), num_files=2
  )
  path = source / 'model-00001-of-00002.safetensors'
  data = path.read_bytes()
  start = 8 + int.from_bytes(data[:8], 'little')
  header = json.loads(data[8:start])
  header['__metadata__'] = {'by': 'Zoë'}
  text = json.dumps(header, indent=3)
  text += ' ' * (len(text) % 2 == 0)
  assert len(text) % 8 and '\\u' in text
  path.write_bytes(hf_io.head(text) + data[start:])
  index = (source / hf_io.INDEX).read_bytes().replace(b'\n', b'\r\n')
  (source / hf_io.INDEX).write_bytes(index)
  importing.convert(source, tmp_path / 'ours')
  exporting.write(exporting.of_import(tmp_path / 'ours'), tmp_path / 'back')
  _same_folders(source, tmp_path / 'back')


def test_pieces_of_any_size_come_back(tmp_path, monkeypatch):
  monkeypatch.setattr(blocks, 'PIECE_BYTES', 300)
  arrays = checkpoints.tensors(DEEPSEEK)
  _same_folders(*_round_trip(tmp_path, DEEPSEEK, arrays))


def test_quantised_weights_go_out_as_bfloat16_and_say_so(tmp_path):
  fields = DEEPSEEK | {'quantization_config': FP8, 'torch_dtype': 'bfloat16'}
  arrays = checkpoints.tensors(DEEPSEEK)
  codes = np.arange(12 * 32, dtype=np.uint8).reshape(12, 32) % 127
  scale = np.full((1, 1), 0.37, np.float32)
  arrays[GATE] = codes.view(ml_dtypes.float8_e4m3fn)
  arrays[f'{GATE}_scale_inv'] = scale
  # With a file for each tensor, that of the scale disappears.
  num_files = len(arrays)
  _, back = _round_trip(tmp_path, fields, arrays, num_files=num_files)
  assert len(list(back.glob('*.safetensors'))) == num_files - 1
  product = arrays[GATE].astype(np.float32) * scale
  tensors = _load(back)
  assert f'{GATE}_scale_inv' not in tensors
  assert tensors.keys() == checkpoints.table_of(DEEPSEEK).keys()
  np.testing.assert_array_equal(
    tensors[GATE], product.astype(ml_dtypes.bfloat16)
  )
  config = files.read_json(back / 'config.json')
  assert config == DEEPSEEK | {'torch_dtype': 'bfloat16'}
  index = files.read_json(back / hf_io.INDEX)
  assert index['weight_map'].keys() == tensors.keys()
  total = sum(array.nbytes for array in tensors.values())
  assert index['metadata']['total_size'] == total


def _packed(rng, arrays, name):
  """Replaces a matrix by int4 codes; returns what they stand for."""
  rows, columns = arrays[name].shape
  codes = rng.integers(0, 16, (rows, columns), np.uint8)
  codes[:, ::32] = rng.integers(0, 2, (rows, columns // 32))  # -8 or -7
  codes[0, :32] = 8  # Zeros, which tell of no scale.
  scales = np.exp(rng.normal(size=(rows, columns // 32)))
  scales = scales.astype(ml_dtypes.bfloat16)
  del arrays[name]
  words = (codes[:, ::2] | codes[:, 1::2] << 4).view(np.int32)
  arrays[f'{name}_packed'] = words
  arrays[f'{name}_scale'] = scales
  arrays[f'{name}_shape'] = np.array([rows, columns], np.int32)
  groups = codes.reshape(rows, -1, 32).astype(np.float32) - 8
  product = groups * scales.astype(np.float32)[..., None]
  return product.reshape(rows, columns).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
  'trains', [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_kimi_k25_goes_through_whole(tmp_path, trains):
  """Experts of int4, names with a prefix, a nested config, a vision tower."""
  text = DEEPSEEK | {
    'model_type': 'kimi_k2',
    'moe_intermediate_size': 64,
    'quantization_config': INT4,
    'dtype': 'bfloat16',
  }
  fields = {'model_type': 'kimi_k25', 'text_config': text}
  arrays = checkpoints.tensors(fields)
  arrays['vision_tower.patch.weight'] = np.arange(6, dtype=np.float32)
  rng, expected = np.random.default_rng(0), {}
  for name in [n for n in arrays if '.experts.' in n]:
    assert name.startswith('language_model.model.layers.')
    expected[name] = _packed(rng, arrays, name)
  source, back = _round_trip(tmp_path, fields, dict(arrays), num_files=3)
  tensors = _load(back)
  wanted = {n: a for n, a in arrays.items() if '.experts.' not in n} | expected
  assert tensors.keys() == wanted.keys()
  for name, array in wanted.items():
    np.testing.assert_array_equal(
      checkpoints.bits(tensors[name]), checkpoints.bits(array), name
    )
  plain = {k: v for k, v in text.items() if k != 'quantization_config'}
  config = files.read_json(back / 'config.json')
  assert config == fields | {'text_config': plain}
  origin = exporting.of_import(tmp_path / 'ours')
  exporting.write(origin, tmp_path / 'int4', dtype='int4')
  _same_folders(source, tmp_path / 'int4')
  if trains:
    _check_trained(tmp_path, source, origin)


def _check_trained(tmp_path, source, origin):
  """After training of one expert the others have the bytes of the source."""
  precision = model_config.PrecisionConfig(experts='int4')
  config = dataclasses.replace(origin.config, precision=precision)
  shapes, _ = decoder.abstract(config)
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = jax.tree.map(lambda x: x.update(sharding=place), shapes)
  masters = importing.load_variables(tmp_path / 'ours', like)
  # What rollouts of the first step sample with is what was imported.
  policy = jax.jit(decoder.policy, static_argnums=1)
  for one, other in zip(
    *map(jax.tree.leaves, (policy(masters, config), masters)), strict=True
  ):
    np.testing.assert_array_equal(one.astype(np.float32), other)
  moe = masters['params']['moe_layers']['moe']
  moe['down'] = moe['down'].at[0, 3].multiply(1.003)
  weights = manager.Checkpoints(tmp_path / 'run' / 'exports' / 'rl', keep=1)
  weights.save(1, masters)
  weights.close()
  run = {
    'model': config.to_dict(),
    'initial': str(tmp_path / 'ours'),
    'imported': imported.identity(tmp_path / 'ours'),
  }
  files.write_json(tmp_path / 'run' / 'config.json', run)
  files.write_json(tmp_path / 'run' / 'tokenizer.json', {'roles': {}})
  trained = exporting.of_run(tmp_path / 'run', 'rl', family=None)
  exporting.write(trained, tmp_path / 'out', dtype='int4')
  before, after = _load(source), _load(tmp_path / 'out')
  assert before.keys() == after.keys()
  changed = [
    name
    for name, array in before.items()
    if array.tobytes() != after[name].tobytes()
  ]
  name = 'language_model.model.layers.1.mlp.experts.3.down_proj.weight'
  assert changed == [f'{name}_packed', f'{name}_scale'] or changed == [
    f'{name}_scale'
  ]
  # A second import reads what rollouts of the run have sampled with.
  importing.convert(tmp_path / 'out', tmp_path / 'again')
  again = importing.load_variables(tmp_path / 'again', like)
  for one, other in zip(
    *map(jax.tree.leaves, (policy(masters, config), again)), strict=True
  ):
    np.testing.assert_array_equal(one.astype(np.float32), other)
  unlike = dataclasses.replace(trained, config=origin.config)
  with pytest.raises(
    ValueError, match="which the run did not train so.*'int4'"
  ):
    exporting.write(unlike, tmp_path / 'other', dtype='int4')


def test_another_dtype_is_rounded_and_the_selection_bias_is_not(tmp_path):
  rng = np.random.default_rng(0)
  arrays = {
    name: rng.normal(size=tensor.shape).astype(np.float32)
    for name, tensor in checkpoints.table_of(DEEPSEEK).items()
  }
  _, back = _round_trip(tmp_path, DEEPSEEK, arrays, dtype='bfloat16')
  for name, array in _load(back).items():
    is_bias = name.endswith('e_score_correction_bias')
    dtype = np.float32 if is_bias else ml_dtypes.bfloat16
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, arrays[name].astype(dtype))
  assert files.read_json(back / 'config.json')['dtype'] == 'bfloat16'


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """The export of a stage, as a run writes it: float32 masters."""
  workdir = tmp_path_factory.mktemp('run')
  config = hf_config.from_hf(DEEPSEEK)[0]
  rng = np.random.default_rng(0)
  shapes = blocks.shapes(checkpoints.table_of(DEEPSEEK))
  variables = {
    name: jax.numpy.asarray(rng.normal(size=shape), np.float32)
    for name, shape in shapes.items()
  }
  weights = manager.Checkpoints(workdir / 'exports' / 'rl', keep=1)
  weights.save(7, variables)
  weights.close()
  run = {'model': config.to_dict(), 'initial': ''}
  files.write_json(workdir / 'config.json', run)
  return workdir, config, variables


def test_a_model_born_here_goes_out_as_its_policy(tmp_path, trained):
  workdir, config, variables = trained
  with pytest.raises(ValueError, match=r"needs --family.*'deepseek_v3'"):
    exporting.of_run(workdir, 'rl', family=None)
  with pytest.raises(ValueError, match=r"no finished stage 'sft'.*\['rl'\]"):
    exporting.of_run(workdir, 'sft', family='deepseek_v3')
  origin = exporting.of_run(workdir, 'rl', family='deepseek_v3')
  with pytest.raises(ValueError, match='--dtype=source needs an imported'):
    exporting.write(origin, tmp_path / 'out', dtype='source')
  exporting.write(origin, tmp_path / 'out', file_bytes=20_000)
  fields = files.read_json(tmp_path / 'out' / 'config.json')
  again, family, _ = hf_config.from_hf(fields)
  assert (again, family) == (config, 'deepseek_v3')
  assert fields['dtype'] == 'bfloat16'
  paths = sorted((tmp_path / 'out').glob('*.safetensors'))
  assert len(paths) > 2
  assert all(path.stat().st_size < 20_000 + 20_000 for path in paths)
  # The bfloat16 policy comes back, and the bias in float32.
  importing.convert(tmp_path / 'out', tmp_path / 'ours')
  single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  like = {
    name: jax.ShapeDtypeStruct(array.shape, np.float32, sharding=single)
    for name, array in variables.items()
  }
  tensors = importing.load_variables(tmp_path / 'ours', like)
  for name, array in variables.items():
    is_bias = name.startswith('selection_bias/')
    dtype = np.float32 if is_bias else ml_dtypes.bfloat16
    np.testing.assert_array_equal(
      tensors[name], np.asarray(array).astype(dtype)
    )


def test_a_model_trained_from_an_import_keeps_what_that_carried(
  tmp_path, trained
):
  workdir, config, variables = trained
  arrays = checkpoints.tensors(DEEPSEEK) | EXTRA
  source, _ = _round_trip(tmp_path, DEEPSEEK, arrays, num_files=2)
  run = shutil.copytree(workdir, tmp_path / 'run')
  fields = {
    'model': config.to_dict(),
    'initial': str(tmp_path / 'ours'),
    'imported': imported.identity(tmp_path / 'ours'),
  }
  files.write_json(run / 'config.json', fields)
  files.write_json(run / 'tokenizer.json', {'roles': {'EOD': 3}})
  with pytest.raises(ValueError, match="imported as 'deepseek_v3' .*leave out"):
    exporting.of_run(run, 'rl', family='olmoe')
  exporting.write(exporting.of_run(run, 'rl', family=None), tmp_path / 'out')
  roles = files.read_json(tmp_path / 'out' / exporting.ROLES)
  assert roles == {'EOD': 3}
  (tmp_path / 'out' / exporting.ROLES).unlink()
  assert sorted(os.listdir(tmp_path / 'out')) == sorted(os.listdir(source))
  before, after = hf_io.Folder(source), hf_io.Folder(tmp_path / 'out')
  assert list(before.headers) == list(after.headers)
  for name in EXTRA:
    one, other = before.tensors[name], after.tensors[name]
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    np.testing.assert_array_equal(
      before.read(one, 0, EXTRA[name].size),
      after.read(other, 0, EXTRA[name].size),
    )
  norm = after.tensors['model.norm.weight']
  np.testing.assert_array_equal(
    after.read(norm, 0, 32),
    np.asarray(variables['params/final_norm/scale']).astype(ml_dtypes.bfloat16),
  )


def _flip(path):
  data = bytearray(path.read_bytes())
  data[-3] ^= 64
  path.write_bytes(data)


def test_changed_weights_are_not_exported(tmp_path):
  arrays = checkpoints.tensors(DEEPSEEK) | EXTRA
  _, back = _round_trip(tmp_path, DEEPSEEK, arrays)
  shutil.rmtree(back)
  ours = tmp_path / 'ours'
  origin = exporting.of_import(ours)
  carried = ours / 'carried' / hf_io.SINGLE
  _flip(carried)
  with pytest.raises(
    ValueError, match='vision.* has changed|mlp.* has changed'
  ):
    exporting.write(origin, back)
  _flip(carried)
  _flip(ours / 'weights' / '0' / 'state' / 'params' / 'embedding' / '0.0')
  with pytest.raises(manager.DamagedCheckpoint, match='embedding has changed'):
    exporting.write(origin, back)
  assert not back.exists()
  (ours / 'carried').rename(ours / 'away')
  with pytest.raises(ValueError, match='carried lacks .*; import the Hugging'):
    exporting.write(origin, back)
  (ours / 'away').rename(ours / 'carried')
  _flip(ours / 'weights' / '0' / 'state' / 'params' / 'embedding' / '0.0')
  # The remains of failed exports are deleted.
  stray = tmp_path / 'back.exporting' / 'composer_jax_export' / 'stray.model'
  assert stray.parent.exists()
  stray.touch()
  exporting.write(origin, back)
  _same_folders(tmp_path / 'hf', back)
  with pytest.raises(ValueError, match='back exists; choose another --out'):
    exporting.write(origin, back)


def test_numbers_beyond_a_dtype_are_named(tmp_path):
  arrays = {
    name: np.zeros(tensor.shape, np.float32)
    for name, tensor in checkpoints.table_of(QWEN).items()
  }
  name = 'model.layers.1.mlp.experts.2.up_proj.weight'
  arrays[name][3, 4] = 65600.0
  with pytest.raises(ValueError, match=f'{name} .* float16, .*--dtype'):
    _round_trip(tmp_path, QWEN, arrays, dtype='float16')
  origin = exporting.of_import(tmp_path / 'ours')
  exporting.write(origin, tmp_path / 'back', dtype='bfloat16')
  assert _load(tmp_path / 'back')[name][3, 4] == 65536.0


def test_exports_leave_a_run_that_is_writing_alone(trained):
  workdir, _, _ = trained
  written = [
    workdir / 'exports' / stage / '8.orbax-checkpoint-tmp'
    for stage in ('rl', 'sft')
  ]
  for path in written:
    path.mkdir(parents=True)
  exporting.of_run(workdir, 'rl', family='deepseek_v3')
  with pytest.raises(ValueError, match=r"no finished stage 'cpt'.*\['rl'\]"):
    exporting.of_run(workdir, 'cpt', family='deepseek_v3')
  assert all(path.is_dir() for path in written)
  assert sorted(os.listdir(workdir / 'exports')) == ['rl', 'sft']


def test_what_is_no_import_is_named(tmp_path):
  with pytest.raises(ValueError, match='not a finished import.*hf.json'):
    exporting.of_import(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps({}))
  with pytest.raises(ValueError, match=r'needs --stage; finished are \[\]'):
    exporting.of_run(tmp_path, None, family=None)


def test_a_path_with_dots_is_not_a_damaged_checkpoint(
  tmp_path, monkeypatch, trained
):
  workdir, _, _ = trained
  source = checkpoints.write(tmp_path / 'hf', QWEN, checkpoints.tensors(QWEN))
  (tmp_path / 'here').mkdir()
  monkeypatch.chdir(tmp_path / 'here')
  importing.convert('../here/../hf', '../ours')
  like = checkpoints.like(
    blocks.shapes(checkpoints.table_of(QWEN)), ml_dtypes.bfloat16
  )
  importing.load_variables('../ours', like)
  exporting.write(exporting.of_import('../ours'), '../here/../back')
  _same_folders(source, tmp_path / 'back')
  run = os.path.relpath(workdir)
  assert '..' in run
  origin = exporting.of_run(run, 'rl', family='deepseek_v3')
  exporting.write(origin, 'trained')
