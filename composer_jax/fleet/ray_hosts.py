"""Hosts of a Ray cluster: one actor a host, which runs its supervisor.

Ray places the actors, and replaces one whose node is lost; all else is that of
`--launch=env`: the actor starts this program again with the number of its host,
and the hosts meet in the workdir. Trajectories, weights and checkpoints never
pass through Ray. It is in the extra `ray`.
"""

import contextlib
import os
import signal
import subprocess
from typing import Any

from composer_jax.fleet import hosts as hosts_lib

_PLACED_S = 600.0
_GRACE_S = 30.0


def _ray() -> Any:
  try:
    import ray
  except ImportError as error:
    raise ValueError(
      '--launch=ray needs Ray, which is not installed: pip install -e '
      "'.[ray]' in the checkout, or use --launch=env under another scheduler."
    ) from error
  return ray


class HostActor:
  """The class of the actors: a supervisor in a process of its own."""

  def __init__(self, command: list[str], folder: str, variables: dict):
    self._command, self._folder = command, folder
    self._variables, self._process = variables, None

  def run(self) -> int:
    """Runs the supervisor to its end; Ray calls it again on another node."""
    environment = {**os.environ, **self._variables}
    self._process = subprocess.Popen(
      self._command, cwd=self._folder, env=environment
    )
    return self._process.wait()

  def stop(self) -> None:
    if self._process is not None:
      self._process.send_signal(signal.SIGTERM)
      self._process.wait(_GRACE_S)


@contextlib.contextmanager
def _placed(ray: Any, place: hosts_lib.RayHosts):
  """Yields a placement group, a bundle for each host, and their number."""
  from ray.util import placement_group, remove_placement_group

  if place.topology:
    from ray.util import tpu

    group = tpu.SlicePlacementGroup(
      topology=place.topology, accelerator_version=place.version
    )
    try:
      yield group.placement_group, group.num_bundles
    finally:
      group.shutdown()
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


def run(
  place: hosts_lib.RayHosts, command: list[str], *, is_dry: bool
) -> str | None:
  """Runs a command's supervisors; returns why the trainer failed, or None."""
  ray = _ray()
  from ray.util import scheduling_strategies as strategies

  if is_dry:
    print(f'[fleet] {place}: {" ".join(command)}', flush=True)
    return None
  ray.init(address='auto', ignore_reinit_error=True, log_to_driver=True)
  with _placed(ray, place) as (group, count):
    bundle = group.bundle_specs[0]
    options: dict[str, Any] = dict(
      num_cpus=bundle.get('CPU', 0),
      num_gpus=bundle.get('GPU', 0),
      resources={k: v for k, v in bundle.items() if k not in ('CPU', 'GPU')},
      # The supervisor of a lost node begins anew on another.
      max_restarts=-1,
      max_task_retries=-1,
      max_concurrency=2,
    )
    actors = [
      ray.remote(HostActor)
      .options(
        scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
          placement_group=group, placement_group_bundle_index=index
        ),
        **options,
      )
      .remote(command, os.getcwd(), _variables(place, index, count))
      for index in range(count)
    ]
    codes = [actor.run.remote() for actor in actors]
    try:
      # The first host says how it ended; the others follow it.
      code = ray.get(codes[0])
      if code == 0:
        ray.get(codes)
    finally:
      with contextlib.suppress(ray.exceptions.RayError):
        ray.get([a.stop.remote() for a in actors], timeout=_GRACE_S)
  return None if code == 0 else f'host 0 ended with exit code {code}'


def _variables(
  place: hosts_lib.RayHosts, index: int, count: int
) -> dict[str, str]:
  number, hosts = hosts_lib.VARIABLES[0]
  variables = {number: str(index), hosts: str(count)}
  if place.devices:
    variables[hosts_lib.DEVICES] = str(place.devices)
  return variables
