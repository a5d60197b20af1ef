"""Deletions that need no proof: short functions of the corpus, for SFT alone.

A task is graded, so that its deletion must be proven to break tests. To show a
policy what a body looks like, any function will do: the prompts, the tools and
the tokens are those of episodes with the tools 'body' and 'finish' alone, and
nothing is executed.
"""

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from composer_jax.tasks.deletion import edit
from composer_jax.tasks.repository import environment
from composer_jax.text import chat, tool_calls

_LINES = range(1, 4)
_PER_FILE = 12


def functions(texts: Iterable[str], seed: int) -> Iterator[tuple[str, str]]:
  """Yields (text, name) of definitions whose bodies have one to three lines.

  At most a dozen of a file, since files of many short functions repeat one.
  """
  draw = random.Random(f'{seed}/bodies')
  for text in texts:
    try:
      symbols = edit.symbols('', text)
    except ValueError:
      continue
    short = [s for s in symbols if s.kind != 'class' and s.num_lines in _LINES]
    for symbol in draw.sample(short, min(len(short), _PER_FILE)):
      yield text, symbol.name


def episode(
  text: str,
  name: str,
  options: environment.RepositoryOptions,
  tokenizer: Any,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens_T and loss_mask_T of an episode that restores a body.

  Raises:
    edit.CannotEdit: the body cannot be told from the lines around it.
  """
  prompt = environment.prompt_around('', text, name, options)
  body = edit.body(text, name)
  dialogue = chat.language_of(tokenizer).dialogue(prompt)
  context_T, parts, masks = dialogue.opening_T, [], []
  for place, call in enumerate(
    (
      tool_calls.JsonCall(name='body', arguments={'text': body}),
      tool_calls.JsonCall(name='finish', arguments={}),
    )
  ):
    said = tool_calls.render_json(call)
    written_T = chat.language_of(tokenizer).written(said, place)
    for tokens_T, is_learnt in ((context_T, False), (written_T, True)):
      parts.append(tokens_T)
      masks.append(np.full(len(tokens_T), is_learnt))
    dialogue.read(written_T, True)
    answer, _ = environment.written(name)
    context_T = dialogue.answer([answer])
  return np.concatenate(parts), np.concatenate(masks)
