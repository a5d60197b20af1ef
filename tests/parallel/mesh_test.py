"""A decoder on 8 emulated devices equals itself on one."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.models import config as model_config
from composer_jax.models import decoder, head, placement
from composer_jax.parallel import layouts, shardings, topology

B, T, V = 8, 8, 16


def _config(num_experts):
  return model_config.ModelConfig.from_dict(
    dict(
      vocab_size=V,
      embed_dim=16,
      num_layers=2,
      num_dense_layers=1,
      dense_ffw_dim=12,
      num_heads=2,
      num_kv_heads=1,
      head_dim=4,
      rope_theta=1e4,
      norm_eps=1e-6,
      tie_embeddings=True,
      remat=False,
      compute_dtype='float32',
      moe=dict(
        num_experts=num_experts,
        num_active=2,
        ffw_dim=4,
        num_shared=1,
        router='softmax',
        renormalize=True,
        routed_scale=1.0,
        aux_loss_weight=0.01,
      ),
    )
  )


def _batch():
  """Two documents per row and mostly padding: whole shards have no token."""
  tokens_BT = jax.random.randint(jax.random.key(1), (B, T), 0, V)
  segments = jnp.ones((B, T), jnp.int32).at[:, 3:].set(2)
  segments = segments.at[3:, 4:].set(0).at[6:].set(0)
  positions = jnp.where(jnp.arange(T) < 3, jnp.arange(T), jnp.arange(T) - 3)
  return tokens_BT, segments, jnp.broadcast_to(positions, (B, T))


def _loss(config, plan, variables, batch):
  out = decoder.Decoder(config, plan).apply(variables, *batch)
  logprobs_BT, _ = head.target_logprobs(
    variables, out.hidden_BTD, batch[0], batch[1], None, config
  )
  loss = 0.01 * out.stats.aux_loss_M.sum() - logprobs_BT.sum() / 30
  return loss, out.stats.load_ME


@functools.cache
def _single(num_experts):
  config = _config(num_experts)
  step = functools.partial(_loss, config, None)
  variables = decoder.init(config, jax.random.key(0))
  return jax.jit(jax.value_and_grad(step, has_aux=True))(variables, _batch())


def _sharded(num_experts, shape):
  config, mesh = _config(num_experts), topology.make_mesh(*shape)
  where = dict(layout=layouts.TRAIN, mesh=mesh)
  plan = placement.exchange_plan(config, **where)
  places = placement.variable_shardings(config, **where)
  variables = jax.device_put(decoder.init(config, jax.random.key(0)), places)
  batch = jax.device_put(_batch(), shardings.tokens(layouts.TRAIN, mesh))
  step = jax.jit(
    jax.value_and_grad(functools.partial(_loss, config, plan), has_aux=True),
    out_shardings=(None, places),
  )
  compiled = step.lower(variables, batch).compile()
  return plan, compiled(variables, batch), compiled.as_text()


def _groups(text, operation):
  """Returns how many devices each collective of one kind joins.

  XLA writes groups as lists, as an iota `[groups,width]<=...`, or as axes of a
  mesh: `mesh['a'=4,'b'=2], device_ids=(...) {'a'}`.
  """
  widths = set()
  for line in text.splitlines():
    if not re.search(rf' {operation}(-start)?\(', line):
      continue
    groups = line.split('replica_groups=')[1]
    if groups.startswith('{{'):
      widths.add(groups[2:].split('}')[0].count(',') + 1)
    elif groups.startswith('['):
      widths.add(int(groups[1:].split(']')[0].split(',')[-1]))
    else:
      sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups))
      axes = re.search(r"\{('[^}]*)\}", groups).group(1).replace("'", '')
      names = axes.split(',')
      widths.add(math.prod(int(sizes[n.strip()]) for n in names))
  return widths


@pytest.mark.parametrize(
  'num_experts,shape,expert_spec',
  [
    # Dense weights over 4 devices, experts over all 8.
    (8, (2, 2, 2), P(('replica', 'fsdp', 'context'), None, None, None)),
    # Six experts do not divide over 8 devices: D takes the other axes.
    (6, (1, 4, 2), P(('replica', 'context'), 'fsdp', None, None)),
  ],
)
def test_loss_and_gradients_equal_one_device(num_experts, shape, expert_spec):
  (loss, load), grads = _single(num_experts)
  plan, ((sharded, sharded_load), sharded_grads), text = _sharded(
    num_experts, shape
  )
  assert dict(plan.weight_specs)['gate_up'] == expert_spec
  np.testing.assert_allclose(sharded, loss, rtol=1e-6)
  np.testing.assert_array_equal(sharded_load, load)
  # Sums in another order: a few units of the last place of the largest term.
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, atol=5e-6 * np.abs(b).max() + 1e-9
    ),
    sharded_grads,
    grads,
  )
  if num_experts == 8:
    # Wide: tokens meet experts across all 8 devices. Narrow: dense weights
    # gather inside a replica of 4.
    assert {4, 8} <= _groups(text, 'all-gather')
    assert _groups(text, 'reduce-scatter') == {8}
