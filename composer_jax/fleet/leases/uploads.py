"""Reads what a worker uploaded, and believes none of it.

A worker may be broken, of other code, or an attacker's. What it uploads must be
bounded, of the group and members of its lease, and of the shape of the model;
everything else is a ValueError, and the members are sampled anew. That a reward
is deserved is not checked here: whoever runs the sandbox decides it.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence

import numpy as np

from composer_jax.agent import rewards
from composer_jax.core import group_bytes, played, records, seams
from composer_jax.core.routes import codec
from composer_jax.delta.format import identity
from composer_jax.fleet.leases import ledger as ledgers
from composer_jax.fleet.leases import turn_bytes

# Of a rollout beside its arrays: turns, hints, names.
_TEXT_BYTES = 2**18
_ROUNDING = 1e-3
_MAX_REWARD = 1e9
# Of a monitor, a tool or a criterion: it is shown on the page of the run.
_NAME = re.compile(r'[\w][\w .:/-]{0,99}')


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadRules:
  """What the rollouts of a run can be at most.

  Attributes:
    members: number of rollouts of a group.
    max_tokens: most tokens of a window.
    max_windows: most windows of an episode.
    vocab_size: number of token ids.
    routes: meaning of the recorded expert ids.
    temperature: temperature at which the run samples.
    resumes: whether unfinished episodes go on elsewhere. Not where the run
      promises bits that a window read in one piece would change: sampled again
      they are the same.
  """

  members: int
  max_tokens: int
  max_windows: int
  vocab_size: int
  routes: codec.RouteScheme
  temperature: float
  resumes: bool = True

  def max_bytes(self, members: int) -> int:
    """Returns the most bytes of so many rollouts, packed or not."""
    per_token = 2 * len(self.routes.layers) * self.routes.num_active + 64
    window = self.max_tokens * per_token + 4096
    return members * (self.max_windows * window + _TEXT_BYTES)


def read(
  data: bytes,
  order: seams.GroupOrder,
  part: ledgers.GroupPart,
  rules: UploadRules,
) -> records.Group:
  """Returns the rollouts of a part; a ValueError says why they are refused."""
  group = group_bytes.from_bytes(data, rules.max_bytes(part.size))
  if (group.group, group.task_id) != (order.group, order.task_id):
    raise ValueError(
      f'it holds group {group.group!r:.99} of task {group.task_id!r:.99}, not '
      f'{order.group} of {order.task_id}'
    )
  members = [r.member for r in group.rollouts]
  if members != list(range(part.first, part.stop)):
    raise ValueError(
      f'it holds members {members!r:.99}, not {part.first} to {part.stop - 1}'
    )
  is_named = all(map(identity.is_hash, (group.policies or {'': ''}).values()))
  if not is_named or min(group.versions) < order.min_version:
    raise ValueError(
      f'it was sampled by versions {sorted(group.versions)!r:.99}, of which '
      f'none may be below {order.min_version} or without its weights'
    )
  version = order.rewards['version']
  for rollout in group.rollouts:
    if rollout.reward_version != version:
      raise ValueError(
        f'its rewards are of version {rollout.reward_version}, not {version}'
      )
    _check_counts(rollout)
    _check_windows(rollout.trajectories, rules)
    _check_hints(rollout, rules)
  return group


def _check_counts(rollout: records.Rollout) -> None:
  names = [*rollout.flags, *filter(None, rollout.tools), *rollout.scores]
  if odd := [name for name in names if not _NAME.fullmatch(name)]:
    raise ValueError(f'{odd[0]!r:.99} is no name of an alarm, tool or score')
  if unknown := rollout.reward_terms.keys() - {*rewards.TERMS}:
    raise ValueError(f'rewards have no term {min(unknown)!r:.99}')
  earned = [rollout.reward, rollout.verdict.score or 0.0]
  earned += rollout.reward_terms.values()
  if (most := max(map(abs, earned))) > _MAX_REWARD:
    raise ValueError(f'it earns {most:g}, of at most {_MAX_REWARD:g}')
  calls, todos = rollout.num_turns, rollout.open_todos
  seconds = rollout.sandbox_seconds
  if not 0 <= rollout.num_invalid <= calls or min(todos, seconds) < 0:
    raise ValueError(
      f'it counts {rollout.num_invalid} of {calls} calls as invalid, {todos} '
      f'to-dos as open and {seconds} s, which cannot be'
    )


def _check_tokens(tokens_T: np.ndarray, rules: UploadRules) -> None:
  if tokens_T.min(initial=0) < 0 or tokens_T.max(initial=0) >= rules.vocab_size:
    raise ValueError(f'its tokens are not all in 0..{rules.vocab_size - 1}')


def _check_windows(
  windows: Sequence[records.Trajectory], rules: UploadRules
) -> None:
  if len(windows) > rules.max_windows:
    raise ValueError(
      f'it has {len(windows)} windows of at most {rules.max_windows}'
    )
  for window in windows:
    tokens_T, sampled_T = window.tokens_T, window.loss_mask_T
    if not 0 < len(window) <= rules.max_tokens:
      raise ValueError(
        f'a window has {len(window)} tokens of at most {rules.max_tokens}'
      )
    _check_tokens(tokens_T, rules)
    if not sampled_T.any() or sampled_T[0]:
      raise ValueError('a window must begin with context and have an answer')
    # Rounding may bring that of a certain token above zero.
    is_high = window.logprobs_T.max() > _ROUNDING
    if is_high or window.logprobs_T[~sampled_T].any():
      raise ValueError('log-probabilities must be <= 0, and 0 of context')
    if window.temperature != rules.temperature:
      raise ValueError(
        f'it was sampled at temperature {window.temperature}, not '
        f'{rules.temperature}'
      )
    codec.check(window.expert_ids_TMA, rules.routes)


def _check_hints(rollout: records.Rollout, rules: UploadRules) -> None:
  last = (0, 0)
  for hint in rollout.hints:
    sampled_T = rollout.trajectories[hint.trajectory].loss_mask_T
    if (hint.trajectory, hint.start) < last:
      raise ValueError('its hints overlap, or are not in the order of turns')
    if not sampled_T[hint.start : hint.stop].all():
      raise ValueError(f'its hint at token {hint.start} is on unsampled ones')
    _check_tokens(hint.tokens_T, rules)
    last = (hint.trajectory, hint.stop)


def max_saved_bytes(rules: UploadRules, lease: seams.Lease) -> int:
  """Returns the most bytes of a lease's saved turns, packed or not.

  A window that moved to another engine has some of its routes twice.
  """
  return 4 * rules.max_bytes(lease.size)


def read_saved(
  data: bytes, lease: seams.Lease, rules: UploadRules
) -> played.SavedTurns:
  """Returns turns to go on from; a ValueError says why they are refused.

  What tools said is compared when the turns are played again, and the whole
  episode is checked as any other.
  """
  saved = turn_bytes.from_bytes(data, max_saved_bytes(rules, lease))
  order = lease.order
  if (saved.group, saved.task_id) != (order.group, order.task_id):
    raise ValueError(
      f'they are of group {saved.group!r:.99} and task {saved.task_id!r:.99}, '
      f'not of {order.group} and {order.task_id}'
    )
  if not set(saved.turns) <= set(range(lease.first, lease.stop)):
    raise ValueError(
      f'they are of members {sorted(saved.turns)!r:.99}, not of {lease.first} '
      f'to {lease.stop - 1}'
    )
  least, most = order.min_version, lease.min_version
  versions = sorted(saved.versions)
  if not (versions and least <= versions[0] and versions[-1] <= most):
    raise ValueError(
      f'they were sampled by versions {versions!r:.99}, of which all must lie '
      f'in {least}..{most}'
    )
  names = saved.policies.values()
  if odd := [name for name in names if not identity.is_hash(name)]:
    raise ValueError(f'{odd[0]!r:.99} is no hash of weights')
  for turns in saved.turns.values():
    _check_turns(turns, rules)
  return saved


def _check_turns(
  turns: Sequence[played.FinishedTurn], rules: UploadRules
) -> None:
  most = rules.max_windows * rules.max_tokens
  answers = [turn.completion for turn in turns]
  tokens = [*(t.context_T for t in turns), *(a.tokens_T for a in answers)]
  if (count := sum(map(len, tokens))) > most:
    raise ValueError(f'an episode has {count} tokens of at most {most}')
  _check_tokens(np.concatenate(tokens), rules)
  for answer in answers:
    highest = answer.logprobs_T.max(initial=-np.inf)
    if not (np.isfinite(answer.logprobs_T).all() and -np.inf < highest):
      raise ValueError('every turn must have log-probabilities, all finite')
    if highest > _ROUNDING:
      raise ValueError('log-probabilities must be <= 0')
    codec.check(answer.consumed_expert_ids_TMA, rules.routes)


def join(parts: Sequence[records.Group]) -> records.Group:
  """Returns the group of all its parts, which come in order."""
  policies = {}
  for part in parts:
    for version, weights in (part.policies or {}).items():
      if policies.setdefault(version, weights) != weights:
        raise ValueError(
          f'its members were sampled by different weights of version {version}'
        )
  rollouts = tuple(itertools.chain(*(part.rollouts for part in parts)))
  return dataclasses.replace(parts[0], rollouts=rollouts, policies=policies)
