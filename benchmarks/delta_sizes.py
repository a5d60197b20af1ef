"""Bytes of bundles beside other ways and the entropy bounds, case by case."""

import dataclasses
import functools
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks import delta_bounds, delta_data, delta_peers, interleaved
from benchmarks import delta_visibility as visibility
from composer_jax.delta import chain
from composer_jax.delta import follower as followers
from composer_jax.delta.format import identity, keys, manifest
from composer_jax.delta.store import objects as stores

RUN_ID = 'run'
# Options of a publisher, by the name of the bundles that it makes.
TIERS = {
  'small': dict(tier='small'),
  'fast': dict(tier='fast'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundles:
  """The bundles of a case by one publisher, one entry a version.

  Attributes:
    infos: the publisher's record of each version, the first a keyframe.
    blobs: bytes of each version's packs, without its manifest.
    publish_s: CPU seconds to publish each, its keyframe included.
    poll_s: CPU seconds of each poll by a receiver that follows.
  """

  infos: list[chain.BundleInfo]
  blobs: list[int]
  publish_s: list[float]
  poll_s: list[float]


def key() -> keys.Hmac:
  return keys.Hmac(b'0123456789abcdef')


def blocks(policy: delta_data.Policy) -> Iterator[identity.Block]:
  for name, array in policy.items():
    ends = tuple((0, length) for length in array.shape)
    yield identity.Block(name, str(array.dtype), array.shape, ends, array)


def head(store: stores.Store) -> manifest.Pointer:
  pointer = store.read_pointer(RUN_ID)
  assert pointer is not None
  return manifest.unseal(pointer[0], key(), RUN_ID)


def bundles(policies: Sequence[delta_data.Policy], **options) -> Bundles:
  """Publishes and follows a case; every version is compared bit for bit."""
  published = Bundles(infos=[], blobs=[], publish_s=[], poll_s=[])
  with tempfile.TemporaryDirectory() as root:
    store = stores.Store(pathlib.Path(root))
    bundling = chain.BundleOptions(threads=1, **options)
    publisher = chain.BundleWriter(store, RUN_ID, key(), options=bundling)
    follower = followers.Follower(store, RUN_ID, key(), threads=1)
    for version, policy in enumerate(policies):
      start = time.process_time()
      info = publisher.publish(blocks(policy), version)
      published.publish_s.append(time.process_time() - start)
      published.infos.append(info)
      published.blobs.append(info.bytes - head(store).head.bytes)
      published.poll_s.append(_check(follower, policy))
  return published


def _check(follower: followers.Follower, policy: delta_data.Policy) -> float:
  """Polls, compares, and returns the CPU seconds of the poll."""
  start = time.process_time()
  update = follower.poll()
  seconds = time.process_time() - start
  assert update is not None, follower.problem
  arrays = update.arrays()
  for name, array in policy.items():
    equal = delta_bounds.bits_of(arrays[name]) == delta_bounds.bits_of(array)
    assert equal.all(), name
  return seconds


def _xor_goal(share: float) -> float | None:
  """Returns bundle over XOR+zstd-1 bytes at most."""
  if 0.01 <= share <= 0.055:
    return 0.33
  return 0.40 if 0.055 < share <= 0.25 else None


def _line(
  case: str,
  ours: list[float],
  peer: list[float] | None = None,
  *,
  against: str = '',
  limit: float = 1.0,
  goal: str = 'none',
  met: Callable[[float, float], bool] = lambda ours, ratio: True,
  unit: str = 'of the bound',
) -> None:
  interleaved.report(
    'delta',
    case,
    (ours, peer or []),
    against=against,
    limit=limit,
    goal=goal,
    met=met,
    unit=unit,
  )


def measure(
  case: delta_data.Case, *, peers_on: int, full_goal: float
) -> dict[str, float]:
  """Prints the lines of a case; returns full over bundle bytes by tier.

  Args:
    case: consecutive policies, each the base of the next.
    peers_on: number of deltas that are compared with the peers.
    full_goal: least full bytes over bundle bytes; 0 for no such goal.
  """
  pairs = list(zip(case.policies, case.policies[1:], strict=False))
  bounds = [delta_bounds.of_policy(*pair) for pair in pairs]
  counts = [delta_bounds.changed(*pair) for pair in pairs]
  share = statistics.median(n / total for n, total in counts)
  full = sum(a.nbytes for a in case.policies[0].values())
  what = f'{case.label}, {share:.2%} changed'
  limit = statistics.median(full / e for _, e in bounds)
  by_tier = {
    name: bundles(case.policies, **options) for name, options in TIERS.items()
  }
  stop = min(8, len(pairs))
  last_steps = slice(stop - peers_on, stop)
  ratios = {
    name: [full / info.bytes for info in tier_bundles.infos[1:]][last_steps]
    for name, tier_bundles in by_tier.items()
  }
  peer_ratios = {
    name: [
      full / delta_peers.policy_bytes(peer, *pair) for pair in pairs[last_steps]
    ]
    for name, peer in delta_peers.SIZED.items()
  }
  line_of_size = functools.partial(_line, limit=limit, unit='times smaller')
  for name, peer in peer_ratios.items():
    most = _xor_goal(share) if name == 'XOR+zstd-1' else None
    line_of_size(
      f'size of small bundles: {what}',
      ratios['small'],
      peer,
      against=name,
      goal=f'ratio >= {1 / most:.3g}' if most else 'none',
      met=lambda _, ratio, most=most: most is None or 1 / ratio <= most,
    )
  line_of_size(
    f'size of fast bundles: {what}',
    ratios['fast'],
    peer_ratios['XOR+zstd-1'],
    against='XOR+zstd-1',
  )
  if full_goal:
    line_of_size(
      f'size of small bundles: {what}',
      ratios['small'],
      goal=f'>= {full_goal:g} times smaller',
      met=lambda ours, _: ours >= full_goal,
    )
  for name, tier_bundles in by_tier.items():
    for part, sizes in (
      ('bundle', [info.bytes for info in tier_bundles.infos[1:]]),
      ('blobs', tier_bundles.blobs[1:]),
    ):
      over = [s / e for s, (_, e) in zip(sizes, bounds, strict=True)]
      has_goal = name == 'small' and part == 'bundle'
      _line(
        f'{part} over bound E, {name}: {what}',
        over[last_steps],
        goal='<= 1.06' if has_goal else 'none',
        met=lambda ours, _: not has_goal or ours <= 1.06,  # noqa: B023
      )
    for action, note, seconds in (
      (
        'publish',
        'encoded, decoded again, compared, written',
        tier_bundles.publish_s,
      ),
      ('poll', 'read, decoded, verified', tier_bundles.poll_s),
    ):
      interleaved.report(
        'delta',
        f'{action}, {name}: {what}',
        ([full / 1e9 / s for s in seconds[1:][last_steps]], []),
        limit=None,
        goal='none',
        met=lambda *_: True,
        unit='GB/s',
        note=note,
      )
  over_m = [m / e for m, e in bounds]
  whole_ratios = [
    delta_bounds.of_whole(*pair) / e
    for pair, (_, e) in zip(pairs[last_steps], bounds[last_steps], strict=True)
  ]
  _line(f'bound M over bound E: {what}', over_m[last_steps])
  _line(f'E of all arrays together over E: {what}', whole_ratios)
  return {name: statistics.median(values) for name, values in ratios.items()}


def law(case: delta_data.Case) -> None:
  """Reports the share of bf16 weights that change, beside its prediction."""
  if case.masters is None:
    return
  before, after = case.masters
  share = delta_data.cast_share(case.masters)
  update = after - before
  rms = float(np.sqrt(np.mean(np.square(update, dtype=np.float64))))
  for words, update_model in (
    ('each update', update),
    ('their rms', rms),
  ):
    predicted = visibility.expected_share(
      before, update_model, delta_data.BFLOAT16
    )
    # Only masters that have left the grid of bfloat16.
    is_law = words == 'each update' and not case.is_cold
    interleaved.report(
      'delta',
      f'share changed, predicted from {words}: {case.label}',
      ([100 * predicted], [100 * share]),
      against='the share as counted',
      limit=None,
      goal='within 5 % of the count' if is_law else 'none',
      met=lambda _, ratio: not is_law or abs(ratio - 1) <= 0.05,  # noqa: B023
      unit='%',
      note=f'updates of rms {rms:.3g}',
    )


def quantised(case: delta_data.Case) -> None:
  """Reports the share of changed codes in receivers that hold fewer bits."""
  assert case.masters is not None
  before, after = case.masters
  bf16 = delta_data.cast_share(case.masters)
  ways = {
    'fp8 with scales of powers of two': (
      lambda m: delta_data.fp8(m, powers_of_two=True),
      0.11,
    ),
    'fp8 with float32 scales': (
      lambda m: delta_data.fp8(m, powers_of_two=False),
      None,
    ),
    'int4 in groups of 32': (delta_data.int4, 0.01),
  }
  for name, (quantise, goal) in ways.items():
    codes, scales = delta_data.differing(quantise(before), quantise(after))
    interleaved.report(
      'delta',
      f'codes changed, {name}: {case.label}',
      ([100 * codes], [100 * bf16]),
      against='weights changed in bf16',
      limit=None,
      goal='none' if goal is None else f'ratio <= {goal}',
      met=lambda _, ratio: goal is None or ratio <= goal,  # noqa: B023
      unit='%',
      note=f'{scales:.3%} of the scales change',
    )
