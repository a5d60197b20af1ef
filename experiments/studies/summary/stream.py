"""Facts come in pieces of which no window holds two; early ones are asked for.

  <|user|> track <|end|> <|call|> next <|end|> <|tool|> w3 a5 w1 ... <|end|>

Each `next` brings another piece: assignments (`a5`: variable a is 5) among
words that mean nothing. After the last piece the answer is `ask a`, and the
policy has to call `a5`. The variable that is asked for is assigned in the first
two pieces only and the others later on, so that a window of later pieces tells
nothing of its value: a policy that sees that window alone is right once in
eight.
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
EARLY = 2  # pieces that may assign the variable asked for
PIECE_TOKENS = 12
PIECES = 4  # pieces of a training stream
# More than ten windows: 40 pieces of 12 tokens, in windows of 48.
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
  """A tokenizer of the words above; numbers are digits, other words dots."""

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
    task_id: name of the task.
    pieces: text of each piece.
    variable: variable asked for.
  """

  task_id: str
  pieces: tuple[str, ...]
  variable: str

  @property
  def answer(self) -> str:
    words = ' '.join(self.pieces).split()
    return [w for w in words if w in _FACTS and w[0] == self.variable][-1]

  def shifted(self, by: int) -> 'Stream':
    """Returns an equally likely stream with another answer."""

    def moved(word: str) -> str:
      if word not in _FACTS or word[0] != self.variable:
        return word
      return f'{word[0]}{(int(word[1]) + by) % NUM_VALUES}'

    pieces = tuple(' '.join(map(moved, p.split())) for p in self.pieces)
    return Stream(f'{self.task_id}+{by}', pieces, self.variable)


def generate(index: int, seed: int, pieces: int) -> Stream:
  """Returns a task; late pieces never assign the variable asked for."""
  draw = random.Random(f'stream/{seed}/{pieces}/{index}')
  variable = draw.choice(VARIABLES)
  distractors = [v for v in VARIABLES if v != variable]
  stream_pieces = []
  for number in range(pieces):
    if number == 0:
      assigned = list(VARIABLES)
    else:
      assigned = draw.sample(
        list(VARIABLES) if number < EARLY else distractors, 2
      )
    words = [f'{v}{draw.randrange(NUM_VALUES)}' for v in assigned]
    words += draw.choices(_FILLERS, k=PIECE_TOKENS - len(words))
    draw.shuffle(words)
    stream_pieces.append(' '.join(words))
  return Stream(
    f'stream/{seed}/{pieces}/{index}', tuple(stream_pieces), variable
  )


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
    """Returns the next piece; the call after the question is the answer."""
    if self._told > len(self._task.pieces):
      self._is_right = text == self._task.answer
      return environment.ToolResult(text='', tool='answer', is_final=True)
    if text != 'next':
      return environment.ToolResult(
        text='next', tool='', outcome=turns_lib.UNKNOWN_TOOL
      )
    self._told += 1
    piece = f'ask {self._task.variable}'
    if self._told <= len(self._task.pieces):
      piece = self._task.pieces[self._told - 1]
    return environment.ToolResult(text=piece, tool='next')

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
  """Follows the protocol; sometimes gets a value in a summary wrong.

  It reads only its context: a wrong value stays, once written.
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
  """Plays the scripted policy; one episode in eight is three times as long."""
  episodes = []
  for index in range(count):
    pieces = PIECES if index % 8 else 3 * PIECES
    draw = random.Random(f'script/{seed}/{index}')
    episodes.append(
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
  return episodes


def carried(rollout: records.Rollout, task: Stream) -> bool:
  """True if the summary before the last window holds the right answer."""
  window = rollout.trajectories[-1]
  words = Words().decode(window.tokens_T[~window.loss_mask_T]).split()
  return task.answer in words


def oracle(
  rollouts: Sequence[records.Rollout], answers: Sequence[str]
) -> float:
  """Returns the best rate of right answers from last windows alone.

  Exact for these episodes: each distinct window, without its first summary,
  gets its most frequent answer.

  Args:
    rollouts: rollouts whose last windows are seen.
    answers: right answers, by rollout.
  """
  answers_by_window: dict[bytes, collections.Counter] = collections.defaultdict(
    collections.Counter
  )
  for rollout, answer in zip(rollouts, answers, strict=True):
    window = rollout.trajectories[-1]
    # The second message is the summary; the policy's own tokens do not count.
    ends = np.flatnonzero(window.tokens_T == Words.END)
    seen_T = np.where(window.loss_mask_T, Words.PAD, window.tokens_T)[ends[1] :]
    answers_by_window[seen_T.tobytes()][answer] += 1
  return sum(max(c.values()) for c in answers_by_window.values()) / len(
    rollouts
  )
