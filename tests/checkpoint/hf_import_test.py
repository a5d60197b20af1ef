"""Imports hold the table's blocks, appear whole, and never hold an array."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from composer_jax.checkpoint import (
  hf_blocks,
  hf_import,
  hf_io,
  hf_source,
  hf_staging,
  manager,
)
from tests.checkpoint import hf_checkpoints
from tests.checkpoint.hf_quantized_test import FP8
from tests.hf import tiny

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
DEEPSEEK = tiny.MODELS['deepseek_v3']
QWEN = tiny.MODELS['qwen3_moe']


def _like(shapes, dtype, sharding=None):
  single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {
    name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding or single)
    for name, shape in shapes.items()
  }


def _check_blocks(variables, table, arrays):
  for name, blocks in hf_checkpoints.expected(table, arrays).items():
    for index, block in blocks:
      np.testing.assert_array_equal(
        hf_checkpoints.bits(np.asarray(variables[name])[index]),
        hf_checkpoints.bits(block),
        err_msg=name,
      )


@pytest.fixture(scope='module')
def imported(tmp_path_factory):
  """A source in two files, its import and its tensors."""
  root = tmp_path_factory.mktemp('import')
  arrays = hf_checkpoints.tensors(DEEPSEEK)
  source = hf_checkpoints.write(root / 'hf', DEEPSEEK, arrays, num_files=2)
  hf_import.convert(source, root / 'ours')
  return source, root / 'ours', arrays


@pytest.mark.parametrize(
  'model, dtype, layout',
  [
    ('qwen3_moe', hf_checkpoints.FLOAT16, 'per_expert'),
    ('qwen3_moe_dense', hf_checkpoints.FLOAT32, 'stacked'),
    ('mixtral', hf_checkpoints.BFLOAT16, 'per_expert'),
  ],
)
def test_arrays_are_the_blocks_of_the_table(tmp_path, model, dtype, layout):
  fields = tiny.MODELS[model]
  arrays = hf_checkpoints.tensors(fields, dtype, layout=layout)
  source = hf_checkpoints.write(tmp_path / 'hf', fields, arrays)
  hf_import.convert(source, tmp_path / 'ours')
  table = hf_checkpoints.table_of(fields, layout)
  like = _like(hf_blocks.shapes(table), dtype)
  found = hf_import.load_variables(tmp_path / 'ours', like)
  _check_blocks(found, table, arrays)
  hf_import.verify(source, tmp_path / 'ours')


def test_an_import_is_a_checkpoint_of_step_0(imported):
  _, ours, arrays = imported
  table = hf_checkpoints.table_of(DEEPSEEK)
  checkpoints = manager.Checkpoints(ours / 'weights', keep=1)
  assert checkpoints.steps() == [0]
  like = _like(hf_blocks.shapes(table), ml_dtypes.bfloat16)
  found, _ = checkpoints.restore(0, like)
  _check_blocks(found, table, arrays)
  checkpoints.close()


def test_pieces_of_any_size_make_the_same_arrays(tmp_path, monkeypatch):
  """41 rows are cut by sevens: the last chunk is padded."""
  monkeypatch.setattr(hf_blocks, 'PIECE_BYTES', 500)
  fields = DEEPSEEK | {'vocab_size': 41}
  arrays = hf_checkpoints.tensors(fields)
  source = hf_checkpoints.write(tmp_path / 'hf', fields, arrays)
  hf_import.convert(source, tmp_path / 'ours')
  with contextlib.closing(hf_import.open_weights(tmp_path / 'ours')) as weights:
    record = weights.record(0)['arrays']
  ends = [name.split(',')[1] for name in record['params/unembedding']['shards']]
  assert ends == ['0:7', '7:14', '14:21', '21:28', '28:35', '35:41']
  table = hf_checkpoints.table_of(fields)
  like = _like(hf_blocks.shapes(table), ml_dtypes.bfloat16)
  _check_blocks(
    hf_import.load_variables(tmp_path / 'ours', like), table, arrays
  )
  hf_import.verify(source, tmp_path / 'ours')


def _place(shapes, mesh):
  """Experts over the mesh, other arrays by any axis that divides, or whole."""

  def sharding(name, shape):
    axis = 1 if '/moe/' in name and len(shape) > 2 else -1
    spec = [None] * len(shape)
    if shape[axis] % mesh.size == 0:
      spec[axis] = 'x'
    return NamedSharding(mesh, P(*spec))

  return {name: sharding(name, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize('num_devices', [8, 3])
def test_sharded_arrays_are_those_of_the_checkpoint(imported, num_devices):
  """Over 8 devices experts are split; over 3, only what 3 divides."""
  path, ours, _ = imported
  mesh = jax.make_mesh(
    (num_devices,), ('x',), devices=jax.devices()[:num_devices]
  )
  source = hf_source.open_source(path)
  shapes = hf_blocks.shapes(source.table)
  shardings = _place(shapes, mesh)
  name = 'params/moe_layers/moe/gate_up'
  assert shardings[name].is_fully_replicated == (num_devices == 3)
  assert not all(s.is_fully_replicated for s in shardings.values())
  like = {
    name: jax.ShapeDtypeStruct(shape, np.float32, sharding=shardings[name])
    for name, shape in shapes.items()
  }
  restored = hf_import.load_variables(ours, like)
  read = hf_import.load_sharded(
    source, source.config, shardings, dtype=np.dtype(np.float32)
  )
  for name, array in read.items():
    assert array.sharding == restored[name].sharding == shardings[name]
    np.testing.assert_array_equal(array, restored[name], err_msg=name)
  source.close()


def test_a_sharded_load_reads_only_its_own_parts(imported, monkeypatch):
  path, _, _ = imported
  source = hf_source.open_source(path)
  read = []
  for name, tensor in source.tensors.items():

    def spy(start, stop, name=name, tensor=tensor):
      read.append(name)
      return type(tensor).read(tensor, start, stop)

    monkeypatch.setattr(tensor, 'read', spy)
  array = 'params/moe_layers/moe/down'
  shape = hf_blocks.shapes(source.table)[array]
  parts = [
    (source.tensors[name], part)
    for name in source.tensors
    for part in source.table[name].parts
    if part.array == array
  ]

  # What the first of 8 processes reads.
  box = ((0, shape[0]), (0, 1), (0, shape[2]), (0, shape[3]))
  placed = hf_import._arrays(source)[array]
  hf_import._assemble(parts, placed, box, np.dtype(np.float32))
  assert {name.split('experts.')[1] for name in read} == {'0.down_proj.weight'}
  assert len(read) == shape[0]
  source.close()


def test_masters_come_from_any_dtype_and_mixtures_are_float32(tmp_path):
  arrays = hf_checkpoints.tensors(QWEN)
  name = 'model.layers.1.mlp.experts.3.up_proj.weight'
  arrays[name] = arrays[name].astype(np.float16)
  source = hf_checkpoints.write(tmp_path / 'hf', QWEN, arrays)
  hf_import.convert(source, tmp_path / 'ours')
  with contextlib.closing(hf_import.open_weights(tmp_path / 'ours')) as weights:
    dtypes = {n: a['dtype'] for n, a in weights.record(0)['arrays'].items()}
  assert {n for n, d in dtypes.items() if d != 'bfloat16'} == {
    'params/moe_layers/moe/gate_up'
  }
  assert dtypes['params/moe_layers/moe/gate_up'] == 'float32'


def test_a_changed_weight_is_noticed(tmp_path, imported):
  source, ours, _ = imported
  shutil.copytree(ours, tmp_path / 'ours')
  state = tmp_path / 'ours' / 'weights' / '0' / 'state'
  chunk = state / 'params' / 'moe_layers' / 'moe' / 'down' / '1.3.0.0'
  data = bytearray(chunk.read_bytes())
  data[7] ^= 16
  chunk.write_bytes(data)
  table = hf_checkpoints.table_of(DEEPSEEK)
  shapes = hf_blocks.shapes(table)
  # Placed whole, a shard an expert, and with blocks across shards.
  for spec in (P(), P(None, 'x'), P(None, None, None, 'x')):
    mesh = jax.make_mesh((8,), ('x',))
    like = _like(shapes, np.float32)
    like['params/moe_layers/moe/down'] = jax.ShapeDtypeStruct(
      shapes['params/moe_layers/moe/down'],
      np.float32,
      sharding=NamedSharding(mesh, spec),
    )
    with pytest.raises(manager.DamagedCheckpoint, match='moe/down has changed'):
      hf_import.load_variables(tmp_path / 'ours', like)
  with pytest.raises(
    ValueError, match='moe/down of .* differs from .*experts.3'
  ):
    hf_import.verify(source, tmp_path / 'ours')


EXTRA = {
  'model.layers.3.eh_proj.weight': np.ones((2, 3), np.float32),
  'model.layers.3.mlp.weight': np.ones((2, 2), ml_dtypes.float8_e4m3fn),
  'vision_tower.patch.weight': np.arange(6, dtype=np.int32),
}


def test_unmodelled_tensors_are_carried_or_refused(tmp_path, capsys):
  arrays = hf_checkpoints.tensors(DEEPSEEK) | EXTRA
  source = hf_checkpoints.write(tmp_path / 'hf', DEEPSEEK, arrays, num_files=2)
  with pytest.raises(ValueError, match=r'holds .*\(3 such tensors\).*carry'):
    hf_import.convert(source, tmp_path / 'ours', unmodelled='refuse')
  assert os.listdir(tmp_path) == ['hf']
  hf_import.convert(source, tmp_path / 'ours')
  shown = capsys.readouterr().out
  for group in ('model.layers.3.* (2 tensors)', 'vision_tower.* (1 tensors)'):
    assert f'carried along unchanged: {group}' in shown
  record = json.loads((tmp_path / 'ours' / 'hf.json').read_text())
  assert set(record['carried']) == EXTRA.keys()
  folder = tmp_path / 'ours' / 'carried'
  with hf_io.Folder(folder, os.listdir(folder)) as carried:
    assert carried.tensors.keys() == EXTRA.keys()
    for name, array in EXTRA.items():
      raw = carried.tensors[name]
      values = carried.read(raw, 0, array.size)
      assert values.dtype == array.dtype
      np.testing.assert_array_equal(values, array.reshape(-1))


GATE = 'model.layers.2.mlp.experts.7.gate_proj.weight'
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


@pytest.mark.parametrize(
  'change, message',
  [
    (_without(GATE), f'lacks 1 tensors .* the first is {GATE}'),
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
    hf_import.convert(source, tmp_path / 'ours')
  assert str(source) in str(error.value)
  assert os.listdir(tmp_path) == ['hf']


def test_a_destination_that_exists_or_is_too_small_is_refused(
  tmp_path, imported, monkeypatch
):
  source, ours, _ = imported
  with pytest.raises(ValueError, match='ours exists; choose another --out'):
    hf_import.convert(source, ours)
  usage = shutil.disk_usage(tmp_path)._replace(free=1000)
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage)
  with pytest.raises(OSError, match='needs .* bytes more and 1000 are free'):
    hf_import.convert(source, tmp_path / 'deep' / 'new')
  assert not os.listdir(tmp_path)


def test_quantised_weights_become_bfloat16(tmp_path):
  fields = DEEPSEEK | {'quantization_config': FP8}
  arrays = hf_checkpoints.tensors(DEEPSEEK)
  codes = np.arange(12 * 32, dtype=np.uint8).reshape(12, 32) % 127
  arrays[GATE] = codes.view(ml_dtypes.float8_e4m3fn)
  scale = np.full((1, 1), 0.37, np.float32)
  arrays[f'{GATE}_scale_inv'] = scale
  source = hf_checkpoints.write(tmp_path / 'hf', fields, arrays)
  hf_import.convert(source, tmp_path / 'ours')
  product = arrays[GATE].astype(np.float32) * scale
  arrays[GATE] = product.astype(ml_dtypes.bfloat16)
  table = hf_checkpoints.table_of(DEEPSEEK)
  like = _like(hf_blocks.shapes(table), ml_dtypes.bfloat16)
  _check_blocks(
    hf_import.load_variables(tmp_path / 'ours', like), table, arrays
  )


def _run(program, *args):
  return subprocess.run(
    [sys.executable, '-c', textwrap.dedent(program), *map(str, args)],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )


# Kills itself at the n-th call of a function, half of its work done.
_KILLED = """
  import os, signal, sys
  from composer_jax.checkpoint import hf_import, hf_io, hf_staging

  source, out, name, count = sys.argv[1:]
  module, name = (hf_io, name) if hasattr(hf_io, name) else (os, name)
  original, left = getattr(module, name), int(count)

  def killed(*args, **kwargs):
    global left
    last = str(args[-1]) == out
    left -= name != 'replace' or last
    if left:
      return original(*args, **kwargs)
    if name == 'write_fully':
      os.pwrite(args[0], args[1][: len(args[1]) // 2], args[2])
    os.kill(os.getpid(), signal.SIGKILL)

  setattr(module, name, killed)
  hf_staging._SYNC_BYTES = 20_000
  hf_import.convert(source, out)
"""


def _content(folder):
  """Bytes of everything but orbax's own records, which have times."""
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file()
    and 'METADATA' not in path.name
    and path.name != 'commit_success.txt'
  }


@pytest.mark.parametrize(
  'function, count',
  [
    # The 70th chunk; the 20th file that orbax takes over; the last step.
    ('write_fully', 70),
    ('link', 20),
    ('replace', 1),
  ],
)
def test_a_killed_import_goes_on_where_it_was(
  tmp_path, monkeypatch, function, count
):
  arrays = hf_checkpoints.tensors(DEEPSEEK) | EXTRA
  source = hf_checkpoints.write(tmp_path / 'hf', DEEPSEEK, arrays, num_files=2)
  out = tmp_path / 'killed'
  run = _run(_KILLED, source, out, function, count)
  assert run.returncode == -signal.SIGKILL, run.stderr
  assert not out.exists()
  with pytest.raises(ValueError, match='not an import directory'):
    hf_import.open_weights(out)
  begun = []
  begin = hf_staging.Staging.begin

  def spy(self, tensor):
    begun.append(tensor)
    begin(self, tensor)

  monkeypatch.setattr(hf_staging.Staging, 'begin', spy)
  hf_import.convert(source, out)
  num_resumed = len(begun)
  hf_import.convert(source, tmp_path / 'whole')
  num_tensors = len(begun) - num_resumed
  assert _content(out) == _content(tmp_path / 'whole')
  assert {p.name for p in tmp_path.iterdir()} == {'hf', 'killed', 'whole'}
  # Between two syncs lies a part of the tensors; all are synced before links.
  wanted = (0,) if function != 'write_fully' else range(1, num_tensors - 20)
  assert num_resumed in wanted


@pytest.mark.parametrize('method', ['save', 'remove'])
def test_a_partial_import_of_another_source_is_refused(
  tmp_path, monkeypatch, method
):
  """Whether or not its weights are a checkpoint already."""
  arrays = hf_checkpoints.tensors(QWEN)
  source = hf_checkpoints.write(tmp_path / 'hf', QWEN, arrays)

  def stop(*_):
    raise RuntimeError

  monkeypatch.setattr(hf_staging.Staging, method, stop)
  with pytest.raises(RuntimeError):
    hf_import.convert(source, tmp_path / 'ours')
  fields = QWEN | {'rope_theta': 20000.0}
  (source / 'config.json').write_text(json.dumps(fields))
  with pytest.raises(ValueError, match='ours.partial was begun from another'):
    hf_import.convert(source, tmp_path / 'ours')


# Prints how much memory an import took beyond what a tiny one had taken.
_MEASURED = """
  import resource, sys
  from composer_jax.checkpoint import hf_import

  def peak():
    if sys.platform != 'linux':
      return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    # Here getrusage begins with the memory of whoever started this process.
    with open('/proc/self/status') as status:
      return int(status.read().split('VmHWM:')[1].split()[0])

  tiny, source, out = sys.argv[1:]
  hf_import.convert(tiny, out + '_tiny')
  before = peak()
  hf_import.convert(source, out)
  print('peak', before // 1024, peak() // 1024)
"""


def _peaks(tmp_path, num_experts, ffw_dim, embed_dim):
  """Returns MiB (of a tiny import, of one with these experts)."""
  tiny_source = hf_checkpoints.write(
    tmp_path / 'tiny', QWEN, hf_checkpoints.tensors(QWEN)
  )
  fields = QWEN | {
    'num_hidden_layers': 1,
    'num_experts': num_experts,
    'moe_intermediate_size': ffw_dim,
    'hidden_size': embed_dim,
  }
  source = tmp_path / 'hf'
  source.mkdir()
  (source / 'config.json').write_text(json.dumps(fields))
  header = hf_io.new_header(
    [
      (name, 'BF16', tensor.shape, 2 * int(np.prod(tensor.shape)))
      for name, tensor in hf_checkpoints.table_of(fields).items()
    ],
    None,
  )
  head = hf_io.render_header(header)
  size = max(entry['data_offsets'][1] for entry in header.values())
  with open(source / hf_io.SINGLE, 'wb') as file:
    file.write(head)
    file.truncate(len(head) + size)  # All zeros, without being written.
  run = _run(_MEASURED, tiny_source, source, tmp_path / 'ours')
  assert run.returncode == 0, run.stderr
  line = next(x for x in run.stdout.splitlines() if x.startswith('peak'))
  shutil.rmtree(tmp_path / 'ours')
  return [int(number) for number in line.split()[1:]]


def test_memory_is_that_of_two_tensors_not_of_an_array(tmp_path):
  """24 experts of 4 MiB: gate and up are an array of 192 MiB."""
  before, after = _peaks(tmp_path, 24, 1024, 2048)
  assert after - before <= 2 * 4 + 4 + 40


@pytest.mark.slow
def test_memory_of_a_frontier_checkpoint(tmp_path):
  """Tensors of 64 MiB, an array of 20 times that, with the interpreter."""
  _, after = _peaks(tmp_path, 10, 4096, 8192)
  assert after <= 2 * 64 + 31 + 512


@pytest.mark.parametrize('count', [30, 80])
def test_where_files_cannot_be_linked_they_are_moved(
  tmp_path, imported, monkeypatch, count
):
  """A run killed between two moves makes anew what has gone.

  The 30th rename is of a small file under a temporary name, the 80th a chunk.
  """
  source, ours, _ = imported

  def refuse(*_):
    raise PermissionError(1, 'no links here')

  moves = []
  move = os.replace

  def stop(one, other):
    moves.append(other)
    if len(moves) == count:
      raise KeyError('killed')
    move(one, other)

  monkeypatch.setattr(os, 'link', refuse)
  with monkeypatch.context() as patch:
    patch.setattr(hf_staging.os, 'replace', stop)
    with pytest.raises(KeyError):
      hf_import.convert(source, tmp_path / 'ours')
  hf_import.convert(source, tmp_path / 'ours')
  assert _content(tmp_path / 'ours') == _content(ours)
