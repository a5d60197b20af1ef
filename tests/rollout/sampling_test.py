"""Samples follow their distribution and depend on seed and position alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.rollout import sampling


@functools.partial(jax.jit, static_argnames=('truncate', 'numerics'))
def _draw(settings, positions_B, logits_BV, truncate, numerics='fast'):
  return sampling.draw(
    settings, positions_B, logits_BV, truncate=truncate, numerics=numerics
  )


def _settings(count, seed=(7,), temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
  def row(value, dtype):
    return np.broadcast_to(np.asarray(value, dtype), count)

  return sampling.Settings(
    keys_B2=np.tile(sampling.key_of(seed), (count, 1)),
    temperatures_B=row(temperature, np.float32),
    top_ps_B=row(top_p, np.float32),
    top_ks_B=row(top_k, np.int32),
    min_ps_B=row(min_p, np.float32),
  )


def _draws(logits_V, count, truncate=False, **settings):
  return _draw(
    _settings(count, **settings),
    np.arange(count, dtype=np.int32),
    np.broadcast_to(np.asarray(logits_V, np.float32), (count, len(logits_V))),
    truncate,
  )


def test_frequencies_match_the_softmax_of_logits_over_temperature():
  probabilities_V = np.array([0.5, 0.25, 0.15, 0.1])
  count, temperature = 20_000, 2.0
  drawn = _draws(
    temperature * np.log(probabilities_V), count, temperature=temperature
  )
  frequencies_V = np.bincount(drawn.tokens_B, minlength=4) / count
  # Five standard errors of a share at most 0.5.
  np.testing.assert_allclose(
    frequencies_V, probabilities_V, atol=5 * 0.5 / count**0.5
  )
  np.testing.assert_allclose(
    drawn.logprobs_B, np.log(probabilities_V)[drawn.tokens_B], atol=1e-5
  )
  raw_V = jax.nn.log_softmax(temperature * jnp.log(probabilities_V))
  np.testing.assert_allclose(
    drawn.raw_logprobs_B, raw_V[drawn.tokens_B], atol=1e-5
  )


def _truncated(logits_V, temperature, top_p, top_k, min_p):
  """The distribution, token by token in float64."""
  exact_V = np.exp(np.float64(logits_V) / temperature)
  order = sorted(range(len(exact_V)), key=lambda i: (-exact_V[i], i))
  top_ids = order[: top_k or None]
  shares = exact_V[top_ids] / exact_V[top_ids].sum()
  nucleus, mass = [], 0.0
  for token, share in zip(top_ids, shares, strict=True):
    if mass < top_p and share >= min_p * shares[0]:
      nucleus.append(token)
    mass += share
  probabilities_V = np.zeros(len(exact_V))
  probabilities_V[nucleus] = exact_V[nucleus] / exact_V[nucleus].sum()
  return probabilities_V


@pytest.mark.parametrize(
  'temperature,top_p,top_k,min_p,size',
  [
    (1.0, 0.6, 0, 0.0, 2),
    (1.0, 1.0, 3, 0.0, 3),
    (2.0, 1.0, 0, 0.6, 2),
    (0.5, 0.99, 4, 0.2, 2),
    # top_p counts the mass that top_k left: 0.4 / 0.7 of two, not 0.4 of all.
    (1.0, 0.56, 2, 0.0, 1),
    (1.0, 1e-6, 0, 0.0, 1),
    # Of three equal tokens, the two with the smaller index.
    (1.0, 1.0, 4, 0.0, 4),
  ],
)
def test_frequencies_match_what_truncation_leaves(
  temperature, top_p, top_k, min_p, size
):
  logits_V = np.log([0.1, 0.3, 0.1, 0.4, 0.1]).astype(np.float32)
  count = 4000
  drawn = _draws(
    logits_V,
    count,
    truncate=True,
    temperature=temperature,
    top_p=top_p,
    top_k=top_k,
    min_p=min_p,
  )
  want_V = _truncated(logits_V, temperature, top_p, top_k, min_p)
  assert (want_V > 0).sum() == size
  frequencies_V = np.bincount(drawn.tokens_B, minlength=5) / count
  np.testing.assert_allclose(frequencies_V, want_V, atol=5 * 0.5 / count**0.5)
  assert not frequencies_V[want_V == 0].any()
  np.testing.assert_allclose(
    drawn.logprobs_B, np.log(want_V[drawn.tokens_B]), atol=1e-5
  )
  np.testing.assert_allclose(
    drawn.raw_logprobs_B, logits_V[drawn.tokens_B], atol=1e-5
  )


def test_temperature_zero_takes_the_likeliest_with_certainty():
  logits_BV = jax.random.normal(jax.random.key(3), (5, 30))
  settings = _settings(5, temperature=[0, 1, 0, 0, 2], top_p=[1, 1, 0.1, 1, 1])
  positions_B = np.arange(5, dtype=np.int32)
  drawn = _draw(settings, positions_B, logits_BV, True)
  greedy = np.array([0, 2, 3])
  np.testing.assert_array_equal(
    drawn.tokens_B[greedy], np.argmax(logits_BV[greedy], -1)
  )
  assert not drawn.logprobs_B[greedy].any() and (drawn.logprobs_B[1] < 0)
  np.testing.assert_allclose(
    drawn.raw_logprobs_B[greedy],
    jax.nn.log_softmax(logits_BV)[greedy].max(-1),
    atol=1e-6,
  )
  alone = _draw(
    _settings(5, temperature=0.0), positions_B, logits_BV, truncate=False
  )
  np.testing.assert_array_equal(alone.tokens_B[greedy], drawn.tokens_B[greedy])


def test_a_row_that_does_not_truncate_is_the_same_beside_one_that_does():
  logits_BV = 3 * jax.random.normal(jax.random.key(4), (8, 40))
  settings = _settings(8, temperature=1.3)
  positions_B = np.arange(8, dtype=np.int32)
  plain = _draw(settings, positions_B, logits_BV, truncate=False)
  beside = _draw(
    settings.replace(top_ks_B=np.array([0] * 7 + [2], np.int32)),
    positions_B,
    logits_BV,
    truncate=True,
  )
  for name in ('tokens_B', 'logprobs_B', 'raw_logprobs_B'):
    np.testing.assert_array_equal(
      getattr(beside, name)[:7], getattr(plain, name)[:7]
    )


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_logits_that_are_no_distribution_show_in_the_raw_logprob(bad):
  logits_BV = np.zeros((3, 6), np.float32)
  logits_BV[1, 4] = bad
  for truncate in (False, True):
    drawn = _draw(
      _settings(3, temperature=[1, 0.7, 0], top_k=[2, 2, 0]),
      np.arange(3, dtype=np.int32),
      logits_BV,
      truncate=truncate,
    )
    np.testing.assert_array_equal(
      np.isfinite(drawn.raw_logprobs_B), [True, False, True]
    )


def test_a_draw_depends_on_seed_and_position_only():
  logits_BV = jax.random.normal(jax.random.key(0), (6, 50))
  settings = _settings(6)
  settings = settings.replace(
    keys_B2=np.stack([sampling.key_of((1, 2, i)) for i in range(6)])
  )
  positions_B = np.arange(6, dtype=np.int32) * 3
  drawn = _draw(settings, positions_B, logits_BV, truncate=False)
  order = np.array([3, 0, 5, 1, 4, 2])
  again = _draw(
    settings.replace(keys_B2=settings.keys_B2[order]),
    positions_B[order],
    logits_BV[order],
    truncate=False,
  )
  np.testing.assert_array_equal(again.tokens_B, drawn.tokens_B[order])
  np.testing.assert_array_equal(again.logprobs_B, drawn.logprobs_B[order])
  moved = _draw(settings, positions_B + 1, logits_BV, truncate=False)
  assert np.any(moved.tokens_B != drawn.tokens_B)


@pytest.mark.parametrize(
  'spread,seed,settings',
  [
    (1.0, (7,), {}),
    (6.0, (8,), {}),
    (0.0, (9,), dict(temperature=0.5)),
    (1.0, (10,), dict(top_p=0.9)),
    (2.0, (11,), dict(top_k=40, min_p=0.01)),
  ],
)
def test_every_token_of_a_large_vocabulary_has_its_chance(
  spread, seed, settings
):
  # 300 tokens in 32 classes, of ten tokens or nine.
  count, vocab_size = 6000, 300
  logits_V = np.array(jax.random.normal(jax.random.key(5), vocab_size))
  logits_V *= spread
  logits_V[10:20] = -np.inf
  truncate = 'temperature' not in settings and bool(settings)
  drawn = _draws(logits_V, count, truncate, seed=seed, **settings)
  everything = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
  want_V = _truncated(logits_V, **(everything | settings))
  counts_V = np.bincount(drawn.tokens_B, minlength=vocab_size)
  assert counts_V.shape == (vocab_size,) and not counts_V[want_V == 0].any()
  # Tokens of less than five expected draws count together.
  cells_V = np.where(count * want_V < 5, vocab_size, np.arange(vocab_size))
  expected_X = np.bincount(cells_V, count * want_V)
  counts_X = np.bincount(cells_V, counts_V)
  likely_X = expected_X > 0
  squares_X = (counts_X - expected_X)[likely_X] ** 2 / expected_X[likely_X]
  freedom = likely_X.sum() - 1
  # Chi-squared: its mean is the degrees of freedom, its variance twice that.
  assert abs(squares_X.sum() - freedom) < 4 * (2 * freedom) ** 0.5


def test_a_race_is_won_by_improbable_tokens_and_by_none_of_weight_zero():
  most, least = 1 - 2.0**-24, 2.0**-33
  weights_BX = jnp.array([[1, 2.0**-34, 0], [1, 2.0**-38, 0], [0, 1e-30, 0]])
  uniforms_BX = jnp.array([[0.9, least, least]] + 2 * [[most, least, least]])
  winners_B = sampling._first(weights_BX, uniforms_BX)
  np.testing.assert_array_equal(winners_B, [1, 0, 1])
  uniforms_U = np.array(sampling._uniforms(sampling.key_of((3,)), 5, 100_000))
  assert uniforms_U.min() >= least and uniforms_U.max() <= most
  np.testing.assert_allclose(uniforms_U.mean(), 0.5, atol=5 * 0.29 / 316)
  # Small ones have more than 24 bits after the point.
  small_U = np.float64(uniforms_U[uniforms_U < 0.01])
  assert (small_U * 2**24 % 1 != 0).mean() > 0.9


def _agreement(p_V, q_V):
  """The probability that p and q have one winner, token by token.

  x wins both of one race with 1 / sum_y max(p_y / p_x, q_y / q_x).
  """

  def both(p_X, q_X):
    ratios_XX = [x_X[:, None] / x_X.clip(1e-300) for x_X in (p_X, q_X)]
    return 1 / np.maximum(*ratios_XX).sum(0)

  num_classes, size = sampling._split(len(p_V))
  p_XC, q_XC = (
    np.pad(x_V, (0, size * num_classes - len(x_V))).reshape(size, num_classes)
    for x_V in (p_V, q_V)
  )
  classes_C = both(p_XC.sum(0), q_XC.sum(0))
  return sum(
    share * both(p_X, q_X).sum()
    for share, p_X, q_X in zip(classes_C, p_XC.T, q_XC.T, strict=True)
  )


def _inverse_agreement(p_V, q_V):
  """The same for inverse distribution functions in the order of tokens."""
  ends_V = np.minimum(p_V.cumsum(), q_V.cumsum())
  starts_V = np.maximum(p_V.cumsum() - p_V, q_V.cumsum() - q_V)
  return (ends_V - starts_V).clip(0).sum()


@pytest.mark.parametrize('spread', [1.0, 3.0, 6.0])
def test_similar_distributions_draw_the_same_token(spread):
  """Two rows of one seed and position agree as the closed form says."""
  count, vocab_size = 6000, 300
  logits_V, change_V = np.random.default_rng(0).normal(size=(2, vocab_size))
  p_V = np.exp(spread * logits_V)
  p_V /= p_V.sum()

  def changed(scale):
    q_V = p_V * np.exp(scale * change_V)
    return q_V / q_V.sum()

  def variation(scale):
    return np.abs(changed(scale) - p_V).sum() / 2

  for most in (0.05, 0.1, 0.3):
    scales = np.linspace(0, 20, 2001)
    q_V = changed(max(x for x in scales if variation(x) <= most))
    t = np.abs(q_V - p_V).sum() / 2
    agreement = _agreement(p_V, q_V)
    assert agreement > (1 - t) / (1 + t)
    assert agreement > _inverse_agreement(p_V, q_V)
    if most <= 0.1:
      assert agreement > 0.9 * (1 - t)  # No coupling reaches more than 1 - t.
    if most == 0.1:
      drafts, tokens = (
        _draws(np.log(x_V), count).tokens_B for x_V in (p_V, q_V)
      )
      measured = (drafts == tokens).mean()
      assert abs(measured - agreement) < 4 * 0.5 / count**0.5


@pytest.mark.parametrize('truncate', [False, True])
def test_batch_invariant_draws_know_nothing_of_the_number_of_rows(truncate):
  count = 40
  logits_BV = 3 * jax.random.normal(jax.random.key(8), (count, 300))
  positions_B = np.arange(count, dtype=np.int32)
  top_ps = np.where(positions_B % 2, 0.9, 1) if truncate else 1.0
  settings = _settings(count, temperature=0.8, top_p=top_ps)
  draw = functools.partial(_draw, truncate=truncate, numerics='batch_invariant')
  all_rows = draw(settings, positions_B, logits_BV)
  for rows in (slice(0, 1), slice(3, 8), slice(7, 40)):
    part = draw(
      jax.tree.map(lambda x, rows=rows: x[rows], settings),
      positions_B[rows],
      logits_BV[rows],
    )
    for name in ('tokens_B', 'logprobs_B', 'raw_logprobs_B'):
      np.testing.assert_array_equal(
        getattr(part, name), getattr(all_rows, name)[rows]
      )


def test_seed_tuples_do_not_collide():
  seeds = [(1,), (1, 0), (0, 1), (10,), (1, 0, 0), (2**32,), (-1,), (), (12,)]
  seeds += [(1, 2)]
  keys = {tuple(sampling.key_of(seed)) for seed in seeds}
  assert len(keys) == len(seeds)
