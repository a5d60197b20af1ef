"""Practice on functions of a corpus has the tokens of episodes."""

import numpy as np
import pytest

from composer_jax.agent import episode
from composer_jax.core import turns
from composer_jax.tasks.deletion import edit
from composer_jax.tasks.practice import bodies
from composer_jax.tasks.repository import environment, scripts
from composer_jax.text import tokenizer as tokenizers
from tests.tasks import small_package

OPTIONS = environment.RepositoryOptions(
  tools=('body', 'finish'), lines_around=3
)
LIMITS = episode.EpisodeOptions(max_tokens=4096, max_call_tokens=1024)


@pytest.fixture(scope='module')
def tokenizer():
  texts = [t for task in small_package.tasks() for t in task.solution.values()]
  return tokenizers.Tokenizer.train(texts, 400)


def test_practice_is_the_episode_that_solves_a_task(tokenizer, larder_sandbox):
  (task,) = [t for t in small_package.tasks() if t.tier == 'body']
  path, _, name = environment.missing_body(task)
  played = episode.run(
    environment.RepositoryEnvironment(task, larder_sandbox, OPTIONS),
    scripts.ScriptedCalls(tokenizer, scripts.gold_calls(task, OPTIONS.tools)),
    tokenizer,
    LIMITS,
    **dict(group=0, member=0, seed=0),
  )
  assert played.verdict.passed and played.tools == ('body', 'finish')
  assert all(t.outcome == turns.OK for t in played.turns)
  (window,) = played.trajectories
  tokens_T, mask_T = bodies.episode(
    task.solution[path], name, OPTIONS, tokenizer
  )
  np.testing.assert_array_equal(tokens_T, window.tokens_T)
  np.testing.assert_array_equal(mask_T, window.loss_mask_T)


def test_functions_are_short_and_few_of_a_file():
  def text(count, lines):
    body = '\n'.join(f'  x{i} = {i}' for i in range(lines))
    return '\n'.join(f'def f{i}():\n  """Doc."""\n{body}' for i in range(count))

  texts = [text(20, 1), text(3, 3), text(5, 4), 'def f(:', 'class C:\n  x = 1']
  found = list(bodies.functions(texts, seed=0))
  assert len(found) == 12 + 3
  assert {len(edit.body(*f).split('\n')) for f in found} == {1, 3}
  assert found == list(bodies.functions(texts, seed=0))
  assert found != list(bodies.functions(texts, seed=1))
