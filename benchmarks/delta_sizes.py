"""Bytes of bundles beside other ways and the entropy bounds, case by case."""

import dataclasses
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks import delta_bounds, delta_data, delta_peers, interleaved
from composer_jax.delta import (
  identity,
  manifest,
  publish,
  signing,
  subscribe,
  visibility,
)
from composer_jax.delta import store as stores

RUN_ID = 'run'
LAG = 8
# Tiers of a publisher, by the name of what it makes.
TIERS = {
  'small': dict(tier='small'),
  'fast': dict(tier='fast'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundles:
  """What one publisher made of a case.

  Attributes:
    infos: of every version, the first a keyframe.
    blobs: bytes of the packs of each, without its manifest.
    publish_s: CPU seconds of each, its skip and keyframe included.
    poll_s: of a receiver that follows.
    catch_up: bytes that a receiver eight versions behind fetched; 0 where the
      case is too short.
  """

  infos: list[publish.BundleInfo]
  blobs: list[int]
  publish_s: list[float]
  poll_s: list[float]
  catch_up: int


def key() -> signing.Hmac:
  return signing.Hmac(b'0123456789abcdef')


def blocks(policy: delta_data.Policy) -> Iterator[identity.Block]:
  for name, array in policy.items():
    ends = tuple((0, length) for length in array.shape)
    yield identity.Block(name, str(array.dtype), array.shape, ends, array)


def head(store: stores.Store) -> manifest.Pointer:
  found = store.read_pointer(RUN_ID)
  assert found is not None
  return manifest.unseal(found[0], key(), RUN_ID)


def bundles(policies: Sequence[delta_data.Policy], **options) -> Bundles:
  """Publishes and follows a case; every version is compared bit for bit."""
  made = Bundles(infos=[], blobs=[], publish_s=[], poll_s=[], catch_up=0)
  with tempfile.TemporaryDirectory() as root:
    store = stores.Store(pathlib.Path(root))
    publisher = publish.Publisher(
      store, RUN_ID, key(), skip_levels=(LAG,), threads=1, **options
    )
    follower, late = (
      subscribe.Subscriber(store, RUN_ID, key(), threads=1) for _ in range(2)
    )
    for version, policy in enumerate(policies):
      start = time.process_time()
      info = publisher.publish(blocks(policy), version)
      made.publish_s.append(time.process_time() - start)
      made.infos.append(info)
      made.blobs.append(info.bytes - len(store.get(head(store).manifest)))
      made.poll_s.append(_check(follower, policy))
      if version == 0:
        _check(late, policy)
      if version == LAG:
        before = store.traffic.bytes_read
        _check(late, policy)
        made = dataclasses.replace(
          made, catch_up=store.traffic.bytes_read - before
        )
  return made


def _check(
  subscriber: subscribe.Subscriber, policy: delta_data.Policy
) -> float:
  """Polls, compares, and returns the CPU seconds of the poll."""
  start = time.process_time()
  update = subscriber.poll()
  seconds = time.process_time() - start
  assert update is not None, subscriber.problem
  found = update.weights.arrays()
  for name, array in policy.items():
    same = delta_bounds.bits_of(found[name]) == delta_bounds.bits_of(array)
    assert same.all(), name
  return seconds


def _xor_goal(share: float) -> tuple[str, float | None]:
  """What a bundle may be of XOR+zstd-1, by the share that changed."""
  if 0.01 <= share <= 0.055:
    return '<= 0.33 of the peer', 0.33
  if 0.055 < share <= 0.25:
    return '<= 0.40 of the peer', 0.40
  return 'none at this share', None


def _line(
  case: str,
  ours: list[float],
  peer: list[float],
  limit: float,
  goal: str,
  met: Callable[[float, float], bool] = lambda ours, ratio: True,
) -> None:
  interleaved.report(
    'delta', case, (ours, peer), limit=limit, goal=goal, met=met, unit='x'
  )


def measure(
  case: delta_data.Case, *, peers_on: int, full_goal: float
) -> dict[str, float]:
  """Prints the lines of a case; returns full over bundle bytes by tier.

  Args:
    case: its policies, the first of which is the base of all.
    peers_on: so many deltas are looked at.
    full_goal: what full bytes over bundle bytes must be; 0 for no such goal.
  """
  pairs = list(zip(case.policies, case.policies[1:], strict=False))
  bounds = [delta_bounds.of_policy(*pair) for pair in pairs]
  counts = [delta_bounds.changed(*pair) for pair in pairs]
  share = statistics.median(n / total for n, total in counts)
  full = sum(a.nbytes for a in case.policies[0].values())
  what = f'{case.label}, {share:.2%} changed'
  limit = statistics.median(full / e for _, e in bounds)
  made = {
    name: bundles(case.policies, **options) for name, options in TIERS.items()
  }
  stop = min(LAG, len(pairs))
  last = slice(stop - peers_on, stop)
  ratios = {
    name: [full / info.bytes for info in found.infos[1:]][last]
    for name, found in made.items()
  }
  others = {
    name: [full / delta_peers.policy_bytes(peer, *pair) for pair in pairs[last]]
    for name, peer in delta_peers.SIZED.items()
  }
  words, most = _xor_goal(share)
  for name, peer in others.items():
    is_xor = name == 'XOR+zstd-1'
    _line(
      f'{what}: full bytes / bundle bytes, small; peer {name}',
      ratios['small'],
      peer,
      limit,
      words if is_xor else 'none',
      (lambda _, ratio: most is None or 1 / ratio <= most)
      if is_xor
      else (lambda _, ratio: True),
    )
  _line(
    f'{what}: full bytes / bundle bytes, fast; peer XOR+zstd-1',
    ratios['fast'],
    others['XOR+zstd-1'],
    limit,
    'none',
  )
  if full_goal:
    _line(
      f'{what}: full bytes / bundle bytes, small',
      ratios['small'],
      [],
      limit,
      f'>= {full_goal:g}',
      lambda ours, _: ours >= full_goal,
    )
  for name, found in made.items():
    for part, sizes in (
      ('bundle', [info.bytes for info in found.infos[1:]]),
      ('blobs', found.blobs[1:]),
    ):
      over = [s / e for s, (_, e) in zip(sizes, bounds, strict=True)]
      has_goal = name == 'small' and part == 'bundle'
      _line(
        f'{what}: {part} bytes / bound E, {name}',
        over[last],
        [],
        1.0,
        '<= 1.06' if has_goal else 'none',
        lambda ours, _: not has_goal or ours <= 1.06,  # noqa: B023
      )
    for what_s, seconds in (
      ('publish: encoded, decoded again, compared, written', found.publish_s),
      ('poll: read, decoded, verified', found.poll_s),
    ):
      interleaved.report(
        'delta',
        f'{what}: {what_s}; {name}, the whole of it on one core',
        ([full / 1e9 / s for s in seconds[1:][last]], []),
        limit=None,
        goal='none',
        met=lambda *_: True,
        unit='GB/s',
      )
  over_m = [m / e for m, e in bounds]
  whole = [
    delta_bounds.of_whole(*pair) / e
    for pair, (_, e) in zip(pairs[last], bounds[last], strict=True)
  ]
  _line(f'{what}: bound M / bound E', over_m[last], [], 1.0, 'none')
  _line(f'{what}: E of all arrays together / E', whole, [], 1.0, 'none')
  found = made['small']
  if found.catch_up:
    singles = sum(info.bytes for info in found.infos[1 : LAG + 1])
    _line(
      f'{what}: bytes to catch up at lag {LAG} / sum of the singles',
      [found.catch_up / singles],
      [],
      0.5,
      '<= 0.55',
      lambda ours, _: ours <= 0.55,
    )
  return {name: statistics.median(values) for name, values in ratios.items()}


def law(case: delta_data.Case) -> None:
  """Share of bf16 weights that change, predicted from masters and update."""
  if case.masters is None:
    return
  before, after = case.masters
  found = delta_data.cast_share(case.masters)
  update = after - before
  rms = float(np.sqrt(np.mean(np.square(update, dtype=np.float64))))
  for words, given in (('each update', update), ('their rms alone', rms)):
    predicted = visibility.expected_share(before, given, delta_data.BFLOAT16)
    # Of masters that have left the grid, and their updates.
    is_law = words == 'each update' and not case.is_cold
    interleaved.report(
      'delta',
      f'{case.label}, updates of rms {rms:.3g}: share changed in per cent, '
      f'predicted from {words}; peer counted',
      ([100 * predicted], [100 * found]),
      limit=None,
      goal='within 5 % of the count' if is_law else 'none',
      met=lambda _, ratio: not is_law or abs(ratio - 1) <= 0.05,  # noqa: B023
      unit='%',
    )


def quantised(case: delta_data.Case) -> None:
  """Changed codes of receivers that hold fewer bits, from the same masters."""
  assert case.masters is not None
  before, after = case.masters
  bf16 = delta_data.cast_share(case.masters)
  ways = {
    'fp8 e4m3, scales of powers of two': (
      lambda m: delta_data.fp8(m, powers_of_two=True),
      0.11,
    ),
    'fp8 e4m3, float32 scales': (
      lambda m: delta_data.fp8(m, powers_of_two=False),
      None,
    ),
    'int4 in groups of 32, bf16 scales': (delta_data.int4, 0.01),
  }
  for name, (quantise, most) in ways.items():
    codes, scales = delta_data.differing(quantise(before), quantise(after))
    interleaved.report(
      'delta',
      f'{case.label}: codes changed of {name} in per cent (of the scales '
      f'{scales:.3%}); peer bf16',
      ([100 * codes], [100 * bf16]),
      limit=None,
      goal='none' if most is None else f'<= {most} of the peer',
      met=lambda _, ratio: most is None or ratio <= most,  # noqa: B023
      unit='%',
    )
