"""Rollout workers in the actors of a Ray cluster.

Each worker has a placement group of its own, so that it begins as soon as a
node has room for it; what waits for room is the demand by which a cluster
scales itself. An actor whose node is lost begins anew on another one. The run's
key passes through Ray; weights, trajectories and checkpoints do not.
"""

import contextlib
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

from composer_jax.fleet import crew, joining
from composer_jax.pipeline import controller

_GRACE_S = 30.0
# Where the cluster is, for sandboxes of the worker.
_ADDRESS = 'RAY_ADDRESS'


class WorkerActor:
  """The class of the actors: a worker in a process of its own."""

  def __init__(self, command: list[str], folder: str, key: str):
    self._command, self._folder, self._key = command, folder, key
    self._process: subprocess.Popen | None = None
    self._is_told = False

  def run(self) -> int:
    """Runs the worker to its end; Ray calls it again on another node."""
    import ray

    if self._is_told:
      return 0
    address = ray.get_runtime_context().gcs_address
    env = os.environ | {controller.PARENT: str(os.getpid()), _ADDRESS: address}
    with tempfile.TemporaryDirectory() as folder:
      key = pathlib.Path(folder) / joining.KEY
      key.touch(mode=0o600)
      key.write_text(self._key)
      command = [*self._command, f'--key={key}']
      self._process = subprocess.Popen(command, cwd=self._folder, env=env)
      return self._process.wait()

  def terminate(self) -> None:
    self._is_told = True
    if self._process is not None:
      self._process.terminate()


class _Placed:
  """A worker in an actor, of which the crew knows no more than of a process."""

  def __init__(self, ray: Any, actor: Any, release: Callable[[], None]):
    self._ray, self._actor, self._release = ray, actor, release
    self._end = actor.run.remote()
    self._code: int | None = None

  def poll(self) -> int | None:
    if self._code is None:
      done, _ = self._ray.wait([self._end], timeout=0)
      if done:
        try:
          self._code = int(self._ray.get(self._end))
        except self._ray.exceptions.RayError:
          self._code = 1
        self._release()
    return self._code

  def terminate(self) -> None:
    with contextlib.suppress(self._ray.exceptions.RayError):
      told = self._actor.terminate.remote()
      # One that waits for room has nothing to drain.
      if not self._ray.wait([told], timeout=_GRACE_S)[0]:
        self._code = 0
        self._release()


@contextlib.contextmanager
def _joined(address: str) -> Any:
  try:
    import ray
  except ImportError as error:
    raise ValueError(
      f'--ray={address} needs Ray, which is not installed: pip install -e '
      "'.[ray]' in the checkout, or leave out --ray for workers here."
    ) from error
  os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
  try:
    ray.init(address=address, ignore_reinit_error=True, log_to_driver=True)
  except (ConnectionError, RuntimeError) as error:
    raise ValueError(
      f'--ray={address} names no Ray cluster that answers ({error!s:.200}). '
      'Start one with `ray start --head`, or name its address.'
    ) from error
  try:
    yield ray
  finally:
    ray.shutdown()


def _bundle(ray: Any, devices: int) -> dict[str, float]:
  """Returns what a node must have free for one worker."""
  bundle: dict[str, float] = {'CPU': 1}
  if ray.cluster_resources().get('GPU'):
    bundle['GPU'] = devices
  return bundle


@contextlib.contextmanager
def starting(address: str, command: list[str], key: str, devices: int) -> Any:
  """Yields a function that starts a worker, and a description of the cluster.

  Args:
    address: 'auto', or address of the cluster.
    command: command of a worker without a key, in this folder on every node.
    key: the run's key.
    devices: accelerators of one worker.

  Raises:
    ValueError: Ray is not installed, or no cluster answers.
  """
  with _joined(address) as ray:
    from ray.util import placement_group, remove_placement_group
    from ray.util import scheduling_strategies as strategies

    bundle = _bundle(ray, devices)

    def start(number: int) -> crew.WorkerProcess:
      group = placement_group([bundle], name=f'worker-{number}')
      where = strategies.PlacementGroupSchedulingStrategy(group, 0)
      options: dict[str, Any] = dict(
        num_cpus=bundle['CPU'],
        num_gpus=bundle.get('GPU', 0),
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=2,  # For `terminate`.
        scheduling_strategy=where,
      )
      actor = ray.remote(**options)(WorkerActor).remote(
        command, os.getcwd(), key
      )

      def release() -> None:
        ray.kill(actor)
        remove_placement_group(group)

      return _Placed(ray, actor, release)

    text = f'{bundle} for each worker of a cluster with '
    yield start, text + str(ray.cluster_resources())
