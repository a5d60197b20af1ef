"""What Muon's plan costs a step, for a person and for the metrics."""

from composer_jax.optim.muon import plan as muon_plan
from composer_jax.telemetry import progress


def metrics(plan: muon_plan.MuonPlan | None) -> dict[str, float | int]:
  """Returns the plan's totals, of one device and one step; {} without one."""
  if plan is None:
    return {}
  return {
    'muon_matrices': _matrices(plan),
    'muon_groups': len(plan.groups),
    'muon_flops': plan.flops,
    'muon_flops_ideal': plan.ideal_flops,
    'muon_bytes': plan.wire_bytes,
  }


def lines(plan: muon_plan.MuonPlan | None) -> list[str]:
  """Returns a line of totals, and one for each group of equal matrices."""
  if plan is None:
    return []
  if not plan.groups:
    return ['Muon has no matrices: every parameter is left to AdamW.']
  parameters = sum(len(group.members) for group in plan.groups)
  first = (
    f'Muon has {_matrices(plan)} matrices of {parameters} parameters, in '
    f'{_counted(len(plan.groups), "group")} over '
    f'{_counted(plan.devices, "device")}. Of a device, in a step: '
    f'{progress.number(float(plan.flops))} FLOP, '
    f'{plan.flops / plan.ideal_flops:.2f} of an even share by the standard '
    f'method; {progress.number(float(plan.wire_bytes))} bytes received.'
  )
  return [first, *map(_group_line, plan.groups)]


def _group_line(group: muon_plan.MuonGroup) -> str:
  names = [member.name for member in group.members]
  more = f' and {len(names) - 1} more' if len(names) > 1 else ''
  return (
    f'  {group.p} x {group.q}: {group.mode}, {group.owned} on a device, in '
    f'{_counted(len(group.chunks), "chunk")}: {names[0]}{more}'
  )


def _matrices(plan: muon_plan.MuonPlan) -> int:
  """Returns how many there are, wherever they lie."""
  return sum(
    group.count * plan.devices // (group.num_shards * group.num_replicas)
    for group in plan.groups
  )


def _counted(count: int, noun: str) -> str:
  return f'{count} {noun}{"" if count == 1 else "s"}'
