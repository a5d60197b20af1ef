"""Numpy records that cross processes: what was sampled, judged and grouped.

A policy answers a `SampleRequest` with a `Completion`. An episode makes
`Trajectory`s of those, one for each context window, and a `Rollout` of all with
the `Verdict` of its task; the rollouts of one prompt are a `Group`, which
training learns from. Guided path, 2 of 10; next: `agent.episode`.

Every record is frozen, keyword-only and checked when it is made, so that code
behind a boundary may trust it. Per-token arrays are indexed by the token they
are *about* and are token-major; device batches (`core.batches`) are
layer-major. Groups travel between processes as bytes (`core.group_bytes`),
never as pickles: a reader runs no code of the writer's.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from composer_jax.core import checks
from composer_jax.core import turns as turns_lib

# Not recorded: the trainer routes that token afresh. A gather with it is NaN.
NO_ROUTE = int(np.iinfo(np.uint16).max)

# Outcomes of grading. Infrastructure failures are not failures of the policy.
GRADED = 'graded'
UNFINISHED = 'unfinished'
INFRASTRUCTURE = 'infrastructure'
VERDICT_STATUSES = (GRADED, UNFINISHED, INFRASTRUCTURE)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
  """One context window of an agent episode.

  `logprobs_T[t]` is the log-probability of `tokens_T[t]` given those before it,
  and `expert_ids_TMA[t]` are the experts used by the pass that consumed it. The
  last token of a window is consumed by no pass and has `NO_ROUTE`.

  Attributes:
    tokens_T: int32, context followed by what the policy and tools wrote.
    loss_mask_T: true where the policy sampled the token.
    logprobs_T: float32 under the rollout policy, zero where not sampled.
    expert_ids_TMA: uint16; `NO_ROUTE` where the engine kept no record.
    policy_version_T: int32, weights that sampled each token; of context, those
      that sampled the token after it. Context is consumed in chunks and weights
      may be swapped between them: routes of earlier chunks may be older.
    temperature: what the policy sampled at; the trainer divides by it too.
  """

  tokens_T: np.ndarray
  loss_mask_T: np.ndarray
  logprobs_T: np.ndarray
  expert_ids_TMA: np.ndarray
  policy_version_T: np.ndarray
  temperature: float

  def __post_init__(self):
    length = len(self.tokens_T)
    checks.array(self, 'tokens_T', np.int32, None)
    checks.array(self, 'loss_mask_T', np.bool_, length)
    checks.array(self, 'logprobs_T', np.float32, length)
    checks.array(self, 'policy_version_T', np.int32, length)
    checks.array(self, 'expert_ids_TMA', np.uint16, length, None, None)
    if np.any(np.diff(self.policy_version_T) < 0):
      raise ValueError(
        'policy_version_T must never decrease within a trajectory; it is '
        f'{self.policy_version_T.tolist()}.'
      )
    checks.require(self, 'temperature', self.temperature > 0, 'be positive')
    if not np.all(np.isfinite(self.logprobs_T)):
      raise ValueError('logprobs_T holds a value that is not finite.')

  def __len__(self) -> int:
    return len(self.tokens_T)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
  """What the verifier found in the final state of an episode.

  Attributes:
    passed: every hidden test passed and the episode finished.
    num_passed, num_tests: hidden tests.
    status: GRADED, UNFINISHED (the policy never called finish) or
      INFRASTRUCTURE (the sandbox failed; says nothing about the policy).
    sandbox_level: isolation that produced it ('bwrap', 'unshare', ...).
    detail: one line for people.
  """

  passed: bool
  num_passed: int
  num_tests: int
  status: str
  sandbox_level: str
  detail: str = ''

  def __post_init__(self):
    checks.one_of(self, 'status', VERDICT_STATUSES)
    is_count = 0 <= self.num_passed <= self.num_tests
    rule = f'lie in 0..num_tests ({self.num_tests})'
    checks.require(self, 'num_passed', is_count, rule)
    is_perfect = self.status == GRADED and self.num_passed == self.num_tests
    if self.passed and not is_perfect:
      raise ValueError(
        'passed needs status "graded" and every test passed; got '
        f'{self.status!r} with {self.num_passed} of {self.num_tests}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
  """One episode of one task.

  Attributes:
    task_id: names the task; the task itself does not travel.
    group: index of the group, which fixes prompt and random numbers.
    trajectories: one per context window, in order.
    reward: of the whole episode; shared by all its tokens.
    num_turns: tool calls made, invalid ones included.
    num_invalid: calls that named no tool or had wrong arguments.
    tools: names of the tools called, in order; '' for an invalid call.
    flags: alarms of monitors, sorted; its success then earns nothing.
    sandbox_seconds: wall time spent inside the sandbox.
    turns: every turn in order, summaries included; () where none are known.
    hints: on faulty turns.
    reward_version: of the reward's terms, which may change during a run.
    reward_terms: name -> what it added to the reward.
    summary_trigger: tokens at which a summary ends a window; None without.
  """

  task_id: str
  group: int
  member: int
  trajectories: tuple[Trajectory, ...]
  verdict: Verdict
  reward: float
  num_turns: int
  num_invalid: int
  tools: tuple[str, ...] = ()
  flags: tuple[str, ...] = ()
  sandbox_seconds: float = 0.0
  turns: tuple[turns_lib.Turn, ...] = ()
  hints: tuple[turns_lib.Hint, ...] = ()
  reward_version: int = 0
  reward_terms: Mapping[str, float] = dataclasses.field(default_factory=dict)
  summary_trigger: int | None = None

  def __post_init__(self):
    if not self.trajectories:
      raise ValueError(f'Rollout of task {self.task_id!r} has no trajectory.')
    lengths = [len(t) for t in self.trajectories]
    turns_lib.check_inside((*self.turns, *self.hints), lengths)
    checks.require(self, 'reward', np.isfinite(self.reward), 'be finite')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
  """All rollouts of one prompt, ordered by member.

  Attributes:
    policies: {version: identity of its weights}, of every version that a token
      names; the `target_id` that the sampler computed of what it received.
      None where weights come through no store.
  """

  group: int
  task_id: str
  rollouts: tuple[Rollout, ...]
  policies: Mapping[int, str] | None = None

  def __post_init__(self):
    members = [r.member for r in self.rollouts]
    if members != list(range(len(self.rollouts))) or not members:
      raise ValueError(
        f'Group {self.group} must hold members 0..R-1 in order; it has '
        f'{members}.'
      )
    for r in self.rollouts:
      if (r.group, r.task_id) != (self.group, self.task_id):
        raise ValueError(
          f'Group {self.group} of task {self.task_id!r} holds a rollout of '
          f'group {r.group}, task {r.task_id!r}.'
        )
    if self.policies is not None and set(self.policies) != self.versions:
      raise ValueError(
        f'Group {self.group} holds tokens of versions {sorted(self.versions)} '
        f'and names the weights of versions {sorted(self.policies)}.'
      )

  @property
  def versions(self) -> set[int]:
    """Of all tokens, context included."""
    return {
      int(version)
      for r in self.rollouts
      for t in r.trajectories
      for version in np.unique(t.policy_version_T)
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
  """Asks the engine to go on with a session: one context window.

  The engine keeps its KV cache between requests, so `context_T` holds only what
  it has not seen yet. Truncations apply in the order top_k, top_p, min_p, each
  to what the one before left, after the temperature. They are for serving: a
  trainer divides by the temperature and knows nothing of them.

  Attributes:
    session: names the context window; the first request opens it.
    context_T: int32 tokens to consume before sampling, at least one unless a
      previous completion left its last token unconsumed.
    stop_tokens: sampling ends after one of these, which is part of the result.
    seed: integers such as (seed, group, member); with the token's position
      they alone decide the random numbers.
    temperature: of the softmax; 0 takes the likeliest token.
    top_p: keeps the likeliest tokens until they hold this much probability.
    top_k: keeps this many of the likeliest tokens; 0 keeps all.
    min_p: keeps tokens at least this likely, relative to the likeliest.
  """

  session: str
  context_T: np.ndarray
  max_new_tokens: int
  stop_tokens: tuple[int, ...]
  seed: tuple[int, ...]
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0

  def __post_init__(self):
    checks.array(self, 'context_T', np.int32, None)
    checks.integers(self, 'seed', 'stop_tokens')
    checks.at_least(self, 1, 'max_new_tokens')
    checks.at_least(self, 0, 'top_k')
    for name, is_right, rule in (
      ('temperature', 0 <= self.temperature < np.inf, '[0, inf); 0 is greedy'),
      ('top_p', 0 < self.top_p <= 1, '(0, 1]; 1 keeps every token'),
      ('min_p', 0 <= self.min_p < 1, '[0, 1); 0 keeps every token'),
    ):
      checks.require(self, name, is_right, f'lie in {rule}')

  @property
  def truncates(self) -> bool:
    """Whether some tokens have no chance; temperature 0 is not meant."""
    return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
  """What the engine sampled for one request.

  Attributes:
    tokens_T: int32 sampled tokens, the stop token included.
    logprobs_T: float32 of each sampled token under the sampled distribution:
      at its temperature, truncated and renormalised where the request asks for
      that, 0 where it takes the likeliest token.
    consumed_expert_ids_TMA: uint16 routes of the tokens from routes_start on
      up to the last but one of the session: usually every token consumed since
      the previous completion, which are its last sampled token (if any), the
      context, and all sampled tokens but the last. `NO_ROUTE` where the engine
      keeps none.
    stopped: true when a stop token ended it, false at `max_new_tokens`.
    raw_logprobs_T: float32 of each sampled token at temperature 1 and without
      truncation; None from a policy that has only the one above.
    routes_start: position in the session of the first of the routes; None
      means right after those of the previous completion. Smaller than that
      after the engine consumed the session anew (other weights, or its cache
      was given to others): the routes replace those recorded before.
    context_version: the oldest that consumed any of the context; None means
      that of the first sampled token.
    num_cached: context tokens whose cache another session had filled.
    top_ids_TX: int32 likeliest tokens at each place, X of them (no axis of the
      legend), the likeliest first; None from an engine that reports none.
    top_logprobs_TX: float32 of those, as raw_logprobs_T.
  """

  session: str
  tokens_T: np.ndarray
  logprobs_T: np.ndarray
  policy_version_T: np.ndarray
  consumed_expert_ids_TMA: np.ndarray
  stopped: bool
  raw_logprobs_T: np.ndarray | None = None
  routes_start: int | None = None
  context_version: int | None = None
  num_cached: int = 0
  top_ids_TX: np.ndarray | None = None
  top_logprobs_TX: np.ndarray | None = None

  def __post_init__(self):
    length, routes = len(self.tokens_T), 'consumed_expert_ids_TMA'
    checks.array(self, 'tokens_T', np.int32, None)
    checks.array(self, 'logprobs_T', np.float32, length)
    checks.array(self, 'policy_version_T', np.int32, length)
    checks.array(self, routes, np.uint16, None, None, None)
    if self.raw_logprobs_T is not None:
      checks.array(self, 'raw_logprobs_T', np.float32, length)
    if self.routes_start is not None:
      checks.at_least(self, 0, 'routes_start')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
  """A request that the engine could not finish; its session is closed.

  Attributes:
    position: in the session, of the first token of the pass that gave values
      that are not finite: a chunk of context, or one token.
    version: of the policy that computed them.
  """

  session: str
  position: int
  version: int
  reason: str
