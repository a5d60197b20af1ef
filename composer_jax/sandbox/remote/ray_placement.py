"""A sandbox spread over the actors of a Ray cluster.

Any level runs in an actor, which gets the same messages as the guest of a micro
VM and is trusted as little. Ray is in the extra `fleet`.
"""

import concurrent.futures
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from composer_jax.sandbox.remote import messages, protocol
from composer_jax.sandbox.remote import renewed as remote_renewed

_START_S = 120.0  # a worker process of Ray has to start first
_CLOSE_S = 10.0


def _import_ray():
  try:
    import ray
  except ImportError as error:
    raise ValueError(
      'a sandbox on Ray needs the package ray: pip install '
      "'composer_jax[fleet]'."
    ) from error
  return ray


class SandboxActor:
  """The class of the actors: a sandbox that answers messages."""

  def __init__(self, level: str, limits: base.Limits, options: dict[str, Any]):
    self._sandbox = sandbox_open.open_sandbox(level, limits, **options)
    self._server = protocol.SandboxServer(self._sandbox)

  def answer(self, header: dict, parts: tuple[bytes, ...]):
    return self._server.answer(header, parts)

  def close(self) -> None:
    self._server.close()
    self._sandbox.close()


class ActorTransport:
  """Asks one actor; an actor that does not answer in time is killed."""

  def __init__(self, ray: Any, actor: Any):
    self._ray, self._actor = ray, actor

  def ask(
    self, header: dict, parts: Sequence[bytes], timeout_s: float
  ) -> messages.Message:
    try:
      answer = self._actor.answer.remote(header, tuple(parts))
      return self._ray.get(answer, timeout=timeout_s)
    except self._ray.exceptions.GetTimeoutError as error:
      self._ray.kill(self._actor)
      raise base.SandboxLost('the actor gave no answer in time') from error
    except self._ray.exceptions.RayError as error:
      reason = str(error).strip().splitlines()[-1][-500:]
      raise base.SandboxLost(f'the actor was lost: {reason}') from error

  def close(self) -> None:
    """Ends the actor and every process that its sandbox started."""
    try:
      self._ray.get(self._actor.close.remote(), timeout=_CLOSE_S)
    except self._ray.exceptions.RayError:
      pass  # killed in any case
    finally:
      self._ray.kill(self._actor)


class RaySandbox(base.Closing):
  """Sends calls and new boxes to actors in turn.

  When an actor dies, what ran there returns 'infrastructure'; its next call or
  box starts another actor.
  """

  def __init__(
    self,
    level: str,
    limits: base.Limits,
    *,
    actors: int = 1,
    size: int = 1,
    num_cpus: float = 1.0,
    images: pathlib.Path | None = None,
    packages: Sequence[str] = (),
    allow_unsafe: bool = False,
  ):
    """Opens a sandbox in each actor; starts Ray here if none was joined.

    Args:
      level: preference of `open.open_sandbox` in each actor.
      limits: limits of each call and program.
      actors: number of actors.
      size: number of calls at a time in each actor.
      num_cpus: processors that Ray reserves for each actor.
      images: folder of images, at the same path on all machines.
      packages: distributions installed there that boxes can import.
      allow_unsafe: true to accept 'rlimits', for trusted code only.

    Raises:
      ValueError: Ray is not installed, or `actors` is less than 1.
      base.SandboxLost: an actor cannot open its sandbox.
    """
    if actors < 1:
      raise ValueError(f'actors ({actors}) must be at least 1.')
    ray = _import_ray()
    if not ray.is_initialized():
      # Ray reports its use to its makers by default.
      os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
      ray.init(include_dashboard=False, log_to_driver=False)
    options = {
        'size': size, 'images': images and images.absolute(),
        'packages': packages, 'allow_unsafe': allow_unsafe,
    }  # fmt: skip
    # One more thread than calls: boxes are read while programs run.
    resources: Any = {'num_cpus': num_cpus, 'max_concurrency': size + 1}
    remote_class = ray.remote(**resources)(SandboxActor)

    def begin() -> protocol.RemoteSandbox:
      transport = ActorTransport(
        ray, remote_class.remote(level, limits, options)
      )
      try:
        # Its first answer comes when the sandbox is open.
        return protocol.RemoteSandbox(
          transport, limits, size=size, grace_s=_START_S
        )
      except base.SandboxLost:
        transport.close()
        raise

    def renewed(_) -> remote_renewed.RenewedSandbox:
      return remote_renewed.RenewedSandbox(begin, 'An actor with a sandbox')

    with concurrent.futures.ThreadPoolExecutor(actors) as threads:
      self._seats = list(threads.map(renewed, range(actors)))
    self._turns = itertools.count()
    self.level = self._seats[0].level
    self.about = {**self._seats[0].about, 'actors': actors}

  def _next(self) -> remote_renewed.RenewedSandbox:
    return self._seats[next(self._turns) % len(self._seats)]

  def call(
    self,
    files: dict[str, str],
    module: str,
    function: str,
    arguments: list[list],
  ) -> base.Result:
    """See `base.Sandbox`."""
    return self._next().call(files, module, function, arguments)

  def open(
    self, image: str, changes: Mapping[str, bytes | None] | None = None
  ) -> protocol.RemoteBox:
    """See `base.Sandbox`."""
    return self._next().open(image, changes)

  def close(self) -> None:
    """Ends the actors, not Ray; may be called twice."""
    for seat in self._seats:
      seat.close()
