"""Trains a small model in an environment of your own, with the real loop.

  python -m experiments.examples.own_environment --steps=20

The environment is a game: find a hidden digit in at most four guesses. It
answers each guess with '<', '>' or '='. The policy begins with random weights
and learns within twenty steps, from the reward alone, that a call is one digit.

The loop is `rl.sync_loop`: the engine samples and records routes, the trainer
replays them. A family of tasks for the whole job (`./run.sh`) wraps the same
environment in an `agent.environment.TaskFamily`.
"""

import functools
import random

import numpy as np
from absl import flags

from composer_jax.agent import environment
from composer_jax.core import records, turns
from experiments import start

STEPS = flags.DEFINE_integer('steps', 20, 'Optimizer steps.', lower_bound=1)

NUM_DIGITS = 8


class Guessing(environment.Environment):
  """One episode; a task is the digit to find."""

  prompt = '?'
  tools = ('guess',)

  def __init__(self, digit: int):
    self.task_id = f'guess {digit}'
    self._digit = digit

  def call(self, text: str) -> environment.ToolResult:
    """Answers what the policy sampled up to its end token."""
    if len(text) != 1 or text not in Symbols.TEXT[:NUM_DIGITS]:
      return environment.ToolResult(
        text='', tool='', outcome=turns.BAD_ARGUMENTS
      )
    guess = int(text)
    is_found = guess == self._digit
    answer = '=' if is_found else '<' if self._digit < guess else '>'
    return environment.ToolResult(text=answer, tool='guess', is_final=is_found)

  def verdict(self, finished: bool) -> records.Verdict:
    """Passes an episode that a final call ended."""
    return records.Verdict(
      passed=finished,
      num_passed=int(finished),
      num_tests=1,
      status=records.GRADED if finished else records.UNFINISHED,
      sandbox_level='none',
    )


class Symbols:
  """A tokenizer of a few characters; `text.tokenizer` trains a real one."""

  TEXT = '01234567?<>='
  USER, CALL, TOOL, END = range(len(TEXT), len(TEXT) + 4)
  vocab_size = len(TEXT) + 4
  special_ids = frozenset({USER, CALL, TOOL, END})

  def encode(self, text: str) -> np.ndarray:
    """Leaves out what it has no symbol for, such as messages of the harness."""
    ids = [self.TEXT.index(c) for c in text if c in self.TEXT]
    return np.array(ids, np.int32)

  def decode(self, ids: np.ndarray) -> str:
    return ''.join(self.TEXT[i] for i in ids)


def train(num_steps: int, loss=None) -> list[dict[str, float]]:
  """Returns the metrics of each step; `loss` as `rl.step.build` takes it."""
  import jax
  import optax

  from composer_jax.agent import episode, rewards
  from composer_jax.models import config as model_config
  from composer_jax.models import decoder
  from composer_jax.rl import batching, collect, policy_loss, sync_loop, update
  from composer_jax.rl import step as steps
  from composer_jax.rollout import engine
  from composer_jax.train import state as train_state
  from configs.models import tiny

  shape = tiny.get_config()
  shape.update(vocab_size=Symbols.vocab_size, num_layers=2, embed_dim=64)
  shape.update(dense_ffw_dim=128)
  shape.moe.update(ffw_dim=64, num_experts=4)
  model = model_config.ModelConfig.from_dict(shape.to_dict())

  # Each group plays one digit; the mean of its rewards is the baseline.
  collector = collect.Collector(
    task_of_group=lambda group: random.Random(group).randrange(NUM_DIGITS),
    play=collect.episode_player(
      Symbols(),
      Guessing,
      episode.EpisodeOptions(max_tokens=32, max_turns=4, max_call_tokens=2),
      reward_of_group=lambda group: rewards.RewardOptions(
        invalid_penalty=0.1, effort_coefficient=0.0
      ),
    ),
    rollouts_per_group=8,
    seed=0,
  )
  optimizer = optax.adam(1e-2)
  init = jax.jit(functools.partial(decoder.init, model))
  _, history = sync_loop.run(
    train_state.create(init(jax.random.key(0)), optimizer),
    steps.build(
      decoder.Decoder(model), optimizer, loss=loss or policy_loss.loss
    ),
    collector,
    lambda values, version: engine.Engine(
      model, values, version, engine.EngineOptions(num_slots=64, max_len=32)
    ),
    update.UpdateOptions(prompts=8, rollouts_per_prompt=8, mismatch_every=0),
    batching.shape_of(model, rows=16, seq_len=128),
    num_steps=num_steps,
  )
  return history


def report(history: list[dict[str, float]]) -> None:
  """Prints every tenth step, and the last."""
  for step, metrics in enumerate(history, 1):
    if step % 10 == 1 or step == len(history):
      print(
        f'step {step:3d}  reward {metrics["reward"]:6.3f}  '
        f'found {metrics["pass_rate"]:.3f}  '
        f'invalid calls {metrics["invalid_rate"]:.3f}'
      )


def main():
  report(train(STEPS.value))


if __name__ == '__main__':
  start.run(main)
