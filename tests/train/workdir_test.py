"""A workdir belongs to one configuration."""

import pytest

from composer_jax.train import workdir


def test_same_configuration_is_accepted_again(tmp_path):
  config = {'model': {'layers': 2, 'shape': (1, 2)}, 'seed': 0}
  workdir.claim(tmp_path / 'run', config)
  workdir.claim(tmp_path / 'run', config)


def test_every_differing_key_is_named_with_both_values(tmp_path):
  workdir.claim(tmp_path, {'model': {'layers': 2, 'old': 1}, 'log': {'n': 1}})
  with pytest.raises(ValueError) as error:
    workdir.claim(
      tmp_path,
      {'model': {'layers': 3}, 'log': {'n': 9}, 'seed': 5},
      ignored=('log',),
    )
  message = str(error.value)
  for part in (
    'model.layers is 2 there and 3 now',
    "model.old is 1 there and 'absent' now",
    "seed is 'absent' there and 5 now",
    '--workdir',
  ):
    assert part in message
  assert 'log.n' not in message


def test_damaged_record_is_named(tmp_path):
  (tmp_path / workdir.CONFIG).write_text('{"mod')
  with pytest.raises(ValueError, match='config.json is not valid JSON'):
    workdir.claim(tmp_path, {})
