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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.core import checks, files
from composer_jax.hf.text import call_formats, chat_template, tokenizer_json
from composer_jax.hf.text import roles as hf_roles
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.text import language, tool_calls

FILE = 'language.json'  # beside the tokenizer of a run
GENERATION = 'generation_config.json'
FORMAT = 'composer_jax.language/1'
_THOUGHT, _THOUGHT_END = '<think>', '</think>'
_TEXT = 'text'
_WORD = 'w0rd'
_USER = {'role': 'user', 'content': 'x'}
_PROBE = call_formats.WrittenCall(
  name='probe', arguments={'word': 'x<y>"é'}, number='functions.probe:0'
)

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
      {"enable_thinking": false}.
  """

  calls: str = 'auto'
  variables: str = '{}'

  def __post_init__(self):
    known = ('auto', *call_formats.FORMATS, _TEXT, 'roles')
    checks.one_of(self, 'calls', known)
    try:
      is_object = isinstance(json.loads(self.variables), dict)
    except ValueError:
      is_object = False
    checks.require(self, 'variables', is_object, 'be a JSON object')


class TemplateLanguage(language.Language):
  """Implements `text.language.Language` by a chat template.

  Attributes:
    ends: the token by which the template ends a turn, and those of the
      generation config.
    calls: name of the form of calls, see `LanguageOptions`.
    is_native: true if calls of the run's tools are written in that form.
    lists_tools: true if the template tells the model of tools.
    rewrites: true if the template changes earlier turns of a conversation.
  """

  def __init__(
    self,
    tokenizer: hf_tokenizer.ImportedTokenizer,
    template: chat_template.ChatTemplate,
    options: LanguageOptions = LanguageOptions(),
    *,
    functions: Sequence[Mapping[str, Any]] = (),
    ends: Sequence[int] = (),
  ):
    """Tries the template; a ValueError if no turns can be told in it.

    Args:
      functions: tools of a run's tasks, in the form of OpenAI's endpoints.
      ends: ids that end a turn beside those of the template.
    """
    self._tokenizer, self._template = tokenizer, template
    self._functions = [dict(f) for f in functions]
    self._variables = json.loads(options.variables)
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
    if options.calls == 'auto' or options.calls in call_formats.FORMATS:
      self._choose_calls(options.calls)
    self.is_native = self.calls != _TEXT and bool(self._functions)
    self.lists_tools = self._looks_at_tools()
    thought = f'{_THOUGHT}\n{_WORD}\n{_THOUGHT_END}'
    before = self.markup([_USER, {**said, 'content': f'{thought}\n\n{_WORD}'}])
    kept = thought in tokenizer.without_marks(before)
    # Some leave out reasoning, some also write an empty one in a last turn.
    self.rewrites = not kept or any(
      not self.markup([*talk, _USER]).startswith(self.markup(talk))
      for talk in ([_USER, said], [_USER, {**said, 'content': thought}])
    )

  def _choose_calls(self, asked: str) -> None:
    """Takes the form in which the template's own calls are found."""
    for name in call_formats.FORMATS if asked == 'auto' else [asked]:
      self.calls = name
      # Some templates expect arguments as an object, others as its text, and
      # DeepSeek-V3's asks whether the content of a call is null.
      for self._dumps, self._template.nulls in itertools.product(
        (False, True), ((), ('content',))
      ):
        try:
          turn_T = self._written(self.turn([_PROBE], ''))
        except ValueError:
          continue
        found = self._format.find(self._tokenizer.decode(turn_T[:-1])) or []
        if [(c.name, c.arguments) for c in found] == [
          (_PROBE.name, _PROBE.arguments)
        ]:
          return
    if asked != 'auto':
      raise ValueError(
        f'{self._template.name}: the chat template writes no calls in the form '
        f"{asked!r}; take --config.language.calls='auto'."
      )
    self.calls, self._dumps, self._template.nulls = _TEXT, False, ()

  def _looks_at_tools(self) -> bool:
    function = {'name': 'f', 'description': 'f', 'parameters': {}}
    tools = [{'type': 'function', 'function': function}]
    try:
      return self.markup([_USER]) != self.markup([_USER], tools=tools)
    except ValueError:
      return True  # An error of the template: it looked at them.

  def describe(self) -> str:
    """Returns one sentence for people on what was chosen, and why."""
    ends = ' '.join(self._tokenizer.decode([i]) for i in self.ends)
    told = 'the template' if self.lists_tools else 'the prompt'
    changed = (
      'the template changes earlier turns (reasoning is dropped): windows keep '
      'them as sampled, and a new window begins as the template renders it'
      if self.rewrites
      else 'earlier turns stay as they are'
    )
    return (
      f'{self._template.name}: calls in the form {self.calls!r}, tools listed '
      f'by {told}, turns end with {ends}; {changed}'
    )

  def markup(
    self, messages: Sequence[Mapping[str, Any]], **options: Any
  ) -> str:
    """Returns a conversation as the template writes it, special tokens marked.

    Calls have arguments as objects; the template gets them as it expects them.
    """
    if self._dumps:
      messages = [_with_text_arguments(message) for message in messages]
    options = {**self._variables, **options}
    return self._template.markup(self._tokenizer, messages, **options)

  def encode(
    self, messages: Sequence[Mapping[str, Any]], **options: Any
  ) -> np.ndarray:
    """Returns the int32 ids of a conversation."""
    return self.ids(self.markup(messages, **options))

  def ids(self, markup: str) -> np.ndarray:
    return self._tokenizer.encode_markup(markup)[0]

  def tail(
    self, messages: Sequence[Mapping[str, Any]], word: str, **options: Any
  ) -> str:
    """Returns what the template writes behind the last place of a word."""
    _, there, after = self.markup(messages, **options).rpartition(word)
    if not there:
      raise ValueError(
        f'{self._template.name}: the chat template leaves out what the '
        'assistant said, so nothing can be learnt by it.'
      )
    return after

  @property
  def native_functions(self) -> list[dict[str, Any]] | None:
    """The tools that the template shall list; None where it lists none."""
    return self._functions if self.is_native and self.lists_tools else None

  def dialogue(self, prompt, protocol='', notes=None) -> 'TemplateDialogue':
    """The notes of a later window stand in one message with the prompt."""
    parts = [prompt]
    if self.is_native:
      parts = [prompt.removesuffix(protocol).rstrip()]
      if not self.lists_tools:
        parts.append(self._listing())
    if notes is not None:
      parts += [self._tokenizer.decode(note_T) for note_T in notes]
    message = {'role': 'user', 'content': '\n\n'.join(parts)}
    opening_T = self.encode(
      [message], tools=self.native_functions, add_generation_prompt=True
    )
    return TemplateDialogue(self, opening_T)

  def _listing(self) -> str:
    tools = [json.dumps(f, ensure_ascii=False) for f in self._functions]
    _, call = self.parts(self._written(self.turn([_PROBE], ''))[:-1])
    lines = ['The tools:', *tools, 'A call of a tool named probe:', call]
    return '\n'.join(lines)

  def written(self, call: str, place: int = 0) -> np.ndarray:
    """Returns the turn as the template writes it behind its opening."""
    calls = []
    if self.is_native:
      with contextlib.suppress(tool_calls.ToolCallError):
        made = tool_calls.parse_json(call)
        number = f'functions.{made.name}:{place}' * (self.calls == 'kimi')
        calls.append(
          call_formats.WrittenCall(
            name=made.name, arguments=dict(made.arguments), number=number
          )
        )
    return self._written(self.turn(calls, call))

  def _written(self, turn: Mapping[str, Any]) -> np.ndarray:
    body = self.continued([_USER], turn)
    ids = self.ids(body).tolist()
    at = next((i for i, t in enumerate(ids) if t in self.ends), None)
    if at is not None:
      return np.array(ids[: at + 1], np.int32)
    # DeepSeek-V3's template leaves the last call of a turn open.
    last = self._format.marks[-1] if turn_calls(turn) else ''
    closing = '' if last in body else self._tokenizer.mark(last)
    return np.array([*ids, *self.ids(closing), self.ends[0]], np.int32)

  def turn(
    self, calls: Sequence[call_formats.WrittenCall], content: str
  ) -> dict[str, Any]:
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
    self, before: Sequence[Mapping[str, Any]], turn: Mapping[str, Any],
    **options: Any,
  ) -> str:  # fmt: skip
    """Returns what the template writes of a turn behind its opening."""
    opening = self.markup(before, add_generation_prompt=True, **options)
    whole = self.markup([*before, turn], **options)
    if whole.startswith(opening):
      return whole[len(opening) :]
    common = len(os.path.commonprefix([opening, whole]))
    begun = self._tokenizer.without_marks(opening[common:])
    if begun.strip() == _THOUGHT:
      # DeepSeek-R1 opens a turn with reasoning, and then leaves that out.
      thought = str(turn.get('reasoning_content') or '')
      return f'{thought}\n{_THOUGHT_END}\n\n{whole[common:]}'
    if list(before) != [_USER]:
      # DeepSeek-V3 forgets to close answers before a second call.
      return self.continued([_USER], turn)
    raise ValueError(
      f'{self._template.name}: the chat template opens a turn with '
      f'{self._tokenizer.without_marks(opening)[-80:]!r}, and writes turns '
      'that begin otherwise: no turn can be learnt by it.'
    )

  def end_of(self, body: str) -> int:
    """Returns the place behind the mark of a turn's end, or its length."""
    spellings = (self._tokenizer.decode([i]) for i in self.ends)
    marked = [hf_tokenizer.MARK + spelling for spelling in spellings]
    places = [(body.find(m), m) for m in marked if m in body]
    place, mark = min(places, default=(len(body), ''))
    return place + len(mark)

  def masked(
    self, markup: str, spans: Sequence[tuple[int, int]]
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids, and a mask that is true for those inside the spans."""
    ids, offsets = self._tokenizer.encode_markup(markup)
    mask = np.zeros(len(ids), bool)
    for start, stop in spans:
      mask |= (offsets[:, 0] >= start) & (offsets[:, 1] <= stop)
    return ids, mask

  def parts(self, tokens_T: np.ndarray) -> tuple[str, str]:
    """Returns the reasoning and the other words of a turn's ids."""
    text = self._tokenizer.shown(tokens_T)
    head, end, rest = text.partition(_THOUGHT_END)
    if not end or (self.is_native and self._format.marks[0] in head):
      return '', text
    return head.strip().removeprefix(_THOUGHT).strip(), rest.strip()

  @property
  def _format(self) -> call_formats.CallFormat:
    return call_formats.FORMATS[self.calls]

  def found(
    self, tokens_T: np.ndarray
  ) -> tuple[language.Said, list[call_formats.WrittenCall]]:
    """Returns what the ids of a turn say, without the one that ended it."""
    if not self._is_said(tokens_T).all():
      return language.Said(fault='error: not a call'), []
    _, content = self.parts(tokens_T)
    if not self.is_native:
      said = (content.strip(),) if content.strip() else ()
      return language.Said(calls=said, fault='' if said else _NO_CALL), []
    calls = self._format.find(content)
    if not calls:
      fault = _DAMAGED if calls is None else _NO_CALL
      return language.Said(fault=fault), []
    texts = [
      tool_calls.render_json(
        tool_calls.JsonCall(name=call.name, arguments=call.arguments)
      )
      for call in calls
    ]
    return language.Said(calls=tuple(texts)), calls

  def _is_said(self, tokens_T: np.ndarray) -> np.ndarray:
    """True for ids of text, and for those of the marks in a turn."""
    known = {_THOUGHT, _THOUGHT_END}
    known |= {*self._format.marks} if self.is_native else set()
    size, specials = self._tokenizer.vocab_size, self._tokenizer.special_ids
    is_text = [i < size and i not in specials for i in tokens_T.tolist()]
    return np.array(is_text, bool) | [
      self._tokenizer.shown([i]) in known for i in tokens_T.tolist()
    ]

  def words(self, tokens_T: np.ndarray) -> np.ndarray:
    _, content = self.parts(tokens_T[self._is_said(tokens_T)])
    return self._tokenizer.encode(content)

  def remark(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    said = {'role': 'user', 'content': text}
    one = self.markup([_USER])
    opening = self.markup([_USER], add_generation_prompt=True)
    prefix_T = self.ids(opening.removeprefix(one))
    try:
      two = self.markup([_USER, said])
    except ValueError:
      two = ''  # Some templates refuse two messages of a user.
    if not two.startswith(one):
      return self._tokenizer.encode(text), prefix_T
    return self.ids(two[len(one) :]), prefix_T

  def messages(self, tokens_T, loss_mask_T=None) -> list[dict[str, str]]:
    """A context is told as the template frames it, a turn by what it says."""
    if loss_mask_T is None:
      text = self._tokenizer.decode(tokens_T)
      for before, after in self._frames:
        _, there, inner = text.partition(before)
        if there and inner.endswith(after):
          text = inner.removesuffix(after)
          break
      return [{'role': 'tool', 'text': text}, {'role': 'call', 'text': ''}]
    shown, start = [], 0
    for is_turn, run in itertools.groupby(loss_mask_T.tolist()):
      stop = start + len(list(run))
      part_T, start = tokens_T[start:stop], stop
      if not is_turn:
        role = 'tool' if shown else 'user'
        shown.append({'role': role, 'text': self._tokenizer.decode(part_T)})
        continue
      if part_T[-1] in self.ends:
        part_T = part_T[:-1]
      thought, content = self.parts(part_T)
      if thought:
        shown.append({'role': 'thought', 'text': thought})
      calls = self.found(part_T)[0].calls
      shown.append({'role': 'call', 'text': '\n'.join(calls) or content})
    return shown

  @functools.cached_property
  def _frames(self) -> list[tuple[str, str]]:
    """What stands before and behind an answer to a call, or to none."""
    frames = []
    for calls in ([_PROBE] * self.is_native, []):
      dialogue = self.dialogue('')
      dialogue.read(self._written(self.turn(calls, _WORD)), True)
      text = self._tokenizer.decode(dialogue.answer([_WORD]))
      before, _, after = text.partition(_WORD)
      frames.append((before, after))
    return frames


def turn_calls(turn: Mapping[str, Any]) -> list[Any]:
  return turn.get('tool_calls') or []


class TemplateDialogue(language.Dialogue):
  """Implements `text.language.Dialogue` by a chat template.

  Earlier messages are kept without their words: what a template writes of an
  answer depends on the kinds of messages before it alone.
  """

  def __init__(self, speech: TemplateLanguage, opening_T: np.ndarray):
    self._speech, self.opening_T = speech, opening_T
    self._history: list[dict[str, Any]] = [_USER]
    self._calls: list[call_formats.WrittenCall] = []
    self._replies: list[dict[str, Any]] = []
    self._turn: dict[str, Any] | None = None
    self._end: int | None = None

  def read(self, tokens_T: np.ndarray, stopped: bool) -> language.Said:
    if self._turn is not None:
      self._history += [self._turn, *self._replies]
    self._end = int(tokens_T[-1]) if stopped else None
    said, calls = language.Said(fault='error: call too long'), []
    if stopped:
      said, calls = self._speech.found(tokens_T[:-1])
    self._calls = [dataclasses.replace(call, arguments={}) for call in calls]
    self._turn = self._speech.turn(self._calls, _WORD)
    return said

  def answer(self, texts: Sequence[str], is_query: bool = False) -> np.ndarray:
    """Answers to calls are a tool's messages, all other texts are a user's."""
    speech, calls = self._speech, self._calls
    texts = [*texts, *[''] * (len(calls) - len(texts))]
    numbers = [c['id'] for c in turn_calls(self._turn or {})]
    replies = [{'role': 'user', 'content': '\n\n'.join(texts)}]
    if numbers:
      replies = [
        {'role': 'tool', 'tool_call_id': number, 'content': text}
        for number, text in zip(numbers, texts, strict=True)
      ]
    self._replies = [{**reply, 'content': _WORD} for reply in replies]
    word = f'{_WORD}.'
    while any(word in text for text in texts):
      word += '.'
    # The word ends the turn: its content, or the arguments of its last call.
    marked = speech.turn(
      [*calls[:-1], *(_ending(c, word) for c in calls[-1:])], word
    )
    before = [*self._history, marked]
    closing = speech.tail(before, word, tools=speech.native_functions)
    after = speech.tail(
      [*before, *replies],
      word,
      tools=speech.native_functions,
      add_generation_prompt=True,
    )
    ids = speech.ids(after)
    if self._end is None:
      return ids
    is_same = after.startswith(closing)
    limit = len(speech.ids(closing)) if is_same else len(ids)
    for place, token in enumerate(ids[:limit].tolist()):
      if token in speech.ends:
        return ids[place + 1 :]
    return speech.ids(after.removeprefix(closing))


def _ending(call: call_formats.WrittenCall, word: str) -> Any:
  return dataclasses.replace(call, arguments={'x': word})


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
  calls = []
  for call in turn_calls(message):
    function = call.get('function') or {}
    given = function.get('arguments')
    if not isinstance(given, str):
      given = json.dumps(given, ensure_ascii=False)
    calls.append({**call, 'function': {**function, 'arguments': given}})
  return {**message, 'tool_calls': calls} if calls else dict(message)


def from_folder(
  folder: str | os.PathLike,
  tokenizer: hf_tokenizer.ImportedTokenizer,
  options: LanguageOptions = LanguageOptions(),
  functions: Sequence[Mapping[str, Any]] = (),
) -> TemplateLanguage | None:
  """Reads the language of a checkpoint; None for the roles of `text.chat`.

  A ValueError if a form of calls is named and there is no chat template.
  """
  if options.calls == 'roles':
    return None
  if options.calls == 'auto' and not chat_template.source_of(folder)[1]:
    return None
  ends = _ends(pathlib.Path(folder), tokenizer)
  return TemplateLanguage(
    tokenizer,
    chat_template.load(folder),
    options,
    functions=functions,
    ends=ends,
  )


def _ends(
  folder: pathlib.Path, tokenizer: hf_tokenizer.ImportedTokenizer
) -> list[int]:
  path = folder / GENERATION
  given = files.read_json(path).get('eos_token_id') if path.exists() else []
  ends = [*given] if isinstance(given, list) else [given]
  config = tokenizer_json.read_config(folder / chat_template.CONFIG)
  eos = hf_roles.special_tokens(config).get('eos_token', '')
  ends.append(tokenizer.id_of(eos))
  return [i for i in ends if type(i) is int]


def save(
  path: pathlib.Path, folder: str | os.PathLike,
  tokenizer: hf_tokenizer.ImportedTokenizer, options: LanguageOptions,
) -> None:  # fmt: skip
  """Keeps what `load` needs of an import; the date is that of now."""
  config = tokenizer_json.read_config(
    pathlib.Path(folder, chat_template.CONFIG)
  )
  value = {
    'format': FORMAT,
    'template': chat_template.source_of(folder)[1],
    'special_tokens': hf_roles.special_tokens(config),
    'ends': _ends(pathlib.Path(folder), tokenizer),
    'now': datetime.datetime.now().isoformat(),
    **dataclasses.asdict(options),
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
    tokenizer.language = TemplateLanguage(
      tokenizer,
      chat_template.ChatTemplate(
        kept['template'],
        kept['special_tokens'],
        str(beside),
        datetime.datetime.fromisoformat(kept['now']),
      ),
      LanguageOptions(calls=kept['calls'], variables=kept['variables']),
      functions=functions,
      ends=kept['ends'],
    )
  return tokenizer
