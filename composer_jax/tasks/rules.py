"""Criteria that need no model: facts of an episode's turns.

A rule gets the episode and returns one of the criterion's choices, by default
'no' or 'yes'. `RULES` are known by name; MODULE:FUNCTION names one's own.
"""

import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_jax.core import turns

EDITS = ('edit', 'write')
_LOOKS = ('list', 'read', 'search')
# Commands for which an environment has a tool of its own.
_REPLACED = re.compile(
  r'(?:^|[|;&("\']|\brun\b)\s*'
  r'(?:cat|head|tail|less|grep|rg|find|ls|sed|tee|pytest)\s'
)
_TAG = re.compile(r'<[^<>]*>')
_COMMENT = re.compile(r'(^|\s)#\s*\w|"""|\'\'\'|\\"\\"\\"', re.M)
_MIN_WORDS = 5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlayedTurn:
  """A turn with its texts.

  Attributes:
    tool: name of the tool; '' for an invalid call.
    outcome: one of `core.turns.OUTCOMES`.
    text: what the policy wrote.
    answer: answer of the environment.
  """

  tool: str
  outcome: str
  text: str
  answer: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
  """What rules and models see of an episode.

  Attributes:
    prompt: first message of the user.
    steps: turns in order, without summaries.
    passed: true if the hidden tests passed and no monitor raised a flag; no
      model sees it.
    open_todos: number of to-dos that are open at the end.
    is_flagged: true if a monitor raised a flag, which takes all that a rubric
      may give.
  """

  prompt: str
  steps: Sequence[PlayedTurn]
  passed: bool = False
  open_todos: int = 0
  is_flagged: bool = False


Rule = Callable[[Episode], str]


def _tools(episode: Episode) -> list[str]:
  return [s.tool for s in episode.steps]


def _last(tools: Sequence[str], names: Sequence[str]) -> int:
  return max((i for i, t in enumerate(tools) if t in names), default=-1)


def passed(episode: Episode) -> bool:
  """The hidden tests pass, and no monitor raised a flag."""
  return episode.passed


def tested(episode: Episode) -> bool:
  """Tests ran after the last edit."""
  tools = _tools(episode)
  last_edit = _last(tools, EDITS)
  return 0 <= last_edit < _last(tools, ('test', 'run'))


def looked_first(episode: Episode) -> bool:
  """A file was read, listed or searched before the first edit."""
  tools = _tools(episode)
  first = next((i for i, t in enumerate(tools) if t in EDITS), len(tools))
  return any(t in _LOOKS for t in tools[:first])


def tool_choice(episode: Episode) -> bool:
  """No shell command did what a tool of the environment is for."""
  commands = [s.text for s in episode.steps if s.tool == 'run']
  return not any(_REPLACED.search(c) for c in commands)


def no_errors(episode: Episode) -> bool:
  """No call was invalid, and no edit failed."""
  bad = (turns.FAILED_EDIT, *turns.INVALID_OUTCOMES)
  return not any(s.outcome in bad for s in episode.steps)


def todos_done(episode: Episode) -> bool:
  """The plan has no open to-do."""
  return episode.open_todos == 0


def commented(episode: Episode) -> bool:
  """An edit brings a comment or a docstring."""
  edits = [s.text for s in episode.steps if s.tool in EDITS]
  return any(_COMMENT.search(text) for text in edits)


def reported(episode: Episode) -> bool:
  """The last turn says in words what was done."""
  text = _TAG.sub(' ', episode.steps[-1].text if episode.steps else '')
  # The arguments of a call are no words.
  said = f'{text.partition("{")[0]} {text.rpartition("}")[2]}'
  said = said if '{' in text else text
  return len(re.findall(r'[^\W\d_]{2,}', said)) >= _MIN_WORDS


RULES: Mapping[str, Callable[[Episode], bool]] = {
  rule.__name__: rule
  for rule in (
    *(passed, tested, looked_first, tool_choice, no_errors, todos_done),
    *(commented, reported),
  )
}


def rule_of(name: str) -> Rule:
  """Returns the rule of a criterion.

  Raises:
    ValueError: there is none of that name, and it cannot be imported.
  """
  if known := RULES.get(name):
    return lambda episode: 'yes' if known(episode) else 'no'
  module, _, attribute = name.partition(':')
  try:
    rule: Any = getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError, ValueError, TypeError) as error:
    raise ValueError(
      f'A rule must be one of {sorted(RULES)} or MODULE:FUNCTION, which takes '
      f'a `tasks.rules.Episode` and returns a choice; not {name!r}: {error}.'
    ) from error
  return rule


def source_of(name: str) -> str:
  """Returns the source of the module of a rule of one's own."""
  rule_of(name)
  return inspect.getsource(sys.modules[name.partition(':')[0]])
