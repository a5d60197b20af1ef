"""The context windows of an episode, token by token.

A window grows at its end only: sampled tokens are kept as sampled, and every
request continues the tokens before it. Re-encoding a policy's text could give
other tokens than those whose log-probabilities and routes were recorded.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from composer_jax.agent import environment
from composer_jax.core import records
from composer_jax.core import turns as turns_lib


class Window:
  """The growing arrays of one context window."""

  def __init__(self):
    self.length = 0
    # Tokens, loss mask, log-probabilities and two versions of each request.
    self._parts: list[tuple[np.ndarray, ...]] = []
    self._routes: list[np.ndarray] = []
    self._consumed: list[np.ndarray] = []  # The versions of the routes.

  @property
  def tokens_T(self) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int32), *(p[0] for p in self._parts)])

  def append(
    self, context_T: np.ndarray, completion: records.Completion
  ) -> None:
    versions_T = completion.policy_version_T
    context_version_T = completion.context_version_T
    if context_version_T is None:
      context_version_T = versions_T
    routes_TMA = completion.consumed_expert_ids_TMA
    consumed_T = completion.consumed_version_T
    if consumed_T is None:
      consumed_T = np.repeat(versions_T[:1], len(routes_TMA))
    tokens_T = np.concatenate([context_T, completion.tokens_T])
    num_context = len(context_T)
    start, num_routed = completion.routes_start, sum(map(len, self._routes))
    if start is None:
      start = num_routed
    # What a refresh computed anew, the first sampled token did not read.
    first = self.length - start
    context_by = consumed_T[first : first + num_context].clip(max=versions_T[0])
    self._parts.append(
      (
        tokens_T,
        np.arange(len(tokens_T)) >= num_context,
        np.pad(completion.logprobs_T, (num_context, 0)),
        np.concatenate([context_by, versions_T]),
        np.pad(context_version_T, (num_context, 0), mode='edge'),
      )
    )
    self.length += len(tokens_T)
    # New routes are appended, or replace those from `routes_start` on.
    if start != num_routed:
      if start > num_routed:
        raise ValueError(
          f'The policy gave routes from token {start} on, but the window has '
          f'only those of {num_routed} tokens; none may be left out.'
        )
      self._routes = [np.concatenate(self._routes)[:start]]
      self._consumed = [np.concatenate(self._consumed)[:start]]
    self._routes.append(routes_TMA)
    self._consumed.append(consumed_T)

  def trajectory(self, temperature: float) -> records.Trajectory:
    routes_TMA = np.concatenate(self._routes)
    if len(routes_TMA) != self.length - 1:
      raise ValueError(
        f'The policy gave routes of {len(routes_TMA)} tokens for a window of '
        f'{self.length}; all but the last are required.'
      )
    tokens_T, loss_mask_T, logprobs_T, versions_T, context_version_T = map(
      np.concatenate, zip(*self._parts, strict=True)
    )
    consumed_T = np.concatenate(self._consumed)
    # No pass has consumed the last token.
    last = ((0, 1), (0, 0), (0, 0))
    routes_TMA = np.pad(routes_TMA, last, constant_values=records.NO_ROUTE)
    return records.Trajectory(
      tokens_T=tokens_T,
      loss_mask_T=loss_mask_T,
      logprobs_T=logprobs_T,
      expert_ids_TMA=routes_TMA,
      policy_version_T=versions_T,
      context_version_T=context_version_T,
      consumed_version_T=np.pad(consumed_T, (0, 1), mode='edge'),
      temperature=temperature,
    )


@dataclasses.dataclass(kw_only=True)
class Chain:
  """The windows of one episode, each a session; only the last one grows.

  Attributes:
    name, seed: session and seed of the first window; those of a later one end
      in its index.
    ends: ids that end a turn.
    num_sampled: number of tokens sampled in all windows.
    failure: error of the policy; None while it has none.
  """

  policy: environment.Policy
  name: str
  seed: tuple[int, ...]
  temperature: float
  ends: tuple[int, ...]
  turns: list[turns_lib.Turn] = dataclasses.field(default_factory=list)
  num_sampled: int = 0
  failure: BaseException | None = None
  _windows: list[Window] = dataclasses.field(
    default_factory=lambda: [Window()], init=False
  )

  @property
  def index(self) -> int:
    """Index of the growing window, and the number of summaries before it."""
    return len(self._windows) - 1

  @property
  def length(self) -> int:
    """Number of tokens of the growing window."""
    return self._windows[-1].length

  @property
  def _session(self) -> str:
    return f'{self.name}/{self.index}' if self.index else self.name

  @property
  def tokens_T(self) -> np.ndarray:
    """The tokens of the growing window."""
    return self._windows[-1].tokens_T

  def sample(
    self, context_T: np.ndarray, max_new_tokens: int
  ) -> records.Completion:
    """Continues the window by context and by tokens that the policy samples."""
    request = records.SampleRequest(
      session=self._session,
      context_T=context_T,
      max_new_tokens=max_new_tokens,
      stop_tokens=self.ends,
      seed=(*self.seed, self.index) if self.index else self.seed,
      temperature=self.temperature,
    )
    try:
      completion = self.policy.complete(request)
    except BaseException as error:
      self.failure = error
      raise
    self._windows[-1].append(context_T, completion)
    self.num_sampled += len(completion.tokens_T)
    return completion

  def note(
    self, completion: records.Completion, tool: str, outcome: str
  ) -> None:
    """Records the completion sampled last as a turn with its outcome."""
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
    """Ends the window; the next sample begins an empty one."""
    self.close()
    self._windows.append(Window())

  def close(self) -> None:
    self.policy.close(self._session)

  def trajectory(self) -> records.Trajectory:
    """Returns the growing window as it is."""
    return self._windows[-1].trajectory(self.temperature)

  def keep(self, indices: Sequence[int]) -> None:
    """Forgets all other windows and their turns; nothing is sampled after."""
    places = {index: place for place, index in enumerate(indices)}
    self._windows = [self._windows[index] for index in indices]
    self.turns = [
      dataclasses.replace(turn, trajectory=places[turn.trajectory])
      for turn in self.turns
      if turn.trajectory in places
    ]

  def trajectories(self) -> tuple[records.Trajectory, ...]:
    windows = (w for w in self._windows if w.length)
    return tuple(w.trajectory(self.temperature) for w in windows)
