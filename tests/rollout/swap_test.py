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
  assert completion.routes_start == 0
  assert (completion.context_version_T == 0).all()
  assert completion.consumed_version_T.tolist() == [0] * old + [5] * (27 - old)
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
  assert completion.routes_start == 0
  assert completion.context_version_T.tolist() == [0] * 6 + [5] * 14
  assert (completion.consumed_version_T == 5).all()
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
  assert (halves.context_version_T == 1).all()
  assert (halves.policy_version_T == 2).all()
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
    assert (completion.context_version_T <= versions_T).all()
    if how == 'keep':  # The oldest cache entry is never renewed.
      assert len(set(completion.context_version_T.tolist())) == 1
    assert len(completion.consumed_expert_ids_TMA) == 25


@refreshing
def test_a_swap_while_tokens_are_consumed_anew_had_better_wait(
  engine, policies
):
  engine.submit(serving.request(0, CONTEXT, new=20))
  for _ in range(3):
    assert not engine.is_refreshing
    engine.step()
  engine.swap(policies[1], 1)
  engine.step()
  assert engine.is_refreshing
  while engine.is_refreshing:
    engine.step()
  engine.swap(policies[0], 2)
  outcome = serving.finish(engine)['session 0']
  # Each token's whole context is then of the version that sampled it.
  np.testing.assert_array_equal(
    outcome.context_version_T, outcome.policy_version_T
  )


class Labelled:
  """Recomputes sampled tokens from the versions that their records name."""

  def __init__(self, config, policies):
    self._config, self._policies = config, policies

  def _parts(self, versions_T):
    """Pairs for `serving.recompute` of the version that consumed each token."""
    ends = np.flatnonzero(np.diff(versions_T)) + 1
    ends = [*ends.tolist(), len(versions_T)]
    return [(self._policies[versions_T[end - 1] % 2], end) for end in ends]

  def logprobs(self, completion, context_T):
    """Float64 log-probabilities; NaN where the cache was overwritten since."""
    tokens_T = np.concatenate([context_T, completion.tokens_T])
    start, count = len(context_T), len(completion.tokens_T)
    sampled_by, read = completion.policy_version_T, completion.context_version_T
    consumed_T = completion.consumed_version_T
    is_last = (read == consumed_T[0]) & (sampled_by == consumed_T[start - 1 :])
    cases = [(is_last, consumed_T)]
    for version in np.unique(sampled_by):
      is_whole = ~is_last & (read == version) & (sampled_by == version)
      cases.append((is_whole, np.full_like(consumed_T, version)))
    found_T = np.full(count, np.nan)
    for mask_T, versions_T in cases:
      if mask_T.any():
        # A copy of the last part makes it a chain, as the engine computes.
        parts = self._parts(np.append(versions_T, versions_T[-1]))
        if len(parts) == 1:
          parts = [(parts[0][0], 1), *parts]
        logits_TV, _ = serving.recompute(self._config, parts, tokens_T)
        logprobs_T = serving.logprobs_of(logits_TV / 1.3, completion, start)
        found_T[mask_T] = logprobs_T[mask_T]
    return found_T


@either
@pytest.mark.parametrize('period', [1, 3, 7])
def test_every_token_is_what_its_versions_compute(
  config, engine, policies, how, period
):
  """Swaps every few steps, two between two tokens included."""
  contexts = [serving.tokens(index, 6 + 5 * index) for index in range(3)]
  for index, context_T in enumerate(contexts):
    engine.submit(serving.request(index, context_T, new=18))
  outcomes, mixed, lost = {}, 0, 0
  for step in range(1, 200):
    outcomes |= {c.session: c for c in engine.step()}
    if step % period == 0:
      engine.swap(policies[step // period % 2], step // period)
  assert len(outcomes) == 3
  labelled = Labelled(config, policies)
  for index, context_T in enumerate(contexts):
    completion = outcomes[f'session {index}']
    want_T = labelled.logprobs(completion, context_T)
    is_lost_T = np.isnan(want_T)
    differs = completion.context_version_T != completion.policy_version_T
    mixed, lost = mixed + differs.sum(), lost + is_lost_T.sum()
    # Only of caches of several versions can too little be known.
    assert differs[is_lost_T].all()
    # The same float32 sums in another order.
    np.testing.assert_allclose(
      completion.logprobs_T[~is_lost_T], want_T[~is_lost_T], atol=1e-4
    )
  assert mixed > 10
  assert lost == 0 if how == 'keep' else lost < mixed
