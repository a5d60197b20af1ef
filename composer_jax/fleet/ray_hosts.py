"""Hosts of a Ray cluster: one actor a host, which runs its supervisor.

Ray places the actors, and replaces one whose node is lost; all else is that of
`--launch=env`: the actor starts this program again with the number of its host,
and the hosts meet in the workdir. Trajectories, weights and checkpoints never
pass through Ray. It is in the extra `ray`.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from typing import Any

from composer_jax.fleet import hosts as hosts_lib
from composer_jax.pipeline import controller

_PLACED_S = 600.0
_GRACE_S = 30.0


class HostActor:
  """The class of the actors: a supervisor in a process of its own."""

  def __init__(self, command: list[str], folder: str, variables: dict):
    self._command, self._folder, self._variables = command, folder, variables
    self._process: subprocess.Popen | None = None

  def run(self) -> int:
    """Runs the supervisor to its end; Ray calls it again on another node."""
    parent = {controller.PARENT: str(os.getpid())}
    env = {**os.environ, **self._variables, **parent}
    process = subprocess.Popen(self._command, cwd=self._folder, env=env)
    self._process = process
    return process.wait()

  def stop(self) -> None:
    if self._process is not None:
      self._process.terminate()
      self._process.wait(_GRACE_S)


@contextlib.contextmanager
def _placed(place: hosts_lib.Hosts) -> Iterator[tuple[Any, int]]:
  """Yields a placement group and the number of its bundles, one a host."""
  import ray
  from ray.util import placement_group, remove_placement_group, tpu

  if place.slice:
    part = tpu.SlicePlacementGroup(*place.slice)
    try:
      yield part.placement_group, part.num_bundles
    finally:
      part.shutdown()
    return
  bundle: dict[str, float] = {'CPU': 1}
  if ray.cluster_resources().get('GPU'):
    bundle['GPU'] = place.devices or 1
  # One host each: two trainers would take the same devices.
  group = placement_group([bundle] * place.count, strategy='STRICT_SPREAD')
  try:
    if not group.wait(_PLACED_S):
      raise ValueError(
        f'The Ray cluster has no {place.count} nodes with {bundle} free each '
        f'within {_PLACED_S:g} s; it has {ray.cluster_resources()}. Add nodes, '
        'or ask for fewer with --launch=ray:N.'
      )
    yield group, place.count
  finally:
    remove_placement_group(group)


def run(place: hosts_lib.Hosts, command: list[str]) -> str | None:
  """Runs a command's supervisors; returns why the trainer failed, or None."""
  try:
    import ray
    from ray.util import scheduling_strategies as strategies
  except ImportError as error:
    raise ValueError(
      '--launch=ray needs Ray, which is not installed: pip install -e '
      "'.[ray]' in the checkout, or use --launch=env under another scheduler."
    ) from error
  ray.init(address='auto', ignore_reinit_error=True)
  with _placed(place) as (group, count):
    others = dict(group.bundle_specs[0])
    options: dict[str, Any] = dict(
      num_cpus=others.pop('CPU', 0),
      num_gpus=others.pop('GPU', 0),
      resources=others,
      # The supervisor of a lost node begins anew on another.
      max_restarts=-1,
      max_task_retries=-1,
      max_concurrency=2,  # For `stop`.
    )
    actor: Any = ray.remote(**options)(HostActor)
    actors = []
    for index in range(count):
      where = strategies.PlacementGroupSchedulingStrategy(group, index)
      number, hosts = hosts_lib.VARIABLES[0]
      variables = {number: str(index), hosts: str(count)}
      if place.devices and not options['num_gpus']:
        variables[hosts_lib.DEVICES] = str(place.devices)
      placed = actor.options(scheduling_strategy=where)
      actors.append(placed.remote(command, os.getcwd(), variables))
    codes = [a.run.remote() for a in actors]
    try:
      # The first host says how the trainer ended; the others follow it.
      code = ray.get(codes[0])
      if code == 0:
        ray.get(codes)
    finally:
      with contextlib.suppress(ray.exceptions.RayError):
        ray.get([a.stop.remote() for a in actors], timeout=_GRACE_S)
  return None if code == 0 else f'host 0 ended with exit code {code}'
