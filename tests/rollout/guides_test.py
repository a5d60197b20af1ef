"""Guides change the distribution of their request, and nothing else."""

import dataclasses

import numpy as np
import pytest

from composer_jax.models import decoder
from composer_jax.rollout import engine as engines
from tests.rollout import serving

OPTIONS = engines.EngineOptions(
  num_slots=3,
  max_len=serving.LENGTH,
  prefill_chunk=8,
  prefill_rows=2,
  decode_steps=3,
  page_size=8,
)


class Table:
  """Adds row t of a table to the logits of the t-th token; notes what came."""

  def __init__(self, bias_TV):
    self.bias_TV, self.taken = np.asarray(bias_TV, np.float32), []

  def bias(self):
    return self.bias_TV[len(self.taken)]

  def take(self, token):
    self.taken.append(token)


@pytest.fixture(scope='module')
def config(make_config):
  return make_config()


@pytest.fixture(scope='module')
def policy(config, make_variables):
  return decoder.policy(make_variables(config, 0))


@pytest.fixture
def engine(config, policy):
  return engines.Engine(config, policy, 0, OPTIONS)


def _play(engine, pairs):
  for request, guide in pairs:
    engine.submit(request, guide=guide)
  outcomes = serving.finish(engine)
  for session in outcomes:
    engine.close(session)
  return [outcomes[request.session] for request, _ in pairs]


@pytest.mark.slow
def test_guided_tokens_have_the_distribution_of_the_sum(engine, config, policy):
  context_T = serving.tokens(1, 11)
  bias_TV = np.random.default_rng(2).normal(size=(6, 40)) * 3
  bias_TV[:, ::3] = -np.inf
  guide = Table(bias_TV)
  # The third truncates: its rule looks at the sum, too.
  requests = [
    serving.request(0, context_T),
    serving.request(1, serving.tokens(5, 4), new=9),
    serving.request(2, context_T, top_k=4),
  ]
  guided, beside, _ = _play(
    engine,
    [(requests[0], guide), (requests[1], None), (requests[2], Table(bias_TV))],
  )
  assert guide.taken == guided.tokens_T.tolist()
  assert not (guided.tokens_T % 3 == 0).any()
  whole_T = np.concatenate([context_T, guided.tokens_T])
  logits_TV, _ = serving.recompute(config, [(policy, len(whole_T))], whole_T)
  rows_T = np.arange(6)
  for name, logprobs_TV in (
    ('logprobs_T', serving.log_softmax((logits_TV[11:] + bias_TV) / 1.3)),
    ('raw_logprobs_T', serving.log_softmax(logits_TV[11:])),
  ):
    exact_T = logprobs_TV[rows_T, guided.tokens_T]
    np.testing.assert_allclose(getattr(guided, name), exact_T, atol=1e-5)
  # What stands beside a guided request has the bits that it has alone.
  (alone,) = _play(engine, [(requests[1], None)])
  serving.assert_same_bits(beside, alone)


@pytest.mark.slow
def test_a_bias_of_zero_changes_no_bit(engine):
  requests = [serving.request(i, serving.tokens(i, 5)) for i in (0, 1)]
  free = _play(engine, [(r, None) for r in requests])
  held = _play(engine, [(r, Table(np.zeros((6, 40)))) for r in requests])
  for a, b in zip(held, free, strict=True):
    serving.assert_same_bits(a, b)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_a_single_allowed_token_is_certain(engine, temperature, monkeypatch):
  noted = []
  note = lambda *report: noted.append(report[3])
  monkeypatch.setattr(engine.controller, 'take', note)
  forced = [7, 3, 39, 0]
  bias_TV = np.full((4, 40), -np.inf)
  bias_TV[np.arange(4), forced] = 0
  request = serving.request(0, [1, 2], new=4, temperature=temperature)
  (made,) = _play(engine, [(request, Table(bias_TV))])
  assert made.tokens_T.tolist() == forced
  np.testing.assert_array_equal(made.logprobs_T, 0)
  assert (made.raw_logprobs_T < 0).all()
  # Its seconds are no measure of plain decoding.
  assert noted == [None] * 4


def test_a_guided_request_goes_on_after_a_swap(config, policy):
  """Its guide takes every token once, also where the cache is made anew."""
  options = dataclasses.replace(OPTIONS, on_swap='refresh')
  engine = engines.Engine(config, policy, 0, options)
  guide = Table(np.zeros((9, 40)))
  engine.submit(serving.request(0, [1, 2, 3], new=9), guide=guide)
  for version in range(1, 5):
    for _ in range(3):
      engine.step()
    engine.swap(policy, version)
  (made,) = serving.finish(engine).values()
  assert guide.taken == made.tokens_T.tolist()


@pytest.mark.slow
def test_warm_compiles_what_guided_requests_run(make_config, make_variables):
  config = make_config(vocab_size=41)
  policy = decoder.policy(make_variables(config, 0))
  engine = engines.Engine(config, policy, 0, OPTIONS)
  engine.warm(guided=True)
  before = engine.traces
  assert before['decode 3 guided'] == before['decode 3 truncating guided'] == 1
  zeros_TV = np.zeros((6, 41))
  for index, fields in enumerate(({}, {'top_k': 3})):
    request = serving.request(index, [1, 2, 3], **fields)
    _play(engine, [(request, Table(zeros_TV))])
  assert engine.traces == before
