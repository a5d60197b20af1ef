"""`--what=muon`: how a step of Muon is divided among devices, and the cost.

The plan is the one that training runs, made for machines that need not exist.
Times are bounds from published speeds. Columns of a group of matrices:

- matrix: short and long side; matrices: those of which a device holds a shard.
- shards: devices that hold one matrix together; replicas: devices that hold the
  same shard.
- owners: devices that matrices are dealt to, or sets of `split` devices that
  own a matrix together; sharers: replicas that divide the work, which the
  others repeat; owned: slots of an owner; padding: empty slots of all owners.
- mode: 'local' if a device holds whole matrices, 'owner' if they travel to an
  owner and back, 'redundant' if each replica has an owner, 'gram_sharded' if a
  few devices share a matrix that is too large for one.
- wire: dtype of exchanges and products.
"""

import dataclasses

import jax
from jax.sharding import NamedSharding

from composer_jax.core import trees
from composer_jax.models import decoder
from composer_jax.optim import roles
from composer_jax.optim.muon import cost, planner
from composer_jax.optim.muon import plan as muon_plan
from composer_jax.parallel import shardings
from composer_jax.plan import case as cases
from composer_jax.plan import muon_model, network, report

# Of peak, what steps of dense models reach on v5p (64 to 70 %, README of
# MaxText).
_SHARE = 0.7


def plan(case: cases.Case) -> muon_plan.MuonPlan:
  """Returns the plan of one step; a ValueError if the case has none."""
  if case.muon is None:
    raise ValueError(
      "The run's pretraining does not use Muon; plan it as if it did with "
      '--config.cpt.optimizer=muon.'
    )
  shapes, axes = (tree['params'] for tree in decoder.abstract(case.model))
  by_role = roles.tree(shapes, axes, case.muon.roles)
  matrices = roles.matrices(shapes, axes, by_role)
  if not trees.flatten_names(matrices):
    raise ValueError(
      f'The roles {case.muon.roles} of cpt.muon.roles leave every parameter to '
      'Adam; Muon needs at least one matrix.'
    )
  specs = shardings.specs(shapes, axes, layout=case.layout, mesh=case.mesh)
  platform = 'cpu' if case.machine == 'cpu' else 'tpu'
  return planner.make(
    shapes,
    matrices,
    shardings=jax.tree.map(lambda spec: NamedSharding(case.mesh, spec), specs),
    newton_schulz=case.muon.resolved(platform),
    fixed=planner.PlanOptions(rates=cost.BY_NAME[case.machine]),
  )


def tables(case: cases.Case) -> list[report.Table]:
  made = plan(case)
  rates = network.rates(case.topology, tuple(case.mesh.shape.values()))
  return [
    _groups(made, case.where),
    _members(made),
    _chunks(made, rates),
    _totals(made),
    _times(made, rates),
  ]


def _groups(made: muon_plan.MuonPlan, where: str) -> report.Table:
  rows = [
    (
      number,
      (group.p, group.q),
      group.mode,
      group.num_shards,
      group.num_replicas,
      group.count,
      group.owners,
      group.split,
      group.sharers,
      group.owned,
      group.owned * group.owners - group.count,
      len(group.chunks),
      round(group.flops / 1e6),
      group.wire_bytes,
      group.newton_schulz.dtype,
    )
    for number, group in enumerate(made.groups)
  ]
  return report.Table(
    title=(
      f'Groups of a Muon step on {where}; MFLOP and bytes of one device; '
      'plan/muon.py explains the columns'
    ),
    columns=(
      *('group', 'matrix', 'mode', 'shards', 'replicas', 'matrices', 'owners'),
      *('split', 'sharers', 'owned', 'padding', 'chunks'),
      *('mflop', 'wire_bytes', 'wire'),
    ),
    rows=rows,
  )


def _members(made: muon_plan.MuonPlan) -> report.Table:
  rows = [
    (
      number,
      member.name,
      member.shape,
      _side(member, group, is_input=True),
      _side(member, group, is_input=False),
      member.count,
    )
    for number, group in enumerate(made.groups)
    for member in group.members
  ]
  return report.Table(
    title='Parameters; each side of a matrix with the mesh axes that shard it',
    columns=('group', 'name', 'shape', 'input', 'output', 'matrices'),
    rows=rows,
  )


def _side(
  member: muon_plan.Member, group: muon_plan.MuonGroup, *, is_input: bool
) -> str:
  is_p = is_input != member.is_transposed
  size, side = (group.p, group.p_side) if is_p else (group.q, group.q_side)
  return '@'.join([str(size), *['+'.join(side.axes)][: len(side.axes)]])


def _chunks(made: muon_plan.MuonPlan, rates: cost.Rates) -> report.Table:
  rows = []
  for g, c in made.sequence:
    chunk = made.groups[g].chunks[c]
    times = cost.chunk_times(made.groups[g], chunk, rates)
    milliseconds = (1e3 * seconds for seconds in times)
    rows.append((g, c, chunk.start, chunk.count, chunk.owned, *milliseconds))
  return report.Table(
    title='Chunks in order; modelled ms to gather, compute and return',
    columns=(
      *('group', 'chunk', 'start', 'matrices', 'owned'),
      *('bring_ms', 'work_ms', 'give_ms'),
    ),
    rows=rows,
  )


def _totals(made: muon_plan.MuonPlan) -> report.Table:
  even = sum(group.even_flops for group in made.groups)
  split = sum(group.split_bytes for group in made.groups)
  padded = muon_model.padding(made) * made.flops
  bound = muon_model.bound_bytes(made)
  rows = [
    (
      name,
      round(value),
      against,
      round(least),
      value / least if least else None,
    )
    for name, value, against, least in (
      ('flops', made.flops, 'standard method, even', made.ideal_flops),
      ('critical_path', made.flops, 'same methods, even', even),
      ('wire_bytes', made.wire_bytes, 'whole matrices', bound),
      ('of_them_to_share', split, 'all wire bytes', made.wire_bytes),
      ('padded_flops', padded, 'all flops', made.flops),
    )
  ]
  return report.Table(
    title='Totals of one device',
    columns=('total', 'value', 'against', 'least', 'ratio'),
    rows=rows,
  )


def _times(made: muon_plan.MuonPlan, rates: network.MeshRates) -> report.Table:
  memory = sum(
    cost.memory_bytes(group, chunk)
    for group in made.groups
    for chunk in group.chunks
  )
  compute, wire = made.flops / rates.flops, muon_model.wire_seconds(made, rates)
  roofline = muon_model.roofline_seconds(made, rates)

  def in_order(share):
    slower = dataclasses.replace(rates, flops=share * rates.flops)
    return muon_model.pipelined_seconds(muon_model.chunk_times(made, slower))

  rows = [
    (name, 1e3 * seconds, seconds / roofline)
    for name, seconds in (
      ('products at peak', compute),
      ('transfers at full bandwidth', wire),
      ('memory traffic', memory / rates.memory),
      ('roofline: the larger of products and transfers', roofline),
      ('products and transfers one after the other', compute + wire),
      ('chunks in order, transfers beside products', in_order(1.0)),
      (f'the same, products at {_SHARE:.0%} of peak', in_order(_SHARE)),
    )
  ]
  return report.Table(
    title=(
      f'Modelled, on published speeds of {rates.name}: '
      f'{rates.flops / 1e12:g} TFLOP/s, memory {rates.memory / 1e9:g} GB/s, '
      f'wires {rates.wires.words}'
    ),
    columns=('time', 'ms', 'of_roofline'),
    rows=rows,
  )
