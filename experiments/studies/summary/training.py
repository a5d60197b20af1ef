"""The model of the study, how it learns the protocol, and its RL."""

import dataclasses
import functools
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from composer_jax.agent import environment
from composer_jax.core import records
from composer_jax.core import turns as turns_lib
from composer_jax.data import stream as streams
from composer_jax.gate import health
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups as optim_groups
from composer_jax.rl import (
  batching,
  collect,
  mismatch,
  policy_loss,
  sync_loop,
  update,
)
from composer_jax.rl import step as steps
from composer_jax.rollout import engine as engines
from composer_jax.train import state as train_state
from composer_jax.train import step as train_step
from experiments.studies.summary import stream

TOKENIZER = stream.Words()
MODEL = model_config.ModelConfig.from_dict(
  {
    'vocab_size': 80,
    'embed_dim': 64,
    'num_layers': 2,
    'num_dense_layers': 0,
    'dense_ffw_dim': 128,
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
    'tie_embeddings': True,
    'remat': False,
    'compute_dtype': 'float32',
    'moe': {
      'num_experts': 4,
      'num_active': 2,
      'ffw_dim': 64,
      'num_shared': 1,
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
# Tokens of a row, which several windows share.
ROW = 4 * stream.SUMMARY.trigger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Sizes of the computation.

  Attributes:
    transcripts: number of scripted transcripts, for clean and noisy each.
    clean_steps: steps of SFT on transcripts without errors.
    noisy_steps: steps of SFT after those, on transcripts with errors.
    noise: probability with which each value of a noisy summary is random.
    steps: steps of RL.
    rate: learning rate of RL.
    prompts: prompts of a step (P).
    rollouts: rollouts of a prompt (R).
    episodes: episodes of an evaluation; with long streams a quarter of that.
  """

  transcripts: int = 4000
  clean_steps: int = 1000
  noisy_steps: int = 900
  noise: float = 0.13
  steps: int = 150
  rate: float = 7e-4
  prompts: int = 8
  rollouts: int = 16
  episodes: int = 400


QUICK = Sizes(
  transcripts=16,
  clean_steps=2,
  noisy_steps=1,
  steps=2,
  prompts=2,
  rollouts=2,
  episodes=4,
)


def about(sizes: Sizes) -> dict[str, Any]:
  """Returns the sizes that a line of results names."""
  shapes, _ = decoder.abstract(MODEL)
  return {
    'parameters': sum(x.size for x in jax.tree.leaves(shapes['params'])),
    'trigger': stream.SUMMARY.trigger,
    'piece_tokens': stream.PIECE_TOKENS,
    **dataclasses.asdict(sizes),
  }


@functools.cache
def _sft_step(total: int) -> tuple[optax.GradientTransformation, Any]:
  """Returns SFT's optimizer, and a step compiled once for all seeds."""
  shapes, axes = decoder.abstract(MODEL)
  optimizer = optim_groups.optimizer(
    optim_groups.OptimizerOptions(
      name='muon',
      learning_rate=1e-2,
      adam_learning_rate=5e-3,
      warmup_steps=min(20, total // 5),
      decay_steps=total * 4 // 5,
      final_ratio=0.05,
      weight_decay=0.0,
    ),
    params=shapes['params'],
    axes=axes['params'],
    total_steps=total,
  )
  step = train_step.make(MODEL, optimizer, plan=None, bias_rate=1e-3)
  return optimizer, jax.jit(step, donate_argnums=0)


def imitate(sizes: Sizes, seed: int) -> dict[str, Any]:
  """Returns variables after SFT, first on clean summaries, then on noisy ones.

  The use of summaries is learnt in a fraction of the steps that noise from the
  start would take; RL has to unlearn the noise.
  """
  optimizer, train = _sft_step(sizes.clean_steps + sizes.noisy_steps)
  variables = jax.jit(lambda key: decoder.init(MODEL, key))(
    jax.random.key(seed)
  )
  state = train_state.create(variables, optimizer)
  for noise, num_steps in (
    (0.0, sizes.clean_steps),
    (sizes.noise, sizes.noisy_steps),
  ):
    batches = _transcripts(sizes, seed, noise)
    for _, batch in zip(range(num_steps), batches, strict=False):
      state, _ = train(state, batch)
  return state.variables()


def _transcripts(sizes: Sizes, seed: int, noise: float) -> streams.LMStream:
  rollouts = stream.transcripts(
    TOKENIZER, seed=seed, count=sizes.transcripts, noise=noise
  )
  return streams.lm_stream(
    [(t.tokens_T, t.loss_mask_T) for r in rollouts for t in r.trajectories],
    batch_size=8,
    seq_len=ROW,
    seed=seed,
    whole=True,
  )


def make_engine(values: Any, version: int) -> engines.Engine:
  return engines.Engine(
    MODEL,
    values,
    version,
    engines.EngineOptions(
      num_slots=64,
      max_len=stream.SUMMARY.trigger,
      prefill_chunk=32,
      prefill_rows=(16, 64),
      decode_steps=2,
      share_prefixes=False,
    ),
  )


class Amnesic:
  """A policy whose summaries are replaced by facts drawn at random."""

  def __init__(self, policy: environment.Policy, seed: tuple[int, ...]):
    self._policy = policy
    self._draw = random.Random(f'amnesic/{seed}')

  def complete(self, request: records.SampleRequest) -> records.Completion:
    completion = self._policy.complete(request)
    if 'summarise' not in TOKENIZER.decode(request.context_T).split():
      return completion
    text = ' '.join(
      f'{v}{self._draw.randrange(stream.NUM_VALUES)}' for v in stream.VARIABLES
    )
    tokens_T = np.append(TOKENIZER.encode(text), TOKENIZER.END)
    # The length must stay, as the other arrays have it.
    tokens_T = np.resize(tokens_T, len(completion.tokens_T)).astype(np.int32)
    return dataclasses.replace(completion, tokens_T=tokens_T)

  def close(self, session: str) -> None:
    self._policy.close(session)


def collector_of(
  *, seed: int, pieces: int, rollouts: int, masked: bool, amnesic: bool = False
) -> collect.Collector:
  """Returns a collector that plays streams.

  Args:
    seed: seed of streams and sampling.
    pieces: pieces of a stream.
    rollouts: rollouts of each stream.
    masked: true if summary tokens have no loss.
    amnesic: true if summaries are replaced by random facts.
  """
  play = collect.episode_player(
    TOKENIZER, stream.StreamEnvironment, stream.EPISODE, summary=stream.SUMMARY
  )

  def changed(task, policy, *, group, member, seed):
    if amnesic:
      policy = Amnesic(policy, (seed, group, member))
    rollout = play(task, policy, group=group, member=member, seed=seed)
    return without_summaries(rollout) if masked else rollout

  return collect.Collector(
    task_of_group=lambda group: stream.generate(group, seed, pieces),
    play=changed,
    rollouts_per_group=rollouts,
    seed=seed,
  )


def without_summaries(rollout: records.Rollout) -> records.Rollout:
  """Returns the rollout without loss on summaries, for the control arm."""
  windows = list(rollout.trajectories)
  for turn in rollout.turns:
    if turn.outcome == turns_lib.SUMMARY:
      window = windows[turn.trajectory]
      mask_T = window.loss_mask_T.copy()
      mask_T[turn.start : turn.stop] = False
      windows[turn.trajectory] = dataclasses.replace(window, loss_mask_T=mask_T)
  return dataclasses.replace(rollout, trajectories=tuple(windows))


@functools.cache
def _rl(rate: float) -> tuple[optax.GradientTransformation, steps.Functions]:
  """Returns RL's optimizer and its functions, compiled once for all arms."""
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.95)
  )
  model = decoder.Decoder(MODEL)
  return optimizer, steps.build(model, optimizer)


def reinforce(
  variables: dict[str, Any], sizes: Sizes, *, seed: int, masked: bool
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
  """Yields variables and metrics every ten steps of `rl.sync_loop`."""
  optimizer, functions = _rl(sizes.rate)
  options = update.UpdateOptions(
    prompts=sizes.prompts,
    rollouts_per_prompt=sizes.rollouts,
    replay=True,
    reward='verdict',
    kl_coefficient=0.0,
    loss=policy_loss.LossOptions(),
    mismatch_every=0,
    seed=seed,
  )
  collector = collector_of(
    seed=1_000_003 + seed,
    pieces=stream.PIECES,
    rollouts=sizes.rollouts,
    masked=masked,
  )
  shape = batching.shape_of(MODEL, rows=16, seq_len=ROW)
  # The default bands: windows of a chain are replayed like any other.
  gate = health.HealthGate(functions, shape, mismatch.GateOptions())
  # Copied, because the update donates its state.
  state = train_state.create(jax.tree.map(jnp.copy, variables), optimizer)
  for stop in range(10, sizes.steps + 10, 10):
    state, history = sync_loop.run(
      state,
      functions,
      collector,
      make_engine,
      options,
      shape,
      num_steps=min(stop, sizes.steps),
      gate=gate,
    )
    yield state.variables(), history


def evaluate(
  variables: dict[str, Any],
  *,
  seed: int,
  pieces: int,
  episodes: int,
  amnesic: bool = False,
) -> dict[str, Any]:
  """Returns the pass rate on new streams at temperature 1, and window counts.

  Args:
    variables: masters of the policy.
    seed: seed of the study.
    pieces: pieces of each stream.
    episodes: number of episodes to play.
    amnesic: true if summaries are replaced by random facts.

  """
  params = train_state.policy_values(variables['params'], MODEL)
  streams_seed = 2_000_003 + seed
  groups = collect.groups(
    collector_of(
      seed=streams_seed,
      pieces=pieces,
      rollouts=1,
      masked=False,
      amnesic=amnesic,
    ),
    make_engine({**variables, 'params': params}, 0),
    range(episodes),
  )
  rollouts = [r for g in groups for r in g.rollouts]
  windows = [len(t) for r in rollouts for t in r.trajectories]
  return {
    'pass_rate': float(np.mean([r.verdict.passed for r in rollouts])),
    'carried': float(
      np.mean(
        [
          stream.carried(r, stream.generate(r.group, streams_seed, pieces))
          for r in rollouts
        ]
      )
    ),
    'episodes': episodes,
    'pieces': pieces,
    'stream_tokens': pieces * stream.PIECE_TOKENS,
    'windows': len(windows) / episodes,
    'longest_window': max(windows),
    'invalid': sum(r.num_invalid for r in rollouts),
  }
