"""Numpy records that cross processes: samples, verdicts and groups.

A policy answers a `SampleRequest` with a `Completion`. An episode makes one
`Trajectory` of each context window, and a `Rollout` of them and the `Verdict`
of its task; the rollouts of one prompt are a `Group`, which training learns
from. Guided path, 2 of 10; next: `agent.episode`.

Every record is frozen and checked when it is made, so that other code may trust
it. Per-token arrays are indexed by the token they are *about* and are
token-major; device batches (`core.batches`) are layer-major. Groups travel as
bytes (`core.group_bytes`), not pickles, which could run code of the writer.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from composer_jax.core import checks
from composer_jax.core import turns as turns_lib

# Expert id of a token without a record, which the trainer routes afresh.
NO_ROUTE = int(np.iinfo(np.uint16).max)

# Outcomes of grading.
GRADED = 'graded'
UNFINISHED = 'unfinished'
INFRASTRUCTURE = 'infrastructure'
VERDICT_STATUSES = (GRADED, UNFINISHED, INFRASTRUCTURE)

# Per-token versions of a `Trajectory`.
VERSIONS = ('policy_version_T', 'context_version_T', 'consumed_version_T')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
  """One context window of an agent episode.

  `logprobs_T[t]` is the log-probability of `tokens_T[t]` given those before it,
  and `expert_ids_TMA[t]` are the experts used by the pass that consumed it. No
  pass consumes the last token of a window, which has `NO_ROUTE`.

  Attributes:
    tokens_T: int32 token ids of the context, the policy and tools.
    loss_mask_T: true where the policy sampled the token.
    logprobs_T: float32 under the rollout policy, zero where not sampled.
    expert_ids_TMA: uint16 route; `NO_ROUTE` where the engine kept no record.
    policy_version_T: int32 policy version that sampled the token; for context,
      the one that computed it for the next sampled token.
    context_version_T: int32 oldest version in the cache that its sampling read;
      for context, that of the next sampled token.
    consumed_version_T: int32 version that computed the token's route and last
      entry in the cache; for the last token, that of the token before.
    temperature: sampling temperature, by which the trainer divides too.
  """

  tokens_T: np.ndarray
  loss_mask_T: np.ndarray
  logprobs_T: np.ndarray
  expert_ids_TMA: np.ndarray
  policy_version_T: np.ndarray
  context_version_T: np.ndarray
  consumed_version_T: np.ndarray
  temperature: float

  def __post_init__(self):
    length = len(self.tokens_T)
    checks.array(self, 'tokens_T', np.int32, None)
    checks.array(self, 'loss_mask_T', np.bool_, length)
    checks.array(self, 'logprobs_T', np.float32, length)
    checks.array(self, 'expert_ids_TMA', np.uint16, length, None, None)
    for name in VERSIONS:
      checks.array(self, name, np.int32, length)
      rises = np.all(np.diff(getattr(self, name)) >= 0)
      checks.require(self, name, rises, 'never decrease within a trajectory')
    is_past = np.all(self.context_version_T <= self.policy_version_T)
    checks.require(self, 'context_version_T', is_past, 'be <= policy_version_T')
    checks.require(self, 'temperature', self.temperature > 0, 'be positive')
    is_finite = np.all(np.isfinite(self.logprobs_T))
    checks.require(self, 'logprobs_T', is_finite, 'be finite')

  def __len__(self) -> int:
    return len(self.tokens_T)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
  """Result of grading the final state of an episode.

  Attributes:
    passed: true if every hidden test passed and the episode finished.
    num_passed: number of hidden tests that passed, of num_tests.
    status: GRADED, UNFINISHED (the policy never called finish) or
      INFRASTRUCTURE (sandbox or endpoint failed, not the policy).
    sandbox_level: isolation in which the tests ran ('unshare', 'microvm', ...).
    detail: one line for people.
    score: reward of success, where it is not 1 or 0 by `passed`.
  """

  passed: bool
  num_passed: int
  num_tests: int
  status: str
  sandbox_level: str
  detail: str = ''
  score: float | None = None

  def __post_init__(self):
    checks.one_of(self, 'status', VERDICT_STATUSES)
    is_count = 0 <= self.num_passed <= self.num_tests
    rule = f'lie in 0..num_tests ({self.num_tests})'
    checks.require(self, 'num_passed', is_count, rule)
    if self.score is not None:
      checks.require(self, 'score', np.isfinite(self.score), 'be finite')
    is_perfect = self.status == GRADED and self.num_passed == self.num_tests
    if self.passed and not is_perfect:
      raise ValueError(
        'passed needs status "graded" and every test passed; got '
        f'{self.status!r} with {self.num_passed} of {self.num_tests}.'
      )


def broken(num_tests: int, level: str, detail: str) -> Verdict:
  """Returns the verdict of an episode whose sandbox of this level failed."""
  return Verdict(
    passed=False,
    num_passed=0,
    num_tests=num_tests,
    status=INFRASTRUCTURE,
    sandbox_level=level,
    detail=detail,
  )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
  """One episode of one task.

  Attributes:
    task_id: name of the task.
    group: index of the group, which determines prompt and random numbers.
    trajectories: context windows in order.
    reward: reward of the whole episode, shared by all its tokens.
    num_turns: number of tool calls, invalid ones included.
    num_invalid: number of calls without a known tool or with wrong arguments.
    tools: names of the tools called, in order; '' for an invalid call.
    flags: alarms of monitors, sorted; with any, success earns nothing.
    sandbox_seconds: wall time spent inside the sandbox.
    turns: all turns in order, summaries included; () if unknown.
    hints: hints on faulty turns.
    reward_version: version of the reward's terms, which may change in a run.
    reward_terms: contribution of each term to the reward, by name.
    summary_trigger: number of tokens at which a summary ends a window; None
      without summaries.
    open_todos: number of to-dos that were open at the end.
    scores: scores from 0 to 1 by criterion of a rubric; empty if not judged.
    rubric: identity of the rubric, and the model that was asked.
    not_judged: why a rubric gave no scores; such a rollout teaches nothing.
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
  open_todos: int = 0
  scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
  rubric: str = ''
  not_judged: str = ''

  @property
  def num_sampled(self) -> int:
    """Number of tokens that the policy sampled."""
    return sum(int(t.loss_mask_T.sum()) for t in self.trajectories)

  @property
  def is_judged(self) -> bool:
    """False where infrastructure failed, which says nothing of the policy."""
    return self.verdict.status != INFRASTRUCTURE and not self.not_judged

  def __post_init__(self):
    if not self.trajectories:
      raise ValueError(f'Rollout of task {self.task_id!r} has no trajectory.')
    lengths = [len(t) for t in self.trajectories]
    turns_lib.check_inside((*self.turns, *self.hints), lengths)
    checks.require(self, 'reward', np.isfinite(self.reward), 'be finite')
    are_shares = all(0 <= s <= 1 for s in self.scores.values())
    checks.require(self, 'scores', are_shares, 'lie in 0..1')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
  """All rollouts of one prompt, ordered by member, or a range of them.

  Several workers may play ranges of a group; the trainer gets whole groups.

  Attributes:
    policies: identity (`target_id`) of the weights of each policy version among
      the tokens, as the receiver computed it; None without a store.
  """

  group: int
  task_id: str
  rollouts: tuple[Rollout, ...]
  policies: Mapping[int, str] | None = None

  def __post_init__(self):
    members = [r.member for r in self.rollouts]
    if not members or members != list(range(members[0], members[-1] + 1)):
      raise ValueError(
        f'Group {self.group} must hold consecutive members in order; it has '
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
    """Policy versions that sampled or consumed any token."""
    return versions_of(t for r in self.rollouts for t in r.trajectories)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
  """Request to continue a session, which is one context window.

  The engine keeps its KV cache between requests, so `context_T` has only tokens
  that it has not seen. Truncations follow the temperature, in the order top_k,
  top_p, min_p. They are for serving: a trainer does not apply them.

  Attributes:
    session: name of the context window, which the first request opens.
    context_T: int32 tokens to consume before sampling, at least one unless a
      previous completion left its last token unconsumed.
    max_new_tokens: largest number of tokens to sample.
    stop_tokens: tokens that end sampling and are part of the result.
    seed: integers such as (seed, group, member), which with a token's position
      determine its random numbers.
    temperature: temperature of the softmax; 0 takes the likeliest token.
    top_p: probability that the likeliest tokens which are kept add up to.
    top_k: number of likeliest tokens which are kept; 0 keeps all.
    min_p: least probability of kept tokens, relative to the likeliest.
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
    """True if top_p, top_k or min_p exclude tokens."""
    return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
  """Tokens that the engine sampled for one request.

  Attributes:
    tokens_T: int32 sampled tokens, the stop token included.
    logprobs_T: float32 log-probability under the sampled distribution, after
      temperature and truncation; 0 at temperature 0.
    consumed_expert_ids_TMA: uint16 routes of the session's tokens from
      routes_start to the last but one; `NO_ROUTE` without a record.
    stopped: true if a stop token ended sampling, false at `max_new_tokens`.
    raw_logprobs_T: float32 log-probability at temperature 1 without truncation;
      None from a policy that reports only logprobs_T.
    routes_start: position in the session of the first route; None continues
      the previous completion. A smaller position, after the engine consumed the
      session again, replaces routes recorded before.
    context_version_T: int32 oldest version in the cache that each sampled
      token's pass read; None is policy_version_T, of weights never swapped.
    consumed_version_T: int32 version that consumed each token, as
      consumed_expert_ids_TMA; None is that of the first sampled token.
    num_cached: number of context tokens whose cache another session filled.
    top_ids_TX: int32 likeliest tokens (X of them), the likeliest first; None if
      not reported.
    top_logprobs_TX: float32 raw log-probabilities of top_ids_TX, or None.
  """

  session: str
  tokens_T: np.ndarray
  logprobs_T: np.ndarray
  policy_version_T: np.ndarray
  consumed_expert_ids_TMA: np.ndarray
  stopped: bool
  raw_logprobs_T: np.ndarray | None = None
  routes_start: int | None = None
  context_version_T: np.ndarray | None = None
  consumed_version_T: np.ndarray | None = None
  num_cached: int = 0
  top_ids_TX: np.ndarray | None = None
  top_logprobs_TX: np.ndarray | None = None

  def __post_init__(self):
    length, routes = len(self.tokens_T), 'consumed_expert_ids_TMA'
    checks.array(self, 'tokens_T', np.int32, None)
    checks.array(self, 'logprobs_T', np.float32, length)
    checks.array(self, 'policy_version_T', np.int32, length)
    checks.array(self, routes, np.uint16, None, None, None)
    num_routes = len(self.consumed_expert_ids_TMA)
    for name, dtype, size in (
      ('raw_logprobs_T', np.float32, length),
      ('context_version_T', np.int32, length),
      ('consumed_version_T', np.int32, num_routes),
    ):
      if getattr(self, name) is not None:
        checks.array(self, name, dtype, size)
    if self.routes_start is not None:
      checks.at_least(self, 0, 'routes_start')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
  """A request that ended with values that are not finite; closes its session.

  Attributes:
    position: position in the session of the first token of the failed pass.
    version: policy version of the failed pass.
  """

  session: str
  position: int
  version: int
  reason: str


def versions_of(sampled: Iterable[Trajectory | Completion]) -> set[int]:
  """Returns the policy versions that sampled or consumed any token."""
  return {
    int(version)
    for record in sampled
    for name in VERSIONS
    for version in np.unique(getattr(record, name))
  }
