"""The models and engines that `benchmarks.rollout` measures."""

import functools
import itertools
from typing import Any

PROMPT, NEW = 40, 128
_names = itertools.count()


def config(
  ffw_dim: int,
  vocab_size: int,
  tie: bool,
  embed_dim: int = 256,
  num_layers: int = 4,
  numerics: str = 'fast',
  **over: Any,
):
  from composer_jax.models import config as config_lib

  moe = dict(
    num_experts=8,
    num_active=2,
    ffw_dim=ffw_dim,
    num_shared=0,
    router='softmax',
    num_groups=1,
    num_active_groups=1,
    renormalize=True,
    routed_scale=1.0,
    aux_loss_weight=0.0,
    z_loss_weight=0.0,
    replay_alpha=0.0,
  )
  return config_lib.ModelConfig.from_dict(
    dict(
      vocab_size=vocab_size,
      embed_dim=embed_dim,
      num_layers=num_layers,
      num_dense_layers=0,
      dense_ffw_dim=ffw_dim,
      norm_eps=1e-6,
      tie_embeddings=tie,
      remat=False,
      compute_dtype=over.pop('compute_dtype', 'float32'),
      numerics=numerics,
      attention=dict(
        kind='gqa',
        num_heads=embed_dim // 64,
        num_kv_heads=embed_dim // 128,
        head_dim=64,
        qk_norm='head',
        qkv_bias=False,
        out_bias=False,
      ),
      rope=dict(theta=10000.0, interleaved=False, yarn=None),
      moe=moe | over,
    )
  )


@functools.cache
def variables(config):
  import dataclasses

  import jax

  from composer_jax.models import decoder

  if config.numerics != 'fast':
    return variables(dataclasses.replace(config, numerics='fast'))
  init = jax.jit(
    lambda key: decoder.policy(decoder.init(config, key)),
    # Compiles four times as fast and changes the last bits.
    compiler_options={'xla_backend_optimization_level': 0},
  )
  return init(jax.random.key(0))


def engine(config, batch: int, **over: Any):
  from composer_jax.rollout import engine

  options: dict[str, Any] = dict(
    num_slots=batch,
    max_len=PROMPT + NEW,
    # Three chunks hold a prompt with few columns left over. A single row
    # reads its weights per chunk, and takes its prompt in one.
    prefill_chunk=64 if batch == 1 else 16,
    prefill_rows=batch,
    decode_steps=32,
    # Prompts are random and share nothing.
    share_prefixes=False,
  )
  return engine.Engine(
    config, variables(config), 0, engine.EngineOptions(**(options | over))
  )


def sample(engine, new: int, prompt: int = PROMPT) -> list[Any]:
  """Serves a request per slot, each of a session of its own."""
  import numpy as np

  from composer_jax.core import records

  sessions = [f'{next(_names)}' for _ in range(engine.options.num_slots)]
  for session in sessions:
    seed = (0, int(session))
    rng = np.random.default_rng(seed)
    tokens_T = rng.integers(0, engine.config.vocab_size, prompt)
    engine.submit(
      records.SampleRequest(
        session=session,
        context_T=tokens_T.astype(np.int32),
        max_new_tokens=new,
        stop_tokens=(),
        seed=seed,
      )
    )
  outcomes = []
  while engine.num_unfinished:
    outcomes += engine.step()
  for session in sessions:
    engine.close(session)
  return outcomes


def tokens(engine, new: int) -> float:
  return float(sum(len(c.tokens_T) for c in sample(engine, new)))


def step_bytes(engine, new: int) -> tuple[int, int]:
  """Returns the bytes of all weights, and those that a decode step reads."""
  import jax
  import numpy as np

  from composer_jax.rollout import forward

  c = engine.config
  width = 4 if c.compute_dtype == 'float32' else 2
  total = sum(x.size for x in jax.tree.leaves(variables(c))) * width
  expert = 3 * c.embed_dim * c.moe.ffw_dim * width
  dense = total - c.num_moe_layers * c.moe.num_experts * expert
  if not c.tie_embeddings:
    dense -= c.vocab_size * c.embed_dim * width
  # Sessions sample in step: the same token index of each is one step.
  routes = np.stack(
    [x.consumed_expert_ids_TMA[-new + 1 :] for x in sample(engine, new)]
  )
  active = np.mean(
    [
      len(np.unique(routes[:, t, m]))
      for t in range(routes.shape[1])
      for m in range(routes.shape[2])
    ]
  )
  experts = int(active * c.num_moe_layers * expert)
  pools = jax.eval_shape(lambda: forward.empty_cache(c, 1, 1))
  cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pools))
  context = engine.options.num_slots * (PROMPT + new // 2) * cache
  return total + context, dense + experts + context


def decoded(engine, new: int) -> float:
  completions = sample(engine, new, prompt=1)
  return float(sum(len(c.tokens_T) for c in completions))


def _batch(config, rows: int, length: int):
  """Returns an RL batch of whole rows, routed afresh."""
  import jax
  import jax.numpy as jnp

  from composer_jax.core import batches

  tokens_BT = jax.random.randint(
    jax.random.key(1), (rows, length), 0, config.vocab_size
  )
  ones_BT = jnp.ones(tokens_BT.shape)
  return batches.RLBatch(
    tokens_BT=tokens_BT,
    segment_ids_BT=jnp.ones_like(tokens_BT),
    positions_BT=jnp.broadcast_to(jnp.arange(length), tokens_BT.shape),
    loss_weights_BT=ones_BT,
    # About a random model's value, so that few ratios are capped.
    rollout_logprobs_BT=jnp.full(tokens_BT.shape, -jnp.log(config.vocab_size)),
    advantages_BT=ones_BT,
    temperatures_BT=ones_BT,
  )


def forward_pass(config, rows: int, length: int):
  """Returns a function that scores a batch as the trainer does."""
  import jax

  from composer_jax.models import decoder
  from composer_jax.rl import step

  batch = _batch(config, rows, length)
  score = step.scorer(decoder.Decoder(config))

  def run() -> float:
    jax.block_until_ready(score(_masters(config), batch).logprobs_BT)
    return float(rows * length)

  return run


@functools.cache
def _masters(config):
  import jax
  import jax.numpy as jnp

  return jax.tree.map(lambda x: x.astype(jnp.float32), variables(config))


def train_steps(config, rows: int, length: int):
  """Returns two functions that train: with routes replayed, and without.

  They run a whole step of RL: the policy's values, a microbatch, and Adam.
  """
  import jax
  import jax.numpy as jnp
  import optax

  from composer_jax.models import decoder
  from composer_jax.rl import step
  from composer_jax.train import state as train_state

  optimizer = optax.adam(1e-6)
  functions = step.build(decoder.Decoder(config), optimizer)
  batch = _batch(config, rows, length)
  routes = functions.score(_masters(config), batch).expert_ids_MBTA
  scale = jnp.float32(1 / (rows * length))

  def runner(batch):
    # Copied, since the optimizer donates its arguments.
    masters = jax.tree.map(jnp.copy, _masters(config))
    state = train_state.create(masters, optimizer)

    def run() -> float:
      nonlocal state
      values = functions.policy(state)
      sums, _ = functions.add_microbatch(values, None, batch)
      state, _ = functions.apply(state, sums, scale)
      jax.block_until_ready(state)
      return float(rows * length)

    return run

  return runner(batch.replace(expert_ids_MBTA=routes)), runner(batch)
