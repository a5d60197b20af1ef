"""Traces of verifiers, and which windows of the policy they train.

A trace is a graph of messages, each with the tokens that it adds; a branch is a
path from a root to a leaf, and the text that a model saw. The policy's own
record of its windows has what a trace lacks: versions, and a route for each
token that a pass consumed. So a branch chooses windows, and everything that
both say must agree. Of the last token of a branch verifiers repeats the row of
the one before, since no pass consumed it: here it has none (`NO_ROUTE`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.core import records

# What stops a trace before its policy says that it is done.
_CUT = (
  *('max_turns', 'max_input_tokens', 'max_output_tokens', 'max_total_tokens'),
  'compaction_failed',
)
# An advantage, the difference of two rewards, is finite in float32.
_MAX_REWARD = float(np.finfo(np.float32).max) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceBranch:
  """A path of a trace.

  Attributes:
    tokens_T: int32, tokens of its messages from the root to the leaf.
    sampled_T: true where a model sampled the token.
    logprobs_T: float32, zero where no model sampled the token.
    expert_ids_TMA: uint16, routes of which the last is `NO_ROUTE`; None where a
      message has none.
  """

  tokens_T: np.ndarray
  sampled_T: np.ndarray
  logprobs_T: np.ndarray
  expert_ids_TMA: np.ndarray | None


def branches(trace: dict[str, Any]) -> list[TraceBranch]:
  """Returns the branches that may train, in the order of their leaves.

  Of a harness that compacts its context, an attempt that it did not go on with
  is none. A ValueError if its nodes are no graph, or their arrays no numbers of
  the kinds that `TraceBranch` names.
  """
  nodes = trace['nodes']
  for index, node in enumerate(nodes):
    parent = node['parent']
    # Else a path back from a node might never end.
    if parent is not None and not (type(parent) is int and 0 <= parent < index):
      raise ValueError(
        f'Node {index} of a trace has the parent {parent!r}; it must be an '
        'earlier node, or None.'
      )
  links = lambda node: node.get('semantic_parents') or ()
  taken = {
    k['node'] for n in nodes for k in links(n) if k['type'] == 'compaction'
  }
  inner = {node['parent'] for node in nodes}
  found = []
  for leaf, node in enumerate(nodes):
    is_attempt = any(k['type'] == 'compaction_attempt' for k in links(node))
    if leaf in inner or (is_attempt and leaf not in taken):
      continue
    path, place = [], leaf
    while place is not None:
      path.insert(0, nodes[place])
      place = nodes[place]['parent']
    if any(any(n['mask']) for n in path):
      found.append(_branch(path))
  return found


def _branch(path: list[dict[str, Any]]) -> TraceBranch:
  joined = lambda name, *kind: np.concatenate(
    [_numbers(name, node[name], *kind) for node in path]
  )
  sampled_T = joined('mask', 'b', bool)
  logprobs_T = np.zeros(len(sampled_T), np.float32)
  logprobs_T[sampled_T] = joined('logprobs', 'iuf', np.float32)
  tokens_T = joined('token_ids', 'iu', np.int32)
  path = [node for node in path if node['token_ids']]
  routes_TMA = None
  if all(node['routed_experts'] is not None for node in path):
    rows = [array(node['routed_experts']) for node in path]
    routes_TMA = np.concatenate(
      [_numbers('routed_experts', r, 'iu', np.uint16, 3) for r in rows]
    )
    routes_TMA[-1] = records.NO_ROUTE
  return TraceBranch(
    tokens_T=tokens_T,
    sampled_T=sampled_T,
    logprobs_T=logprobs_T,
    expert_ids_TMA=routes_TMA,
  )


def _numbers(
  name: str, given: Any, kinds: str, dtype: Any, ndim: int = 1
) -> np.ndarray:
  """Returns numbers of a node, none of which a cast may change to another.

  Args:
    kinds: kinds of numpy that they may have; integers are not negative.
  """
  values = np.asarray(given)
  if not values.size and values.ndim == 1:
    return np.empty((0,) * ndim, dtype)
  is_right = values.ndim == ndim and values.dtype.kind in kinds
  if is_right and np.dtype(dtype).kind in 'iu' and values.size:
    is_right = values.min() >= 0 and values.max() <= np.iinfo(dtype).max
  if not is_right:
    raise ValueError(
      f'A node of a trace has {name} of {values.dtype} in {values.ndim} '
      f'dimensions; they must be {np.dtype(dtype)} in {ndim}, and integers lie '
      'in its range from 0 on.'
    )
  return values.astype(dtype)


def trained(
  traces: Sequence[dict[str, Any]], windows: Sequence[records.Trajectory]
) -> list[int]:
  """Returns the windows that traces of trainable agents are made of, in order.

  Each sampled token is in one window, so that branches that share a beginning
  train it once.

  Raises:
    ValueError: a trace has tokens that this policy did not sample, or other
      log-probabilities or routes than those of its window.
  """
  chosen: set[int] = set()
  for trace in traces:
    for branch in branches(trace):
      missing_T = branch.sampled_T.copy()
      for i, window in enumerate(windows):
        if _is_prefix(window.tokens_T, branch.tokens_T):
          _check(branch, window, _shared(window, windows[:i]))
          missing_T[: len(window)] &= ~window.loss_mask_T
          chosen.add(i)
      if missing_T.any():
        raise ValueError(
          f'A trace of {trace["task"]["type"]} has {int(missing_T.sum())} '
          'sampled tokens that the policy of this run did not sample. An agent '
          'with another model must not be trainable.'
        )
  return sorted(chosen)


def _is_prefix(tokens_T: np.ndarray, of_T: np.ndarray) -> bool:
  return np.array_equal(tokens_T, of_T[: len(tokens_T)])


def _shared(
  window: records.Trajectory, earlier: Sequence[records.Trajectory]
) -> int:
  """Returns how many leading tokens an earlier window had, too."""
  longest = 0
  for other in earlier:
    size = min(len(window), len(other))
    same_T = window.tokens_T[:size] == other.tokens_T[:size]
    longest = max(longest, size if same_T.all() else int(same_T.argmin()))
  return longest


def _check(
  branch: TraceBranch, window: records.Trajectory, shared: int
) -> None:
  """Raises a ValueError where a trace and its window disagree.

  Of the leading tokens that an earlier window has, too (`shared` of them), a
  trace has the routes of that window's pass.
  """
  size, mask_T = len(window), window.loss_mask_T
  for name, ours, theirs in (
    ('marks of sampled tokens', branch.sampled_T[:size][mask_T], True),
    (
      'log-probabilities',
      branch.logprobs_T[:size][mask_T],
      window.logprobs_T[mask_T],
    ),
  ):
    if not np.all(ours == theirs):
      raise ValueError(f'A trace has other {name} than the policy gave.')
  if branch.expert_ids_TMA is not None:
    rows = slice(shared, size - 1)
    if not np.array_equal(
      branch.expert_ids_TMA[rows], window.expert_ids_TMA[rows]
    ):
      raise ValueError('A trace has other routes than the policy gave.')


def reward_of(trace: dict[str, Any]) -> float:
  """Returns the sum of a trace's rewards by their weights.

  Raises:
    ValueError: it is no number, or beyond half of what float32 holds.
  """
  given = [r for r in trace['rewards'].values() if r is not None]
  try:
    reward = float(sum(r['score'] * r['weight'] for r in given))
  except (TypeError, OverflowError) as error:
    raise ValueError(f'The rewards are no numbers: {error}') from error
  if not abs(reward) <= _MAX_REWARD:
    raise ValueError(f'The reward ({reward}) must be within {_MAX_REWARD:g}.')
  return reward


def is_cut(trace: dict[str, Any]) -> bool:
  """True if a limit ended it, or cut off its last message."""
  if trace['stop_condition'] in _CUT or trace['is_timeout']:
    return True
  done = [call for call in trace['calls'] if call['error'] is None]
  return bool(done) and done[-1]['finish_reason'] == 'length'


def array(value: Any) -> np.ndarray:
  """Returns an array of the form in which verifiers sends them.

  Raises:
    ValueError: it has another form.
  """
  if isinstance(value, np.ndarray):
    return value
  try:
    values = np.frombuffer(value['data'], np.dtype(value['dtype']))
    return values.reshape(value['shape'])
  except (KeyError, TypeError) as error:
    raise ValueError(
      f'A trace has an array of no such form: {error}.'
    ) from error
