"""What an episode needs from whoever decides: tokens for a context."""

from typing import Protocol

from composer_jax.core import records


class Policy(Protocol):
  """Samples tokens. Many episodes, each in a thread, may share one policy."""

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Goes on with `request.session`; blocks until sampling ended."""
    ...

  def close(self, session: str) -> None:
    """Forgets a session; unknown ones are ignored."""
    ...
