"""The context windows of an episode, token by token as policy and host wrote.

A window grows at its end only: what the policy sampled is kept as sampled, and
every request continues the tokens before it. Re-encoding a policy's text could
give other tokens than those whose log-probabilities and routes were recorded.
"""

import numpy as np

from composer_jax.agent import policy as policy_lib
from composer_jax.core import records
from composer_jax.core import turns as turns_lib


class Window:
  """The growing arrays of one context window."""

  def __init__(self):
    self._tokens: list[np.ndarray] = []
    self._sampled: list[np.ndarray] = []
    self._logprobs: list[np.ndarray] = []
    self._versions: list[np.ndarray] = []
    self._routes: list[np.ndarray] = []
    self._num_routed = 0
    self.length = 0

  def append(
    self, context_T: np.ndarray, completion: records.Completion
  ) -> None:
    """Adds what one request consumed and what it sampled."""
    sampled_T = completion.tokens_T
    num_context, num_sampled = len(context_T), len(sampled_T)
    # The engine may swap weights between chunks of context. The oldest version
    # is recorded: what follows reads the keys and values that it made. Context
    # consumed anew after some tokens were sampled is newer than those.
    first = completion.policy_version_T[:1]
    if completion.context_version is not None:
      first = np.minimum(first, completion.context_version)
    self._tokens += [context_T, sampled_T]
    self._sampled += [np.zeros(num_context, bool), np.ones(num_sampled, bool)]
    self._logprobs += [
      np.zeros(num_context, np.float32),
      completion.logprobs_T,
    ]
    self._versions += [
      np.repeat(first, num_context),
      completion.policy_version_T,
    ]
    self._append_routes(completion)
    self.length += num_context + num_sampled

  def _append_routes(self, completion: records.Completion) -> None:
    """Adds routes, or replaces those from `routes_start` on."""
    start = completion.routes_start
    if start is not None and start != self._num_routed:
      if start > self._num_routed:
        raise ValueError(
          f'The policy gave routes from token {start} on, but the window has '
          f'only those of {self._num_routed} tokens before.'
        )
      self._routes = [np.concatenate(self._routes)[:start]]
      self._num_routed = start
    self._routes.append(completion.consumed_expert_ids_TMA)
    self._num_routed += len(completion.consumed_expert_ids_TMA)

  def trajectory(self, temperature: float) -> records.Trajectory:
    routes_TMA = np.concatenate(self._routes)
    if len(routes_TMA) != self.length - 1:
      raise ValueError(
        f'The policy gave routes of {len(routes_TMA)} tokens for a window of '
        f'{self.length}; all but the last are required.'
      )
    last_1MA = np.full((1, *routes_TMA.shape[1:]), records.NO_ROUTE, np.uint16)
    return records.Trajectory(
      tokens_T=np.concatenate(self._tokens),
      loss_mask_T=np.concatenate(self._sampled),
      logprobs_T=np.concatenate(self._logprobs),
      expert_ids_TMA=np.concatenate([routes_TMA, last_1MA]),
      policy_version_T=np.concatenate(self._versions),
      temperature=temperature,
    )


class Chain:
  """The windows of one episode; the last of them grows, in a session.

  Attributes:
    turns: what was sampled in each go.
    num_sampled: tokens sampled in all windows.
    is_open: the last thing sampled lacks its end token.
  """

  def __init__(
    self,
    policy: policy_lib.Policy,
    *,
    name: str,
    seed: tuple[int, ...],
    temperature: float,
    end: int,
  ):
    """Opens no session yet.

    Args:
      policy: samples.
      name: of the episode; of its first session too.
      seed: of the first window's random numbers; a later one adds its index.
      temperature: of sampling.
      end: token that ends a turn.
    """
    self.turns: list[turns_lib.Turn] = []
    self.num_sampled = 0
    self.is_open = False
    self._policy = policy
    self._name = name
    self._seed = seed
    self._temperature = temperature
    self._end = end
    self._windows = [Window()]

  @property
  def index(self) -> int:
    """Of the window that grows; as many summaries were made."""
    return len(self._windows) - 1

  @property
  def length(self) -> int:
    """Of the window that grows."""
    return self._windows[-1].length

  @property
  def _session(self) -> str:
    return f'{self._name}/{self.index}' if self.index else self._name

  def sample(
    self, context_T: np.ndarray, max_new_tokens: int
  ) -> records.Completion:
    """Continues the window by some context and what the policy samples."""
    seed = (*self._seed, self.index) if self.index else self._seed
    completion = self._policy.complete(
      records.SampleRequest(
        session=self._session,
        context_T=context_T,
        max_new_tokens=max_new_tokens,
        stop_tokens=(self._end,),
        seed=seed,
        temperature=self._temperature,
      )
    )
    self._windows[-1].append(context_T, completion)
    self.num_sampled += len(completion.tokens_T)
    self.is_open = not completion.stopped
    return completion

  def note(
    self, completion: records.Completion, tool: str, outcome: str
  ) -> None:
    """Records what the completion, sampled last, came to."""
    self.turns.append(
      turns_lib.Turn(
        trajectory=self.index,
        start=self.length - len(completion.tokens_T),
        stop=self.length,
        tool=tool,
        outcome=outcome,
      )
    )

  def restart(self) -> None:
    """Ends the window; the next sample begins another one, empty."""
    self.close()
    self._windows.append(Window())
    self.is_open = False

  def close(self) -> None:
    """Lets the policy forget the session."""
    self._policy.close(self._session)

  def trajectories(self) -> tuple[records.Trajectory, ...]:
    return tuple(w.trajectory(self._temperature) for w in self._windows)
