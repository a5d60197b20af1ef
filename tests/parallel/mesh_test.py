"""A decoder on 8 emulated devices equals itself on one."""

import pytest
from jax.sharding import PartitionSpec as P

from composer_jax.core import trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from tests.parallel import collectives, on_mesh

# Sizes such that arrays of different meaning have different numbers of
# elements: collectives are told apart by them.
V, D, F = 18, 24, 7


def _config(num_layers, num_experts, router, remat):
  return model_config.ModelConfig.from_dict(
    dict(
      vocab_size=V,
      embed_dim=D,
      num_layers=num_layers,
      num_dense_layers=1,
      dense_ffw_dim=12,
      attention=dict(
        kind='gqa',
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        qk_norm='none',
        qkv_bias=False,
        out_bias=False,
      ),
      rope=dict(theta=1e4, interleaved=False, yarn=None),
      norm_eps=1e-6,
      tie_embeddings=True,
      remat=remat,
      compute_dtype='float32',
      moe=dict(
        num_experts=num_experts,
        num_active=2,
        ffw_dim=F,
        num_shared=3,
        router=router,
        num_groups=1,
        num_active_groups=1,
        renormalize=True,
        routed_scale=1.0,
        aux_loss_weight=0.01,
        z_loss_weight=0.0,
      ),
    )
  )


WIDE = _config(2, 8, 'softmax', remat=False)
# Six experts do not divide over 8 devices. Two layers of them, since of one the
# compiler would merge the forward pass and its recomputation.
UNEVEN = _config(3, 6, 'sigmoid', remat=True)


@pytest.fixture(scope='module')
def wide():
  return on_mesh.sharded(WIDE, (2, 2, 2))


# tests/parallel/hsdp_test.py has these laws for a mesh by default.
@pytest.mark.slow
def test_loss_and_gradients_equal_one_device(wide):
  plan, result, _ = wide
  on_mesh.assert_equal(result, on_mesh.single(WIDE))
  expert = P(('replica', 'fsdp', 'context'), None, None, None)
  assert dict(plan.weight_specs)['gate_up'] == expert


def test_uneven_experts_in_zigzag_order_equal_one_device():
  single = on_mesh.single(UNEVEN)
  # The mesh replays the routes of one device.
  plan, result, _ = on_mesh.sharded(
    UNEVEN, (1, 2, 4), single[0][1][1], sequence_order='zigzag'
  )
  on_mesh.assert_equal(result, single)
  # Two devices share six experts; D takes the other axis.
  expert = P(('replica', 'fsdp'), 'context', None, None)
  assert dict(plan.weight_specs)['gate_up'] == expert


def _weight_sizes(config):
  """Returns the sizes of a layer's dense matrices and stacked experts."""
  shapes, axes = decoder.abstract(config)
  axes = trees.flatten_names(axes['params'])
  dense, experts = set(), set()
  for name, leaf in trees.flatten_names(shapes['params']).items():
    layers = leaf.shape[0] if 'layer' in axes[name] else 1
    if 'expert' in axes[name]:
      experts.add(leaf.size // layers)
    elif 'embed' in axes[name]:
      dense.add(leaf.size // layers)
  return dense, experts


@pytest.mark.slow
def test_dense_weights_gather_inside_a_replica_and_experts_never_move(wide):
  *_, sent = wide
  dense, experts = _weight_sizes(WIDE)
  gathered = set()
  for collective in sent:
    if collective.kind == 'all-gather' and set(collective.sizes) & dense:
      # Four devices hold a replica of the dense weights.
      assert collective.groups == collectives.blocks(8, 4), collective
      gathered |= set(collective.sizes)
    # Each device holds its own expert, so neither the weight nor its gradient
    # is gathered or reduced.
    moved = {size // 8 for size in experts} | experts
    assert not moved & set(collective.sizes), collective
  assert gathered == dense


@pytest.mark.slow
def test_tokens_meet_experts_across_all_devices(wide):
  *_, sent = wide
  everyone = collectives.blocks(8, 8)
  inside = []
  for scope, kinds in (
    ('dispatch', {'all-gather', 'all-to-all'}),
    ('combine', {'all-to-all'}),
  ):
    of_scope = [c for c in sent if scope in c.scope.split('/')]
    assert {c.kind for c in of_scope} == kinds
    inside += of_scope
  assert {c.groups for c in inside} == {everyone}
  # Only the gradients of dense weights cross replicas otherwise, as sums.
  crossing = [c for c in sent if c.groups == everyone and c not in inside]
  assert {c.kind for c in crossing} <= {'all-reduce'}
