"""Weights change between steps: which version made a token; what is refused."""

import copy
import dataclasses

import jax
import numpy as np
import pytest

from composer_jax.models import decoder
from composer_jax.rollout import engine as engines
from tests.rollout import serving

OPTIONS = engines.EngineOptions(
  num_slots=4,
  max_len=serving.LENGTH,
  prefill_chunk=5,
  prefill_rows=2,
  decode_steps=3,
  page_size=4,
  num_pages=64,
  num_top=2,
)
CONTEXT = serving.tokens(0, 8)


@pytest.fixture(scope='module')
def config(make_config):
  return make_config()


@pytest.fixture(scope='module')
def policies(config, make_variables):
  return [decoder.policy(make_variables(config, i)) for i in range(2)]


@pytest.fixture
def how():
  return 'keep'


@pytest.fixture
def engine(config, policies, how):
  options = dataclasses.replace(OPTIONS, on_swap=how)
  return engines.Engine(config, policies[0], 0, options)


refreshing = pytest.mark.parametrize('how', ['refresh'])
either = pytest.mark.parametrize('how', ['keep', 'refresh'])


def _swapped(engine, policies, new=20):
  """Serves a request whose weights change while it samples."""
  engine.submit(serving.request(0, CONTEXT, new=new))
  for _ in range(4):  # Two chunks of context and two decode dispatches.
    engine.step()
  engine.swap(policies[1], 5)
  completion = serving.finish(engine)['session 0']
  versions = completion.policy_version_T.tolist()
  assert versions == [0] * 6 + [5] * (new - 6)
  return completion


def _assert_logprobs(config, parts, completion, start=0):
  """Compares the sampled tokens from `start` on with the decoder."""
  tokens_T = np.concatenate([CONTEXT, completion.tokens_T])
  logits_TV, routes_TMA = serving.recompute(config, parts, tokens_T)
  for name, temperature in (('logprobs_T', 1.3), ('raw_logprobs_T', 1.0)):
    want_T = serving.logprobs_of(
      logits_TV / temperature, completion, len(CONTEXT)
    )
    # The same float32 sums in another order.
    np.testing.assert_allclose(
      getattr(completion, name)[start:], want_T[start:], atol=1e-4
    )
  return routes_TMA


def test_keep_goes_on_with_the_keys_of_older_weights(engine, config, policies):
  completion = _swapped(engine, policies)
  # The last token before the swap is consumed after it.
  old = len(CONTEXT) + 5
  parts = [(policies[0], old), (policies[1], 28)]
  routes_TMA = _assert_logprobs(config, parts, completion)
  np.testing.assert_array_equal(
    completion.consumed_expert_ids_TMA, routes_TMA[:-1]
  )
  assert completion.routes_start == completion.context_version == 0
  # Neither policy alone would give these.
  with pytest.raises(AssertionError, match='Not equal to tolerance'):
    _assert_logprobs(config, [(policies[1], 28)], completion, start=6)


@refreshing
def test_refresh_consumes_everything_anew(engine, config, policies):
  completion = _swapped(engine, policies)
  routes_TMA = _assert_logprobs(
    config, [(policies[1], 28)], completion, start=6
  )
  np.testing.assert_array_equal(
    completion.consumed_expert_ids_TMA, routes_TMA[:-1]
  )
  assert completion.routes_start == 0 and completion.context_version == 5
  tokens_T = np.concatenate([CONTEXT, completion.tokens_T])
  before_TV, _ = serving.recompute(config, [(policies[0], 28)], tokens_T)
  want_T = serving.logprobs_of(before_TV / 1.3, completion, len(CONTEXT))
  np.testing.assert_allclose(completion.logprobs_T[:6], want_T[:6], atol=1e-4)


@refreshing
def test_an_idle_session_is_refreshed_when_it_goes_on(engine, config, policies):
  (first,) = serving.complete(engine, serving.request(0, CONTEXT))
  engine.swap(policies[1], 3)
  (second,) = serving.complete(engine, serving.request(0, [7, 8], new=4))
  tokens_T = np.concatenate([CONTEXT, first.tokens_T, [7, 8], second.tokens_T])
  logits_TV, routes_TMA = serving.recompute(
    config, [(policies[1], 20)], tokens_T
  )
  want_T = serving.logprobs_of(logits_TV / 1.3, second, 16)
  np.testing.assert_allclose(second.logprobs_T, want_T, atol=1e-4)
  assert second.routes_start == 0
  np.testing.assert_array_equal(second.consumed_expert_ids_TMA, routes_TMA[:-1])


def test_no_prompt_of_before_a_swap_is_found_after_it(engine, policies):
  requests = [serving.request(i, CONTEXT) for i in range(4)]
  serving.complete(engine, requests[0])
  engine.swap(policies[1], 1)
  completions = [serving.complete(engine, a)[0] for a in requests[1:3]]
  assert [c.num_cached for c in completions] == [0, 7]
  # Nor is a prompt found whose first half was consumed before the swap.
  engine.submit(serving.request(7, serving.tokens(9, 8)))
  engine.step()
  engine.swap(policies[0], 2)
  halves = serving.finish(engine)['session 7']
  assert halves.context_version == 1 and (halves.policy_version_T == 2).all()
  (again,) = serving.complete(engine, serving.request(8, serving.tokens(9, 8)))
  assert again.num_cached == 0


def _changed(policy, change):
  policy = copy.deepcopy(jax.tree.map(np.asarray, policy))
  change(policy['params'])
  return policy


def _cast(params):
  layers = params['moe_layers']['attention_norm']
  layers['scale'] = layers['scale'].astype(np.float32)


@pytest.mark.parametrize(
  'change,version,message',
  [
    (
      lambda p: p.pop('final_norm'),
      5,
      'params/final_norm/scale of version 5 is missing; .* is bfloat16',
    ),
    (
      lambda p: p.update(extra={'a': np.zeros(2), 'b': np.zeros(3)}),
      5,
      'params/extra/a of version 5 is float64.* it is missing',
    ),
    (
      lambda p: p.update(embedding=p['embedding'][:-1]),
      5,
      r'params/embedding of version 5 is bfloat16\[39, 16\].*\[40, 16\]',
    ),
    (_cast, 5, r'attention_norm/scale of version 5 is float32.*bfloat16'),
  ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_serve_on(
  engine, policies, change, version, message
):
  request = serving.request(0, CONTEXT)
  (before,) = serving.complete(engine, request)
  engine.close('session 0')
  engine.swap(policies[0], 4)
  with pytest.raises(ValueError, match=message):
    engine.swap(_changed(policies[1], change), version)
  assert engine.version == 4
  (after,) = serving.complete(engine, request)
  serving.assert_same_bits(before, after)
  assert (after.policy_version_T == 4).all()


@either
def test_an_older_version_is_served_once_no_session_is_open(engine, policies):
  """Then rolling back makes no session's versions decrease."""
  request = serving.request(0, CONTEXT)
  (first,) = serving.complete(engine, request)
  engine.close('session 0')
  engine.swap(policies[1], 4)
  serving.complete(engine, request)
  placed = engine.place(policies[0], 0)
  with pytest.raises(
    ValueError, match='version 4 for the older 0 while 1 sessions are open'
  ):
    engine.switch(placed)
  assert engine.version == 4
  engine.close('session 0')
  engine.switch(placed)
  (again,) = serving.complete(engine, request)
  serving.assert_same_bits(first, again)
  assert engine.stats().swaps == 2 and engine.stats().swap_s > 0


def test_an_engine_is_not_made_of_weights_of_another_model(
  config, policies, make_config, make_variables
):
  other_model_variables = make_variables(make_config(dense_ffw_dim=8), 0)
  with pytest.raises(ValueError, match=r'ffw/down of version 0 .*\[1, 8, 16\]'):
    engines.Engine(config, other_model_variables, 0, OPTIONS)


@either
def test_versions_never_decrease_over_many_swaps(engine, policies, how):
  """All requests end, though weights are swapped after every step."""
  for index in range(3):
    engine.submit(serving.request(index, serving.tokens(index, 6), new=20))
  outcomes = {}
  for version in range(1, 120):
    outcomes |= {c.session: c for c in engine.step()}
    engine.swap(policies[version % 2], version)
  assert len(outcomes) == 3
  for completion in outcomes.values():
    assert len(completion.tokens_T) == 20
    versions_T = completion.policy_version_T
    assert (np.diff(versions_T) >= 0).all()
    assert len(set(versions_T.tolist())) > 3
    # context_version is that of the oldest cache entry; a refresh renews all.
    assert (
      completion.context_version <= versions_T[-1 if how == 'refresh' else 0]
    )
    assert len(completion.consumed_expert_ids_TMA) == 25
