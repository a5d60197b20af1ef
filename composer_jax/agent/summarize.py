"""Windows that restart from the policy's own summary.

Before a window would grow beyond `trigger` tokens, the host asks for a summary
in the same session. The policy writes it, and a new window begins with the
task, the summary, the plan and the answer that the old window had no room for:

  window 0   prompt, calls and answers ..., query, summary 1
  window 1   prompt, summary 1, plan, answer, calls ..., query, summary 2

(Cursor, "Training Composer for longer horizons".) Summaries are sampled tokens
like any other: the reward of the episode trains them too. The query is context.
Room for query and summary is reserved from the start, so that no window is ever
longer than `trigger`. The new window repeats a summary's tokens as sampled, but
for special tokens, which could pose as messages.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from composer_jax.agent import window
from composer_jax.core import checks
from composer_jax.core import turns as turns_lib
from composer_jax.text import chat

_CUT = '...'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SummaryOptions:
  """Limits of windows that end with a summary, and the query for it.

  Attributes:
    trigger: most tokens of a window; 0 turns summaries off, and a full window
      ends the episode.
    max_tokens: most tokens of a summary, its end token included.
    max_summaries: most summaries of an episode; when the window after the last
      one is full, the episode ends.
    plan_tokens: most tokens of the to-do list that a new window begins with.
    query: message by which the host asks for a summary.
  """

  trigger: int = 0
  max_tokens: int = 128
  max_summaries: int = 8
  plan_tokens: int = 64
  query: str = (
    'Your context is full. Summarise what you did, what you found out and what '
    'is left to do: you will go on with that summary alone.'
  )

  def __post_init__(self):
    checks.at_least(self, 0, 'trigger', 'plan_tokens')
    checks.at_least(self, 1, 'max_tokens', 'max_summaries')

  def limit(self, max_tokens: int) -> int:
    """Returns the most tokens of a window, given those of an episode."""
    rule = f'not exceed the max_tokens of an episode ({max_tokens})'
    checks.require(self, 'trigger', self.trigger <= max_tokens, rule)
    return self.trigger or max_tokens


OFF = SummaryOptions()


class Summarizer:
  """Decides when one episode needs a summary, asks for it and restarts.

  Attributes:
    dialogue: messages of the growing window.
  """

  def __init__(
    self,
    tokenizer: Any,
    prompt: str,
    options: SummaryOptions,
    *,
    max_tokens: int,
    max_call_tokens: int,
    protocol: str = '',
  ):
    """Reserves room; a ValueError if the trigger leaves too little.

    Args:
      max_tokens: most tokens of a window without summaries.
      max_call_tokens: tokens reserved for a call while summaries remain.
      protocol: end of the prompt on how to write a call as text.
    """
    self.limit = options.limit(max_tokens)
    self.options = options
    self._tokenizer = tokenizer
    self._language = chat.language_of(tokenizer)
    self._prompt = (prompt, protocol)
    self.dialogue = self._language.dialogue(prompt, protocol)
    self._call_tokens = max_call_tokens
    if not options.trigger:
      return
    # As long as it gets: after a call that was cut off.
    asked = self._language.dialogue('')
    asked.read(np.zeros(0, np.int32), False)
    query = len(asked.answer([options.query], is_query=True))
    self._reserve = query + options.max_tokens
    head_T = self._summary(options.max_summaries, np.zeros(0, np.int32), '')
    notes = (head_T, tokenizer.encode(_CUT))
    needed = len(self._language.dialogue(*self._prompt, notes).opening_T)
    needed += options.max_tokens + options.plan_tokens
    needed += self._call_tokens + self._reserve
    if needed > self.limit:
      raise ValueError(
        f'trigger ({self.limit}) must be at least {needed}: a prompt of '
        f'{len(self.dialogue.opening_T)} tokens, two summaries of '
        f'{options.max_tokens}, a plan of {options.plan_tokens}, a query of '
        f'{query} and a call of {self._call_tokens} have to fit.'
      )

  def opening(self, history: Sequence[tuple[str, str]]) -> np.ndarray:
    """Returns the context of the first turn, behind earlier calls and answers.

    To be called once, before any turn.
    """
    parts = [self.dialogue.opening_T]
    for place, (call, answer) in enumerate(history):
      turn_T = self._language.written(call, place)
      self.dialogue.read(turn_T, True)
      parts += [turn_T, self.dialogue.answer([answer])]
    return np.concatenate(parts)

  def is_due(self, chain: window.Chain, context_T: np.ndarray) -> bool:
    """True if a call after this context might leave no room for a summary."""
    if not self.options.trigger or chain.index >= self.options.max_summaries:
      return False
    needed = len(context_T) + self._call_tokens + self._reserve
    return chain.length + needed > self.limit

  def restart(self, chain: window.Chain, plan: str, answer: str) -> np.ndarray:
    """Has the window summarised; returns the context of a new window.

    `answer` is that to the last call, which the summary does not cover.
    """
    query_T = self.dialogue.answer([self.options.query], is_query=True)
    # A template may frame this query with some tokens more than was reserved.
    room = self.limit - chain.length - len(query_T)
    completion = chain.sample(query_T, min(self.options.max_tokens, room))
    chain.note(completion, '', turns_lib.SUMMARY)
    chain.restart()
    words_T = self._language.words(completion.tokens_T)
    summary_T = self._summary(chain.index, words_T, plan)
    notes = (summary_T, summary_T[:0])
    head = self._language.dialogue(*self._prompt, notes)
    room = self.limit - len(head.opening_T) - self._call_tokens
    if chain.index < self.options.max_summaries:
      room -= self._reserve
    notes = (summary_T, self._answer(answer, room))
    self.dialogue = self._language.dialogue(*self._prompt, notes)
    return self.dialogue.opening_T

  def _summary(self, count: int, words_T: np.ndarray, plan: str) -> np.ndarray:
    """Returns the text that repeats a summary, with its number and plan."""
    encode = self._tokenizer.encode
    parts = [encode(f'summary {count}\n'), words_T]
    if plan:
      parts.append(encode(f'\nplan\n{plan}')[: self.options.plan_tokens])
    return np.concatenate(parts).astype(np.int32)

  def _answer(self, text: str, room: int) -> np.ndarray:
    """Returns a tool's answer, cut to `room` tokens."""
    answer_T = self._tokenizer.encode(text)
    if len(answer_T) <= room:
      return answer_T
    cut_T = self._tokenizer.encode(_CUT)
    return np.append(answer_T[: room - len(cut_T)], cut_T).astype(np.int32)
