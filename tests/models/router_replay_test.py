"""Replayed experts: forced, plausible or refilled, and weighed by live scores.

All cases run in one program; a case is a router and an alpha.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.models import config as model_config
from composer_jax.models import router
from tests import compiling
from tests.models import routing

Z, E, A = 64, 8, 3
OPTIONS = compiling.QUICKLY
ALPHAS = (0.0, 0.3, 0.7, 0.97, 1.0)


def _config(kind, **changes):
  fields = dict(
    num_experts=E,
    num_active=A,
    ffw_dim=1,
    num_shared=0,
    router=kind,
    num_groups=1,
    num_active_groups=1,
    renormalize=True,
    routed_scale=2.5,
    aux_loss_weight=0.0,
    z_loss_weight=0.0,
  )
  return model_config.MoEConfig(**(fields | changes))


ROUTERS = {
  'softmax': (_config('softmax'), None),
  'sigmoid': (_config('sigmoid'), np.linspace(-0.5, 0.5, E)),
  # Every biased score is below zero.
  'negative': (_config('sigmoid'), np.linspace(-1.5, -1.1, E)),
  'groups': (
    _config('sigmoid', num_groups=4, num_active_groups=2),
    np.linspace(0.2, -0.3, E),
  ),
}


def _inputs():
  rng = np.random.default_rng(0)
  logits_ZE = (1.5 * rng.normal(size=(Z, E))).astype(np.float32)
  replay_ZA = np.argsort(rng.random((Z, E)), axis=-1)[:, :A].astype(np.uint16)
  replay_ZA[::7] = records.NO_ROUTE
  replay_ZA[3, 1] = records.NO_ROUTE  # half a record is none
  return logits_ZE, replay_ZA, rng.random(Z) < 0.8


@functools.cache
def _routed():
  """Returns {(router, alpha or None): (weights_ZA, ids_ZA, stats, grads)}.

  Without an alpha nothing is replayed. The gradients are those of a sum of
  weights by (logits, bias).
  """
  logits_ZE, replay_ZA, valid_Z = _inputs()

  def run(name, alpha, logits_ZE, replay_ZA):
    config, bias_E = ROUTERS[name]
    config = dataclasses.replace(config, replay_alpha=alpha or 0.0)
    if alpha is None:
      replay_ZA = None

    def total(logits_ZE, bias_E):
      weights_ZA, ids_ZA, stats = routing.route(
        logits_ZE,
        config=config,
        valid_BT=valid_Z,
        bias_E=None if name == 'softmax' else bias_E,
        replay_BTA=replay_ZA,
      )
      return (weights_ZA * jnp.arange(1, A + 1)).sum(), (
        weights_ZA,
        ids_ZA,
        stats,
      )

    bias_E = jnp.zeros(E) if bias_E is None else jnp.float32(bias_E)
    (_, out), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(
      logits_ZE, bias_E
    )
    return *out, grads

  cases = [(name, alpha) for name in ROUTERS for alpha in (None, *ALPHAS)]
  run_all = jax.jit(
    lambda *arrays: [run(*case, *arrays) for case in cases],
    compiler_options=OPTIONS,
  )
  results = jax.device_get(run_all(logits_ZE, replay_ZA))
  return dict(zip(cases, results, strict=True))


def _recorded(replay_ZA):
  return (replay_ZA != records.NO_ROUTE).all(-1)


@pytest.mark.parametrize('name', ROUTERS)
def test_alpha_0_replays_everything_recorded(name):
  _, replay_ZA, _ = _inputs()
  _, own_ZA, _, _ = _routed()[name, None]
  _, ids_ZA, stats, _ = _routed()[name, 0.0]
  recorded_Z = _recorded(replay_ZA)
  np.testing.assert_array_equal(ids_ZA[recorded_Z], replay_ZA[recorded_Z])
  np.testing.assert_array_equal(ids_ZA[~recorded_Z], own_ZA[~recorded_Z])
  assert stats.replay_replaced == 0


@pytest.mark.parametrize('name', ROUTERS)
def test_alpha_1_is_the_routers_own_choice_bit_for_bit(name):
  own, replayed = _routed()[name, None], _routed()[name, 1.0]
  same = operator.itemgetter(0, 1, 3)  # weights, ids, gradients
  jax.tree.map(np.testing.assert_array_equal, same(own), same(replayed))


def _reference(name, alpha, logits_E, replay_A, own_A):
  """The rule one expert at a time; returns ids, and the closest call."""
  config, bias_E = ROUTERS[name]
  logits_E = logits_E.astype(np.float64)
  if config.router == 'sigmoid':
    scores_E = 1 / (1 + np.exp(-logits_E))
  else:
    scores_E = np.exp(logits_E) / np.exp(logits_E).sum()
  bias_E = np.zeros(E) if bias_E is None else bias_E
  last = scores_E[own_A[-1]] + bias_E[own_A[-1]]
  bars = [alpha * max(last - bias_E[j], 0) for j in replay_A]
  keep = [
    scores_E[j] >= bar or j in own_A
    for j, bar in zip(replay_A, bars, strict=True)
  ]
  kept = [j for j, stays in zip(replay_A, keep, strict=True) if stays]
  spare = iter([j for j in own_A if j not in kept])
  ids = [j if k else next(spare) for j, k in zip(replay_A, keep, strict=True)]
  close = min(abs(scores_E[j] - b) for j, b in zip(replay_A, bars, strict=True))
  return ids, close


@pytest.mark.parametrize('alpha', ALPHAS[1:-1])
@pytest.mark.parametrize('name', ROUTERS)
def test_a_reference_that_loops_keeps_and_refills_the_same(name, alpha):
  logits_ZE, replay_ZA, _ = _inputs()
  _, own_ZA, _, _ = _routed()[name, None]
  _, ids_ZA, _, _ = _routed()[name, alpha]
  num_close, changed = 0, 0
  for z in np.flatnonzero(_recorded(replay_ZA)):
    expected, gap = _reference(
      name, alpha, logits_ZE[z], replay_ZA[z].tolist(), own_ZA[z].tolist()
    )
    num_close += gap < 1e-5
    changed += expected != replay_ZA[z].tolist()
    assert gap < 1e-5 or ids_ZA[z].tolist() == expected
  assert num_close < 3
  assert changed > 0


@pytest.mark.parametrize('name', ROUTERS)
def test_a_larger_alpha_never_keeps_more_and_what_is_kept_stays_put(name):
  _, replay_ZA, valid_Z = _inputs()
  recorded_Z = _recorded(replay_ZA)
  before, replaced = np.ones((recorded_Z.sum(), A), bool), -1.0
  for alpha in ALPHAS:
    _, ids_ZA, stats, _ = _routed()[name, alpha]
    assert (np.diff(np.sort(ids_ZA), axis=-1) > 0).all()
    ids_ZA, old_ZA = ids_ZA[recorded_Z], replay_ZA[recorded_Z]
    kept_ZA = (old_ZA[..., None] == ids_ZA[:, None]).any(-1)
    if alpha < 1:
      np.testing.assert_array_equal(ids_ZA[kept_ZA], old_ZA[kept_ZA])
    assert not (kept_ZA & ~before).any()
    share = 1 - kept_ZA[valid_Z[recorded_Z]].mean()
    np.testing.assert_allclose(stats.replay_replaced, share, atol=1e-6)
    assert stats.replay_replaced >= replaced
    before, replaced = kept_ZA, stats.replay_replaced
  assert replaced > 0.2


@pytest.mark.parametrize('alpha', [None, *ALPHAS])
@pytest.mark.parametrize('name', ROUTERS)
def test_weights_come_from_live_scores_and_teach_the_router_alone(name, alpha):
  logits_ZE, _, _ = _inputs()
  weights_ZA, ids_ZA, stats, (d_logits_ZE, d_bias_E) = _routed()[name, alpha]
  odds_ZE = np.exp(logits_ZE.astype(np.float64))
  if name == 'softmax':
    scores_ZE = odds_ZE / odds_ZE.sum(-1, keepdims=True)
  else:
    scores_ZE = odds_ZE / (1 + odds_ZE)
  scores_ZA = np.take_along_axis(scores_ZE, ids_ZA, -1)
  expected_ZA = 2.5 * scores_ZA / scores_ZA.sum(-1, keepdims=True)
  np.testing.assert_allclose(weights_ZA, expected_ZA, rtol=1e-5)
  np.testing.assert_array_equal(d_bias_E, np.zeros(E))
  # Every token has a gradient, also with replayed experts.
  assert (np.abs(d_logits_ZE).max(-1) > 1e-3).all()


@pytest.mark.parametrize('name', ROUTERS)
def test_agreement_is_of_the_record_whatever_the_filter_makes_of_it(name):
  _, replay_ZA, valid_Z = _inputs()
  _, own_ZA, own_stats, _ = _routed()[name, None]
  counted_Z = _recorded(replay_ZA) & valid_Z
  same_Z = (np.sort(replay_ZA) == np.sort(own_ZA)).all(-1)
  for alpha in ALPHAS:
    stats = _routed()[name, alpha][2]
    np.testing.assert_allclose(
      stats.replay_agreement, same_Z[counted_Z].mean(), rtol=1e-6
    )
  assert tuple(own_stats[3:]) == (1, 0)


_route = jax.jit(
  routing.route,
  static_argnames='config',
  compiler_options=OPTIONS,
)


def _one(config, logits, replay, bias=None):
  _, ids, stats = _route(
    jnp.asarray(logits, jnp.float32)[None, None],
    config=config,
    valid_BT=jnp.ones((1, 1), bool),
    bias_E=bias,
    replay_BTA=jnp.array([[replay]], jnp.uint16),
  )
  return ids[0, 0].tolist(), float(stats.replay_replaced)


@pytest.mark.parametrize(
  'alpha,ids,replaced',
  [(0.3, [3, 2], 0), (0.5, [0, 2], 0.5), (0.9, [0, 1], 1)],
)
def test_a_softmax_keeps_shares_of_its_last_own_score(alpha, ids, replaced):
  # The second best has 0.3, so the bar is 0.09, 0.15 and 0.27.
  config = _config('softmax', num_experts=4, num_active=2, replay_alpha=alpha)
  logits = np.log([0.4, 0.3, 0.2, 0.1])
  assert _one(config, logits, [3, 2]) == (ids, replaced)


@pytest.mark.parametrize(
  'alpha,ids', [(0.5, [1, 0]), (0.7, [3, 0]), (0.9, [3, 2])]
)
def test_a_bias_raises_the_bar_of_those_it_holds_back(alpha, ids):
  # Biased 0.4, 0.1, 0.5 and 0.55. In place of expert 2, expert 1 would have
  # needed 1 and has 0.6; expert 0 would have needed 0.5 and has 0.4.
  config = _config('sigmoid', num_experts=4, num_active=2, replay_alpha=alpha)
  scores = np.array([0.4, 0.6, 0.5, 0.2])
  bias = jnp.array([0, -0.5, 0, 0.35])
  actual, _ = _one(config, np.log(scores / (1 - scores)), [1, 0], bias)
  assert actual == ids


@pytest.mark.parametrize('alpha', [0.3, 0.9])
def test_a_closed_expert_that_its_bias_would_have_chosen_is_kept(alpha):
  # Biased sums of the groups: -1, 1.1, 1 and 0.4. The last own expert has 0.5,
  # for which expert 0 would have needed 0.5 - 0.8: less than any score.
  config = _config(
    'sigmoid', num_groups=4, num_active_groups=2, replay_alpha=alpha
  )
  scores = np.array([0.1, 0.1, 0.5, 0.6, 0.55, 0.45, 0.2, 0.14])
  bias = jnp.array([0.8, -2, 0, 0, 0, 0, 0, 0])
  actual, _ = _one(config, np.log(scores / (1 - scores)), [0, 3, 7], bias)
  assert actual == [0, 3, 4]


def test_own_experts_are_kept_in_any_order_whatever_rounding_does():
  # With such a bias scores are rounded to multiples of 1/2.
  config = _config('sigmoid', replay_alpha=0.9999999)
  logits_ZE, _, valid_Z = _inputs()
  bias_E = jnp.full(E, 2.0**22)
  route = functools.partial(
    _route, logits_ZE, config=config, valid_BT=valid_Z, bias_E=bias_E
  )
  _, own_ZA, _ = route()
  _, ids_ZA, _ = route(replay_BTA=own_ZA[:, ::-1].astype(np.uint16))
  np.testing.assert_array_equal(ids_ZA, own_ZA[:, ::-1])


def test_an_alpha_of_0_adds_nothing_to_the_program():
  config, bias_E = ROUTERS['sigmoid']
  logits_ZE, replay_ZA, _ = _inputs()

  def lines(alpha):
    choose = functools.partial(
      router.choose, config=dataclasses.replace(config, replay_alpha=alpha)
    )
    jaxpr = jax.make_jaxpr(lambda x, b, r: choose(x, bias_E=b, replay_BTA=r))(
      logits_ZE, bias_E, replay_ZA
    )
    return len(str(jaxpr).splitlines())

  assert lines(0.0) < lines(0.5)


@pytest.mark.parametrize('alpha', [-0.1, 1.5, float('nan')])
def test_an_alpha_outside_of_0_to_1_is_refused(alpha):
  with pytest.raises(ValueError, match='replay_alpha .*'):
    _config('softmax', replay_alpha=alpha)
