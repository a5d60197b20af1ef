"""The protocol of a language: messages and calls as tokens, and back.

The tokens of a window are only ever appended to: what was sampled stays as it
was sampled, and the host encodes only its own words. `text.chat` is the
language of models trained here, `hf.text.language` that of a checkpoint.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Said:
  """What a sampled turn says.

  Attributes:
    calls: tool calls, each in the form that environments take.
    fault: answer to a turn without a call; '' for one with calls.
  """

  calls: tuple[str, ...] = ()
  fault: str = ''


class Dialogue(Protocol):
  """The messages of one window, in which host and policy take turns.

  Attributes:
    opening_T: int32 context of the first turn.
  """

  opening_T: np.ndarray

  def read(self, tokens_T: np.ndarray, stopped: bool) -> Said:
    """Takes in a sampled turn, whose last token ended it if it `stopped`."""

  def answer(self, texts: Sequence[str], is_query: bool = False) -> np.ndarray:
    """Returns the int32 context between the turn read last and the next.

    Args:
      texts: answers to the calls of that turn, or to its fault, in order.
      is_query: true where the one text is a question of the host instead.
    """


class Language(Protocol):
  """How one model is spoken to.

  Law: no text of a task, tool or policy becomes a special token.

  Attributes:
    ends: ids that end a sampled turn.
  """

  ends: tuple[int, ...]

  def dialogue(
    self,
    prompt: str,
    protocol: str = '',
    notes: tuple[np.ndarray, np.ndarray] | None = None,
  ) -> Dialogue:
    """Opens a window.

    Args:
      prompt: task of the user.
      protocol: end of the prompt on how to write a call as text.
      notes: ids of the texts that a later window repeats, a summary and the
        last answer; None for a first window.
    """

  def written(self, call: str, place: int = 0) -> np.ndarray:
    """Returns the ids of the turn that makes a call, `place` calls before."""

  def words(self, tokens_T: np.ndarray) -> np.ndarray:
    """Returns those ids of a turn that later windows may repeat as text."""

  def remark(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns a message of the host, and the ids before a turn it precedes."""

  def messages(
    self, tokens_T: np.ndarray, loss_mask_T: np.ndarray | None = None
  ) -> list[dict[str, str]]:
    """Returns a window or a context as readable `{'role', 'text'}` messages.

    Args:
      loss_mask_T: true where the policy sampled; None for context alone, which
        ends with an empty message of the policy.
    """
