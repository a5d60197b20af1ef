"""The engine serves latent attention: shared prompts, forked pages, swaps."""

import numpy as np
import pytest

from composer_jax.models import decoder
from composer_jax.rollout import engine as engines
from tests.rollout import forward_test, serving

OPTIONS = engines.EngineOptions(
  num_slots=4,
  max_len=serving.LENGTH,
  prefill_chunk=5,
  prefill_rows=1,
  decode_steps=3,
  page_size=4,
  num_pages=64,
)
CONTEXT = serving.tokens(0, 8)


@pytest.mark.slow
def test_latents_are_shared_forked_and_kept_over_a_swap(
  make_config, make_variables
):
  config = make_config(
    num_layers=2,
    attention=forward_test.LATENT,
    rope={'theta': 100.0, 'interleaved': True, 'yarn': forward_test.YARN},
  )
  policies = [decoder.policy(make_variables(config, i)) for i in range(2)]
  engine = engines.Engine(config, policies[0], 0, OPTIONS)
  requests = [serving.request(i, CONTEXT, new=18) for i in range(3)]
  for request in requests:
    engine.submit(request)
  while engine.stats().sampled_tokens < 3 * 3:
    engine.step()
  # All three share one full page and copy three tokens of the next one.
  assert engine.stats().context_tokens == 7
  engine.swap(policies[1], 1)
  for completion in serving.finish(engine).values():
    versions_T = completion.policy_version_T
    tokens_T = np.concatenate([CONTEXT, completion.tokens_T])
    old = len(CONTEXT) + int((versions_T == 0).sum()) - 1
    assert 8 < old < 25 and completion.routes_start == 0
    logits_TV, routes_TMA = serving.recompute(
      config, [(policies[0], old), (policies[1], 26)], tokens_T
    )
    want_T = serving.logprobs_of(logits_TV / 1.3, completion, len(CONTEXT))
    # float32 sums run in another order.
    np.testing.assert_allclose(completion.logprobs_T, want_T, atol=1e-4)
    np.testing.assert_array_equal(
      completion.consumed_expert_ids_TMA, routes_TMA[:-1]
    )
  # A session that begins after the swap has new weights and no cached prompt.
  (alone,) = serving.complete(engine, serving.request(9, CONTEXT, new=4))
  assert alone.num_cached == 0
  tokens_T = np.concatenate([CONTEXT, alone.tokens_T])
  logits_TV, _ = serving.recompute(config, [(policies[1], 12)], tokens_T)
  want_T = serving.logprobs_of(logits_TV / 1.3, alone, len(CONTEXT))
  np.testing.assert_allclose(alone.logprobs_T, want_T, atol=1e-4)
