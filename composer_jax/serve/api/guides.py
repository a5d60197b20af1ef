"""What a request adds to the logits of its tokens: biases, penalties, grammars.

Grammars are llguidance's, an extra: it gives the tokens that may come next,
within limits of its own on the size of a grammar and on the work for a token.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

import numpy as np

from composer_jax.serve.api import errors, texts

# Compiled grammars that are kept: clients send the same ones again and again.
_KEPT = 64
# Compiling takes up to a few seconds for so many characters, and a stack of
# some kilobytes for each reference among them. Only what is touched is memory.
_MAX_CHARACTERS = 100_000
_STACK_BYTES = 1 << 30
# A few characters can take minutes, such as multiples of a large prime, and
# what compiles cannot be stopped: so many at once may, and requests wait so
# long for them.
_COMPILERS = 2
_LONGEST_S = 10.0


class Grammars:
  """Compiles grammars for one vocabulary; threads share it."""

  def __init__(self, tokenizer: Any, vocab_size: int, ends: tuple[int, ...]):
    """Compiles nothing yet.

    Args:
      tokenizer: the model's tokenizer.
      vocab_size: number of the model's logits.
      ends: ids that end an answer, which a grammar allows where it is complete.
    """
    self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, ends
    self._kept: collections.OrderedDict[str, Any] = collections.OrderedDict()
    self._lock = threading.Lock()
    self._compilers = threading.BoundedSemaphore(_COMPILERS)
    # Requests that wait for a grammar take no thread from others.
    self.waiting = futures.ThreadPoolExecutor(8, 'grammar')

  def matcher(self, grammar: str) -> Any:
    """Returns an `llguidance.LLMatcher` of a Lark grammar.

    Raises:
      errors.ApiError: the grammar is refused, or the package is missing.
    """
    with self._lock:
      known = self._kept.pop(grammar, None)
    if known is None:
      known = self._compiled(grammar)
    with self._lock:
      self._kept[grammar] = known
      while len(self._kept) > _KEPT:
        self._kept.popitem(last=False)
      return known.deep_copy()

  def _compiled(self, grammar: str) -> Any:
    if len(grammar) > _MAX_CHARACTERS:
      raise errors.invalid(
        f'The schemas that the answer must be held to make {len(grammar)} '
        f'characters; {_MAX_CHARACTERS} is the most.',
        None,
        'invalid_schema',
      )
    with self._lock:
      library, vocabulary = self._vocabulary
    limits = library.LLParserLimits(verbose_errors=False)
    matchers = []

    def compile() -> None:
      with contextlib.ExitStack() as stack:
        stack.callback(self._compilers.release)
        build()

    def build() -> None:
      made = library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
      # Some grammars have no sentence, which shows at the first token.
      tried = made.deep_copy()
      if not tried.is_error():
        tried.compute_bitmask()
      matchers.extend((made, tried))

    if not self._compilers.acquire(timeout=_LONGEST_S):
      raise errors.ApiError(
        503,
        'Other schemas are being prepared; try again.',
        code='grammars_busy',
      )
    if not _ends_in_time(compile):
      raise errors.invalid(
        'Answers cannot be held to the schema of the response format or of a '
        f'tool: it takes more than {_LONGEST_S:g} s to prepare.',
        None,
        'invalid_schema',
      )
    made, tried = matchers
    if tried.is_error() or (tried.is_stopped() and not tried.is_accepting()):
      reason = made.get_error().partition('\n')[0][:300]
      reason = reason or 'no answer satisfies it'
      if 'panic' in reason:
        reason = 'the schema is too large'
      if 'oneOf' in reason:
        reason = (
          'alternatives of a oneOf may overlap; write anyOf, or give each of '
          'them a required property with a const of its own'
        )
      raise errors.invalid(
        'Answers cannot be held to the schema of the response format or of a '
        f'tool: {reason}.',
        None,
        'invalid_schema',
      )
    return made

  @functools.cached_property
  def _vocabulary(self) -> tuple[Any, Any]:
    try:
      import llguidance  # An extra.
    except ModuleNotFoundError as error:
      raise errors.invalid(
        'Answers that must follow a schema, and calls that must be made, need '
        "the package 'llguidance' on the server: pip install -e '.[grammar]'.",
        None,
        'unsupported_parameter',
      ) from error
    wrapper = llguidance.TokenizerWrapper(
      _Vocabulary(self._tokenizer, self._vocab_size, self._ends)
    )
    return llguidance, llguidance.LLTokenizer(
      wrapper, n_vocab=self._vocab_size, eos_token=list(self._ends)
    )


def _ends_in_time(run: Callable[[], None]) -> bool:
  """Runs in a thread that no recursion over a grammar of ours overflows.

  Returns:
    False if it still runs after the longest time, as it then goes on to do.
  """
  thread = threading.Thread(target=run, daemon=True)
  before = threading.stack_size(_STACK_BYTES)
  try:
    thread.start()
  finally:
    threading.stack_size(before)
  thread.join(_LONGEST_S)
  return not thread.is_alive()


class _Vocabulary:
  """The vocabulary as llguidance reads it."""

  bos_token_id = None

  def __init__(self, tokenizer: Any, vocab_size: int, ends: tuple[int, ...]):
    self._tokenizer, self.eos_token_id = tokenizer, ends[0]
    # Ids of no text: special ones, and logits beyond the vocabulary.
    beyond = range(min(tokenizer.vocab_size, vocab_size), vocab_size)
    specials = (i for i in tokenizer.special_ids if i < vocab_size)
    self.special_token_ids = sorted({*beyond, *specials, *ends})
    named = frozenset(self.special_token_ids)
    self.tokens = [
      f'<{i}>'.encode() if i in named else texts.spelling(tokenizer, i)
      for i in range(vocab_size)
    ]

  def __call__(self, text: str | bytes) -> list[int]:
    if isinstance(text, bytes):
      text = text.decode('utf-8', 'replace')
    return self._tokenizer.encode(text).tolist()


@dataclasses.dataclass(kw_only=True)
class RequestGuide:
  """Implements `rollout.sessions.Guide` for the parameters of OpenAI.

  Attributes:
    vocab_size: number of the model's logits.
    ends: ids that end the answer.
    logit_bias: term of a token's logit, by id.
    frequency_penalty: taken from a token's logit for each time it was sampled.
    presence_penalty: taken from the logit of a token that was sampled.
    matcher: llguidance's state of a grammar; None without one.
  """

  vocab_size: int
  ends: tuple[int, ...]
  logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
  frequency_penalty: float = 0.0
  presence_penalty: float = 0.0
  matcher: Any = None

  def __post_init__(self):
    self._fixed_V = np.zeros(self.vocab_size, np.float32)
    for token, term in self.logit_bias.items():
      self._fixed_V[token] = term
    self._counts: collections.Counter[int] = collections.Counter()

  def bias(self) -> np.ndarray:
    bias_V = self._fixed_V.copy()
    for token, count in self._counts.items():
      bias_V[token] -= self.presence_penalty + count * self.frequency_penalty
    if self.matcher is not None:
      bias_V[~self._allowed()] = -np.inf
    return bias_V

  def take(self, token: int) -> None:
    self._counts[token] += 1
    if self.matcher is not None and not self.matcher.is_stopped():
      self.matcher.consume_token(token)

  def _allowed(self) -> np.ndarray:
    """Returns a mask; where the grammar has failed, of the ends alone.

    It fails where a token takes more work than its limits allow, so that the
    answer ends early.
    """
    bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
    allowed_V = np.unpackbits(bits, bitorder='little')[: self.vocab_size]
    if self.matcher.is_error() or not allowed_V.any():
      allowed_V = np.zeros(self.vocab_size, np.uint8)
      allowed_V[list(self.ends)] = 1
    return allowed_V.astype(bool)

  @property
  def failed(self) -> bool:
    """True if the answer is not held to its grammar any more."""
    return self.matcher is not None and self.matcher.is_error()
