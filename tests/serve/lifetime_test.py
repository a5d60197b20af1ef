"""A server loads an export, an import, or the policy that RL publishes."""

import contextlib
import functools
import pathlib
import shutil
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest

import composer_jax.serve
from composer_jax.core import files
from composer_jax.delta import publisher as bundles
from composer_jax.delta import transport as receivers
from composer_jax.hf import importing
from composer_jax.models import config as config_lib
from composer_jax.models import decoder
from composer_jax.serve import http_server, lifetime, policies
from composer_jax.text import tokenizer as tokenizers
from composer_jax.train.checkpoints import export
from configs.composer import tiny
from configs.serve import gpu as serve_gpu
from configs.serve import tiny as serve_tiny
from experiments import tiny_checkpoint


def _variables(config, seed):
  rng = np.random.default_rng(seed)
  shapes, _ = decoder.abstract(config)
  return jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), shapes
  )


@pytest.fixture(scope='module')
def model():
  fields = tiny.get_config('smoke').model.to_dict()
  return config_lib.ModelConfig.from_dict(
    {**fields, 'embed_dim': 32, 'num_layers': 2, 'vocab_size': 300}
  )


@pytest.fixture(scope='module')
def workdir(tmp_path_factory, model):
  """A run with finished SFT and running RL."""
  folder = tmp_path_factory.mktemp('runs') / 'mine'
  files.write_json(folder / 'config.json', {'model': model.to_dict()})
  tokenizers.Tokenizer.train(['hello world'], 300).save(
    folder / 'tokenizer.json'
  )
  export.save(folder, 'sft', 5, jax.device_put(_variables(model, 0)))
  return folder


def _equal(variables, masters):
  jax.tree.map(
    np.testing.assert_array_equal, variables, decoder.policy(masters)
  )


def test_the_last_stage_is_served_as_its_policy(workdir, model, tmp_path):
  source = lifetime.load(workdir, overrides={'numerics': 'batch_invariant'})
  _equal(source.variables, _variables(model, 0))
  assert (source.name, source.version, source.chats) == ('mine-sft', 0, True)
  assert source.model.numerics == 'batch_invariant'
  assert source.stop_tokens == (6, 2) and source.receiver is None
  folder = tmp_path / 'mine'
  shutil.copytree(workdir, folder)
  export.save(folder, 'rl', 40, jax.device_put(_variables(model, 1)))
  source = lifetime.load(folder)
  _equal(source.variables, _variables(model, 1))
  assert (source.name, source.version) == ('mine-rl', 40)
  assert lifetime.load(folder, stage='sft').version == 0


def test_what_is_published_is_followed(workdir, model, tmp_path):
  folder = tmp_path / 'mine'
  shutil.copytree(workdir, folder)
  config = files.read_json(folder / 'config.json')
  store = str(tmp_path / 'elsewhere')
  files.write_json(folder / 'config.json', config | {'delta': {'store': store}})
  with pytest.raises(ValueError, match='is RL running'):
    lifetime.load(folder, follow=True, wait_s=0.0)
  sender = bundles.Publisher(store, folder / receivers.KEY)

  def send(version):
    policy = decoder.policy(jax.device_put(_variables(model, version)))
    sender.publish(policy, version)
    sender.wait()

  with contextlib.closing(sender):
    send(4)
    source = lifetime.load(folder, follow=True)
    _equal(source.variables, _variables(model, 4))
    assert (source.name, source.version) == ('mine-rl', 4)
    engine = types.SimpleNamespace(version=4, place=lambda *weights: weights)
    engine.switch = lambda placed: served.append(placed) or placed
    served, news = [], threading.Event()
    followed = policies.Policies(engine, source.receiver, 0.01, news.set)
    followed.serve_newest()
    assert not served
    followed.start()
    send(5)
    assert news.wait(20)
    followed.serve_newest()
    [(variables, version)] = served
    _equal(variables, _variables(model, 5))
    assert version == 5
  # A mirror of the store, as a cache is.
  mirror = shutil.copytree(store, tmp_path / 'mirror')
  assert lifetime.load(folder, follow=True, store=str(mirror)).version == 5
  (tmp_path / 'elsewhere/refs/policy/latest').write_text('torn')
  deadline = time.monotonic() + 20
  while 'refs/policy/latest' not in followed.problem:
    assert time.monotonic() < deadline, 'no problem is seen'
    time.sleep(0.01)
  followed.stop()


def test_an_import_is_served_by_its_template(tmp_path):
  tiny_checkpoint.write(tmp_path / 'hf', 'qwen3_moe', 0)
  files.write_json(
    tmp_path / 'hf' / 'generation_config.json', {'eos_token_id': [7, 1001]}
  )
  importing.convert(tmp_path / 'hf', tmp_path / 'model')
  source = lifetime.load(tmp_path / 'model')
  assert (source.name, source.version, source.chats) == ('model', 0, True)
  assert 7 in source.stop_tokens and source.tokenizer.language is not None
  leaves = jax.tree.leaves(source.variables['params'])
  assert {leaf.dtype.name for leaf in leaves} == {'bfloat16'}
  for more in ({'stage': 'sft'}, {'follow': True}):
    with pytest.raises(ValueError, match='is an import'):
      lifetime.load(tmp_path / 'model', **more)


def test_what_cannot_be_served_is_told(workdir, tmp_path):
  with pytest.raises(ValueError, match='neither the workdir .* nor an import'):
    lifetime.load(tmp_path)
  with pytest.raises(ValueError, match=r"'rl' .* finished are \['sft'\]"):
    lifetime.load(workdir, stage='rl')
  shutil.copy(workdir / 'config.json', tmp_path)
  with pytest.raises(ValueError, match='--follow'):
    lifetime.load(tmp_path)


def _run(fields, port=0):
  load = functools.partial(lifetime.load, pathlib.Path('nowhere'))
  lifetime.run(load, fields, host='127.0.0.1', port=port)


def _fields(config=serve_tiny):
  fields = config.get_config().to_dict()
  # The program takes the window of what it serves.
  assert fields['engine']['max_len'] == 0
  fields['engine']['max_len'] = 512
  return fields


@pytest.mark.parametrize('section', ['engine', 'limits', 'engine.speculation'])
def test_a_misspelt_field_is_named(section):
  fields = _fields()
  of_section = functools.reduce(dict.get, section.split('.'), fields)
  of_section['misspelt'] = 1
  with pytest.raises(ValueError, match=rf'config\.{section} has no .*misspelt'):
    _run(fields)


@pytest.mark.parametrize('value', ['ngrams', None, {'depth': 3}, {'depth': {}}])
def test_what_is_no_speculation_is_named(value):
  fields = _fields()
  fields['engine']['speculation'] = value
  with pytest.raises(
    ValueError, match=r'config\.engine\.speculation.* must be'
  ):
    _run(fields)


def test_a_missing_limit_is_named():
  fields = _fields()
  del fields['limits']['max_queue']
  with pytest.raises(ValueError, match=r'config\.limits: .*missing.*max_queue'):
    _run(fields)


@pytest.mark.parametrize('config', [serve_tiny, serve_gpu])
def test_configs_are_those_of_a_server(config):
  with pytest.raises(ValueError, match='neither the workdir'):
    _run(_fields(config))


def test_a_port_that_is_taken_is_told_before_anything_is_loaded():
  fields = _fields()
  with http_server.bind('127.0.0.1', 0, '') as sock:
    sock.listen()
    port = sock.getsockname()[1]
    with pytest.raises(ValueError, match=f'Cannot listen on 127.0.0.1:{port}'):
      _run(fields, port)


def test_a_missing_package_is_named_with_its_cure(monkeypatch):
  monkeypatch.delitem(sys.modules, 'composer_jax.serve.http_server', False)
  monkeypatch.delattr(composer_jax.serve, 'http_server', False)
  monkeypatch.setitem(sys.modules, 'uvicorn', None)
  with pytest.raises(
    ValueError, match=r"uvicorn is not .*pip install -e '\.\[serve\]'"
  ):
    _run({})
