"""Finds the turns of an episode that went wrong, and writes a hint on each.

A hint is a message of the harness, placed where it would have helped: right
before the faulty call, like one more answer. The policy never reads it. It goes
into the record, and `rl.hints.distill` lets a teacher score the same call with
it. A kind of mistake is a row of `DETECTORS`, and a config gives it a template.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.agent import environment
from composer_jax.core import checks
from composer_jax.core import turns as turns_lib
from composer_jax.tasks import calls
from composer_jax.text import chat

# Most characters of an answer or call that a hint repeats.
_MAX_QUOTED = 200

# Kind of mistake -> predicate, true for a turn with that mistake.
DETECTORS: Mapping[str, Callable[[environment.Moment], bool]] = {
  'unknown_tool': lambda m: m.turn.outcome == turns_lib.UNKNOWN_TOOL,
  'bad_arguments': lambda m: m.turn.outcome == turns_lib.BAD_ARGUMENTS,
  'not_a_call': lambda m: m.turn.outcome == turns_lib.NOT_A_CALL,
  'failed_edit': lambda m: m.turn.outcome == turns_lib.FAILED_EDIT,
  'unfinished_todo': lambda m: m.is_final and m.open_todos > 0,
}

_FIELDS = ('tools', 'usage', 'answer', 'call', 'todos')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HintOptions:
  """The mistakes that get a hint, and the texts of the hints.

  Attributes:
    templates: (kind of mistake, text) pairs, () for no hints; the first pair
      whose mistake a turn shows gives its hint. In braces: `tools` that exist,
      `usage` of the tool that the call names, `answer` of the environment,
      `call` as written, number of open `todos`.
    max_hints: most hints on an episode, the first ones: each costs another
      forward pass over all tokens before it.
  """

  templates: tuple[tuple[str, str], ...] = (
    ('unknown_tool', 'Reminder: the available tools are {tools}.'),
    ('bad_arguments', 'Reminder: usage: {usage}. Avoid: {answer}'),
    ('not_a_call', 'Reminder: write one short call of {tools}.'),
    ('failed_edit', 'Reminder: look before you edit. Avoid: {answer}'),
    ('unfinished_todo', 'Reminder: {todos} to-dos are open; do them first.'),
  )
  max_hints: int = 4

  def __post_init__(self):
    pairs = tuple((kind, text) for kind, text in self.templates)
    object.__setattr__(self, 'templates', pairs)
    checks.at_least(self, 0, 'max_hints')
    kinds = [kind for kind, _ in pairs]
    if len(set(kinds)) != len(kinds) or set(kinds) - set(DETECTORS):
      raise ValueError(
        f'HintOptions.templates names {kinds}; it may name each of '
        f'{sorted(DETECTORS)} once.'
      )
    for kind, text in pairs:
      try:
        text.format(**dict.fromkeys(_FIELDS, 0))
      except (ValueError, LookupError, AttributeError) as error:
        raise ValueError(
          f'The template of {kind!r} is {text!r}, which cannot be filled in '
          f'({error!r}); it may name {_FIELDS}. Write {{{{ and }}}} for braces '
          'that stay.'
        ) from None
      if not text.strip():
        raise ValueError(
          f'The template of {kind!r} is empty: leave the kind out.'
        )

  def write(
    self,
    env: environment.Environment,
    tokenizer: Any,
    moments: Sequence[environment.Moment],
    windows: Sequence[np.ndarray],
  ) -> tuple[turns_lib.Hint, ...]:
    """Returns hints on the faulty turns of an episode, in order.

    They may be of any length: `rl.hints.batching` drops and counts those that
    do not fit in a row with their turn.
    """
    hints: list[turns_lib.Hint] = []
    for moment in moments:
      matching = (p for p in self.templates if DETECTORS[p[0]](moment))
      kind, template = next(matching, ('', ''))
      if not kind or len(hints) == self.max_hints:
        continue
      turn = moment.turn
      text = template.format(**_fields(moment, env.tools, env.usage))
      # A message may stand before the marker that opens the call.
      tokens_T, prefix_T = chat.language_of(tokenizer).remark(text)
      at = max(turn.start - len(prefix_T), 0)
      before_T = windows[turn.trajectory][at : turn.start]
      hints.append(
        turns_lib.Hint(
          trajectory=turn.trajectory,
          start=turn.start,
          stop=turn.stop,
          at=at if np.array_equal(before_T, prefix_T) else turn.start,
          kind=kind,
          tokens_T=tokens_T,
        )
      )
    return tuple(hints)


def _fields(
  moment: environment.Moment, tools: Sequence[str], usage: Callable[[str], str]
) -> dict[str, Any]:
  named = [word for word in re.findall(r'\w+', moment.call) if word in tools]
  return {
    'tools': ', '.join(tools),
    'usage': usage(named[0]) if named else '; '.join(map(usage, tools)),
    'answer': calls.quoted(moment.answer, _MAX_QUOTED),
    'call': calls.quoted(moment.call, _MAX_QUOTED),
    'todos': moment.open_todos,
  }
