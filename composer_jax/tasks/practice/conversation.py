"""One episode with a chat model: messages and calls, and no tokens of ours.

`agent.episode` keeps tokens, which training needs, and its limits are those of
a trained row. A model behind a chat endpoint has a tokenizer and a context of
its own: here limits are in its tokens or in characters, a message may hold
several calls, and what stands beside them is kept and sent back to the model.
"""

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_jax.agent import environment, episode, rewards
from composer_jax.core import checks, records, turns
from composer_jax.text import tool_calls

# What a model has to read again to go on thinking where it stopped.
_KEPT = ('content', 'reasoning', 'reasoning_content', 'reasoning_details')
_THOUGHT_END = '</think>'
USAGE = '\n\nEach of your messages is one call of a tool. The tools:'
BLOCKS = (
  '\n\nA message may hold several calls, and text around them, if each call '
  'stands alone between two lines of ```.'
)
_NAME = re.compile(r'[\w-]{1,64}', re.A)
_NO_ROOM = re.compile(r'context.?(length|window|size)|too (long|many)|no_room')
_CUT = 'error: your message was cut off at its limit; no call was carried out'
_NO_CALL = 'error: no call of a tool; the episode ends with a call of finish'
_OVER = 'not carried out: the episode has ended'
_MOST = 10**12  # tokens or USD that an endpoint may count


class EndpointError(RuntimeError):
  """An endpoint cannot be used.

  Attributes:
    code, status: those of its refusal; '' and None where no answer came.
  """

  def __init__(self, message: str, code: str = '', status: int | None = None):
    super().__init__(message)
    self.code, self.status = code, status


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelMessage:
  """A chat model's message, and what it took.

  Attributes:
    message: the message as the endpoint gave it.
    finish: the endpoint's `finish_reason`.
    usage: the endpoint's counts of tokens, unchecked; empty if it counts none.
    seconds: time of the attempt that succeeded.
    first_s: time until a stream began; None without a stream.
    attempts: number of attempts.
  """

  message: Mapping[str, Any]
  finish: str
  usage: Mapping[str, Any]
  seconds: float
  first_s: float | None = None
  attempts: int = 1


# (messages, tools, **sampling) -> the next message; EndpointError if none.
Ask = Callable[..., ModelMessage]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions:
  """Limits of a conversation, and the form of its requests.

  Attributes:
    native_tools: true to have the endpoint call tools by its own means; false
      has calls written as text.
    stream: true to have answers sent while they are written.
    max_turns: most tool calls, invalid ones and messages without one included.
    max_answer_tokens: most tokens of an answer, by the endpoint's tokenizer.
    max_context_tokens: tokens of a conversation, as the endpoint counts them,
      at which it ends; 0 leaves that to the endpoint.
    max_characters: characters of a conversation at which it ends.
    requests_per_minute: most requests that are begun in a minute; 0 for any.
    patience_s: longest time for which a failing request is repeated.
    price_in, price_out: USD per million tokens that the model reads and writes,
      for endpoints that name no cost.
    body: JSON object of fields that replace those of every request, such as
      {"max_tokens": null, "max_completion_tokens": 9000}; a null leaves a
      field out.
  """

  native_tools: bool = False
  stream: bool = False
  max_turns: int = 100
  max_answer_tokens: int = 8192
  max_context_tokens: int = 0
  max_characters: int = 1_000_000
  requests_per_minute: float = 0.0
  patience_s: float = 600.0
  price_in: float = 0.0
  price_out: float = 0.0
  body: str = '{}'

  def __post_init__(self):
    names = ('max_turns', 'max_answer_tokens', 'max_characters')
    checks.at_least(self, 1, *names)
    checks.at_least(self, 0, 'max_context_tokens')
    names = ('requests_per_minute', 'patience_s', 'price_in', 'price_out')
    checks.number(self, 0, *names)
    is_object = parse_object(self.body) is not None
    checks.require(self, 'body', is_object, 'be a JSON object')


class Conversation:
  """A growing conversation; once played, it has the fields of a Rollout.

  Attributes:
    ended: why it ended: 'finish', 'refusal', 'sandbox', 'endpoint', 'context'
      (that of the endpoint is full), or the limit of ChatOptions that was hit.
    transcript: messages, calls and answers in order, each with its facts.
  """

  def __init__(
    self, env: environment.Environment, options: ChatOptions, member: int
  ):
    self.task_id, self.member, self.ended = env.task_id, member, ''
    self._env, self._options = env, options
    # Policies trained here know the tools of an environment without protocol.
    usage = '\n'.join([USAGE, *map(env.usage, env.tools)])
    prompt = env.prompt + ('' if env.protocol else usage) + BLOCKS
    if options.native_tools:
      prompt = env.prompt.removesuffix(env.protocol).rstrip()
    self._sent: list[dict[str, Any]] = [{'role': 'user', 'content': prompt}]
    for place, (call, answer) in enumerate(env.history):
      self._sent += _earlier(call, answer, place, options.native_tools)
    self.transcript: list[Mapping[str, Any]] = [*self._sent]
    self._answers: list[ModelMessage] = []
    self._turns: list[turns.Turn] = []

  def play(
    self, ask: Ask, functions: Sequence[Any], reward: rewards.RewardOptions,
    **sampling: Any,
  ) -> None:  # fmt: skip
    """Takes turns with the model, and grades; closes the environment.

    A failure of the endpoint gives the status INFRASTRUCTURE, as one of the
    sandbox does.

    Args:
      functions: tools for the endpoint's own calls; () with calls in text.
      **sampling: fields of requests; the seed grows by 1 with each answer.
    """
    seed = sampling.pop('seed')
    with contextlib.closing(self._env) as env:
      try:
        while not self._is_over():
          place = len(self._answers)
          self._take(ask(self._sent, functions, seed=seed + place, **sampling))
        self.verdict = env.verdict(self.ended == 'finish')
      except EndpointError as error:
        said = f'{error.code} {error}'.lower()
        is_full = error.status in (400, 413, 422) and _NO_ROOM.search(said)
        self.ended = 'context' if is_full else 'endpoint'
        self.transcript.append({'role': 'endpoint', 'content': str(error)})
        self.verdict = records.broken(0, '', str(error))
        if is_full:
          self.verdict = env.verdict(False)
      self.flags, self.sandbox_seconds = env.flags, env.sandbox_seconds
      self.open_todos = env.open_todos
      self.reward, self.reward_terms = rewards.score(
        self.verdict,
        self._turns,
        env.flags,
        reward,
        num_sampled=self.usage()['tokens_out'],
        open_todos=env.open_todos,
      )
    self.num_turns = len(self._turns)
    self.num_invalid = sum(not t.is_valid for t in self._turns)
    self.tools = tuple(t.tool for t in self._turns)

  def usage(self) -> dict[str, Any]:
    """Returns sums and counts of the answers, as columns of a row."""
    given, options = [a.usage for a in self._answers], self._options
    read = sum(_count(u, 'prompt_tokens') for u in given)
    written = sum(_count(u, 'completion_tokens') for u in given)
    priced = (read * options.price_in + written * options.price_out) / 1e6
    named = [u['cost'] for u in given if _is_count(u.get('cost'))]
    return {
      'ended': self.ended,
      'tokens_in': read,
      'tokens_out': written,
      'cost_usd': sum(named) if named else priced,
      'answer_s': [round(a.seconds, 3) for a in self._answers],
      'attempts': sum(a.attempts for a in self._answers),
      'cut': sum(a.finish == 'length' for a in self._answers),
    }

  def _is_over(self) -> bool:
    """True if the conversation has ended; names a limit that it has hit."""
    options = self._options
    usage = self._answers[-1].usage if self._answers else {}
    tokens = _count(usage, 'prompt_tokens') + _count(usage, 'completion_tokens')
    for name, value in (
      ('max_turns', len(self._turns)),
      ('max_context_tokens', tokens),
      ('max_characters', sum(map(_length, self._sent))),
    ):
      if 0 < getattr(options, name) <= value:
        self.ended = self.ended or name
    return bool(self.ended)

  def _take(self, answer: ModelMessage) -> None:
    """Carries out the calls of an answer, and answers each."""
    self._answers.append(answer)
    message = {**answer.message, 'role': 'assistant'}
    facts = {k: v for k, v in vars(answer).items() if k != 'message'}
    self.transcript.append(message | facts)
    native = (
      _native(message, len(self._sent)) if self._options.native_tools else []
    )
    reply = {k: message[k] for k in ('role', *_KEPT) if k in message}
    if native:
      reply['tool_calls'] = [call for call, _ in native]
    self._sent.append(reply)
    if message.get('refusal') or answer.finish == 'content_filter':
      self.ended = 'refusal'
      return
    texts = [text for _, text in native]
    if not self._options.native_tools:
      texts = _texts(str(message.get('content') or ''))
    if answer.finish == 'length' or not texts:
      self._note('', turns.NOT_A_CALL)
      results = [_CUT if answer.finish == 'length' else _NO_CALL]
      self.transcript.append({'role': 'tool', 'content': results[0]})
      results *= max(1, len(native))
    else:
      results = [self._result(text) for text in texts]
    if self._env.single_turn:
      self.ended = self.ended or 'max_turns'
    if len(self._turns) == self._options.max_turns - 1:
      results[-1] += episode.LAST_CALL
    if not native and len(results) > 1:
      results = [f'answer {n}:\n{r}' for n, r in enumerate(results, 1)]
      results = ['\n\n'.join(results)]
    for place, result in enumerate(results):
      link: dict[str, Any] = {'role': 'user'}
      if native:
        link = {'role': 'tool', 'tool_call_id': native[place][0]['id']}
      self._sent.append({**link, 'content': result})

  def _result(self, text: str) -> str:
    """Returns the environment's answer to a call, which is kept with it."""
    if self.ended or len(self._turns) == self._options.max_turns:
      self.transcript.append({'role': 'tool', 'call': text, 'content': _OVER})
      return _OVER
    begin = time.monotonic()
    result = self._env.call(text)
    self._note(result.tool, result.outcome)
    self.transcript.append({
      'role': 'tool',
      'call': text,
      'content': result.text,
      'tool': result.tool,
      'outcome': result.outcome,
      'seconds': time.monotonic() - begin,
    })  # fmt: skip
    if result.is_final or self._env.is_broken:
      self.ended = 'finish' if result.is_final else 'sandbox'
    return result.text

  def _note(self, tool: str, outcome: str) -> None:
    # Its place is in no window: there are no tokens.
    turn = dict(trajectory=0, start=len(self._turns), stop=len(self._turns) + 1)
    self._turns.append(turns.Turn(tool=tool, outcome=outcome, **turn))


def _native(
  message: Mapping[str, Any], index: int
) -> list[tuple[dict[str, Any], str]]:
  """Returns an endpoint's calls as they are sent back, and as texts of ours."""
  pairs, ids = [], set()
  for place, call in enumerate(message.get('tool_calls') or ()):
    name = str(call['function'].get('name') or '')
    arguments = call['function'].get('arguments') or '{}'
    if not isinstance(arguments, str):
      arguments = json.dumps(arguments)
    # What is no object makes no call; the environment says so.
    text, parsed = f'{name} {arguments}', parse_object(arguments)
    if parsed is not None:
      made = tool_calls.JsonCall(name=name, arguments=parsed)
      text = tool_calls.render_json(made)
    number = call.get('id')
    if not isinstance(number, str) or not number or number in ids:
      number = f'call_{index}_{place}'
    ids.add(number)
    # Endpoints refuse a conversation with other names and arguments.
    function = {
      'name': name if _NAME.fullmatch(name) else 'unknown',
      'arguments': '{}' if parsed is None else arguments,
    }
    pairs.append(
      ({'id': number, 'type': 'function', 'function': function}, text)
    )
  return pairs


def _earlier(
  call: str, answer: str, place: int, is_native: bool
) -> list[dict[str, Any]]:
  """Returns the messages of a call that stands before the first turn."""
  said: dict[str, Any] = {'role': 'assistant', 'content': call}
  link: dict[str, Any] = {'role': 'user'}
  if is_native:
    made, number = tool_calls.parse_json(call), f'call_{place}'
    function = {'name': made.name, 'arguments': json.dumps(made.arguments)}
    native = {'id': number, 'type': 'function', 'function': function}
    said = {'role': 'assistant', 'content': None, 'tool_calls': [native]}
    link = {'role': 'tool', 'tool_call_id': number}
  return [said, {**link, 'content': answer}]


def _texts(content: str) -> list[str]:
  """Returns the calls in a message: its blocks, or all of it without one."""
  said = content.rpartition(_THOUGHT_END)[2].strip()
  blocks: list[str] = []
  block: list[str] | None = None
  for line in said.split('\n'):
    if block is None:
      block = [] if line.startswith('```') else None
    elif line.rstrip(' \t') != '```':
      block.append(line)
    else:
      blocks.append('\n'.join(block).rstrip('\n'))
      block = None
  return blocks or [said] * bool(said)


def parse_object(text: str) -> dict[str, Any] | None:
  """Parses a JSON object; None for any other text."""
  try:
    value = json.loads(text)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def _count(usage: Mapping[str, Any], name: str) -> int:
  value = usage.get(name)
  return value if isinstance(value, int) and _is_count(value) else 0


def _is_count(value: Any) -> bool:
  return type(value) in (int, float) and 0 <= value <= _MOST


def _length(message: Mapping[str, Any]) -> int:
  called = (c['function']['arguments'] for c in message.get('tool_calls', ()))
  texts = (*(message.get(name) for name in _KEPT), *called)
  return sum(len(t) for t in texts if isinstance(t, str))
