"""Sampler and trainer agree bit for bit where the numerics are invariant.

A random workload runs through the real engine: sessions of many lengths that
arrive one by one, share prompts, have second turns, wait for pages and lose
them, in row buckets of several sizes. The trainer's functions score what was
recorded. In `batch_invariant` numerics every log-probability and route is
equal, bit for bit, with and without replay.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.agent import window
from composer_jax.core import records
from composer_jax.kernels.attention import grouped_query
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.rl import batching
from composer_jax.rl import step as steps
from composer_jax.rollout import controller
from composer_jax.rollout import engine as engines
from composer_jax.rollout import options as rollout_options
from tests.models import adapters_test
from tests.rl import replayed

MAX_LEN = 96
OPTIONS = engines.EngineOptions(
  num_slots=4,
  max_len=MAX_LEN,
  prefill_chunk=24,
  prefill_rows=(1, 3),
  decode_steps=3,
  page_size=grouped_query.KEY_BLOCK,
  # Pages for two long sessions, with four slots.
  num_pages=7,
)
NUM_SESSIONS = 9


def _config(name, dtype, variant=''):
  """Returns a model; a variant is 'adapted' or a format of experts."""
  config = dataclasses.replace(
    replayed.CONFIGS[name], numerics='batch_invariant', compute_dtype=dtype
  )
  if variant == 'adapted':
    return dataclasses.replace(config, adapters=adapters_test.ALL)
  if not variant:
    return config
  # In one layer; the others stay in bf16.
  precision = model_config.PrecisionConfig(
    experts=variant, backward='mxfp8', first=1, last=config.num_moe_layers - 2
  )
  return dataclasses.replace(config, precision=precision)


@functools.cache
def _policy(config):
  variables = replayed.variables(config)
  # Frozen parameters, which `policy` leaves out, have the same cast.
  frozen = decoder.policy({'params': variables['params']})
  return {**frozen, **decoder.policy(variables, config)}


def _turns(index):
  """Returns (context, tokens to sample) of each turn; some share a prompt."""
  rng = np.random.default_rng(index)
  first_T = np.random.default_rng(100 + index % 3).integers(
    0, replayed.V, 5 + 28 * (index % 3)
  )
  if index % 2:
    tail_T = rng.integers(0, replayed.V, rng.integers(1, 12))
    first_T = np.concatenate([first_T, tail_T])
  turns = [(first_T, int(rng.integers(1, 30)))]
  if index % 4:
    second_T = rng.integers(0, replayed.V, rng.integers(1, 9))
    turns.append((second_T, int(rng.integers(1, 12))))
  return [(context_T.astype(np.int32), new) for context_T, new in turns]


def _request(index, turn):
  context_T, new = _turns(index)[turn]
  return records.SampleRequest(
    session=str(index),
    context_T=context_T,
    max_new_tokens=new,
    stop_tokens=(3,),
    seed=(7, index),
    temperature=0.7 + 0.1 * index,
  )


def _play(engine, order, pace, at_step=None):
  """Returns the trajectory of each session, and how many lost their pages.

  Args:
    engine: rollout engine that plays the sessions.
    order: sessions in order of arrival.
    pace: seed of the steps between arrivals.
    at_step: functions to call before the steps of their numbers.
  """
  lost = 0
  rng = np.random.default_rng(pace)
  windows = {i: window.Window() for i in order}
  turns = dict.fromkeys(order, 0)
  coming, calls = list(order), dict(at_step or {})
  for number in itertools.count():
    if not (coming or engine.num_unfinished):
      break
    calls.pop(number, lambda: None)()
    if coming and (not engine.num_unfinished or rng.random() < 0.3):
      engine.submit(_request(coming.pop(0), 0))
    for completion in engine.step():
      index = int(completion.session)
      lost += turns[index] > 0 and completion.routes_start == 0
      windows[index].append(_turns(index)[turns[index]][0], completion)
      turns[index] += 1
      if turns[index] < len(_turns(index)):
        engine.submit(_request(index, turns[index]))
      elif index % 2:
        engine.close(completion.session)
  return [windows[i].trajectory(0.7 + 0.1 * i) for i in sorted(order)], lost


@functools.cache
def _sampled(config):
  """Plays with a full cache; returns trajectories, number of losses, engine."""
  engine = engines.Engine(config, _policy(config), 0, OPTIONS)
  return *_play(engine, range(NUM_SESSIONS), 0), engine


def _assert_same(have, want):
  for actual, expected in zip(have, want, strict=True):
    for field in dataclasses.fields(records.Trajectory):
      np.testing.assert_array_equal(
        getattr(actual, field.name), getattr(expected, field.name), field.name
      )


SLOW = pytest.mark.slow


@pytest.fixture(
  scope='module',
  params=[
    'gqa_softmax-float32',
    # One layer with codes and one without.
    pytest.param('gqa_softmax-float32-nvfp4', marks=SLOW),
    pytest.param('gqa_softmax-float32-adapted', marks=SLOW),
    pytest.param('mla_sigmoid-float32-mxfp8', marks=SLOW),
    pytest.param('mla_sigmoid-bfloat16-nvfp4', marks=SLOW),
    pytest.param('gqa_softmax-float32-fp8', marks=SLOW),
    pytest.param('gqa_softmax-bfloat16-int4', marks=SLOW),
    pytest.param('mla_sigmoid-float32', marks=SLOW),
    pytest.param('mla_sigmoid-bfloat16-adapted', marks=SLOW),
    pytest.param('gqa_softmax-bfloat16', marks=SLOW),
    pytest.param('mla_sigmoid-bfloat16', marks=SLOW),
  ],
)
def config(request):
  return _config(*request.param.split('-'))


@pytest.mark.slow
def test_the_workload_meets_what_it_is_for(config):
  trajectories, lost, engine = _sampled(config)
  blocks = {-(-len(t) // grouped_query.KEY_BLOCK) for t in trajectories}
  assert blocks == {1, 2, 3}
  assert lost > 0 and engine.stats().prefix_hit_tokens > 0
  # Every bucket was used and compiled once.
  names = ('extend 1', 'extend 3', 'decode 4')
  assert engine.traces == dict.fromkeys(names, 1)


@pytest.mark.slow
def test_buckets_order_and_room_change_no_bit(config):
  """One bucket, other arrivals, and pages for all at once."""
  trajectories, *_ = _sampled(config)
  options = dataclasses.replace(OPTIONS, prefill_rows=3, num_pages=32)
  engine = engines.Engine(config, _policy(config), 0, options)
  order = np.random.default_rng(1).permutation(NUM_SESSIONS).tolist()
  mine, lost = _play(engine, order, 5)
  assert lost == 0
  _assert_same(mine, trajectories)


@SLOW
@pytest.mark.parametrize('depth', [2, 4])
@pytest.mark.parametrize('drafter', ['ngrams', 'heads'])
@pytest.mark.parametrize(
  'name', ['gqa_softmax-float32', 'mla_sigmoid-bfloat16']
)
def test_speculation_changes_no_bit(name, drafter, depth):
  """Heads have layers of the decoder's names, whose routes are in no record."""
  config = _config(*name.split('-'))
  trajectories, *_ = _sampled(config)
  policy, served = _policy(config), config
  if drafter == 'heads':
    heads = model_config.MTPConfig(depth=2)
    served = dataclasses.replace(config, mtp=heads)
    masters = replayed.variables(served)
    policy = policy | {'mtp': decoder.policy(masters, served)['mtp']}
  speculation = rollout_options.Speculation(drafter=drafter)
  options = dataclasses.replace(OPTIONS, speculation=speculation)
  engine = engines.Engine(served, policy, 0, options)
  engine.controller = controller.Controller((depth,))
  mine, lost = _play(engine, range(NUM_SESSIONS), 0)
  assert lost > 0 and engine.stats().prefix_hit_tokens > 0
  _assert_same(mine, trajectories)
  stats = engine.stats()
  assert 0 < stats.draft_tokens < stats.draft_passes * depth


@pytest.mark.parametrize('way', ['replay', 'afresh', 'gradient'])
def test_the_trainer_scores_what_was_sampled(config, way):
  trajectories, *_ = _sampled(config)
  shape = replayed.shape(
    config, rows=3, seq_len=160, align=grouped_query.KEY_BLOCK
  )
  lengths = [len(t) for t in trajectories]
  # The trainer's weights: the policy's values, in float32.

  values = jax.tree.map(lambda x: x.astype(jnp.float32), _policy(config))
  packed = batching.pack(
    trajectories, [0.0] * len(trajectories), shape
  ).microbatches
  if way == 'afresh':
    packed = [b.replace(expert_ids_MBTA=None) for b in packed]
  score = (_trainer if way == 'gradient' else _scorer)(config)
  scores = [jax.device_get(score(values, b)) for b in packed]
  compared = 0
  for trajectory, place in zip(
    trajectories, batching.places(lengths, shape), strict=True
  ):
    mine = scores[place.batch]
    sampled_T = trajectory.loss_mask_T
    np.testing.assert_array_equal(
      mine.logprobs_BT[place.row, place.span][sampled_T],
      trajectory.logprobs_T[sampled_T],
    )
    routes_MTA = mine.expert_ids_MBTA[:, place.row, place.span]
    np.testing.assert_array_equal(
      routes_MTA.swapaxes(0, 1)[:-1], trajectory.expert_ids_TMA[:-1]
    )
    compared += sampled_T.sum()
  assert compared > 60


@functools.cache
def _scorer(config):
  return steps.scorer(decoder.Decoder(config))


@functools.cache
def _trainer(config):
  """Also computes an entropy and gradients, which the engine never does."""
  step = functools.partial(steps.microbatch_sums, decoder.Decoder(config))

  @jax.jit
  def run(values, batch):
    sums, scores = step(values, batch)
    return scores, sums

  return lambda values, batch: run(values, batch)[0]
