"""`--what=search`: the best few meshes for a train step, by counting.

Memory is counted by `plan.memory`, and compared with the compiler's for what is
kept in benchmarks/results. Times are modelled: products at peak speed, and the
bytes of each kind of transfer at the network's speed. A transfer may be hidden
by products, so meshes that fit are ordered by the longer of both for a token,
then by their transfers. What is proposed should be compiled (`--what=compile`).
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from composer_jax.core import platforms, trees
from composer_jax.models import config as model_config
from composer_jax.models import decoder, flops, placement
from composer_jax.optim import groups
from composer_jax.optim.muon import cost
from composer_jax.parallel import exchange, layouts, topology
from composer_jax.pipeline import spec as specs
from composer_jax.plan import case as cases
from composer_jax.plan import memory, report, skew, topologies

_GIB = 1 << 30
_MOST_CONTEXT = 8  # Longer rows are a question of their own.
_SHOWN = 5


def meshes(count: int) -> Iterator[specs.Mesh]:
  """Yields each mesh of so many devices with a context of at most 8."""
  divisors = [n for n in range(1, count + 1) if count % n == 0]
  for replica, fsdp in itertools.product(divisors, repeat=2):
    context, rest = divmod(count, replica * fsdp)
    if not rest and 0 < context <= _MOST_CONTEXT:
      yield specs.Mesh(replica=replica, fsdp=fsdp, context=context)


def traffic(
  model: model_config.ModelConfig,
  mesh: specs.Mesh,
  layout: layouts.Layout,
  rows: int,
  seq_len: int,
  rates: cost.Rates,
) -> dict[str, float]:
  """Returns modelled seconds of a step's transfers of one device, by kind.

  Weights are gathered in the forward pass and again for the backward pass,
  gradients scattered once, in float32, and summed over replicas.
  """
  where: Any = AbstractMesh(
    (mesh.replica, mesh.fsdp, mesh.context), topology.AXES
  )
  shapes, axes = (
    trees.flatten_names(tree['params']) for tree in decoder.abstract(model)
  )
  places = trees.flatten_names(
    placement.variable_shardings(model, layout=layout, mesh=where)['params']
  )
  width = jnp.dtype(model.compute_dtype).itemsize
  gathered = scattered = summed = 0.0
  for name, leaf in shapes.items():
    place = places[name]
    shard, kept = place.shard_shape(leaf.shape), list(leaf.shape)
    if 'expert' in axes[name]:  # Which stay on their devices.
      axis = axes[name].index('expert')
      kept[axis] = shard[axis]
    local, whole = math.prod(shard), math.prod(kept)
    gathered += (1 + model.remat) * width * (whole - local)
    scattered += 4 * (whole - local)
    copies = mesh.size * local // leaf.size
    summed += 2 * 4 * local * (copies - 1) / copies
  narrow = mesh.fsdp * mesh.context
  seconds = {
    'weights': rates.wire_seconds(gathered, narrow),
    'gradients': rates.wire_seconds(scattered, narrow),
    'sums': rates.wire_seconds(summed, mesh.size),
  }
  plan = placement.exchange_plan(model, layout=layout, mesh=where)
  if plan is not None and plan.travels:
    tokens = rows * seq_len // mesh.size
    shards = exchange.shards_of(
      plan,
      num_tokens=tokens,
      num_active=model.moe.num_active,
      num_local=model.moe.num_experts // plan.expert_shards,
    )
    rows_bytes = model.num_moe_layers * skew.row_bytes(model, shards, tokens)
    seconds['rows'] = rates.wire_seconds(rows_bytes, shards.num_shards)
  return seconds


def table(case: cases.Case, optimizer: str, seq_len: int) -> report.Table:
  """Returns the best meshes of the case's devices, those that fit first."""
  machine, rates = topologies.MACHINES[case.machine], cost.BY_NAME[case.machine]
  count, model = case.mesh.size, case.model
  options = groups.OptimizerOptions(
    name=optimizer, muon=case.muon or groups.MuonChoices()
  )
  found, refused = [], 0
  for mesh in meshes(count):
    rows = mesh.replica * mesh.fsdp  # One for each device that shards them.
    try:
      with platforms.targeting(machine.platform):
        need = memory.training(
          *('train', model, options, mesh, case.layout),
          (rows, seq_len, False),
        )
        wire = traffic(model, mesh, case.layout, rows, seq_len, rates)
    except ValueError:  # A dimension does not divide.
      refused += 1
      continue
    products = (3 + model.remat) * flops.forward_per_token(
      model, seq_len, causal=True
    )
    products *= rows * seq_len / count / rates.flops
    total = sum(wire.values())
    fits = machine.hbm is None or need.total <= machine.hbm
    most = max(wire, key=lambda kind: wire[kind])
    found.append(
      (
        (not fits, max(products, total) / rows, total / rows),
        (
          f'{mesh.replica},{mesh.fsdp},{mesh.context}',
          need.total / _GIB,
          max(need.terms, key=lambda term: need.terms[term]),
          'yes' if fits else 'no',
          *(rows * seq_len, products, total, most, wire[most]),
        ),
      )
    )
  found.sort(key=lambda pair: pair[0])
  title = (
    f'Best {_SHOWN} of {len(found)} meshes of {count} {case.machine}, layout '
    f'{case.layout.name}, {optimizer}; counted and modelled, not compiled'
  )
  if refused:
    title += f'; {refused} do not divide'
  columns = ('mesh', 'GiB', 'largest', 'fits', 'tokens')
  return report.Table(
    title=title,
    columns=(*columns, 'products_s', 'wire_s', 'most', 'its_s'),
    rows=[row for _, row in found[:_SHOWN]],
  )
