"""The turns of an episode, and hints on the faulty ones."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from composer_jax.core import checks

# Outcomes of a call.
OK = 'ok'
FAILED = 'failed'
FAILED_EDIT = 'failed_edit'
NOT_A_CALL = 'not_a_call'
UNKNOWN_TOOL = 'unknown_tool'
BAD_ARGUMENTS = 'bad_arguments'
INVALID_OUTCOMES = (NOT_A_CALL, UNKNOWN_TOOL, BAD_ARGUMENTS)
SUMMARY = 'summary'
OUTCOMES = (OK, FAILED, FAILED_EDIT, SUMMARY, *INVALID_OUTCOMES)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
  """Tokens that the policy sampled for one tool call or one summary.

  Attributes:
    trajectory: index of the window.
    start: index of the turn's first token in the window.
    stop: index after its last token.
    tool: name of the tool; '' for an invalid call and for a summary.
    outcome: one of OUTCOMES.
  """

  trajectory: int
  start: int
  stop: int
  tool: str
  outcome: str

  def __post_init__(self):
    checks.one_of(self, 'outcome', OUTCOMES)
    in_order = 0 <= self.start < self.stop
    checks.require(self, 'start', in_order, f'lie below stop ({self.stop})')

  @property
  def is_valid(self) -> bool:
    return self.outcome not in INVALID_OUTCOMES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hint:
  """Advice on one faulty turn, which only the teacher reads.

  The teacher scores the turn's tokens in the context
  `tokens_T[:at] + hint + tokens_T[at:stop]`; see `rl.hints.distill`.

  Attributes:
    trajectory, start, stop: place of the turn, as in `Turn`.
    at: index at which the hint is inserted, at most `start`.
    kind: name of the kind of mistake.
    tokens_T: int32 token ids of the hint.
  """

  trajectory: int
  start: int
  stop: int
  at: int
  kind: str
  tokens_T: np.ndarray

  def __post_init__(self):
    checks.array(self, 'tokens_T', np.int32, None)
    in_order = 0 <= self.at <= self.start < self.stop
    rule = f'be at most start ({self.start}), below stop ({self.stop})'
    checks.require(self, 'at', in_order, rule)


def check_inside(parts: Sequence[Turn | Hint], lengths: Sequence[int]) -> None:
  """Raises a ValueError for what lies outside windows of these lengths."""
  for part in parts:
    is_inside = 0 <= part.trajectory < len(lengths)
    if not (is_inside and part.stop <= lengths[part.trajectory]):
      raise ValueError(
        f'{part} lies outside windows of {list(lengths)} tokens.'
      )
