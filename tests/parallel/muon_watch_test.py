"""XLA's warning of a rematerialisation is seen, so that none means none."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.parallel import muon_meshes


def test_a_full_rematerialisation_is_noticed():
  mesh = jax.make_mesh((2, 4), ('a', 'b'), axis_types=(AxisType.Auto,) * 2)
  rows, columns = (
    NamedSharding(mesh, spec)
    for spec in (P('a', 'b'), P(None, None, ('b', 'a')))
  )

  def move(x):
    x = jax.lax.with_sharding_constraint(jnp.sin(2 * x), rows)
    return jax.lax.with_sharding_constraint(jnp.cos(x), columns)

  shape = jax.ShapeDtypeStruct((12, 8, 24), jnp.float32, sharding=rows)
  # Compiled anew, since a cached program prints nothing.
  _, warnings = muon_meshes.watched(jax.jit(move).lower(shape).compile)
  assert 'rematerialization' in warnings
