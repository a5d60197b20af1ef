"""`--what=comms`: bytes that a train step moves, by layer and kind.

What a line means, and what its least is, says `plan.traffic`. Nothing is
allocated; times are bounds from published speeds.
"""

import functools
import math
from typing import NamedTuple

from jax.sharding import AbstractMesh

from composer_jax.optim.muon import cost
from composer_jax.parallel import transports
from composer_jax.plan import case as cases
from composer_jax.plan import report, topologies, traffic

_ORDER = ('dense layer', 'mixture layer', 'step')


def tables(
  case: cases.Case,
  *,
  batch_size: int = 0,
  seq_len: int = 4096,
  transport: str = 'auto',
  bucket: float | None = None,
  microbatches: int = 1,
) -> list[report.Table]:
  """Answers `--what=comms`.

  Args:
    case: of the plan.
    batch_size: rows of one forward pass, over all devices; 0: one on each
      device that has rows of its own.
    seq_len: tokens of a row.
    transport: of traffic.TRANSPORTS, or 'auto', which chooses as a run would.
    bucket: room for rows in means; None for the worst case.
    microbatches: forward passes of one step.
  """
  rows = math.prod(case.mesh.shape[axis] for axis in case.layout.batch)
  step = functools.partial(
    traffic.Step,
    batch_size=batch_size or rows,
    seq_len=seq_len,
    bucket=bucket,
  )
  known = (*traffic.TRANSPORTS, 'auto')
  if transport not in known:
    raise ValueError(f'transport {transport!r} is not one of {known}.')
  each = {t: traffic.lines(case, step(transport=t)) for t in traffic.TRANSPORTS}
  name, chosen_for = transports.choose(
    traffic.load(case, step(transport='ring')),
    platform=topologies.MACHINES[case.machine].platform,
    bucket=bucket,
  )
  reason = 'as asked'
  if transport == 'auto':
    transport, reason = name, chosen_for
  tokens = f'{batch_size or rows} x {seq_len} tokens'
  where = f'{case.where}, {tokens}, {transport}'
  return [
    _of_a_layer(case, each[transport], where),
    _of_a_step(case, each[transport], microbatches),
    _of_transports(case, each, reason),
  ]


def _of_a_layer(case, found, where) -> report.Table:
  return report.Table(
    title=f'Bytes into a device, of one layer or the step, on {where}',
    columns=(
      *('where', 'what', 'phase', 'kind', 'axes', 'devices', 'operations'),
      *('bytes', 'least', 'ratio'),
    ),
    rows=[
      (
        *line[:4],
        '+'.join(line.axes),
        math.prod(case.mesh.shape[axis] for axis in line.axes),
        line.count,
        *_against(line),
      )
      for line in sorted(found, key=lambda line: _ORDER.index(line.where))
    ],
  )


def _of_a_step(case, found, microbatches) -> report.Table:
  """Adds up layers and microbatches."""
  rates = cost.BY_NAME[case.machine]
  rows = []
  for what in (*dict.fromkeys(line.what for line in found), 'total'):
    mine = [line for line in found if what in (line.what, 'total')]
    total = _added(case, mine, microbatches)
    size = total.bytes / (1 << 30)
    rows.append((what, *_against(total), size, 1e3 * total.seconds))
  return report.Table(
    title=(
      f'Of a step of {microbatches} forward passes; ms as if nothing '
      f'else were on the published wire of {rates.name}'
    ),
    columns=('what', 'bytes', 'least', 'ratio', 'gib', 'ms'),
    rows=rows,
  )


def _of_transports(case, each, reason) -> report.Table:
  rows = []
  for transport, found in each.items():
    # Of one layer, so nothing is to be multiplied.
    parts = ('dispatch', 'combine', 'routes')
    mine = [t._replace(where='step') for t in found if t.what in parts]
    total = _added(case, mine)
    rows.append((transport, *_against(total), 1e3 * total.seconds))
  return report.Table(
    title=f'Dispatch, combine and routes of a mixture layer ({reason})',
    columns=('transport', 'bytes', 'least', 'ratio', 'ms'),
    rows=rows,
  )


class _Total(NamedTuple):
  bytes: int
  least: int
  seconds: float


def _against(
  total: _Total | traffic.Traffic,
) -> tuple[int, int, float | None]:
  ratio = total.bytes / total.least if total.least else None
  return total.bytes, total.least, ratio


def _added(
  case: cases.Case, found: list[traffic.Traffic], microbatches: int = 1
) -> _Total:
  """Adds up lines of all layers and passes."""
  layers = {
    'dense layer': case.model.num_dense_layers,
    'mixture layer': case.model.num_moe_layers,
    'step': 1,
  }
  rates = cost.BY_NAME[case.machine]
  total = _Total(0, 0, 0.0)
  for line in found:
    times = layers[line.where] * microbatches
    # Sums over copies could wait for the last microbatch.
    waits = line.what in ('copies', 'vectors')
    sent = times * line.bytes
    total = _Total(
      total.bytes + sent,
      total.least + times // (microbatches if waits else 1) * line.least,
      total.seconds + rates.wire_seconds(sent, _span(case.mesh, line.axes)),
    )
  return total


def _span(mesh: AbstractMesh, axes: tuple[str, ...]) -> int:
  """Returns the devices from the first to the last of a group."""
  strides, stride = {}, 1
  for axis in reversed(mesh.axis_names):
    strides[axis] = stride
    stride *= mesh.shape[axis]
  return 1 + sum((mesh.shape[axis] - 1) * strides[axis] for axis in axes)
