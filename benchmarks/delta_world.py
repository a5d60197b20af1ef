"""Egress of the trainer and time until 4, 16 and 64 clusters hold a bundle.

Each cluster has an nginx of configs/delta and a subscriber that decodes,
verifies and holds the weights; publisher and subscribers are one process. The
links are simulated (`delta_links`): each nginx reaches the one above it in a
4-ary tree over a link of its own, all of the same bandwidth and round trip. The
bundle is small and the links are slow, so that the two cores that stand for all
clusters matter little; packs are small in proportion.
"""

import contextlib
import os
import pathlib
import tempfile
import threading
import time

import numpy as np

from benchmarks import (
  delta_data,
  delta_links,
  delta_servers,
  delta_sizes,
  interleaved,
)
from composer_jax.delta import chain, chunking, rebuild
from composer_jax.delta import follower as followers
from composer_jax.delta.store import objects as stores

FANOUT = 4
ROUND_TRIP_S = 0.1  # round trip across an ocean
SEND_S = 15.0  # time of the bundle over one link
POLL_S = 0.5  # poll of clusters; each nginx asks at most once a second
# Packs of a bundle, about, and packs in flight at once: nginx gives a pack that
# it is storing to one reader at a time, so a level costs the time of these few.
PACKS, IN_FLIGHT = 40, 4
# Changes of the nginx config: 64 servers run on one machine.
_SMALL = {'worker_processes auto;': 'worker_processes 1;'}


def _policies(arrays: int) -> list[delta_data.Policy]:
  """Returns two policies between which nearly all weights change."""
  rng = np.random.default_rng(0)
  shape = (arrays, 64, 1024)
  masters = np.float32(0.02) * rng.standard_normal(shape, np.float32)
  update = delta_data.adamw(rng, shape, 1e-3)
  return [
    {
      f'layer_{n:02d}/kernel': row
      for n, row in enumerate(step_masters.astype(delta_data.BFLOAT16))
    }
    for step_masters in (masters, masters + update())
  ]


def depth(clusters: int) -> int:
  """Returns the links between the trainer and the farthest cluster."""
  levels, leaves = 1, 1
  while leaves < clusters:
    leaves = leaves * FANOUT + 1
    levels += 1
  return levels


class _Cluster:
  """The receiver of a cluster; `held` says when it had version 1."""

  def __init__(self, url: str):
    self.subscriber = followers.Follower(
      stores.Store(url), delta_sizes.RUN_ID, delta_sizes.key(), threads=1
    )
    self.held = 0.0

  def follow(self, version: int, gives_up: float) -> None:
    while time.perf_counter() < gives_up:
      update = self.subscriber.poll()
      if update is not None and update.version == version:
        self.held = time.perf_counter()
        return
      time.sleep(POLL_S)


def _all_follow(
  clusters: list[_Cluster], version: int, gives_up: float
) -> None:
  threads = [
    threading.Thread(target=c.follow, args=(version, gives_up))
    for c in clusters
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert all(c.held for c in clusters), [c.subscriber.problem for c in clusters]


def _world(
  clusters: int, policies: list[delta_data.Policy], send_s: float
) -> tuple[float, float, float]:
  """Returns egress in bundles, seconds, and the bound of the links."""
  with contextlib.ExitStack() as stack:
    # In memory if possible: real clusters would not share one disk.
    memory = '/dev/shm' if os.path.isdir('/dev/shm') else None
    root = pathlib.Path(
      stack.enter_context(tempfile.TemporaryDirectory(dir=memory))
    )
    network = stack.enter_context(delta_links.network())
    trainer = stores.Store(root / 'trainer')
    publisher = chain.BundleWriter(
      trainer,
      delta_sizes.RUN_ID,
      delta_sizes.key(),
      options=chain.BundleOptions(),
    )
    publisher.publish(delta_sizes.blocks(policies[0]), 0)

    # The trainer's end of its only link, in place of a bucket.
    origin = stack.enter_context(delta_servers.Origin(root / 'trainer'))
    servers: list[delta_servers.Nginx] = []
    for number in range(clusters):
      above = servers[(number - 1) // FANOUT].port if number else origin.port
      link = network.link(above, round_trip_s=ROUND_TRIP_S)
      server = delta_servers.Nginx(f'http://127.0.0.1:{link.port}', _SMALL)
      servers.append(stack.enter_context(server))
    followers = [_Cluster(server.url) for server in servers]
    # The first weights arrive at once; only the step is measured.
    _all_follow(followers, 0, time.perf_counter() + 120)
    info = publisher.publish(delta_sizes.blocks(policies[1]), 1)
    for link in network.links:
      link.bytes_per_s = info.bytes / send_s
      link.bytes_down = 0
    for cluster in followers:
      cluster.held = 0.0
    start = time.perf_counter()
    _all_follow(followers, 1, start + 20 * send_s)
    seconds = max(c.held for c in followers) - start
    bound = send_s + depth(clusters) * ROUND_TRIP_S
    return network.links[0].bytes_down / info.bytes, seconds, bound


def measure(cores: set[int], *, quick: bool) -> None:
  pinned = os.sched_getaffinity(0)
  os.sched_setaffinity(0, cores)
  policies = _policies(4 if quick else 32)
  size = sum(a.nbytes for a in policies[0].values())
  before = chunking.PACK_BYTES, rebuild.RANGE_BYTES, rebuild.IN_FLIGHT
  # With packs of 8 MiB a bundle of 1 TB has hundreds.
  chunking.PACK_BYTES = rebuild.RANGE_BYTES = size // 3 // PACKS
  rebuild.IN_FLIGHT = IN_FLIGHT
  try:
    for clusters in (4,) if quick else (4, 16, 64):
      # One process holds all clusters, and 64 at this rate would fill its
      # cores.
      send_s = 5.0 if quick else SEND_S * max(1, clusters // 16)
      egress, seconds, bound = _world(clusters, policies, send_s)
      note = (
        f'tree of {FANOUT}, depth {depth(clusters)}, '
        f'round trip {1e3 * ROUND_TRIP_S:.0f} ms, bundle {send_s:g} s a link'
      )
      interleaved.report(
        'delta',
        f'egress of the trainer, HTTP included: {clusters} clusters',
        ([egress], []),
        limit=1.0,
        goal='<= 1.05',
        met=lambda ours, _: ours <= 1.05,
        unit='of the bundle',
        note=note,
      )
      interleaved.report(
        'delta',
        f'until all hold a bundle: {clusters} clusters',
        ([seconds], [bound]),
        against='one link, and a round trip for each level',
        limit=bound,
        goal='ratio <= 1.3',
        met=lambda _, ratio: ratio <= 1.3,
        unit='s',
        note=note,
      )
  finally:
    chunking.PACK_BYTES, rebuild.RANGE_BYTES, rebuild.IN_FLIGHT = before
    os.sched_setaffinity(0, pinned)
