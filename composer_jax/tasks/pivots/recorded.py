"""Cuts recorded conversations of experts into tasks of a single turn.

A file holds one conversation a line, in OpenAI's form:

  {"messages": [...], "tools": [...], "id": "optional"}

Each turn of the assistant that is one call of a tool becomes a task: given all
that came before, make that call. Words beside calls, reasoning for one, are not
part of a task. A conversation is cut as far as its turns are single calls with
an answer each.

This is cheap practice before whole episodes: NeMo-RL's recipe for SWE tasks
takes most of its gain from it (PivotRL).
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from composer_jax.core import files
from composer_jax.text import tool_calls

MAX_LINE, MAX_LINES, MAX_TURNS = 16 << 20, 1_000_000, 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pivot:
  """One turn of an expert.

  Attributes:
    task_id: name of the conversation, and number of the turn.
    source: name of the conversation.
    prompt: words of system and user.
    history: calls and answers before the turn, as text.
    call: the expert's call.
  """

  task_id: str
  source: str
  prompt: str
  history: tuple[tuple[str, str], ...]
  call: tool_calls.JsonCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedPivots:
  """The pivots of a file, and the tools of its conversations by name."""

  pivots: tuple[Pivot, ...]
  tools: Mapping[str, Mapping[str, Any]]


def read(path: str | os.PathLike) -> RecordedPivots:
  """Reads a file; a ValueError names the line that is none."""
  pivots: list[Pivot] = []
  tools: dict[str, Mapping[str, Any]] = {}
  names: set[str] = set()
  for number, line in _lines(pathlib.Path(path)):
    where = f'{path}, line {number}'
    try:
      fields = json.loads(line)
      for tool in fields.get('tools') or ():
        name = tool['function']['name']
        if tools.setdefault(name, tool) != tool:
          raise ValueError(f'tool {name!r} differs from an earlier line')
      source = fields.get('id') or files.sha256(line)[:16]
      cut = list(_cut(str(source), fields['messages']))
    except (
      ValueError, LookupError, TypeError, AttributeError, RecursionError
    ) as error:  # fmt: skip
      raise ValueError(
        f'{where} is no conversation with tools ({error!r:.200}); a line is '
        '{"messages": [...], "tools": [...]} in the form of OpenAI.'
      ) from error
    if str(source) in names:
      raise ValueError(f'{where}: another conversation is named {source!r}.')
    names.add(str(source))
    pivots += cut
  missing = {p.call.name for p in pivots} - set(tools)
  if missing:
    raise ValueError(
      f'{path}: no line lists the tools {sorted(missing)}, which are called.'
    )
  return RecordedPivots(pivots=tuple(pivots), tools=tools)


def _lines(path: pathlib.Path) -> Iterator[tuple[int, bytes]]:
  with path.open('rb') as file:
    for number in range(1, MAX_LINES + 2):
      line = file.readline(MAX_LINE + 1)
      if not line:
        return
      if len(line) > MAX_LINE or number > MAX_LINES:
        raise ValueError(
          f'{path}, line {number}: at most {MAX_LINES} lines of {MAX_LINE} '
          'bytes are read.'
        )
      if line.strip():
        yield number, line


def _cut(source: str, messages: list[Mapping[str, Any]]) -> Iterator[Pivot]:
  """Yields a task for each turn that is one call, as long as there are such."""
  opening = []
  place = 0
  while messages[place]['role'] in ('system', 'developer', 'user'):
    opening.append(_words(messages[place]))
    place += 1
  history: list[tuple[str, str]] = []
  while place < len(messages) and len(history) < MAX_TURNS:
    call = _only_call(messages[place])
    if call is None:
      return
    yield Pivot(
      task_id=f'pivots/{source}/{len(history)}',
      source=source,
      prompt='\n\n'.join(opening),
      history=tuple(history),
      call=call,
    )
    if place + 1 >= len(messages) or messages[place + 1]['role'] != 'tool':
      return
    answer = _words(messages[place + 1])
    history.append((tool_calls.render_json(call), answer))
    place += 2


def _words(message: Mapping[str, Any]) -> str:
  content = message.get('content') or ''
  if isinstance(content, list):
    content = ''.join(part['text'] for part in content)
  if not isinstance(content, str):
    raise ValueError('content is no text')
  content.encode()  # Lone surrogates are a ValueError.
  return content


def _only_call(message: Mapping[str, Any]) -> tool_calls.JsonCall | None:
  """Returns the call of a turn; None if it makes none or several."""
  if message['role'] != 'assistant':
    return None
  calls = message.get('tool_calls') or ()
  if len(calls) != 1:
    return None
  function = calls[0]['function']
  arguments = function.get('arguments') or '{}'
  if isinstance(arguments, str):
    arguments = json.loads(arguments)
  # Its text must read as the same call.
  call = tool_calls.JsonCall(name=function['name'], arguments=arguments)
  return tool_calls.parse_json(tool_calls.render_json(call))
