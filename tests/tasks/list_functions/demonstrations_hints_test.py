"""Laws of examples with a hint: a mended call in place of the mistake."""

import numpy as np
import pytest

from composer_jax.agent import episode
from composer_jax.tasks import mistakes
from composer_jax.tasks.list_functions import (
  demonstrations,
  environment,
  family,
  runners,
)
from composer_jax.text import chat
from composer_jax.text import tokenizer as tokenizer_lib


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train(['return sum(v for v in values)'], 280)


def transcripts(tokenizer, **noise):
  return list(
    demonstrations.transcripts(
      tokenizer,
      seed=0,
      count=12,
      noise=demonstrations.Noise(**noise),
      options=episode.EpisodeOptions(max_tokens=2048, max_call_tokens=256),
      hints=mistakes.HintOptions().write,
    )
  )


def last(tokenizer, tokens_T, count):
  return [m['text'] for m in chat.turns(tokenizer, tokens_T)[-count:]]


def test_an_example_has_the_call_that_was_meant_and_not_the_mistake(tokenizer):
  num_examples = 0
  for index, rollout in enumerate(
    transcripts(tokenizer, wrong_tool=0.3, broken_edit=0.2)
  ):
    window = rollout.trajectories[0]
    examples = list(demonstrations.hindsight(rollout))
    hints = {tuple(h.tokens_T.tolist()): h for h in rollout.hints}
    for tokens_T, mask_T in examples:
      num_examples += 1
      advice, call = last(tokenizer, tokens_T, 2)
      assert advice.startswith('Reminder:')
      hint = hints[tuple(chat.tool(tokenizer, advice).tolist())]
      # The context is that of the mistake and the hint.
      context_T = tokens_T[~mask_T]
      np.testing.assert_array_equal(context_T[-1:], chat.call_prefix(tokenizer))
      before = last(tokenizer, context_T[: -len(hint.tokens_T) - 1], 1)
      assert before[0] in last(tokenizer, window.tokens_T, 99)
      # The loss covers one valid call with its end token.
      assert tokens_T[mask_T][-1] == tokenizer.END
      assert tokenizer.decode(tokens_T[mask_T][:-1]) == call
      task = family.generate(index, 'train', 0)
      runner = runners.TrustedRunner()
      env = environment.FunctionEnvironment(task, runner)
      assert env.call(call).is_valid
  assert num_examples > 10


def test_giving_up_mends_nothing(tokenizer):
  given_up = transcripts(tokenizer, wrong_tool=0.4, give_up=1.0)
  assert any(r.hints for r in given_up)
  for rollout in [*given_up, *transcripts(tokenizer)]:
    assert not list(demonstrations.hindsight(rollout))
