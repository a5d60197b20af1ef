"""The main that turns checkpoints into bundles and back, as a user has it."""

import time

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from composer_jax.core import trees
from composer_jax.delta import checkpoints, commands
from composer_jax.delta.store import objects as stores
from composer_jax.train.checkpoints import manager
from tests import programs
from tests.delta import s3_server

MAIN = 'experiments.delta'
RUN = 'demo'


def variables(step=0):
  random = np.random.default_rng(0)
  kernel = random.normal(size=(64, 48)).astype(np.float32)
  moved = random.random(kernel.shape) < 0.05
  return {
    'params': {'kernel': jnp.asarray(kernel + step * moved * kernel / 64)},
    'selection_bias': jnp.asarray(random.normal(size=4), jnp.float32),
    # Heads, too, are served in bfloat16.
    'mtp': {
      'params': {'layers': jnp.asarray(random.normal(size=3), jnp.float32)},
      'selection_bias': jnp.asarray(random.normal(size=2), jnp.float32),
    },
  }


def policy(step=0):
  """What a checkpoint of ours is published as: bfloat16 of the masters."""
  tree = variables(step)
  return {
    'params/kernel': np.asarray(tree['params']['kernel']).astype(
      ml_dtypes.bfloat16
    ),
    'selection_bias': np.asarray(tree['selection_bias']),
    'mtp/params/layers': np.asarray(tree['mtp']['params']['layers']).astype(
      ml_dtypes.bfloat16
    ),
    'mtp/selection_bias': np.asarray(tree['mtp']['selection_bias']),
  }


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run's folder: a finished stage, and checkpoints of another."""
  root = tmp_path_factory.mktemp('workdir')
  exports = manager.Checkpoints(root / 'exports' / 'rl', keep=1)
  exports.save(7, variables(0))
  exports.close()
  states = manager.Checkpoints(root / 'checkpoints' / 'rl', keep=2)
  for step in (1, 2):
    model = variables(step)
    heads = model.pop('mtp')
    heads |= {'opt_state': heads['params'], 'step': jnp.int32(step)}
    moments = {'mu': model['params']}
    state = {**model, 'opt_state': moments, 'step': jnp.int32(step)}
    state['heads'] = heads
    states.save(step, state)
  states.close()
  return root


def same(found, wanted):
  assert found.keys() == wanted.keys()
  for name, array in wanted.items():
    assert found[name].dtype == array.dtype, name
    assert found[name].tobytes() == array.tobytes(), name


# Sources.


def test_our_checkpoints_are_read_as_the_policy(workdir):
  same(checkpoints.read(f'{workdir}:rl'), policy(0))
  same(checkpoints.read(str(workdir / 'exports' / 'rl')), policy(0))
  # Of a train state the model alone, of several steps the last.
  states = workdir / 'checkpoints' / 'rl'
  same(checkpoints.read(str(states)), policy(2))
  same(checkpoints.read(str(states / '1')), policy(1))


@pytest.mark.parametrize('use_ocdbt', [True, False])
def test_any_orbax_checkpoint_is_read_as_stored(tmp_path, use_ocdbt):
  tree = variables(0)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as c:
    c.save(tmp_path / 'plain', args=ocp.args.PyTreeSave(tree))
  wanted = {
    name: np.asarray(leaf) for name, leaf in trees.flatten_names(tree).items()
  }
  same(checkpoints.read(str(tmp_path / 'plain')), wanted)


def test_orbax_managers_are_read(tmp_path):
  with ocp.CheckpointManager(tmp_path / 'managed') as managed:
    managed.save(3, args=ocp.args.StandardSave({'w': jnp.ones(3)}))
    managed.wait_until_finished()
  for path in (tmp_path / 'managed', tmp_path / 'managed' / '3'):
    same(checkpoints.read(str(path)), {'w': np.ones(3, np.float32)})


def test_sources_that_are_none_name_the_cure(tmp_path, workdir):
  with pytest.raises(ValueError, match='no orbax checkpoint. Name the folder'):
    checkpoints.read(str(tmp_path))
  with pytest.raises(ValueError, match=r"'sft' .* finished are \['rl'\]"):
    checkpoints.read(f'{workdir}:sft')


def test_a_damaged_checkpoint_of_ours_is_not_published(tmp_path):
  exports = manager.Checkpoints(tmp_path / 'rl', keep=1)
  exports.save(7, variables(0))
  exports.close()
  files = [p for p in (tmp_path / 'rl/7/state').rglob('*') if p.is_file()]
  largest = max(files, key=lambda p: p.stat().st_size)
  data = bytearray(largest.read_bytes())
  data[len(data) // 2] ^= 1
  largest.write_bytes(data)
  with pytest.raises(ValueError, match='damaged'):
    checkpoints.read(str(tmp_path / 'rl'))


# Commands.


@pytest.fixture(scope='module')
def place(workdir, tmp_path_factory):
  """Three versions: an export and two checkpoints."""
  root = tmp_path_factory.mktemp('delta')
  flags = dict(store=str(root / 'store'), run=RUN, key=root / 'key')
  states = workdir / 'checkpoints' / 'rl'
  for source in (f'{workdir}:rl', str(states / '1'), str(states / '2')):
    commands.publish(source=source, tier='fast', **flags)
  return flags


@pytest.mark.parametrize('version, step', [(0, 0), (1, 1), (2, 2), (None, 2)])
def test_a_version_becomes_an_orbax_checkpoint(place, tmp_path, version, step):
  out = tmp_path / 'made' / 'here'
  said = commands.apply(out=out, version=version, **place)
  assert str(out) in said and f'Version {step}' in said
  same(checkpoints.read(str(out)), policy(step))
  with ocp.StandardCheckpointer() as reader:
    tree = reader.restore(out, checkpoints.read_plain(out))
  kernel = np.asarray(tree['params']['kernel'])
  assert kernel.tobytes() == policy(step)['params/kernel'].tobytes()
  with pytest.raises(ValueError, match='exists; choose another --out'):
    commands.apply(out=out, **place)


def test_two_checkpoints_become_a_delta_and_a_checkpoint_again(
  workdir, tmp_path
):
  states = workdir / 'checkpoints' / 'rl'
  store, key = str(tmp_path / 'store'), tmp_path / 'store.key'
  flags = dict(out=store, run='policy', key=key)
  flags |= dict(base=str(states / '1'), new=str(states / '2'))
  said = commands.diff(**flags)
  assert 'Version 0' in said and "Version 1 of run 'policy': delta of" in said
  out = tmp_path / 'out'
  commands.apply(store=store, run='policy', key=key, out=out)
  with ocp.StandardCheckpointer() as reader:
    tree = reader.restore(out)
  kernel = np.asarray(tree['params']['kernel'])
  assert kernel.tobytes() == policy(2)['params/kernel'].tobytes()
  with pytest.raises(ValueError, match="has a run 'policy' already"):
    commands.diff(**flags)


def test_what_cannot_be_trusted_is_said_plainly(place, tmp_path):
  place = {**place, 'out': tmp_path / 'out'}
  with pytest.raises(ValueError, match='there is no key; --key must name'):
    commands.apply(**{**place, 'key': tmp_path / 'none'})
  with pytest.raises(ValueError, match="has no run 'other'"):
    commands.apply(**{**place, 'run': 'other'})
  (tmp_path / 'wrong').write_text('hmac-sha256 ' + '00' * 32)
  with pytest.raises(ValueError, match='cannot be trusted: .*signature'):
    commands.apply(**{**place, 'key': tmp_path / 'wrong'})


def test_another_key_does_not_begin_a_run_anew(place, workdir, tmp_path):
  pointer = stores.Store(place['store']).read_pointer(RUN)
  (tmp_path / 'other').write_text('hmac-sha256 ' + '00' * 32)
  for key, words in ('other', 'cannot be trusted'), ('none', 'there is no key'):
    with pytest.raises(ValueError, match=words):
      commands.publish(
        source=f'{workdir}:rl', **{**place, 'key': tmp_path / key}
      )
  assert stores.Store(place['store']).read_pointer(RUN) == pointer
  assert not (tmp_path / 'none').exists()


def test_what_is_read_by_http_is_not_published_to(place):
  with pytest.raises(ValueError, match='http://host can only be read'):
    commands.publish(source='nowhere', **{**place, 'store': 'http://host'})


def test_an_expired_pointer_is_told(place, tmp_path, monkeypatch):
  said = commands.apply(out=tmp_path / 'first', **place)
  assert 'pointer expired' not in said
  later = time.time() + 366 * 86400
  monkeypatch.setattr(commands.time, 'time', lambda: later)
  told = commands.apply(out=tmp_path / 'out', **place)
  assert 'pointer expired 1.0 days ago' in told


@pytest.fixture
def remote():
  with s3_server.run():
    yield f's3://{s3_server.BUCKET}/weights'


def test_commands_work_on_a_remote_store(workdir, tmp_path, remote):
  flags = dict(store=remote, run=RUN, key=tmp_path / 'key')
  commands.publish(source=f'{workdir}:rl', **flags)
  commands.publish(source=str(workdir / 'checkpoints/rl/1'), **flags)
  commands.apply(out=tmp_path / 'out', **flags)
  same(checkpoints.read(str(tmp_path / 'out')), policy(1))


# The program.


def test_the_main_publishes_and_says_errors_in_one_line(workdir, tmp_path):
  flags = [
    f'--store={tmp_path / "store"}',
    '--run=demo',
    f'--key={tmp_path / "key"}',
  ]
  run = programs.run_fresh(MAIN, 'publish', *flags, f'--source={workdir}:rl')
  assert run.returncode == 0, run.stderr
  assert "Version 0 of run 'demo': key of" in run.stdout
  run = programs.run(MAIN, 'apply', *flags)
  assert run.returncode == 1
  assert run.stderr == 'error: apply needs --out; see --help.\n'


def test_what_must_be_local_is_no_url(place, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  url = 's3://bucket/x'
  with pytest.raises(ValueError, match=f'--source is {url}; it must lie in'):
    checkpoints.read(url)
  with pytest.raises(ValueError, match=f'--out is {url}; it must lie in'):
    commands.apply(out=url, **place)
  assert not list(tmp_path.iterdir())


def test_help_names_the_commands():
  run = programs.run(MAIN, '--help')
  assert run.returncode == 0
  assert '--store' in run.stdout and 'experiments.delta publish' in run.stdout
  run = programs.run(MAIN, 'fetch')
  assert run.stderr.startswith("error: 'fetch' is no command; the commands are")
  assert "['publish'," in run.stderr
  assert run.stderr.count('\n') == 1
