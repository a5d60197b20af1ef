"""Uneven routing: its chances, and what an exchange of it takes."""

import dataclasses
import json
import re

import numpy as np
import pytest

from composer_jax.models import config as model_config
from composer_jax.parallel import exchange, rounds
from composer_jax.plan import skew
from experiments.studies.routing import spreads
from tests.parallel import rounds_test
from tests.plan import params_test


def shards_of(transport, room, mesh='8', num_tokens=12):
  plan = rounds_test.make_plan(mesh, rounds_test.Variant(transport, room))
  return plan, exchange.shards_of(
    plan,
    num_tokens=num_tokens,
    num_active=rounds_test.A,
    num_local=rounds_test.E // plan.expert_shards,
  )


@pytest.mark.parametrize('spread', [0.0, 0.5, 3.0, 20.0])
def test_chances_are_of_distinct_experts(spread):
  random = np.random.default_rng(0)
  weights_PE = np.exp(spread * random.normal(size=(5, 24)))
  chances_PE = skew._chances(weights_PE, 3)
  np.testing.assert_allclose(chances_PE.sum(1), 3, rtol=1e-9)
  assert chances_PE.min() > 0 and chances_PE.max() <= 1
  # Among those below one they have the proportions of the weights.
  is_free = chances_PE < 1
  ratio = np.where(is_free, chances_PE / weights_PE, np.nan)
  np.testing.assert_allclose(np.nanmin(ratio, 1), np.nanmax(ratio, 1))
  assert (chances_PE == 1).any() == (spread > 1)


@pytest.mark.parametrize('transport', ['a2a', 'ragged_a2a'])
@pytest.mark.parametrize('room', [0.3, 0.7, 1.0, 2.5])
def test_rounds_are_those_of_the_exchange(transport, room):
  """Of routes of tokens, counted there on the host and here by pair."""
  plan, shards = shards_of(transport, room)
  for seed in range(6):
    ids_BTA, valid_BT = rounds_test.drawn(seed)
    counts_PE = np.zeros((plan.mesh.size, rounds_test.E), int)
    (*outer, columns) = plan.mesh.shape.values()
    size_b = rounds_test.B // int(np.prod(outer))
    size_t = rounds_test.T // columns
    for (i, j), is_valid in np.ndenumerate(valid_BT):
      chosen = {e for e in ids_BTA[i, j] if is_valid and e < rounds_test.E}
      for expert in chosen:
        counts_PE[i // size_b * columns + j // size_t, expert] += 1
    if counts_PE.any():
      want = rounds_test.needed(plan, ids_BTA, valid_BT)
      assert skew.effect(counts_PE, shards).rounds == want


def test_even_and_worst_load_have_closed_forms():
  tokens, each = 240, 240 * 3 // 24
  for transport, wire in (('a2a', 1.5), ('ragged_a2a', 1.0)):
    _, shards = shards_of(transport, 1.5, num_tokens=tokens)
    even = skew.effect(np.full((8, 24), each), shards)
    assert even == (1.0, 1.0, 1, wire)
    worst_PE = np.zeros((8, 24), int)
    worst_PE[:, :3] = tokens  # All three experts of the first shard.
    worst = skew.effect(worst_PE, shards)
    assert worst[:2] == (8.0, 8.0)
    most = 3 * tokens * (1 if transport == 'a2a' else 8)
    assert worst.rounds == -(-most // shards.rows) > 1


def test_uneven_routing_never_needs_less():
  moe = model_config.ModelConfig.from_dict(params_test.fields('tiny')).moe
  moe = dataclasses.replace(moe, num_experts=64, num_active=4)
  _, shards = shards_of('ragged_a2a', 1.1, num_tokens=4096)
  shards = dataclasses.replace(shards, num_local=8, rows=4096 * 4 * 11 // 10)
  routings = [
    skew.Routing(name=str(s), layer=s, rows=s) for s in (0.0, 0.2, 0.5, 1.0)
  ]
  found = [e for _, e in skew.effects(moe, shards, 4096, routings)]
  assert [e.busiest for e in found] == sorted(e.busiest for e in found)
  assert found[0].rounds == 1 < found[-1].rounds
  assert found[0].busiest < 1.05


@pytest.mark.parametrize('true', [0.2, 0.6])
def test_the_study_finds_the_spread_that_was_drawn(true):
  random = np.random.default_rng(1)
  chances_E = np.exp(0.3 * random.normal(size=64))
  chances_E /= chances_E.sum()
  weights_RE = chances_E * np.exp(true * random.normal(size=(400, 64)))
  weights_RE /= weights_RE.sum(1, keepdims=True)
  loads_RE = random.poisson(500 * weights_RE)
  load_E = loads_RE.sum(0)
  found = spreads.spread(loads_RE, load_E / load_E.sum())
  assert found == pytest.approx(true, rel=0.08)
  even = random.poisson(500 * chances_E, size=(400, 64))
  assert spreads.spread(even, chances_E) < 0.05


def test_the_command_answers_without_devices():
  code, text, _ = params_test.command(
    '--config=configs/models/kimi_k2.py',
    '--topology=v5p:8x8x8',
    '--mesh=4,64,2',
    '--what=routing',
    '--json',
  )
  assert code == 0
  (table,) = json.loads(text)['routing']
  uniform, measured, *strong = table['rows']
  assert uniform['rounds'] == rounds.PARTS < strong[-1]['rounds']
  assert 1.3 < uniform['pair_over_mean'] < 1.4  # Of pairs with 128 copies.
  assert len({row['MB'] for row in table['rows']}) == 1
  assert uniform['products_ms'] < measured['products_ms']
  code, _, error = params_test.command(
    '--config=configs/models/tiny.py',
    '--topology=cpu:8',
    '--layout=data_parallel',
    '--what=routing',
  )
  assert code == 1 and 'no token of 8 cpu' in error[0]
  for flag, message in (
    ('--room=-1', 'room must be positive'),
    ('--batch=3', '--batch'),
    ('--accumulate=0', 'accumulate.*at least 1'),
    ('--seq_len=0', 'seq_len.*at least 1'),
  ):
    code, _, error = params_test.command(
      '--config=configs/models/tiny.py', '--what=routing', flag
    )
    assert code == 1 and re.search(message, error[0])
