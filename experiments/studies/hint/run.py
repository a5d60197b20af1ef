"""Trains one policy per seed on demonstrations, then every arm from there.

  python -m experiments.studies.hint.run --seeds=0,1,2

Episodes, hints, engine and updates are those of the library; only the desk
(`world`) is made for the study. An arm and seed in results/ is not run again.
"""

import dataclasses
import functools
import itertools
import pathlib
import random
import time
from collections import Counter
from typing import Any

import jax
import numpy as np
import optax
from absl import flags

from composer_jax.agent import episode, rewards
from composer_jax.core import batches, records, turns
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.rl import batching, collect, policy_loss, update
from composer_jax.rl import step as steps
from composer_jax.rl.hints import distill
from composer_jax.rollout import engine as engines
from composer_jax.tasks import mistakes
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step
from experiments import start
from experiments.studies import results
from experiments.studies.hint import world

_SEEDS = flags.DEFINE_list(
  'seeds',
  ['0', '1', '2'],
  'Seeds; each has one SFT policy, with which all its arms begin.',
)
_STEPS = flags.DEFINE_integer('steps', 100, 'Steps of RL.')
_RESULTS = flags.DEFINE_string(
  'results',
  str(pathlib.Path(__file__).parent / 'results'),
  'Folder to append to.',
)

WORDS = world.Words()
MODEL = model_config.ModelConfig.from_dict(
  {
    'vocab_size': WORDS.vocab_size,
    'embed_dim': 48,
    'num_layers': 2,
    'num_dense_layers': 0,
    'dense_ffw_dim': 64,
    'attention': {
      'kind': 'gqa',
      'num_heads': 4,
      'num_kv_heads': 2,
      'head_dim': 16,
      'qk_norm': 'none',
      'qkv_bias': False,
      'out_bias': False,
    },
    'rope': {'theta': 1e4, 'interleaved': False, 'yarn': None},
    'norm_eps': 1e-6,
    'tie_embeddings': False,
    'remat': False,
    'compute_dtype': 'float32',
    'moe': {
      'num_experts': 4,
      'num_active': 2,
      'ffw_dim': 64,
      'num_shared': 0,
      'router': 'sigmoid',
      'num_groups': 1,
      'num_active_groups': 1,
      'renormalize': True,
      'routed_scale': 1.0,
      'aux_loss_weight': 0.0,
      'z_loss_weight': 0.0,
    },
  }
)
PROMPTS, ROLLOUTS = 8, 8
SHAPE = batching.shape_of(MODEL, rows=16, seq_len=256)
LEARNING_RATE = 3e-4
SFT_STEPS, SFT_ROWS, SFT_LEN = 600, 16, 256

RIGHT = 'tools {tools}'
# With few hints in SFT a teacher knows the arguments a little less.
RARE = 0.05
WRONG = 'tools ' + ' '.join(world.TOOLS['far'])


@dataclasses.dataclass(frozen=True)
class Arm:
  """Differences between runs.

  Attributes:
    hint: text of the hint; '' for RL alone.
    divergence: divergence between student and teacher.
    teacher: 'frozen', 'ema' (0.05), or 'live', the policy of the same step.
    is_dense: true if each failing call costs a sixth instead of nothing.
    hinted: share of the demonstrations that follow a reminder.
  """

  hint: str = RIGHT
  divergence: str = 'reverse'
  teacher: str = 'frozen'
  is_dense: bool = False
  hinted: float = 0.5


ARMS = {
  'hint': Arm(),
  'wrong_hint': Arm(hint=WRONG),
  'live_teacher': Arm(teacher='live'),
  'grpo': Arm(hint=''),
  'dense_grpo': Arm(hint='', is_dense=True),
  'dense_hint': Arm(is_dense=True),
  'ema_teacher': Arm(teacher='ema'),
  'forward': Arm(divergence='forward'),
  'jsd': Arm(divergence='jsd'),
  'rare_hint': Arm(hinted=RARE),
  'rare_live_teacher': Arm(hinted=RARE, teacher='live'),
}
_ARMS = results.define_arms(ARMS)


def _sft_batches(seed: int, hinted: float) -> Any:
  """Yields LMBatches of packed transcripts without end."""
  stream = world.transcripts(WORDS, random.Random(f'sft/{seed}'), hinted)
  transcript = next(stream)
  while True:
    shape = (SFT_ROWS, SFT_LEN)
    arrays: dict[str, Any] = {
      'tokens_BT': np.zeros(shape, np.int32),
      'segment_ids_BT': np.zeros(shape, np.int32),
      'positions_BT': np.zeros(shape, np.int32),
      'loss_weights_BT': np.zeros(shape, np.float32),
    }
    for row in range(SFT_ROWS):
      offset, segment = 0, 1
      while offset + len(transcript[0]) <= SFT_LEN:
        tokens_T, is_call_T = transcript
        span = slice(offset, offset + len(tokens_T))
        arrays['tokens_BT'][row, span] = tokens_T
        arrays['segment_ids_BT'][row, span] = segment
        arrays['positions_BT'][row, span] = np.arange(len(tokens_T))
        arrays['loss_weights_BT'][row, span] = is_call_T
        offset, segment, transcript = span.stop, segment + 1, next(stream)
    yield batches.LMBatch(**arrays)


def sft(seed: int, hinted: float) -> Any:
  """Returns variables of the policy with which the arms of a seed begin."""
  optimizer = optax.adam(
    optax.warmup_cosine_decay_schedule(0.0, 4e-3, 50, SFT_STEPS, 1e-4)
  )
  step = jax.jit(
    train_step.make(MODEL, optimizer, plan=None, bias_rate=1e-3),
    donate_argnums=0,
  )
  state = train_state.create(
    jax.jit(functools.partial(decoder.init, MODEL))(jax.random.key(seed)),
    optimizer,
  )
  began = time.monotonic()
  metrics = None
  for batch in itertools.islice(_sft_batches(seed, hinted), SFT_STEPS):
    state, metrics = step(state, batch)
  assert metrics is not None
  seconds = time.monotonic() - began
  print(
    f'sft {seed}, {hinted:g} hinted: {float(metrics.loss.loss):.4f}, '
    f'{seconds:.0f} s'
  )
  return jax.device_get(state.variables())


def hint_options(arm: Arm) -> distill.HintLossOptions:
  return distill.HintLossOptions(
    weight=1.0 if arm.hint else 0.0,
    divergence=arm.divergence,
    teacher='ema' if arm.teacher == 'ema' else 'frozen',
    ema_rate=0.05,
  )


OPTIMIZER = optax.chain(
  optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE)
)


@functools.cache
def functions_of(hints: distill.HintLossOptions) -> steps.Functions:
  return steps.build(
    decoder.Decoder(MODEL),
    OPTIMIZER,
    hints=hints,
  )


def collector_of(arm: Arm, seed: int) -> collect.Collector:
  hints = None
  if arm.hint:
    hints = mistakes.HintOptions(
      templates=tuple((kind, arm.hint) for kind in turns.INVALID_OUTCOMES),
      max_hints=world.NUM_TURNS,
    ).write
  prices = dataclasses.replace(
    rewards.UNPRICED,
    invalid_penalty=1 / world.NUM_TURNS if arm.is_dense else 0.0,
  )
  play = collect.episode_player(
    WORDS,
    world.Desk,
    episode.EpisodeOptions(
      max_tokens=96, max_turns=world.NUM_TURNS, max_call_tokens=6
    ),
    reward_of_group=lambda group: prices,
    hints=hints,
  )
  return collect.Collector(
    task_of_group=functools.partial(world.task_of, seed=seed),
    play=play,
    rollouts_per_group=ROLLOUTS,
    seed=seed,
  )


def run_arm(name: str, seed: int, variables: Any) -> list[results.Row]:
  """Trains an arm; returns a row of each step, and one of the seconds."""
  arm = ARMS[name]
  hints = hint_options(arm)
  functions = functions_of(hints)
  options = update.UpdateOptions(
    prompts=PROMPTS,
    rollouts_per_prompt=ROLLOUTS,
    replay=True,
    reward='verdict',
    kl_coefficient=0.0,
    loss=policy_loss.LossOptions(),
    mismatch_every=0,
    seed=seed,
    hints=hints,
  )
  state = train_state.create(
    jax.tree.map(jax.numpy.array, variables),
    OPTIMIZER,
    with_teacher=arm.teacher == 'ema',
  )
  # A frozen teacher needs its own buffers, since the state's are donated.
  values = functions.policy(state)
  engine = engines.Engine(
    MODEL,
    values,
    0,
    engines.EngineOptions(
      num_slots=PROMPTS * ROLLOUTS,
      max_len=96,
      prefill_chunk=12,
      prefill_rows=PROMPTS * ROLLOUTS,
      decode_steps=3,
      page_size=32,
    ),
  )
  collector = collector_of(arm, seed)
  began, rows = time.monotonic(), []
  for step in range(_STEPS.value):
    ids = range(step * PROMPTS, (step + 1) * PROMPTS)
    groups = collect.groups(collector, engine, ids)
    teacher = functions.policy(state) if arm.teacher == 'live' else values
    state, metrics = update.update(
      state, groups, functions, options, SHAPE, teacher=teacher
    )
    engine.swap(functions.policy(state), step + 1)
    row = {'stage': 'rl', 'step': step, 'arm': name, 'seed': seed}
    rows.append(row | _told(groups, metrics))
  seconds = time.monotonic() - began
  marker = {'stage': 'done', 'step': _STEPS.value, 'arm': name, 'seed': seed}
  rows.append(marker | {'seconds': seconds})
  print(f'{name} {seed}: {metrics["invalid_rate"]:.3f}, {seconds:.0f} s')
  return rows


def _told(
  groups: list[records.Group], metrics: dict[str, Any]
) -> dict[str, float]:
  calls = Counter(
    t.outcome for g in groups for r in g.rollouts for t in r.turns
  )
  names = ('reward', 'pass_rate', 'invalid_rate', 'entropy', 'grad_norm')
  fields = {
    **{name: metrics[name] for name in names},
    **{k: v for k, v in metrics.items() if k.startswith('hint')},
    **{f'share_{o}': calls[o] / calls.total() for o in turns.INVALID_OUTCOMES},
  }
  return {name: float(f'{value:.5g}') for name, value in fields.items()}


def main() -> None:
  finished = {
    (row['arm'], row['seed'])
    for row in results.read(_RESULTS.value)
    if row['stage'] == 'done'
  }
  policy_of = functools.cache(sft)
  for name, seed in itertools.product(_ARMS.value, map(int, _SEEDS.value)):
    if (name, seed) not in finished:
      rows = run_arm(name, seed, policy_of(seed, ARMS[name].hinted))
      results.add(_RESULTS.value, rows, by=('stage', 'arm', 'seed'))


if __name__ == '__main__':
  start.run(main)
