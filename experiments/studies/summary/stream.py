"""Facts come in pieces that no window holds two of; early ones are asked.

  <|user|> track <|end|> <|call|> next <|end|> <|tool|> w3 a5 w1 ... <|end|>

Each `next` brings another piece: assignments (`a5`: variable a is 5) among
words that mean nothing. After the last piece the answer is `ask a`, and the
policy has to call `a5`. The variable that is asked for is assigned in the first
two pieces only and the others later on, so that a window of later pieces tells
nothing of its value: whoever sees that window alone is right once in eight.
"""

import collections
import dataclasses
import random
from collections.abc import Iterable, Sequence

import numpy as np

from composer_jax.agent import environment, episode, summarize
from composer_jax.core import records
from composer_jax.core import turns as turns_lib
from composer_jax.tasks.repository import scripts

VARIABLES = 'abcd'
NUM_VALUES = 8
EARLY = 2  # pieces that may assign what is asked for
PIECE_TOKENS = 12
PIECES = 4  # of a stream that the policy is trained on
# Ten times the window and more: 40 pieces of 12 tokens against 48.
LONG_PIECES = 40

_FACTS = [f'{v}{n}' for v in VARIABLES for n in range(NUM_VALUES)]
_FILLERS = [f'w{n}' for n in range(8)]
_SPECIALS = ('<|pad|>', '<|user|>', '<|call|>', '<|tool|>', '<|end|>')
_WORDS = (
  *('track', 'next', 'ask', 'summary', 'summarise', '...'),
  *VARIABLES,
  *'0123456789',
  *_FACTS,
  *_FILLERS,
)

SUMMARY = summarize.SummaryOptions(
  trigger=48,
  max_tokens=len(VARIABLES) + 1,
  max_summaries=99,
  plan_tokens=0,
  query='summarise',
)
EPISODE = episode.EpisodeOptions(
  max_tokens=SUMMARY.trigger, max_turns=99, max_call_tokens=2
)


class Words:
  """A tokenizer of the words above; a number is its digits, the rest dots."""

  PAD, USER, CALL, TOOL, END = range(5)
  special_ids = frozenset(range(5))
  vocab_size = len(_SPECIALS) + len(_WORDS)

  def __init__(self):
    self._names = (*_SPECIALS, *_WORDS)
    self._ids = {name: i for i, name in enumerate(self._names)}

  def encode(self, text: str) -> np.ndarray:
    ids: list[int] = []
    for word in text.split():
      parts = list(word) if word.isdecimal() else [word]
      ids += [self._ids.get(part, self._ids['...']) for part in parts]
    return np.array(ids, np.int32)

  def decode(self, ids: Iterable[int]) -> str:
    return ' '.join(self._names[int(i)] for i in ids)


@dataclasses.dataclass(frozen=True)
class Stream:
  """One task.

  Attributes:
    task_id: names it.
    pieces: words of each.
    variable: asked for.
  """

  task_id: str
  pieces: tuple[str, ...]
  variable: str

  @property
  def answer(self) -> str:
    words = ' '.join(self.pieces).split()
    return [w for w in words if w in _FACTS and w[0] == self.variable][-1]

  def shifted(self, by: int) -> 'Stream':
    """The stream as likely as this one in which the answer is another."""

    def moved(word: str) -> str:
      if word not in _FACTS or word[0] != self.variable:
        return word
      return f'{word[0]}{(int(word[1]) + by) % NUM_VALUES}'

    pieces = tuple(' '.join(map(moved, p.split())) for p in self.pieces)
    return Stream(f'{self.task_id}+{by}', pieces, self.variable)


def generate(index: int, seed: int, pieces: int) -> Stream:
  """The task of that number; later pieces spare the variable asked for."""
  draw = random.Random(f'stream/{seed}/{pieces}/{index}')
  asked = draw.choice(VARIABLES)
  others = [v for v in VARIABLES if v != asked]
  found = []
  for number in range(pieces):
    if number == 0:
      assigned = list(VARIABLES)
    else:
      assigned = draw.sample(list(VARIABLES) if number < EARLY else others, 2)
    words = [f'{v}{draw.randrange(NUM_VALUES)}' for v in assigned]
    words += draw.choices(_FILLERS, k=PIECE_TOKENS - len(words))
    draw.shuffle(words)
    found.append(' '.join(words))
  return Stream(f'stream/{seed}/{pieces}/{index}', tuple(found), asked)


class StreamEnvironment(environment.Environment):
  """An environment that tells a stream and asks."""

  prompt = 'track'
  tools = ('next', 'answer')

  def __init__(self, task: Stream):
    self.task_id = task.task_id
    self._task = task
    self._told = 0
    self._is_right = False

  def call(self, text: str) -> environment.ToolResult:
    """Tells the next piece; after the question any call is the answer."""
    if self._told > len(self._task.pieces):
      self._is_right = text == self._task.answer
      return environment.ToolResult(text='', tool='answer', is_final=True)
    if text != 'next':
      return environment.ToolResult(
        text='next', tool='', outcome=turns_lib.UNKNOWN_TOOL
      )
    self._told += 1
    told = f'ask {self._task.variable}'
    if self._told <= len(self._task.pieces):
      told = self._task.pieces[self._told - 1]
    return environment.ToolResult(text=told, tool='next')

  def verdict(self, finished: bool) -> records.Verdict:
    return records.Verdict(
      passed=finished and self._is_right,
      num_passed=int(finished and self._is_right),
      num_tests=1,
      status=records.GRADED if finished else records.UNFINISHED,
      sandbox_level='none',
    )

  def close(self) -> None:
    pass


class ScriptedPolicy:
  """Knows the protocol; forgets a variable in a summary now and then.

  It reads what it is given and nothing else: once it wrote a wrong value, that
  value is what it goes on with.
  """

  def __init__(self, tokenizer: Words, draw: random.Random, noise: float):
    self._tokenizer = tokenizer
    self._draw = draw
    self._noise = noise
    self._session = ''
    self._known: dict[str, str] = {}

  def complete(self, request: records.SampleRequest) -> records.Completion:
    """Writes a call, or a summary with some values drawn at random."""
    is_first = request.session != self._session
    if is_first:
      self._session, self._known = request.session, {}
    words = self._tokenizer.decode(request.context_T).split()
    self._known |= {w[0]: w for w in words if w in _FACTS}
    text = 'next'
    if 'summarise' in words:
      text = ' '.join(self._noisy(v) for v in VARIABLES)
    elif 'ask' in words:
      text = self._fact(words[words.index('ask') + 1])
    return scripts.completion(self._tokenizer, request, text, is_first=is_first)

  def close(self, session: str) -> None:
    del session

  def _fact(self, variable: str) -> str:
    return self._known.get(variable, f'{variable}0')

  def _noisy(self, variable: str) -> str:
    if self._draw.random() < self._noise:
      return f'{variable}{self._draw.randrange(NUM_VALUES)}'
    return self._fact(variable)


def transcripts(
  tokenizer: Words, *, seed: int, count: int, noise: float
) -> list[records.Rollout]:
  """Episodes of the scripted policy; one in eight is three times as long."""
  found = []
  for index in range(count):
    pieces = PIECES if index % 8 else 3 * PIECES
    draw = random.Random(f'script/{seed}/{index}')
    found.append(
      episode.run(
        StreamEnvironment(generate(index, seed, pieces)),
        ScriptedPolicy(tokenizer, draw, noise),
        tokenizer,
        EPISODE,
        group=index,
        member=0,
        seed=seed,
        summary=SUMMARY,
      )
    )
  return found


def carried(rollout: records.Rollout, task: Stream) -> bool:
  """Whether the last window was given the right answer, by its summary."""
  last = rollout.trajectories[-1]
  words = Words().decode(last.tokens_T[~last.loss_mask_T]).split()
  return task.answer in words


def oracle(
  rollouts: Sequence[records.Rollout], answers: Sequence[str]
) -> float:
  """Share that the best policy could answer that sees last windows alone.

  Exact for these episodes: each distinct window, without the summary that it
  begins with, gets its most frequent answer.

  Args:
    rollouts: whose last windows are seen.
    answers: right ones.
  """
  found: dict[bytes, collections.Counter] = collections.defaultdict(
    collections.Counter
  )
  for rollout, answer in zip(rollouts, answers, strict=True):
    last = rollout.trajectories[-1]
    # The second message is the summary; the policy's own tokens are no fact.
    ends = np.flatnonzero(last.tokens_T == Words.END)
    seen_T = np.where(last.loss_mask_T, Words.PAD, last.tokens_T)[ends[1] :]
    found[seen_T.tobytes()][answer] += 1
  return sum(max(c.values()) for c in found.values()) / len(rollouts)
