"""What the trainer wrote down of its policies, and which groups it refuses."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import trees
from composer_jax.delta import chain, transport
from composer_jax.models import config as model_config
from composer_jax.telemetry import writer as writers
from composer_jax.train import state as train_state
from tests.fleet import groups
from tests.rl import replayed

MODEL = replayed.CONFIGS['gqa_softmax']
NVFP4 = model_config.PrecisionConfig(experts='nvfp4')


class Sender:
  """Finishes a version when it is waited for, as one that is slow would."""

  def __init__(self):
    self.rewound, self.trees, self.fails = None, [], None
    self.encode_s = 0.5  # 0 of versions that are found to be published
    self._started, self._done = [], []

  def rewind(self, version):
    self.rewound = version

  def publish(self, tree, version, *, owned):
    assert owned
    self.wait()
    self.trees.append(tree)
    self._started.append(version)

  def wait(self):
    if self.fails:
      raise self.fails
    self._done += [info(v, self.encode_s) for v in self._started]
    self._started = []

  def results(self):
    done, self._done = self._done, []
    return done


def info(version, encode_s):
  return chain.BundleInfo(
    version=version,
    kind='delta',
    target_id=f'id{version}',
    base_id=f'id{version - 1}',
    bytes=10,
    full_bytes=100,
    changed=1,
    elements=50,
    encode_s=encode_s,
  )


def state(value):
  moe = {'gate_up': jnp.full((2, 1, 4, 2, 3), value), 'down': jnp.ones(12)}
  moe['down'] = moe['down'].reshape(2, 1, 3, 2)
  masters = {
    'params': {'w': jnp.float32(value), 'moe_layers': {'moe': moe}},
    'bias': {'b': jnp.ones(2)},
  }
  return types.SimpleNamespace(variables=lambda: masters)


@pytest.fixture
def run(tmp_path):
  """run(first) -> (Publication of a run that goes on there, its Sender)."""
  opened = []

  def start(first=0):
    sender, writer = Sender(), writers.Writer(tmp_path, tensorboard=False)
    opened.append(writer)
    config = dataclasses.replace(MODEL, precision=NVFP4)
    return transport.Publication(
      sender, writer, tmp_path, first, config
    ), sender

  yield start
  for writer in opened:
    writer.close()


def lines(workdir):
  return {row['step']: row for row in writers.read(workdir)}


def test_a_version_has_the_weights_that_the_trainer_multiplies(run):
  published, sender = run()
  config = dataclasses.replace(MODEL, precision=NVFP4)
  variables = replayed.variables(config)
  published.publish(types.SimpleNamespace(variables=lambda: variables), 0)
  values = train_state.policy_values(variables['params'], config)
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x.astype(jnp.float32), y),
    sender.trees[0]['params'],
    jax.tree.map(np.asarray, values),
  )


def test_a_version_is_on_record_before_the_next_one_is_handed_over(
  run, tmp_path
):
  published, _ = run()
  for version in range(3):
    published.publish(state(version), version)
    # What a checkpoint of this version presupposes.
    assert sorted(lines(tmp_path)) == list(range(version))
  published.wait()
  line = lines(tmp_path)[2]
  assert line['stage'] == 'delta' and line['target_id'] == 'id2'
  assert (line['bytes'], line['full_bytes'], line['changed']) == (10, 100, 0.02)


def test_what_is_handed_over_outlives_the_state(run):
  published, sender = run()
  now = state(1.01)
  published.publish(now, 0)
  for leaf in trees.flatten_names(now.variables()).values():
    leaf.delete()
  found = trees.flatten_names(sender.trees[0])
  assert found['params/w'].dtype == jnp.bfloat16
  assert found['bias/b'].dtype == jnp.float32 and found['bias/b'].sum() == 2


def test_a_run_that_goes_on_keeps_the_lines_of_what_is_not_void(run, tmp_path):
  published, _ = run()
  for version in range(5):
    published.publish(state(version), version)
  published.wait()
  before = lines(tmp_path)
  published, sender = run(2)
  assert sender.rewound == 2 and sorted(lines(tmp_path)) == [0, 1, 2]
  # Found to be published: nothing to tell of how.
  published.publish(state(2), 2)
  published.publish(state(3), 3)
  published.wait()
  after = lines(tmp_path)
  assert sorted(after) == [0, 1, 2, 3]
  assert all(after[v] == before[v] for v in range(3))


def test_what_was_published_by_a_killed_run_has_a_line_without_its_cost(
  run, tmp_path
):
  published, sender = run()
  sender.encode_s = 0.0
  published.publish(state(0), 0)
  published.wait()
  line = lines(tmp_path)[0]
  assert line['target_id'] == 'id0' and line['bytes'] == 10
  assert not {'changed', 'encode_s', 'upload_s'} & line.keys()


def group(policies, version):
  return dataclasses.replace(groups.make_group(6, version), policies=policies)


def test_groups_of_what_was_published_are_let_in(run):
  published, _ = run()
  for version in range(3):
    published.publish(state(version), version)
  # Version 2 is still under way, and has reached a worker already.
  for v in (0, 1, 2):
    assert not published.fault_of(group({v: f'id{v}'}, v))
  resumed, _ = run(1)
  assert not resumed.fault_of(group({1: 'id1'}, 1))


@pytest.mark.parametrize(
  'policies, version, message',
  [
    ({1: 'id7'}, 1, 'Group 6 .*weights id7 as version 1; .* are id1'),
    (None, 1, 'weights none as version 1; published under it are id1'),
    (None, 5, 'weights none as version 5; published under it are none'),
    ({5: 'id5'}, 5, 'weights id5 as version 5; published under it are none'),
  ],
)
def test_a_group_of_other_weights_is_named(run, policies, version, message):
  published, _ = run()
  for earlier in range(3):
    published.publish(state(earlier), earlier)
  assert re.search(message, published.fault_of(group(policies, version)))


def test_what_cannot_be_published_is_told_and_not_on_record(run, tmp_path):
  published, sender = run()
  published.publish(state(0), 0)
  sender.fails = OSError(28, 'no room')
  for call in (
    lambda: published.publish(state(1), 1),
    published.wait,
    lambda: published.fault_of(group({0: 'id0'}, 0)),
  ):
    with pytest.raises(OSError, match='no room'):
      call()
  assert not lines(tmp_path)
