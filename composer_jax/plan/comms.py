"""`--what=comms`: bytes that a train step moves, by layer and kind.

`plan.traffic` explains each line and its least. Times are those of the bytes
alone, at published speeds.
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
    case: model, mesh and layout.
    batch_size: rows of one forward pass on all devices; 0 gives each device
      that shards the batch one row.
    seq_len: tokens of a row.
    transport: one of traffic.TRANSPORTS; 'auto' chooses as training does.
    bucket: size of the experts' receive buffers as a multiple of the mean
      load; None for the worst case.
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
  reason = f'transport {transport}, as asked'
  if transport == 'auto':
    transport, reason = transports.choose(
      traffic.load(case, step(transport='ring')),
      platform=topologies.MACHINES[case.machine].platform,
      bucket=bucket,
    )
  lines = traffic.lines(case, step(transport=transport))
  where = f'{case.where}, {batch_size or rows} x {seq_len} tokens; {reason}'
  return [
    _layer_table(case, lines, where),
    _step_table(case, lines, microbatches),
  ]


def _layer_table(case, lines, where) -> report.Table:
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
      for line in sorted(lines, key=lambda line: _ORDER.index(line.where))
    ],
  )


def _step_table(case, lines, microbatches) -> report.Table:
  rates = cost.BY_NAME[case.machine]
  rows = []
  for what in (*dict.fromkeys(line.what for line in lines), 'total'):
    summands = [line for line in lines if what in (line.what, 'total')]
    total = _added(case, summands, microbatches)
    size = total.bytes / (1 << 30)
    rows.append((what, *_against(total), size, 1e3 * total.seconds))
  return report.Table(
    title=(
      f'One step of {microbatches} forward passes; ms of the bytes alone at '
      f'the published network speed of {rates.name}'
    ),
    columns=('what', 'bytes', 'least', 'ratio', 'gib', 'ms'),
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
  case: cases.Case, lines: list[traffic.Traffic], microbatches: int
) -> _Total:
  layers = {
    'dense layer': case.model.num_dense_layers,
    'mixture layer': case.model.num_moe_layers,
    'step': 1,
  }
  rates = cost.BY_NAME[case.machine]
  total = _Total(0, 0, 0.0)
  for line in lines:
    sent = layers[line.where] * microbatches * line.bytes
    # One sum over copies after the last microbatch would do.
    is_once = line.what in ('copies', 'vectors')
    passes = 1 if is_once else microbatches
    total = _Total(
      total.bytes + sent,
      total.least + layers[line.where] * passes * line.least,
      total.seconds + rates.wire_seconds(sent, _span(case.mesh, line.axes)),
    )
  return total


def _span(mesh: AbstractMesh, axes: tuple[str, ...]) -> int:
  """Returns the number of devices from a group's first to its last."""
  strides, stride = {}, 1
  for axis in reversed(mesh.axis_names):
    strides[axis] = stride
    stride *= mesh.shape[axis]
  return 1 + sum((mesh.shape[axis] - 1) * strides[axis] for axis in axes)
