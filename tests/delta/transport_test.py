"""Policies from a trainer's Sender to an engine's weights, by any store."""

import contextlib
import dataclasses
import threading
import time
import weakref

import jax
import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.core import trees
from composer_jax.delta import chain
from composer_jax.delta import publisher as bundles
from composer_jax.delta import transport as receivers
from composer_jax.models import config as config_lib
from composer_jax.models import decoder, placement
from composer_jax.parallel import layouts
from composer_jax.rollout import placing as rollout_placing
from composer_jax.telemetry import writer as writers
from configs.composer import tiny


@pytest.fixture(scope='module')
def model():
  fields = tiny.get_config('smoke').model.to_dict()
  fields |= {'embed_dim': 16, 'vocab_size': 300}
  return config_lib.ModelConfig.from_dict(fields)


@pytest.fixture(scope='module')
def policies(model):
  """Of the versions 0, 1 and so on, each a small step from the one before."""
  shapes, _ = decoder.abstract(model)
  rng = np.random.default_rng(0)
  masters = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32), shapes
  )
  found = []
  for _ in range(4):
    found.append(decoder.policy(jax.device_put(masters)))
    masters = jax.tree.map(
      lambda x: x + 1e-3 * rng.normal(size=x.shape).astype(np.float32), masters
    )
  return found


@pytest.fixture
def make(tmp_path, model):
  """make(store) -> (Sender, what makes another Receiver of the same run)."""
  with contextlib.ExitStack() as stack:

    def open_both(store='', **options):
      options = {'threads': 1, **options}
      sender = bundles.Publisher(
        receivers.store_of(tmp_path, store),
        tmp_path / receivers.KEY,
        receivers.RUN_ID,
        chain.BundleOptions(**options),
      )
      stack.enter_context(contextlib.closing(sender))
      return sender, lambda **more: receivers.Receiver(
        tmp_path, model, store, threads=1, **more
      )

    yield open_both


def send(sender, policies, *versions):
  """Publishes and returns {version: identity}."""
  for version in versions:
    sender.publish(policies[version], version)
  sender.wait()
  return {i.version: i.target_id for i in sender.results()}


def assert_equal(variables, policy):
  found, want = (trees.flatten_names(t) for t in (variables, policy))
  assert found.keys() == want.keys()
  for name, leaf in want.items():
    assert found[name].dtype == leaf.dtype
    np.testing.assert_array_equal(
      np.asarray(found[name]).view(np.uint8), np.asarray(leaf).view(np.uint8)
    )


@pytest.mark.parametrize('store', ['', 'elsewhere'])
def test_what_is_received_is_what_was_published(
  make, policies, store, tmp_path
):
  sender, receiver = make(store and str(tmp_path / store))
  following, joining = receiver(), receiver()
  ids = send(sender, policies, 0)
  first = receivers.first(following, 0.0)
  assert_equal(first.variables, policies[0])
  assert (first.version, first.target_id) == (0, ids[0])
  assert first.received['route'] == ('key 0',)
  ids |= send(sender, policies, 1, 2)
  newest = following.poll()
  assert_equal(newest.variables, policies[2])
  assert (newest.version, newest.target_id) == (2, ids[2])
  assert newest.received['bytes'] > 0 and newest.received['transfer_s'] > 0
  assert following.poll() is None and following.problem is None
  # By another way to the same identity.
  late = receivers.first(joining, 0.0)
  assert late.target_id == ids[2] and late.received['route'][0] == 'key 0'
  assert_equal(late.variables, policies[2])


def test_policies_go_straight_to_the_shards_of_an_engine(make, policies, model):
  sender, receiver = make()
  send(sender, policies, 0)
  mesh = rollout_placing.mesh_of(2)
  found = receivers.first(receiver(mesh=mesh), 0.0)
  wanted = placement.variable_shardings(model, layout=layouts.DECODE, mesh=mesh)
  assert jax.tree.map(lambda a: a.sharding, found.variables) == wanted
  assert_equal(found.variables, policies[0])


class State:
  """A train state, as far as a publication looks."""

  def __init__(self, variables):
    self.variables = lambda: variables


def test_what_is_handed_over_directly_has_the_identity_of_its_bundle(
  make, model, policies, tmp_path
):
  sender, _ = make()
  ids = send(sender, policies, 0, 1)
  options = receivers.DeltaOptions(store=receivers.DIRECT)
  direct = receivers.PolicyTransport(tmp_path, model, options)
  writer = writers.Writer(tmp_path, tensorboard=False)
  with (
    contextlib.closing(writer),
    contextlib.closing(direct.publisher(writer, 0)) as publication,
    contextlib.closing(direct.receiver(in_background=False)) as receiving,
  ):
    for version in (0, 1):
      publication.publish(State(policies[version]), version)
      if version == 0:
        policy = receiving.first(0.0)
        receiving.follow(Engine())
      else:
        receiving.look()
        policy = receiving.take()
        policy = dataclasses.replace(
          policy, variables=policy.variables.variables
        )
      assert (policy.version, policy.target_id) == (version, ids[version])
      assert_equal(policy.variables, policies[version])
    assert receiving.take() is None
    publication.wait()
  rows = writers.read(tmp_path)
  assert [row['target_id'] for row in rows] == [ids[0], ids[1]]


def test_what_lives_in_a_process_is_not_for_two():
  config = tiny.get_config('smoke')
  config.delta.store, config.rl.placement = 'direct:', 'processes'
  with pytest.raises(ValueError, match="single.*placement='colocated'"):
    wiring.spec_of(config.to_dict())


def test_before_a_trainer_there_is_nothing_and_it_is_told(
  make, model, tmp_path, policies
):
  early = receivers.Receiver(tmp_path, model)
  assert early.poll() is None
  with pytest.raises(
    ValueError, match='No such file.*delta.key.*is RL running'
  ):
    receivers.first(early, 0.0)
  sender, _ = make()
  with pytest.raises(ValueError, match='nothing there'):
    receivers.first(early, 0.0)
  send(sender, policies, 0)
  assert receivers.first(early, 0.0).version == 0


def test_a_store_of_another_key_is_not_believed(make, policies, tmp_path):
  sender, receiver = make()
  send(sender, policies, 0)
  (tmp_path / receivers.KEY).unlink()
  make(str(tmp_path / 'other'))  # makes a key
  found = receiver()
  assert found.poll() is None and 'signature' in found.problem


def test_a_receiver_that_is_started_again_takes_no_older_pointer(
  make, policies, tmp_path
):
  sender, receiver = make()
  memory = receivers.memory_of(tmp_path, '')
  pointer = tmp_path / 'store' / 'refs' / receivers.RUN_ID / 'latest'
  send(sender, policies, 0)
  old = pointer.read_bytes()
  send(sender, policies, 1)
  assert receivers.first(receiver(memory=memory), 0.0).version == 1
  pointer.write_bytes(old)
  again = receiver(memory=memory)
  assert again.poll() is None and 'rolled back' in again.problem
  # Another store has a memory of its own.
  assert receivers.memory_of(tmp_path, 's3://x/y') != memory


def test_weights_of_another_model_are_told_at_every_look(
  make, policies, model, tmp_path
):
  sender, _ = make()
  send(sender, policies, 0)
  other = dataclasses.replace(model, vocab_size=301)
  found = receivers.Receiver(tmp_path, other, threads=1)
  for _ in range(2):
    with pytest.raises(ValueError, match='the model wants'):
      found.poll()


@dataclasses.dataclass
class Weights:
  variables: dict
  version: int


class Engine:
  """Places what it is given by remembering it."""

  def place(self, variables, version):
    return Weights(variables, version)


@contextlib.contextmanager
def in_background(receiver, engine=None):
  background = receivers.Placing(receiver, 0.001)
  with contextlib.closing(background):
    background.follow(engine or Engine())
    yield background


def wait_for(condition):
  while not (found := condition()):
    time.sleep(0.005)
  return found


def test_policies_come_in_the_background_and_outlive_damage(
  make, policies, tmp_path, caplog
):
  sender, receiver = make()
  ids = send(sender, policies, 0)
  found = receiver()
  receivers.first(found, 0.0)
  pointer = tmp_path / 'store' / 'refs' / receivers.RUN_ID / 'latest'
  with in_background(found) as background:
    intact = pointer.read_bytes()
    pointer.write_bytes(b'rot')
    wait_for(lambda: found.problem)
    assert background.take() is None and 'latest' in caplog.text
    pointer.write_bytes(intact)
    ids |= send(sender, policies, 1)
    placed = wait_for(background.take)
    assert (placed.version, placed.target_id) == (1, ids[1])
    assert_equal(placed.variables.variables, policies[1])
    assert placed.received['route'] == ('delta 0-1',)
    assert placed.received['place_s'] >= 0
    assert background.take() is None


def test_what_is_served_no_more_is_freed_in_the_background(
  make, policies, tmp_path
):
  sender, receiver = make()
  send(sender, policies, 0)
  with in_background(receiver()) as background:
    before = wait_for(background.take).variables
    there = weakref.ref(before)
    background.drop(before)
    del before
    wait_for(lambda: there() is None)


def test_a_thread_that_ended_is_told(make, policies, monkeypatch, tmp_path):
  monkeypatch.setattr(threading, 'excepthook', lambda _: None)
  sender, receiver = make()
  send(sender, policies, 0)
  with in_background(receiver(), object()) as background:

    def told():
      with contextlib.suppress(RuntimeError):
        background.take()
        return False
      return True

    wait_for(told)
    with pytest.raises(RuntimeError, match="any more: AttributeError.*'place'"):
      background.take()
