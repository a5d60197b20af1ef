"""A stage resumes bit for bit, is not repeated, and stops on NaN."""

import dataclasses
import functools
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from composer_jax.core import batches, trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups
from composer_jax.parallel import topology
from composer_jax.telemetry import writer as metrics_writer
from composer_jax.train import loop, placement
from composer_jax.train.checkpoints import export, manager

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

MODEL = model_config.ModelConfig.from_dict(
  {
    'vocab_size': 32,
    'embed_dim': 16,
    'num_layers': 2,
    'num_dense_layers': 1,
    'dense_ffw_dim': 16,
    'attention': {
      'kind': 'gqa',
      'num_heads': 2,
      'num_kv_heads': 1,
      'head_dim': 8,
      'qk_norm': 'none',
      'qkv_bias': False,
      'out_bias': False,
    },
    'rope': {'theta': 1e4, 'interleaved': False, 'yarn': None},
    'norm_eps': 1e-6,
    'tie_embeddings': True,
    'remat': False,
    'compute_dtype': 'float32',
    'moe': {
      'num_experts': 4,
      'num_active': 2,
      'ffw_dim': 8,
      'num_shared': 1,
      'router': 'sigmoid',
      'num_groups': 1,
      'num_active_groups': 1,
      'renormalize': True,
      'routed_scale': 1.0,
      'aux_loss_weight': 0.01,
      'z_loss_weight': 0.0,
    },
  }
)

OPTIONS = loop.LoopOptions(
  stage='cpt',
  steps=6,
  batch_size=2,
  seq_len=16,
  optimizer=groups.OptimizerOptions(
    name='muon',
    learning_rate=0.01,
    adam_learning_rate=0.01,
    warmup_steps=1,
    decay_steps=2,
    final_ratio=0.1,
  ),
  bias_rate=0.001,
  checkpoint_every=2,
  eval_every=3,
  log_every=1,
  seed=0,
)


class CountingStream:
  """A stream whose batch n is drawn from seed n; its state is n."""

  def __init__(self, stop_at=None, sleep_s=0.0):
    self.index = 0
    self.stop_at = stop_at
    self.sleep_s = sleep_s

  def __next__(self):
    if self.index == self.stop_at:
      raise KeyboardInterrupt
    time.sleep(self.sleep_s)
    batch = random_batch(self.index)
    self.index += 1
    return batch

  def get_state(self):
    return {'index': self.index}

  def set_state(self, state):
    self.index = state['index']


def random_batch(seed):
  rng = np.random.default_rng(seed)
  segments = np.repeat([[1, 2], [1, 0]], [9, 7], axis=1).astype(np.int32)
  positions = np.tile(np.r_[:9, :7], (2, 1)).astype(np.int32)
  weights = ((segments > 0) & (positions > 0)).astype(np.float32)
  return batches.LMBatch(
    tokens_BT=rng.integers(0, 32, (2, 16), dtype=np.int32),
    segment_ids_BT=segments,
    positions_BT=positions,
    loss_weights_BT=weights,
  )


@functools.cache  # One placement, so that each program is compiled once.
def placed(replica=1, fsdp=1, context=1, *, room=1.25):
  devices = jax.devices()[: replica * fsdp * context]
  mesh = topology.make_mesh(replica, fsdp, context, devices=devices)
  parallel = placement.ParallelOptions(room=room)
  return placement.build(MODEL, mesh=mesh, options=parallel)


def train(
  workdir,
  *,
  options=OPTIONS,
  stream=None,
  initial=None,
  mesh=(1, 1, 1),
  **parallel,
):
  with metrics_writer.Writer(workdir, tensorboard=False) as writer:
    return loop.run(
      options,
      workdir=workdir,
      model=MODEL,
      placement=placed(*mesh, **parallel),
      stream=stream or CountingStream(),
      heldout=[random_batch(-s % 2**31) for s in (1, 2)],
      writer=writer,
      initial=initial or initial_variables(),
    )


def initial_variables(model=MODEL):
  """Draws weights without compiling `decoder.init`, which takes seconds."""
  rng = np.random.default_rng(0)
  abstract, _ = decoder.abstract(model)

  def draw(name, leaf):
    if name.endswith('bias'):
      return np.zeros(leaf.shape, np.float32)
    if name.endswith('scale'):
      return np.ones(leaf.shape, np.float32)
    return rng.normal(size=leaf.shape, scale=0.05).astype(np.float32)

  return trees.map_names(draw, abstract)


def curves(workdir):
  """Returns the metrics that must be equal bit for bit: all but times."""
  clock = ('time', 'tokens_per_s', 'mfu')
  return [
    {k: v for k, v in row.items() if k not in clock}
    for row in metrics_writer.read(workdir)
  ]


@pytest.fixture(scope='module')
def straight(tmp_path_factory):
  """Folder and variables of a run without interruption."""
  workdir = tmp_path_factory.mktemp('straight')
  return workdir, train(workdir)


def test_metrics_of_a_stage(straight):
  rows = curves(straight[0])
  losses = {r['step']: r['loss'] for r in rows if 'loss' in r}
  heldout = {r['step']: r['heldout_loss'] for r in rows if 'heldout_loss' in r}
  assert list(losses) == [1, 2, 3, 4, 5, 6]
  assert list(heldout) == [0, 3, 6]
  # Weights near zero predict nothing: the loss starts at log V.
  assert losses[1] == pytest.approx(np.log(32), abs=0.1)
  assert [r['lr'] for r in rows if 'lr' in r] == pytest.approx(
    [0.01, 0.01, 0.01, 0.01, 0.01, 0.0055]
  )


def test_the_plan_of_muon_is_reported_once(straight):
  rows = [r for r in curves(straight[0]) if 'muon_flops' in r]
  assert [r['step'] for r in rows] == [0]
  (row,) = rows
  # Per layer, by head: 2 queries, 1 key, 1 value, 2 outs. The dense layer, the
  # shared expert and each of 4 experts have 3 matrices.
  assert row['muon_matrices'] == 2 * 6 + 3 + 3 + 4 * 3
  assert 0 < row['muon_flops'] <= row['muon_flops_ideal']
  assert row['muon_bytes'] == 0


@pytest.mark.parametrize('stop_at', [0, 1, 3, 5])
def test_interrupted_run_continues_bit_for_bit(straight, tmp_path, stop_at):
  workdir, variables = straight
  with pytest.raises(KeyboardInterrupt):
    train(tmp_path, stream=CountingStream(stop_at=stop_at))
  again = train(tmp_path)
  assert curves(tmp_path) == curves(workdir)
  jax.tree.map(np.testing.assert_array_equal, again, variables)


@pytest.mark.slow
def test_killed_process_continues_bit_for_bit(straight, tmp_path):
  workdir, variables = straight
  code = (
    'import sys; from tests.train import loop_test as t; '
    't.train(sys.argv[1], stream=t.CountingStream(sleep_s=0.2))'
  )
  process = subprocess.Popen(
    [sys.executable, '-c', code, str(tmp_path)],
    cwd=REPOSITORY,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
    stdout=subprocess.DEVNULL,
  )
  committed = tmp_path / 'checkpoints' / 'cpt' / '2'
  deadline = time.monotonic() + 60
  while not committed.exists() and process.poll() is None:
    assert time.monotonic() < deadline
    time.sleep(0.02)
  process.send_signal(signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  again = train(tmp_path)
  assert curves(tmp_path) == curves(workdir)
  jax.tree.map(np.testing.assert_array_equal, again, variables)


@pytest.mark.slow
def test_stage_resumes_on_another_mesh(straight, tmp_path):
  with pytest.raises(KeyboardInterrupt):
    train(tmp_path, stream=CountingStream(stop_at=4))
  variables = train(tmp_path, mesh=(1, 2, 2))
  matrices = [r['muon_matrices'] for r in curves(tmp_path) if 'muon_bytes' in r]
  assert set(matrices) == {30}
  assert all(len(a.devices()) == 4 for a in jax.tree.leaves(variables))
  losses, straight_losses = (
    [r['loss'] for r in curves(w) if 'loss' in r]
    for w in (tmp_path, straight[0])
  )
  assert losses[:4] == straight_losses[:4]
  # Both resume from equal states, but sums run in another order.
  np.testing.assert_allclose(losses[4:], straight_losses[4:], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_run_of_many_rounds_goes_on_bit_for_bit(tmp_path):
  initial = initial_variables()
  # All 50 copies go to two experts, which lie on the same one of two shards.
  bias_ME = initial['selection_bias']['moe_layers']['moe']['bias']
  bias_ME[:] = [9, 9, 0, 0]
  run = functools.partial(train, initial=initial, mesh=(1, 2, 1), room=0.5)
  variables = run(tmp_path / 'straight')
  rows = curves(tmp_path / 'straight')
  steps = [r for r in rows if 'loss' in r]
  assert [r['step'] for r in steps] == [1, 2, 3, 4, 5, 6]
  # Of 32 copies of a device, 8 travel to each of two in a round.
  assert {r['exchange_rounds'] for r in steps} == {4}
  for stop_at in (2, 3):
    workdir = tmp_path / str(stop_at)
    with pytest.raises(KeyboardInterrupt):
      run(workdir, stream=CountingStream(stop_at=stop_at))
    again = run(workdir)
    assert curves(workdir) == rows
    jax.tree.map(np.testing.assert_array_equal, again, variables)
  # The number of rounds changes rounding alone.
  run(tmp_path / 'one', room=2.0)
  others = [r for r in curves(tmp_path / 'one') if 'loss' in r]
  assert {r['exchange_rounds'] for r in others} == {1}
  np.testing.assert_allclose(
    *([r['loss'] for r in each] for each in (steps, others)), rtol=1e-5
  )


def test_finished_stage_is_not_repeated(straight):
  workdir, variables = straight
  before = (workdir / 'metrics.jsonl').read_bytes()
  again = train(workdir, stream=CountingStream(stop_at=0))
  assert (workdir / 'metrics.jsonl').read_bytes() == before
  jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_next_stage_starts_from_the_export(straight, tmp_path):
  workdir, variables = straight
  like = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding),
    variables,
  )
  exported = export.load(workdir, 'cpt', like)
  jax.tree.map(np.testing.assert_array_equal, exported, variables)
  options = dataclasses.replace(OPTIONS, stage='sft')
  with pytest.raises(
    KeyboardInterrupt
  ):  # The export that the stage started from is enough.
    train(
      tmp_path,
      options=options,
      stream=CountingStream(stop_at=0),
      initial=exported,
    )
  last_loss = [
    r['heldout_loss'] for r in curves(workdir) if 'heldout_loss' in r
  ][-1]
  first_row = curves(tmp_path)[0]
  assert (first_row['stage'], first_row['heldout_loss']) == ('sft', last_loss)


def test_unfinished_stage_has_no_export(tmp_path):
  with pytest.raises(ValueError, match="Stage 'cpt'.*not finished"):
    export.load(tmp_path, 'cpt', {})


def test_non_finite_loss_stops_and_keeps_good_checkpoints(straight, tmp_path):
  class Poisoned(CountingStream):
    def __next__(self):
      batch = super().__next__()
      if self.index == 4:  # No weighted token: the mean is 0 / 0.
        batch = batch.replace(loss_weights_BT=np.zeros((2, 16), np.float32))
      return batch

  with pytest.raises(FloatingPointError) as error:
    train(tmp_path, stream=Poisoned())
  message = str(error.value)
  for part in (
    "'cpt' stopped at step 4",
    'loss nan',
    'grad_norm nan',
    'loss weights sum to 0',
    'last finite loss 3.',
  ):
    assert part in message, message
  assert sorted(os.listdir(tmp_path / 'checkpoints' / 'cpt')) == ['2']
  train(tmp_path)  # With the batch repaired the same command resumes.
  assert curves(tmp_path) == curves(straight[0])


def test_damaged_checkpoint_is_named_and_can_be_deleted(straight, tmp_path):
  with pytest.raises(KeyboardInterrupt):
    train(tmp_path, stream=CountingStream(stop_at=5))
  folder = tmp_path / 'checkpoints' / 'cpt' / '4'
  # This file indexes all arrays; others also hold superseded blocks.
  (index,) = (folder / 'state' / 'd').iterdir()
  data = bytearray(index.read_bytes())
  data[len(data) // 2] ^= 1
  index.write_bytes(data)
  with pytest.raises(manager.DamagedCheckpoint, match='step 4 .*from step 2'):
    train(tmp_path)
  os.rename(folder, tmp_path / 'away')
  train(tmp_path)
  assert curves(tmp_path) == curves(straight[0])


def test_stream_that_ends_or_misfits_is_named(tmp_path):
  class Empty(CountingStream):
    def __next__(self):
      raise StopIteration

  with pytest.raises(ValueError, match='ended before step 1 of 6'):
    train(tmp_path / 'a', stream=Empty())

  class Short(CountingStream):
    def __next__(self):
      return jax.tree.map(lambda a: a[:, :8], super().__next__())

  with pytest.raises(ValueError, match=r'\(2, 8\).*\(2, 16\)'):
    train(tmp_path / 'b', stream=Short())


def test_selection_bias_moves_by_its_rate(straight):
  bias = straight[1]['selection_bias']
  for bias_ME in jax.tree.leaves(bias):
    ratio = np.asarray(bias_ME) / OPTIONS.bias_rate
    np.testing.assert_allclose(ratio, np.round(ratio), atol=1e-3)
    assert 0 < np.abs(ratio).max() <= OPTIONS.steps
