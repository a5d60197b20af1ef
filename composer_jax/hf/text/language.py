"""Speaks the chat template of a checkpoint: prompts, calls and answers.

A template renders whole conversations, and a window must grow token by token.
The context after a turn is therefore rendered twice, with the turn last and
with the host's answer behind it: a word that stands for the end of the turn is
looked for in both, and what follows it is the end of the turn and the answer.
What was sampled is never rendered, so a template that changes earlier turns
(Qwen3 and DeepSeek-R1 drop their reasoning) changes nothing in a window. A new
window begins with what the template makes of its messages.
"""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.core import checks, files
from composer_jax.hf.text import call_formats, chat_template
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.text import chat, tool_calls

FILE = 'language.json'  # beside the tokenizer of a run
GENERATION = 'generation_config.json'
FORMAT = 'composer_jax.language/1'
_THOUGHT, _THOUGHT_END = '<think>', '</think>'
_TEXT = 'text'
_Messages = Sequence[Mapping[str, Any]]
_Calls = list[call_formats.WrittenCall]
_WORD = 'w0rd'
_USER = {'role': 'user', 'content': 'x'}
_PROBED = ('probe', {'word': 'x<y>"é'})
_PROBE = call_formats.WrittenCall(*_PROBED, number='functions.probe:0')

_NO_CALL = 'error: no call of a tool'
_DAMAGED = 'error: a damaged call of a tool; its arguments are a JSON object'


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageOptions:
  """How a run speaks to an imported model.

  Attributes:
    calls: form of tool calls: 'hermes' (Qwen), 'deepseek', 'kimi', or 'text',
      a message that is one call; 'auto' takes the one that the chat template
      writes, and 'roles' the protocol of models trained here.
    variables: JSON object of variables of the chat template, such as
      {"enable_thinking": false}; '' for none.
  """

  calls: str = 'auto'
  variables: str = ''

  def __post_init__(self):
    known = ('auto', *call_formats.FORMATS, _TEXT, 'roles')
    checks.one_of(self, 'calls', known)
    try:
      is_object = isinstance(json.loads(self.variables or '{}'), dict)
    except ValueError:
      is_object = False
    checks.require(self, 'variables', is_object, 'be a JSON object')


class TemplateLanguage(chat.Language):
  """Implements `text.chat.Language` by a chat template.

  Attributes:
    ends: the token by which the template ends a turn, and those of the
      generation config.
    calls: name of the form of calls, see `LanguageOptions`.
    is_native: true if calls of the run's tools are written in that form.
    lists_tools: true if the template tells the model of tools.
    listed: tools that the template shall list; None where it lists none.
  """

  def __init__(
    self,
    tokenizer: hf_tokenizer.ImportedTokenizer,
    template: chat_template.ChatTemplate,
    options: LanguageOptions = LanguageOptions(),
    functions: Sequence[Mapping[str, Any]] = (),
    ends: Sequence[int] = (),
  ):
    """Tries the template; a ValueError if no turns can be told in it.

    Args:
      functions: tools of a run's tasks, in the form of OpenAI's endpoints.
      ends: ids that end a turn beside those of the template.
    """
    self.tokenizer, self.template, self.options = tokenizer, template, options
    self._functions = [dict(f) for f in functions]
    self._variables = json.loads(options.variables or '{}')
    self.ends, self.calls, self._dumps = (), _TEXT, False
    said = {'role': 'assistant', 'content': _WORD}
    closing_T = self.ids(self.tail([_USER, said], _WORD))
    special = [i for i in closing_T.tolist() if i in tokenizer.special_ids]
    self.ends = tuple(dict.fromkeys([*special[:1], *map(int, ends)]))
    if not self.ends:
      raise ValueError(
        f'{template.name}: the chat template ends no turn with a special '
        f'token, and {GENERATION} names none: a turn would never end.'
      )
    if options.calls != _TEXT:
      self._choose_calls(options.calls)
    self.lists_tools = self._looks_at_tools()
    self.is_native = self.calls != _TEXT and bool(self._functions)
    self.listed = self._functions if self.is_native * self.lists_tools else None

  @functools.cached_property
  def rewrites(self) -> bool:
    """True if the template changes earlier turns of a conversation.

    Some leave out reasoning, or write an empty one in a last turn alone; others
    keep the last messages, or shorten old answers.
    """
    thought = f'{_THOUGHT}\n{_WORD}\n{_THOUGHT_END}'
    said = {'role': 'assistant', 'content': _WORD}
    reasoned = {**said, 'content': f'{thought}\n\n{_WORD}'}
    before = self.tokenizer.without_marks(self.markup([_USER, reasoned]))
    long = {'role': 'tool', 'tool_call_id': 'x', 'content': 'x\n' * 10_000}
    turn = {**self.turn([_PROBE], ''), 'reasoning_content': _WORD}
    replies = [turn, {**long, 'tool_call_id': turn_calls(turn)[0]['id']}]
    if self.calls == _TEXT:
      replies = [reasoned, {**_USER, 'content': long['content']}]
    called = [_USER, *(replies * 6), said, _USER, *replies, said]
    spoken = [_USER, said, _USER, reasoned, _USER, said]
    return thought not in before or not all(map(self._grows, (spoken, called)))

  def _grows(self, talk: _Messages) -> bool:
    """True if each message of a talk only adds to what the template writes."""
    texts = []
    with contextlib.suppress(ValueError):  # It may refuse some.
      texts += (self.markup(talk[:n]) for n in range(1, len(talk) + 1))
    return all(b.startswith(a) for a, b in itertools.pairwise(texts))

  def _choose_calls(self, asked: str) -> None:
    """Takes the form in which the template's own calls are found."""
    for name in call_formats.FORMATS if asked == 'auto' else [asked]:
      self.calls = name
      # Some templates expect arguments as an object, others as its text, and
      # DeepSeek-V3's asks whether the content of a call is null.
      for self._dumps, self.template.nulls in itertools.product(
        (False, True), ((), ('content',))
      ):
        try:
          turn_T = self._written(self.turn([_PROBE], ''))
        except ValueError:
          continue
        found = self._format.find(self.tokenizer.decode(turn_T[:-1])) or []
        if [(c.name, c.arguments) for c in found] == [_PROBED]:
          return
    if asked != 'auto':
      raise ValueError(
        f'{self.template.name}: the chat template writes no calls in the form '
        f"{asked!r}; take --config.language.calls='auto'."
      )
    self.calls, self._dumps, self.template.nulls = _TEXT, False, ()

  def _looks_at_tools(self) -> bool:
    function = {'name': 'f', 'description': 'f', 'parameters': {}}
    tools = [{'type': 'function', 'function': function}]
    try:
      return self.markup([_USER]) != self.markup([_USER], tools=tools)
    except ValueError:
      return True  # An error of the template: it looked at them.

  def describe(self) -> str:
    """Returns one sentence for people on what was chosen, and why."""
    ends = ' '.join(self.tokenizer.decode([i]) for i in self.ends)
    told = 'the template' if self.listed else 'the prompt'
    changed = 'keeps earlier turns'
    if self.rewrites:
      changed = 'changes earlier turns; a window keeps them as sampled, and a '
      changed += 'new window begins as the template renders it'
    return (
      f'{self.template.name}: calls in the form {self.calls!r}, tools listed '
      f'by {told}, turns end with {ends}; the template {changed}'
    )

  def markup(self, messages: _Messages, **options: Any) -> str:
    """Returns a conversation as the template writes it, special tokens marked.

    Calls have arguments as objects; the template gets them as it expects them.
    """
    if self._dumps:
      try:
        messages = [_with_text_arguments(message) for message in messages]
      except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(
          f'tool_calls are no list of calls ({error!r}).'
        ) from error
    options = {**self._variables, **options}
    return self.template.markup(self.tokenizer, messages, **options)

  def encode(self, messages: _Messages, **options: Any) -> np.ndarray:
    """Returns the int32 ids of a conversation."""
    return self.ids(self.markup(messages, **options))

  def ids(self, markup: str) -> np.ndarray:
    return self.tokenizer.encode_markup(markup)[0]

  def tail(self, messages: _Messages, word: str, **options: Any) -> str:
    """Returns what the template writes behind the last place of a word."""
    _, there, after = self.markup(messages, **options).rpartition(word)
    if not there:
      raise ValueError(
        f'{self.template.name}: the chat template leaves out what the '
        'assistant said, so nothing can be learnt by it.'
      )
    return after

  def dialogue(self, prompt, protocol='', notes=None) -> 'TemplateDialogue':
    """The notes of a later window stand in one message with the prompt."""
    parts = [prompt]
    if self.is_native:
      parts = [prompt.removesuffix(protocol).rstrip()]
      parts += [self._listing] * (not self.lists_tools)
    parts += [self.tokenizer.decode(note_T) for note_T in notes or ()]
    talk = [{'role': 'user', 'content': '\n\n'.join(parts)}]
    options = {'tools': self.listed, 'add_generation_prompt': True}
    return TemplateDialogue(self, self.encode(talk, **options))

  @functools.cached_property
  def _listing(self) -> str:
    tools = [json.dumps(f, ensure_ascii=False) for f in self._functions]
    _, call = self.parts(self._written(self.turn([_PROBE], ''))[:-1])
    lines = ['The tools:', *tools, 'A call of a tool named probe:', call]
    return '\n'.join(lines)

  def written(self, call: str, place: int = 0) -> np.ndarray:
    """Returns the turn as the template writes it behind its opening."""
    calls = []
    with contextlib.suppress(tool_calls.ToolCallError):
      made = tool_calls.parse_json(call)
      number = f'functions.{made.name}:{place}' * (self.calls == 'kimi')
      calls = [call_formats.WrittenCall(made.name, made.arguments, number)]
    return self._written(self.turn(calls * self.is_native, call))

  def _written(self, turn: Mapping[str, Any]) -> np.ndarray:
    return self.ids(self.closed(self.continued([_USER], turn), turn))

  def turn(self, calls: _Calls, content: str) -> dict[str, Any]:
    """Returns an assistant's message with calls, or with content alone."""
    if not calls:
      return {'role': 'assistant', 'content': content}
    made = [
      {
        # Nine letters and digits, as Mistral's templates want it.
        'id': call.number or f'call{place:05d}',
        'type': 'function',
        'function': {'name': call.name, 'arguments': call.arguments},
      }
      for place, call in enumerate(calls)
    ]
    return {'role': 'assistant', 'content': None, 'tool_calls': made}

  def continued(
    self, before: _Messages, turn: Mapping[str, Any], **options: Any
  ) -> str:
    """Returns what the template writes of a turn behind its opening."""
    opening = self.markup(before, add_generation_prompt=True, **options)
    whole = self.markup([*before, turn], **options)
    if whole.startswith(opening):
      return whole[len(opening) :]
    head, _, rest = opening.rpartition(self.tokenizer.mark(_THOUGHT))
    if head and not rest.strip() and whole.startswith(head):
      # DeepSeek-R1 opens a turn with reasoning, and then leaves that out.
      thought = str(turn.get('reasoning_content') or '')
      return f'{thought}\n{_THOUGHT_END}\n\n{whole.removeprefix(head)}'
    if list(before) != [_USER]:
      # DeepSeek-V3 forgets to close answers before a second call.
      return self.continued([_USER], turn)
    raise ValueError(
      f'{self.template.name}: the chat template opens a turn with '
      f'{self.tokenizer.without_marks(opening)[-80:]!r}, and writes turns '
      'that begin otherwise: no turn can be learnt by it.'
    )

  def closed(self, body: str, turn: Mapping[str, Any]) -> str:
    """Returns what the template writes of a turn up to the end of the turn.

    DeepSeek-V3's leaves the last call open, and the model has to end it.
    """
    spellings = map(self.tokenizer.decode, ([i] for i in self.ends))
    marks = [f'{hf_tokenizer.MARK}{s}' for s in spellings]
    if found := re.search('|'.join(map(re.escape, marks)), body):
      return body[: found.end()]
    is_open = turn_calls(turn) and self.calls != _TEXT
    last = self._format.marks[-1] if is_open else ''
    return body + self.tokenizer.mark(last) * (last not in body) + marks[0]

  def masked(
    self, markup: str, spans: Sequence[tuple[int, int]]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids, and a mask that is true for those inside the spans."""
    ids, offsets = self.tokenizer.encode_markup(markup)
    mask = np.zeros(len(ids), bool)
    for start, stop in spans:
      mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= stop)
    return ids, mask

  def parts(self, tokens_T: np.ndarray) -> tuple[str, str]:
    """Returns the reasoning and the other words of a turn's ids."""
    text = self.tokenizer.shown(tokens_T)
    head, end, rest = text.partition(_THOUGHT_END)
    if not end or (self.is_native and self._format.marks[0] in head):
      return '', text
    return head.strip().removeprefix(_THOUGHT).strip(), rest.strip()

  @property
  def _format(self) -> call_formats.CallFormat:
    return call_formats.FORMATS[self.calls]

  def found(self, tokens_T: np.ndarray) -> tuple[chat.Said, _Calls]:
    """Returns what the ids of a turn say, without the one that ended it."""
    if not self._is_said(tokens_T).all():
      return chat.Said(fault='error: not a call'), []
    _, content = self.parts(tokens_T)
    if not self.is_native:
      said = (content.strip(),) if content.strip() else ()
      return chat.Said(calls=said, fault='' if said else _NO_CALL), []
    calls = self._format.find(content)
    if not calls:
      fault = _DAMAGED if calls is None else _NO_CALL
      return chat.Said(fault=fault), []
    made = (
      tool_calls.JsonCall(name=c.name, arguments=c.arguments) for c in calls
    )
    return chat.Said(calls=tuple(map(tool_calls.render_json, made))), calls

  def _is_said(self, tokens_T: np.ndarray) -> np.ndarray:
    """True for ids of text, and for those of the marks in a turn."""
    known = {_THOUGHT, _THOUGHT_END}
    known |= {*self._format.marks} if self.is_native else set()
    size, specials = self.tokenizer.vocab_size, self.tokenizer.special_ids
    is_said = [
      (i < size and i not in specials) or self.tokenizer.shown([i]) in known
      for i in tokens_T.tolist()
    ]
    return np.array(is_said, bool)

  def words(self, tokens_T: np.ndarray) -> np.ndarray:
    _, content = self.parts(tokens_T[self._is_said(tokens_T)])
    return self.tokenizer.encode(content)

  def remark(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    one = self.markup([_USER])
    opening = self.markup([_USER], add_generation_prompt=True)
    words_T = self.tokenizer.encode(text)
    with contextlib.suppress(ValueError):
      # Some templates refuse two messages of a user.
      two = self.markup([_USER, {'role': 'user', 'content': text}])
      if two.startswith(one):
        words_T = self.ids(two[len(one) :])
    return words_T, self.ids(opening.removeprefix(one))

  def messages(self, tokens_T, loss_mask_T=None) -> list[dict[str, str]]:
    """A turn is told by what it says, a context as the template frames it.

    Without a mask, an answer that is a user's message has no frame.
    """
    if loss_mask_T is None:
      text, (before, after) = self.tokenizer.decode(tokens_T), self._frame
      if before in text:
        text = text.partition(before)[2].removesuffix(after)
      return [{'role': 'tool', 'text': text}, {'role': 'call', 'text': ''}]
    shown = []
    cuts = np.flatnonzero(np.diff(loss_mask_T)) + 1
    for part_T, is_turn_T in zip(
      np.split(tokens_T, cuts), np.split(loss_mask_T, cuts), strict=True
    ):
      role, text = 'tool' if shown else 'user', ''
      if not is_turn_T[0]:
        text = self.tokenizer.decode(part_T)
      else:
        part_T = part_T[: len(part_T) - int(part_T[-1] in self.ends)]
        thought, text = self.parts(part_T)
        if thought:
          shown.append({'role': 'thought', 'text': thought})
        role, text = 'call', '\n'.join(self.found(part_T)[0].calls) or text
      shown.append({'role': role, 'text': text})
    return shown

  @functools.cached_property
  def _frame(self) -> tuple[str, str]:
    """What stands before and behind a user's answer to a turn."""
    dialogue = self.dialogue('')
    dialogue.read(self._written(self.turn([], _WORD)), True)
    text = self.tokenizer.decode(dialogue.answer([_WORD]))
    before, _, after = text.partition(_WORD)
    return before, after


def turn_calls(turn: Mapping[str, Any]) -> list[Any]:
  return turn.get('tool_calls') or []


class TemplateDialogue(chat.Dialogue):
  """Implements `text.chat.Dialogue` by a chat template.

  Earlier messages are kept without their words: what a template writes of an
  answer depends on the kinds of messages before it alone.
  """

  def __init__(self, speech: TemplateLanguage, opening_T: np.ndarray):
    self._speech, self.opening_T = speech, opening_T
    self._history: list[Mapping[str, Any]] = [_USER]
    # The turn read last, and the answer to it.
    self._calls: _Calls = []
    self._last: list[Mapping[str, Any]] = []
    self._stopped = True

  def read(self, tokens_T: np.ndarray, stopped: bool) -> chat.Said:
    self._history += self._last
    self._stopped, calls = stopped, []
    said = chat.Said(fault='error: call too long')
    if stopped:
      said, calls = self._speech.found(tokens_T[:-1])
    self._calls = [call._replace(arguments={}) for call in calls]
    return said

  def answer(self, texts: Sequence[str], is_query: bool = False) -> np.ndarray:
    """Answers to calls are a tool's messages, all other texts are a user's."""
    speech, calls = self._speech, self._calls
    texts = [*texts, *[''] * (len(calls) - len(texts))]
    turn = speech.turn(calls, _WORD)
    replies = [
      {'role': 'tool', 'tool_call_id': call['id'], 'content': text}
      for call, text in zip(turn_calls(turn), texts, strict=False)
    ] or [{'role': 'user', 'content': '\n\n'.join(texts)}]
    self._last = [turn, *({**reply, 'content': _WORD} for reply in replies)]
    word = f'{_WORD}.'
    while any(word in text for text in texts):
      word += '.'
    # The word ends the turn: its content, or the arguments of its last call.
    for last in calls[-1:]:
      calls = [*calls[:-1], last._replace(arguments={'': word})]
    before = [*self._history, speech.turn(calls, word)]
    closing = speech.tail(before, word, tools=speech.listed)
    options = {'tools': speech.listed, 'add_generation_prompt': True}
    after = speech.tail([*before, *replies], word, **options)
    ids = speech.ids(after)
    if not self._stopped:
      return ids
    is_same = after.startswith(closing)
    limit = len(speech.ids(closing)) if is_same else len(ids)
    ends = np.flatnonzero(np.isin(ids[:limit], speech.ends))
    if len(ends):
      return ids[ends[0] + 1 :]
    return speech.ids(after.removeprefix(closing))


def _with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
  calls = []
  for call in turn_calls(message):
    given = call['function'].get('arguments')
    if not isinstance(given, str):
      given = json.dumps(given, ensure_ascii=False)
    calls.append({**call, 'function': {**call['function'], 'arguments': given}})
  return {**message, 'tool_calls': calls} if calls else message


def from_folder(
  folder: str | os.PathLike,
  tokenizer: hf_tokenizer.ImportedTokenizer,
  options: LanguageOptions = LanguageOptions(),
  functions: Sequence[Mapping[str, Any]] = (),
) -> TemplateLanguage | None:
  """Reads the language of a checkpoint; None for the roles of `text.chat`.

  A ValueError if a form of calls is named and there is no chat template.
  """
  has_template = bool(chat_template.source_of(folder)[1])
  if options.calls == 'roles' or (options.calls == 'auto' and not has_template):
    return None
  template = chat_template.load(folder)
  eos = tokenizer.id_of(template.special_tokens.get('eos_token', ''))
  ends = [*ends_of(folder), *([] if eos is None else [eos])]
  return TemplateLanguage(tokenizer, template, options, functions, ends)


def ends_of(folder: str | os.PathLike) -> list[int]:
  """Returns the ids that end a generation, by the checkpoint's config."""
  path = pathlib.Path(folder) / GENERATION
  given = files.read_json(path).get('eos_token_id') if path.exists() else []
  ends = given if isinstance(given, list) else [given]
  return [i for i in ends if type(i) is int]


def save(path: pathlib.Path, speech: TemplateLanguage) -> None:
  """Keeps what `load_any` needs, so that every process speaks the same."""
  template = speech.template
  value = {
    'format': FORMAT,
    'source': template.source,
    'special_tokens': template.special_tokens,
    'now': template.now.isoformat(),
    'ends': speech.ends,
    **dataclasses.asdict(speech.options),
  }
  files.write_json(path, value)


def load_any(
  path: str | os.PathLike, functions: Sequence[Mapping[str, Any]] = ()
) -> hf_tokenizer.AnyTokenizer:
  """Reads a run's tokenizer, with the language that is kept beside it."""
  tokenizer = hf_tokenizer.load_any(path)
  beside = pathlib.Path(path).with_name(FILE)
  if isinstance(tokenizer, hf_tokenizer.ImportedTokenizer) and beside.exists():
    kept = files.read_json(beside)
    if not isinstance(kept, dict) or kept.get('format') != FORMAT:
      raise ValueError(
        f'{beside} is not a language of format {FORMAT!r}; start the run anew.'
      )
    now = datetime.datetime.fromisoformat(kept['now'])
    template = chat_template.ChatTemplate(
      kept['source'], kept['special_tokens'], str(beside), now
    )
    options = LanguageOptions(calls=kept['calls'], variables=kept['variables'])
    tokenizer.language = TemplateLanguage(
      tokenizer, template, options, functions, kept['ends']
    )
  return tokenizer
