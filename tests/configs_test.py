"""Every file in configs/ loads and says what it is."""

import ast
import importlib.util
import pathlib

import ml_collections
import pytest

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = sorted(
  path
  for path in (ROOT / 'configs').rglob('*.py')
  if not path.name.startswith('_')
)


def load(path: pathlib.Path):
  name = '_'.join(path.relative_to(ROOT).with_suffix('').parts)
  spec = importlib.util.spec_from_file_location(name, path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def leaves(config, prefix=''):
  """Yields (dotted name, value) of everything that is not a ConfigDict."""
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from leaves(value, f'{prefix}{name}.')
    else:
      yield prefix + name, value


def test_there_are_configs():
  assert ROOT / 'configs' / 'composer' / 'tiny.py' in CONFIGS


@pytest.mark.parametrize(
  'path', CONFIGS, ids=lambda p: str(p.relative_to(ROOT / 'configs'))
)
def test_config_loads(path):
  assert ast.get_docstring(ast.parse(path.read_bytes())), f'{path}: docstring'
  config = load(path).get_config()
  assert isinstance(config, ml_collections.ConfigDict)
  values = dict(leaves(config))
  assert values, f'{path} sets nothing'
  # YAML and the command line know these types only.
  for name, value in values.items():
    kinds = (bool, int, float, str, tuple, list, type(None))
    assert isinstance(value, kinds), f'{path}: {name} is a {type(value)}'


@pytest.mark.parametrize(
  'path', CONFIGS, ids=lambda p: str(p.relative_to(ROOT / 'configs'))
)
def test_two_loads_share_nothing(path):
  module = load(path)
  first, second = module.get_config(), module.get_config()
  with first.unlocked():
    for name in list(first):
      del first[name]
  assert dict(leaves(second)) == dict(leaves(module.get_config()))
