"""Policies that follow a script: given calls, or the right solution of a task.

They test tools, budgets, graders and monitors, and show that a task can be
solved through its tools. One policy plays one episode. Its log-probabilities
are zero, and every route is `NO_ROUTE`.
"""

import collections
import difflib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from composer_jax.agent import summarize
from composer_jax.core import records
from composer_jax.tasks.deletion import edit
from composer_jax.tasks.repository import environment, schemas, task_set
from composer_jax.text import chat, tool_calls


def completion(
  tokenizer: Any,
  request: records.SampleRequest,
  text: str,
  *,
  is_first: bool,
  place: int = 0,
) -> records.Completion:
  """Returns a completion of a chosen call, cut off at the request's limit.

  `place` is the number of calls before it in its window.
  """
  language = chat.language_of(tokenizer)
  tokens_T = language.written(text, place)[: request.max_new_tokens]
  # No pass has consumed the last token of the session.
  consumed = len(request.context_T) + len(tokens_T) - int(is_first)
  routes_TMA = np.full((consumed, 1, 1), records.NO_ROUTE, np.uint16)
  return records.Completion(
    session=request.session,
    tokens_T=tokens_T,
    logprobs_T=np.zeros(len(tokens_T), np.float32),
    policy_version_T=np.zeros(len(tokens_T), np.int32),
    consumed_expert_ids_TMA=routes_TMA,
    stopped=int(tokens_T[-1]) in language.ends,
  )


class ScriptedCalls:
  """Samples given texts in order; implements `agent.environment.Policy`.

  Asked for a summary by `query`, it writes `summary` and then goes on.
  """

  def __init__(
    self,
    tokenizer: Any,
    texts: Iterable[str],
    summary: str = 'I follow my script.',
    query: str = summarize.OFF.query,
  ):
    self._tokenizer = tokenizer
    self._texts = iter(texts)
    self._summary, self._query = summary, query
    # Number of calls in each session.
    self._sessions: collections.Counter[str] = collections.Counter()

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Samples the next text; a ValueError once there are no more."""
    place = self._sessions[request.session]
    self._sessions[request.session] += 1
    language = chat.language_of(self._tokenizer)
    messages = language.messages(request.context_T)
    if place and any(self._query in m['text'] for m in messages):
      text = self._summary
    else:
      text = next(self._texts, None)
    if text is None:
      raise ValueError(
        f'The script of session {request.session!r} has no more calls; its '
        'last one should be "finish".'
      )
    return completion(
      self._tokenizer, request, text, is_first=not place, place=place
    )

  def close(self, session: str) -> None:
    del self._sessions[session]


def gold_calls(
  task: task_set.RepositoryTask, tools: Sequence[str] = tuple(schemas.TOOLS)
) -> Iterator[str]:
  """Yields calls that look around, plan, restore each file, test and finish.

  Raises:
    ValueError: the changes need a tool that is not there.
  """
  place = environment.missing_body(task) if 'body' in tools else None
  if place is not None:
    path, _, name = place
    text = edit.body(task.solution[path], name)
    calls = iter([_call('body', text=text), _call('finish')])
  else:
    calls = _gold(task, 'edit' in tools)
  for call in calls:
    if call.name in tools:
      yield tool_calls.render_json(call)
    elif call.name == 'write':
      raise ValueError(
        f'The solution of task {task.task_id!r} needs the tool "write" for '
        f'{call.arguments["path"]!r}; the tools are {tuple(tools)}.'
      )


def _call(name: str, **arguments: Any) -> tool_calls.JsonCall:
  return tool_calls.JsonCall(name=name, arguments=arguments)


def _gold(
  task: task_set.RepositoryTask, may_edit: bool
) -> Iterator[tool_calls.JsonCall]:
  yield _call('list')
  yield _call('test')
  for path in task.solution:
    yield _call('todo', action='add', text=f'restore {path}')
  for deleted in task.deleted:
    if deleted.symbol:
      name = deleted.symbol.split('.')[-1]
      yield _call('search', pattern=rf'\b{name}\b')
  for item, (path, text) in enumerate(task.solution.items(), 1):
    view = task.changes[path]
    if view is not None:
      yield _call('read', path=path)
    if view and may_edit:
      for old, new in edits(view, text):
        yield _call('edit', path=path, old=old, new=new)
    else:
      yield _call('write', path=path, text=text)
    program = f'import ast; ast.parse(open({path!r}, "rb").read())'
    yield _call('run', command=f'python -c {shlex.quote(program)}')
    yield _call('todo', action='done', item=item)
  yield _call('test')
  yield _call('finish')


def edits(before: str, after: str) -> list[tuple[str, str]]:
  """Returns replacements (old, new) that in order turn `before` into `after`.

  Each replaces whole lines that occur exactly once at its turn.
  """
  lines = before.splitlines(keepends=True)
  wanted = after.splitlines(keepends=True)
  matcher = difflib.SequenceMatcher(None, lines, wanted)
  replacements = []
  # From the end, so that the lines above keep their numbers.
  for tag, start, stop, low, high in reversed(matcher.get_opcodes()):
    if tag == 'equal':
      continue
    text = ''.join(lines)
    top, bottom = start, stop
    while text.find(old := ''.join(lines[top:bottom])) != text.rfind(old):
      top, bottom = max(top - 1, 0), min(bottom + 1, len(lines))
    fresh = [*lines[top:start], *wanted[low:high], *lines[stop:bottom]]
    replacements.append((old, ''.join(fresh)))
    lines[start:stop] = wanted[low:high]
  return replacements
