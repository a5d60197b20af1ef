"""A catalogue of false records, each of a stated size."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from composer_jax.core import records


@dataclasses.dataclass(frozen=True)
class World:
  """What a lie may be made of.

  Attributes:
    stale_routes: routes_TMA that an older version chooses, by trajectory.
    stale_logprobs: logprobs_T of an older version, by trajectory.
    true_logprobs: logprobs_T of all tokens, context too, by trajectory.
    num_experts: number of experts.
  """

  stale_routes: list[np.ndarray]
  stale_logprobs: list[np.ndarray]
  true_logprobs: list[np.ndarray]
  num_experts: int


# (trajectories, number of the one to change, its world, draws) -> fields.
Change = Callable[..., dict[str, Any]]


def _chosen(ids_TMA, share, rng):
  """Returns a mask of a share of the consumed tokens, at least one."""
  count = max(1, round(share * (len(ids_TMA) - 1)))
  mask_T = np.zeros(len(ids_TMA), bool)
  mask_T[rng.permutation(len(ids_TMA) - 1)[:count]] = True
  return mask_T


def random_routes(all_of, i, world, rng, *, share):
  ids_TMA = all_of[i].expert_ids_TMA.copy()
  mask_T = _chosen(ids_TMA, share, rng)
  drawn = np.argsort(rng.random((*ids_TMA.shape[:2], world.num_experts)), -1)
  drawn_TMA = drawn[..., : ids_TMA.shape[-1]].astype(np.uint16)
  ids_TMA[mask_T] = drawn_TMA[mask_T]
  return {'expert_ids_TMA': ids_TMA}


def missing_routes(all_of, i, world, rng, *, share):
  del world
  ids_TMA = all_of[i].expert_ids_TMA.copy()
  ids_TMA[_chosen(ids_TMA, share, rng)] = records.NO_ROUTE
  return {'expert_ids_TMA': ids_TMA}


def permuted_routes(all_of, i, world, rng):
  del world
  ids_TMA = all_of[i].expert_ids_TMA.copy()
  ids_TMA[:-1] = ids_TMA[rng.permutation(len(ids_TMA) - 1)]
  return {'expert_ids_TMA': ids_TMA}


def shifted_routes(all_of, i, world, rng, *, by):
  del world, rng
  ids_TMA = all_of[i].expert_ids_TMA.copy()
  ids_TMA[:-1] = np.roll(ids_TMA[:-1], by, axis=0)
  return {'expert_ids_TMA': ids_TMA}


def routes_of_other_layers(all_of, i, world, rng):
  del world, rng
  return {'expert_ids_TMA': all_of[i].expert_ids_TMA[:, ::-1].copy()}


def routes_of_another(all_of, i, world, rng):
  del world, rng
  ids_TMA = all_of[i].expert_ids_TMA.copy()
  other_TMA = all_of[(i + 1) % len(all_of)].expert_ids_TMA[:-1]
  count = min(len(ids_TMA) - 1, len(other_TMA))
  ids_TMA[:count] = other_TMA[:count]
  return {'expert_ids_TMA': ids_TMA}


def stale_routes(all_of, i, world, rng):
  del rng
  ids_TMA = all_of[i].expert_ids_TMA.copy()
  ids_TMA[:-1] = world.stale_routes[i][:-1]
  return {'expert_ids_TMA': ids_TMA}


def _logprobs(trajectory, logprobs_T):
  logprobs_T = np.where(trajectory.loss_mask_T, logprobs_T, 0)
  return {'logprobs_T': logprobs_T.astype(np.float32)}


def scaled(all_of, i, world, rng, *, by):
  del world, rng
  return _logprobs(all_of[i], all_of[i].logprobs_T * by)


def moved(all_of, i, world, rng, *, by):
  del world, rng
  return _logprobs(all_of[i], all_of[i].logprobs_T + by)


def noisy(all_of, i, world, rng, *, by):
  del world
  noise_T = by * rng.normal(size=len(all_of[i]))
  return _logprobs(all_of[i], all_of[i].logprobs_T + noise_T)


def stale_logprobs(all_of, i, world, rng):
  del rng
  return _logprobs(all_of[i], world.stale_logprobs[i])


def temperature(all_of, i, world, rng, *, by):
  del world, rng
  return {'temperature': all_of[i].temperature * by}


def relabelled(all_of, i, world, rng, *, by, names=records.VERSIONS):
  del world, rng
  return {name: getattr(all_of[i], name) + np.int32(by) for name in names}


def widened(all_of, i, world, rng, *, is_true):
  """Marks the last two tokens of context as sampled."""
  del rng
  t = all_of[i]
  first = int(np.argmax(t.loss_mask_T))
  mask_T, logprobs_T = t.loss_mask_T.copy(), t.logprobs_T.copy()
  mask_T[first - 2 : first] = True
  if is_true:
    logprobs_T[first - 2 : first] = world.true_logprobs[i][first - 2 : first]
  return {'loss_mask_T': mask_T, 'logprobs_T': logprobs_T}


def trained_logprobs(all_of, i, world, rng, *, noise=0.0):
  noise_T = noise * rng.normal(size=len(all_of[i]))
  return _logprobs(all_of[i], world.true_logprobs[i] + noise_T)


def renumbered_experts(all_of, i, world, rng):
  del rng
  ids_TMA = all_of[i].expert_ids_TMA.copy()
  ids_TMA[:-1] = (ids_TMA[:-1] + 1) % world.num_experts
  return {'expert_ids_TMA': ids_TMA}


def other_context(all_of, i, world, rng, *, share):
  """Replaces a share of the tokens that were not sampled."""
  del world
  t = all_of[i]
  places = np.flatnonzero(~t.loss_mask_T)
  places = rng.permutation(places)[: max(1, round(share * len(places)))]
  tokens_T = t.tokens_T.copy()
  tokens_T[places] = rng.permutation(t.tokens_T)[: len(places)]
  return {'tokens_T': tokens_T}


def hidden(all_of, i, world, rng, *, lie):
  """Another lie, under versions of which no cache can have been."""
  t = all_of[i]
  newest, oldest = t.consumed_version_T.max(), t.consumed_version_T.min()
  names = dict(zip(records.VERSIONS, (newest, oldest - 1, newest), strict=True))
  return lie(all_of, i, world, rng) | {
    name: np.full(len(t), version, np.int32) for name, version in names.items()
  }


def recomputed(all_of, i, world, rng, *, share):
  """Random routes, said to be of the newest weights, which sampled nothing."""
  t = all_of[i]
  newest = max(int(other.consumed_version_T.max()) for other in all_of)
  return random_routes(all_of, i, world, rng, share=share) | {
    'consumed_version_T': np.full(len(t), newest, np.int32)
  }


def narrowed(all_of, i, world, rng):
  """Marks the first half of the sampled tokens as context."""
  del world, rng
  t = all_of[i]
  is_first_T = np.cumsum(t.loss_mask_T) <= t.loss_mask_T.sum() // 2
  return {
    'loss_mask_T': t.loss_mask_T & ~is_first_T,
    'logprobs_T': np.where(is_first_T, 0, t.logprobs_T).astype(np.float32),
  }


def _named(change, **fields):
  return functools.partial(change, **fields) if fields else change


# name -> (change, share of the trajectories that it changes).
CATALOGUE: dict[str, tuple[Change, float]] = {
  **{
    f'{name} routes on {share:.0%} of tokens': (_named(change, share=share), 1)
    for name, change in (('random', random_routes), ('no', missing_routes))
    for share in (0.01, 0.05, 0.2, 1.0)
  },
  **{
    f'{name} in {share:.0%} of trajectories': (change, share)
    for name, change in (
      ('permuted routes', permuted_routes),
      ('routes a token late', _named(shifted_routes, by=1)),
      ('routes a token early', _named(shifted_routes, by=-1)),
      ('routes of other layers', routes_of_other_layers),
      ('routes of another trajectory', routes_of_another),
      ('routes of a stale version', stale_routes),
      ('routes of experts renumbered', renumbered_experts),
      ('random routes', _named(random_routes, share=1.0)),
      ('no routes', _named(missing_routes, share=1.0)),
      ('log-probabilities times 0.5', _named(scaled, by=0.5)),
      ('log-probabilities of a stale version', stale_logprobs),
      ('log-probabilities of the trained version', trained_logprobs),
      *(
        (
          f'log-probabilities of the trained version and noise of {noise}',
          _named(trained_logprobs, noise=noise),
        )
        for noise in (3e-5, 3e-4)
      ),
      *(
        (f'{size:.0%} of context replaced', _named(other_context, share=size))
        for size in (0.05, 0.2)
      ),
      ('a temperature of 1.25 times', _named(temperature, by=1.25)),
      ('masks of half of the sampled tokens', narrowed),
      (
        'random routes on 10% of tokens, said to be computed anew',
        _named(recomputed, share=0.1),
      ),
      (
        'versions of no cache over log-probabilities times 0.5',
        _named(hidden, lie=_named(scaled, by=0.5)),
      ),
      (
        'versions of no cache over random routes',
        _named(hidden, lie=_named(random_routes, share=1.0)),
      ),
    )
    for share in (0.01, 0.05, 0.2, 1.0)
  },
  **{
    f'log-probabilities {name} {size}': (_named(change, by=size), 1)
    for name, change, sizes in (
      ('times', scaled, (0.9, 0.99, 1.05)),
      ('moved by', moved, (0.3, -0.05, 0.01)),
      ('with noise of', noisy, (0.3, 0.05, 0.02)),
    )
    for size in sizes
  },
  'a temperature of 0.97 times': (_named(temperature, by=0.97), 1),
  'newer versions': (_named(relabelled, by=1), 1),
  'older versions': (_named(relabelled, by=-1), 1),
  'older sampling versions': (
    _named(relabelled, by=-1, names=('policy_version_T', 'context_version_T')),
    1,
  ),
  'masks over context': (_named(widened, is_true=False), 1),
  'masks over context, with its log-probabilities': (
    _named(widened, is_true=True),
    1,
  ),
}


def tell(
  groups: list[records.Group],
  name: str,
  world: World,
  seed: int,
  *,
  only: int | None = None,
) -> list[records.Group]:
  """Returns the groups with one lie told in a share of their trajectories.

  Or in `only` one of them, by its number.
  """
  change, share = CATALOGUE[name]
  rng = np.random.default_rng(seed)
  all_of = [r.trajectories[0] for g in groups for r in g.rollouts]
  count = max(1, round(share * len(all_of)))
  told = set(rng.permutation(len(all_of))[:count].tolist())
  if only is not None:
    told = {only}
  changed = iter(
    dataclasses.replace(t, **change(all_of, i, world, rng)) if i in told else t
    for i, t in enumerate(all_of)
  )
  return [
    dataclasses.replace(
      g,
      rollouts=tuple(
        dataclasses.replace(r, trajectories=(next(changed),))
        for r in g.rollouts
      ),
    )
    for g in groups
  ]
