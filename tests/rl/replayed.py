"""Small models and trajectories with recorded routes, for several tests."""

import functools
from typing import NamedTuple

import jax
import numpy as np

from composer_jax.core import batches, records
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.rl import batching, policy_loss
from composer_jax.rl import step as steps
from tests import compiling

M, A, V = 2, 2, 24
LENGTHS = (8, 5, 3, 7, 4, 6)
LOSS = policy_loss.LossOptions()
OPTIONS = compiling.QUICKLY

_COMMON = dict(
  vocab_size=V,
  embed_dim=16,
  num_layers=M,
  num_dense_layers=0,
  dense_ffw_dim=16,
  norm_eps=1e-6,
  tie_embeddings=True,
  remat=False,
  compute_dtype='float32',
)
_MOE = dict(
  num_active=A,
  ffw_dim=8,
  num_shared=0,
  renormalize=True,
  aux_loss_weight=0.0,
  z_loss_weight=0.0,
)


def _config(**fields):
  return model_config.ModelConfig.from_dict(_COMMON | fields)


CONFIGS = {
  'gqa_softmax': _config(
    attention=dict(
      kind='gqa',
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      qk_norm='none',
      qkv_bias=False,
      out_bias=False,
    ),
    rope=dict(theta=1e4, interleaved=False, yarn=None),
    moe=_MOE
    | dict(
      num_experts=8,
      router='softmax',
      num_groups=1,
      num_active_groups=1,
      routed_scale=1.0,
    ),
  ),
  # Six experts do not divide over eight devices.
  'mla_sigmoid': _config(
    attention=dict(
      kind='mla',
      num_heads=2,
      q_lora_dim=8,
      kv_lora_dim=8,
      nope_dim=6,
      rope_dim=4,
      value_dim=6,
      latent_norm_eps=1e-6,
    ),
    rope=dict(theta=1e4, interleaved=True, yarn=None),
    moe=_MOE
    | dict(
      num_experts=6,
      router='sigmoid',
      num_groups=3,
      num_active_groups=2,
      routed_scale=2.5,
    ),
  ),
}


@functools.cache
def variables(config):
  """Returns weights so large that another expert changes the loss."""
  rng = np.random.default_rng(1)
  shapes, _ = decoder.abstract(config)
  return jax.tree.map(
    lambda x: (0.3 * rng.normal(size=x.shape)).astype(np.float32), shapes
  )


def trajectory(length, seed, num_experts):
  """Returns a trajectory with random routes.

  The first two tokens of every other trajectory have none.
  """
  rng = np.random.default_rng(seed)
  order = np.argsort(rng.random((length, M, num_experts)), axis=-1)
  ids_TMA = order[..., :A].astype(np.uint16)
  ids_TMA[-1] = records.NO_ROUTE
  if seed % 2:
    ids_TMA[:2] = records.NO_ROUTE
  mask_T = rng.random(length) < 0.7
  mask_T[0], mask_T[-1] = False, True
  return records.Trajectory(
    tokens_T=rng.integers(0, V, length).astype(np.int32),
    loss_mask_T=mask_T,
    logprobs_T=-3 - rng.random(length).astype(np.float32),
    expert_ids_TMA=ids_TMA,
    policy_version_T=np.zeros(length, np.int32),
    context_version_T=np.zeros(length, np.int32),
    consumed_version_T=np.zeros(length, np.int32),
    temperature=0.7 + 0.1 * seed,
  )


def trajectories(config):
  experts = config.moe.num_experts
  return [trajectory(n, i, experts) for i, n in enumerate(LENGTHS)]


ADVANTAGES = [1.0, -0.5, 2.0, -1.5, 0.25, -1.0]


def shape(config, **sizes):
  return batching.BatchShape(
    num_moe_layers=M,
    num_active=A,
    num_experts=config.moe.num_experts,
    **sizes,
  )


def pack(config, **sizes) -> list[batches.RLBatch]:
  return batching.pack(
    trajectories(config), ADVANTAGES, shape(config, **sizes)
  ).microbatches


def alone(config, **sizes) -> list[batches.RLBatch]:
  """Returns each trajectory in a microbatch of its own."""
  return [
    batch
    for item, advantage in zip(trajectories(config), ADVANTAGES, strict=True)
    for batch in batching.pack(
      [item], [advantage], shape(config, **sizes)
    ).microbatches
  ]


@functools.cache
def _run(config):
  return jax.jit(
    functools.partial(steps.microbatch_sums, decoder.Decoder(config)),
    compiler_options=OPTIONS,
  )


def one(config, batch):
  """Returns (sums, scores) of one microbatch on one device."""
  return jax.device_get(_run(config)(variables(config), batch))


class Result(NamedTuple):
  """Results of all trajectories, independent of their packing.

  Attributes:
    sums: sums over all microbatches.
    logprobs: float32 log-probabilities of each trajectory's tokens but the
      first.
    expert_ids: layer-major routes of each trajectory's consumed tokens.
    mass: sum of the absolute terms of the loss.
  """

  sums: steps.StepSums
  logprobs: list[np.ndarray]
  expert_ids: list[np.ndarray]
  mass: float


def gather(packed, results) -> Result:
  """Joins (sums, scores) of all microbatches.

  Each trajectory has a temperature of its own, which identifies it.
  """
  logprobs, expert_ids, mass = {}, {}, 0.0
  for batch, (_, scores) in zip(packed, results, strict=True):
    for row, segments_T in enumerate(batch.segment_ids_BT):
      for segment in range(1, segments_T.max() + 1):
        span = np.flatnonzero(segments_T == segment)
        name = batch.temperatures_BT[row, span[0]]
        logprobs[name] = scores.logprobs_BT[row, span[1:]]
        expert_ids[name] = scores.expert_ids_MBTA[:, row, span[:-1]]
    terms_BT = batch.advantages_BT * scores.logprobs_BT * batch.loss_weights_BT
    mass += LOSS.ratio_cap * np.abs(terms_BT).sum()
  assert len(logprobs) == len(LENGTHS)
  return Result(
    functools.reduce(steps.add, [sums for sums, _ in results]),
    [logprobs[name] for name in sorted(logprobs)],
    [expert_ids[name] for name in sorted(expert_ids)],
    mass,
  )


def result(config, packed) -> Result:
  """Returns the Result of microbatches on one device."""
  return gather(packed, [one(config, batch) for batch in packed])


def assert_equal_up_to_rounding(have: Result, want: Result):
  jax.tree.map(np.testing.assert_array_equal, have.expert_ids, want.expert_ids)
  # Values of up to 9 nats, whose sums run in another order: some units of the
  # last place.
  for actual, expected in zip(have.logprobs, want.logprobs, strict=True):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6)
  # The terms of the loss have both signs and cancel to a twentieth or less, so
  # the error is compared with their sizes.
  assert abs(have.sums.loss - want.sums.loss) < 2e-7 * want.mass
  # Sums run in another order: some units of the last place of the largest term.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=5e-6 * np.abs(b).max() + 1e-9
    ),
    have.sums.grads,
    want.sums.grads,
  )
  np.testing.assert_array_equal(have.sums.load_ME, want.sums.load_ME)
  assert have.sums.stats.num_tokens == want.sums.stats.num_tokens
