"""A sandbox in actors of a Ray cluster, on as many nodes as there are.

Any level runs in the actor, which gets the same messages as the guest of a
micro VM and is trusted as little. Ray is in the extra `ray`.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

from composer_jax.sandbox import base
from composer_jax.sandbox.remote import messages, protocol, renewed, spread

_START_S = 120.0  # a worker process of Ray has to start first
_CLOSE_S = 10.0


class SandboxActor:
  """The class of the actors: a sandbox that answers messages."""

  def __init__(self, open_sandbox: Callable[..., base.Sandbox], *args, **more):
    self._sandbox = open_sandbox(*args, **more)
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


class RaySandbox(spread.SpreadSandbox):
  """A sandbox in actors of one call each; others replace those that die."""

  def __init__(
    self,
    open_sandbox: Callable[..., base.Sandbox],
    level: str,
    limits: base.Limits,
    *,
    num_cpus: float = 1.0,
    size: int = 1,
    **options: Any,
  ):
    """Opens a sandbox in an actor; joins RAY_ADDRESS, or starts Ray here.

    Args:
      open_sandbox: `open.open_sandbox`, which the actor calls.
      level: its preference.
      limits: limits of each call and program.
      num_cpus: processors that Ray reserves for each actor.
      size: number of actors at most, which is that of calls at a time.
      options: its further options; images is an absolute path on all machines,
        and packages are installed there.

    Raises:
      ValueError: Ray is not installed.
      base.SandboxLost: the actor cannot open its sandbox.
    """
    try:
      import ray
    except ImportError as error:
      raise ValueError(
        "A sandbox on Ray needs the package ray: pip install -e '.[ray]' in "
        'the checkout.'
      ) from error
    if not ray.is_initialized():
      # Ray reports its use to its makers by default.
      os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
      ray.init(include_dashboard=False, log_to_driver=False)
    # One more thread than calls: boxes are read while programs run.
    resources: Any = {'num_cpus': num_cpus, 'max_concurrency': 2}
    actors = ray.remote(**resources, scheduling_strategy='SPREAD')(SandboxActor)

    def begin() -> protocol.RemoteSandbox:
      transport = ActorTransport(
        ray, actors.remote(open_sandbox, level, limits, size=1, **options)
      )
      try:
        # Its first answer comes when the sandbox is open.
        return protocol.RemoteSandbox(
          transport, limits, level='ray', size=1, grace_s=_START_S
        )
      except base.SandboxLost:
        transport.close()
        raise

    what = 'An actor with a sandbox'
    super().__init__(lambda: renewed.RenewedSandbox(begin, what), size)
