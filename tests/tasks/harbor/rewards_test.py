"""Rewards by name are read within bounds, or their fault is named."""

import pytest

from composer_jax.tasks.harbor import rewards


@pytest.mark.parametrize(
  'text, value',
  [('1', 1.0), (' 0.25\n', 0.25), ('-3.', -3.0), ('1e-3', 0.001), ('.5', 0.5)],
)
def test_a_number_alone_is_the_reward(text, value):
  assert rewards.of_text(text.encode()) == {'reward': value}


@pytest.mark.parametrize(
  'data',
  [
    b'',
    b'nan',
    b'inf',
    b'1 2',
    b'one',
    b'\xff',
    b'1_0',
    b'1e400',
    b'1e10',
    b'.',
    b'e5',
    b'.e-3',
  ]
  + [b'1' * 40, '٣'.encode()],
)
def test_other_texts_are_no_reward(data):
  with pytest.raises(rewards.NoReward, match='reward'):
    rewards.of_text(data)


def test_objects_and_numbers_of_json():
  assert rewards.of_json(b'0.5') == {'reward': 0.5}
  table = {'reward': 1.0, 'speed': -2.0}
  assert rewards.of_json(b'{"reward": 1, "speed": -2}') == table


@pytest.mark.parametrize(
  'data, words',
  [
    (b'', 'not JSON'),
    (b'{}', '0 rewards'),
    (b'[1]', 'no number'),
    (b'{"reward": NaN}', 'NaN'),
    (b'{"reward": 1e309}', '1e309'),
    (b'{"reward": 1e10}', 'billion'),
    (b'{"reward": true}', 'no number'),
    (b'{"reward": "1"}', 'no number'),
    (b'{"reward": {"a": 1}}', 'no number'),
    (b'{"%s": 1}' % (b'x' * 101), '101 characters'),
    (b'[' * 5000, 'deeper'),
    (b'{%s}' % b','.join(b'"%d":1' % i for i in range(101)), '101 rewards'),
    (b'1' * 5000, 'reward'),
  ],
)
def test_other_json_is_no_reward(data, words):
  with pytest.raises(rewards.NoReward, match=words):
    rewards.of_json(data)


def test_the_main_reward_and_those_of_several_steps():
  assert rewards.main({'reward': 0.5, 'speed': 3}) == 0.5
  assert rewards.main({'a': 1, 'b': 0}) == 0.5
  assert rewards.main({}) == 0.0
  steps = [{'reward': 1.0, 'a': 1.0}, {'reward': 0.5}]
  assert rewards.joined(steps, 'mean') == {'reward': 0.75, 'a': 0.5}
  assert rewards.joined(steps, 'final') == {'reward': 0.5}
