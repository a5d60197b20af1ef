"""Shared by tests of the engine: requests, and answers of the decoder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from composer_jax.core import records
from composer_jax.models import decoder, head
from composer_jax.rollout import forward

LENGTH = 40


def request(index, context, new=6, **fields):
  return records.SampleRequest(
    session=f'session {index}',
    context_T=np.asarray(context, np.int32),
    max_new_tokens=new,
    seed=fields.pop('seed', (3, index)),
    stop_tokens=fields.pop('stop_tokens', ()),
    temperature=fields.pop('temperature', 1.3),
    **fields,
  )


def tokens(seed, count):
  return np.random.default_rng(seed).integers(0, 40, count).astype(np.int32)


def finish(engine):
  """Steps until every request has ended; returns outcomes by session."""
  outcomes = {}
  for _ in range(400):
    if not engine.num_unfinished:
      return outcomes
    outcomes |= {outcome.session: outcome for outcome in engine.step()}
  raise AssertionError('the engine did not finish')


def complete(engine, *requests):
  """Submits all requests at once and returns their outcomes in order."""
  for request in requests:
    engine.submit(request)
  outcomes = finish(engine)
  return [outcomes[request.session] for request in requests]


def assert_same_bits(actual, expected):
  names = ('tokens_T', 'logprobs_T', 'raw_logprobs_T')
  for name in (*names, 'consumed_expert_ids_TMA', 'top_logprobs_TX'):
    np.testing.assert_array_equal(
      getattr(actual, name), getattr(expected, name), name
    )


@functools.partial(jax.jit, static_argnames='config')
def _decode_whole(variables, tokens_BT, positions_BT, config):
  output = decoder.Decoder(config).apply(
    variables, tokens_BT, jnp.ones_like(tokens_BT), positions_BT
  )
  logits_BTV = head.logits(variables, output.hidden_BTD, config)
  return logits_BTV, output.expert_ids_MBTA


@functools.partial(jax.jit, static_argnames='config')
def _consume(weights, cache, tokens_BT, valid_BT, positions_BT, config):
  hidden_BTD, ids_MBTA, cache = forward.forward(
    weights,
    cache,
    tokens_BT,
    valid_BT,
    positions_BT,
    jnp.zeros((1, 1), jnp.int32),
    config=config,
  )
  return forward.logits(weights, hidden_BTD, config), ids_MBTA, cache


def recompute(config, parts, tokens_T):
  """Computes a session's logits and routes without the engine.

  Args:
    config: decoder's config.
    parts: pairs (variables, end); the weights of each consume tokens from the
      end of the pair before up to `end`. The decoder computes a single pair;
      several consume one cache, in turn.
    tokens_T: token ids of the session.

  Returns:
    logits_TV that predict each token (the first row is unused), and the
    expert_ids_TMA of the pass that consumed it.
  """
  tokens_BT = np.zeros((1, LENGTH), np.int32)
  tokens_BT[0, : len(tokens_T)] = tokens_T
  positions_BT = np.arange(LENGTH, dtype=np.int32)[None]
  logits, routes, start = [], [], 0
  cache = forward.empty_cache(config, 1, LENGTH)
  for variables, end in parts:
    if len(parts) == 1:
      variables = jax.tree.map(lambda x: x.astype(jnp.float32), variables)
      results = _decode_whole(variables, tokens_BT, positions_BT, config)
    else:
      weights = forward.unstack(variables, config)
      valid_BT = (start <= positions_BT) & (positions_BT < end)
      *results, cache = _consume(
        weights, cache, tokens_BT, valid_BT, positions_BT, config
      )
    logits_BTV, ids_MBTA = (np.asarray(x) for x in results)
    logits.append(logits_BTV[0, start:end])
    routes.append(np.moveaxis(ids_MBTA, 0, 2)[0, start:end])
    start = end
  logits_TV = np.concatenate(logits).astype(np.float64)
  return np.roll(logits_TV, 1, axis=0), np.concatenate(routes)


def log_softmax(logits_TV):
  logits_TV = logits_TV - logits_TV.max(-1, keepdims=True)
  return logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))


def logprobs_of(logits_TV, completion, start):
  """Returns float64 log-probabilities of a completion from `start` on."""
  rows_T = np.arange(start, start + len(completion.tokens_T))
  return log_softmax(logits_TV)[rows_T, completion.tokens_T]
