"""Every shard sees every token and adds what its experts make of it.

all_gather there, psum_scatter back. The wire carries (shards - 1) tokens for
each token both ways, whatever the routes are: nothing to count and nothing to
balance.
"""

import jax
from jax import ad_checkpoint

from composer_jax.parallel import dispatch


def carry(
  compute: dispatch.Compute,
  tokens: dispatch.Tokens,
  group: dispatch.Group,
) -> tuple[jax.Array, dispatch.Needs]:
  """Returns y_ZD of this shard's tokens, and what this shard needed for it.

  Args:
    compute: tokens -> (their sum over the experts of this shard, copies).
    tokens: of this shard.
    group: whose experts they go to.
  """
  x_ZD, ids_ZA, gates_ZA = tokens
  with jax.named_scope('dispatch'):
    x_ZD, packed_ZA = (
      _gathered(array, group)
      for array in (x_ZD, dispatch.pack(ids_ZA, gates_ZA))
    )
    x_ZD = ad_checkpoint.checkpoint_name(x_ZD, 'dispatched')
    packed_ZA = dispatch.named_routes(packed_ZA)
  y_ZD, count = compute(dispatch.Tokens(x_ZD, *dispatch.unpack(packed_ZA)))
  with jax.named_scope('combine'):
    y_PZD = y_ZD.reshape(group.num_shards, -1, y_ZD.shape[1])
    y_ZD = jax.lax.psum_scatter(y_PZD, group.axes, tiled=False)
    y_ZD = ad_checkpoint.checkpoint_name(y_ZD, 'combined')
  return y_ZD, dispatch.Needs(count)


def _gathered(array_Z, group):
  """Returns the tokens of all shards, one after another.

  Here and on the way back shards are a dimension of their own: XLA:TPU fills up
  what it scatters to whole tiles, and tiles of rows are larger.
  """
  array_PZ = jax.lax.all_gather(array_Z, group.axes, tiled=False)
  return array_PZ.reshape(-1, array_Z.shape[1])
