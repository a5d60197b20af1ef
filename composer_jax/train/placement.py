"""Where the arrays of a training stage lie on the mesh."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from composer_jax.core import batches
from composer_jax.models import config as model_config
from composer_jax.models import placement as model_placement
from composer_jax.parallel import exchange, layouts, shardings


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
  """One mesh, and what lies where on it; compared by identity.

  Attributes:
    mesh: of all devices.
    variables: tree of NamedShardings for the model's variables.
    batch: sharding of every [B, T] array.
    plan: exchange of tokens with experts; None on one device.
  """

  mesh: Mesh
  variables: dict[str, Any]
  batch: NamedSharding
  plan: exchange.ExchangePlan | None

  @property
  def replicated(self) -> NamedSharding:
    return shardings.replicated(self.mesh)

  def put(self, batch: batches.LMBatch) -> batches.LMBatch:
    """Places a numpy batch; each process gives its own rows."""
    return jax.tree.map(
      lambda a: jax.make_array_from_process_local_data(self.batch, a), batch
    )


def build(
  model: model_config.ModelConfig,
  *,
  mesh: Mesh,
  layout: layouts.Layout = layouts.TRAIN,
) -> Placement:
  """Places a model by a layout table.

  Raises:
    ValueError: a parameter's axis is missing from the table, or its size does
      not divide; names the parameter.
  """
  return Placement(
    mesh=mesh,
    variables=model_placement.variable_shardings(
      model, layout=layout, mesh=mesh
    ),
    batch=shardings.tokens(layout, mesh),
    plan=model_placement.exchange_plan(model, layout=layout, mesh=mesh),
  )
