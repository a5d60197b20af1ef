"""What a recorder of answers is to the server (`live.recorder` is one)."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from composer_jax.core import records
from composer_jax.serve import exchange

# (request, completion, seconds, identities of policies by version), called in
# the engine's thread, which it must not keep waiting.
OnEnd = Callable[
  [records.SampleRequest, records.Completion, float, Mapping[int, str]], None
]


class AnswerRecorder(Protocol):
  """Keeps answers of episodes whose users consented."""

  def routes(
    self,
  ) -> dict[str, Callable[[exchange.Exchange, Any], Awaitable[None]]]:
    """Returns what answers a POST to each path."""

  def keeper(
    self,
    metadata: Mapping[str, Any],
    requests: Sequence[records.SampleRequest],
    changed: Sequence[str],
  ) -> OnEnd | None:
    """Returns what keeps the answer; None where nothing is kept.

    Args:
      metadata: `metadata` field of the request.
      requests: requests that the engine will sample, one for each choice.
      changed: names of parameters that change the sampled distribution in ways
        that a trainer does not know.

    Raises:
      errors.ApiError: the request names an episode and cannot be of it.
    """
