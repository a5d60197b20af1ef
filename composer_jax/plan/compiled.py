"""`--what=compile`: a train step as the machines' own compiler makes it.

Memory, collectives and their order are the compiler's; seconds are modelled
(`plan.timeline`) and nobody has measured them.
"""

import re
from collections.abc import Iterable
from typing import Any

from composer_jax.models import flops
from composer_jax.optim.muon import cost
from composer_jax.plan import aot, report, timeline, topologies
from composer_jax.plan import case as cases
from composer_jax.plan.hlo import overlap

# Title of a table that must not be there.
FAILED = 'FAILED: involuntary full rematerialisation'
_MOST_ROWS = 16
_GIB = 1 << 30


def summary(case: cases.Case, compiled: aot.Compiled) -> dict[str, Any]:
  """Returns what the tables say in numbers, of one device.

  `hidden_share` is the share of the modelled time of collectives in which a
  product runs; `flops` leaves `unknown_kernels` out, and counts loops whose
  end the data decide (`dynamic_loops`) once.
  """
  return _Reading(case, compiled).summary()


def tables(
  case: cases.Case, compiled: aot.Compiled, seq_len: int
) -> list[report.Table]:
  """Answers `--what=compile`."""
  read = _Reading(case, compiled)
  found = [
    read.step(),
    read.work(seq_len),
    read.kinds(),
    read.exposed(),
    read.live(),
    read.remarks(),
    read.failures(),
  ]
  return [table for table in found if table.rows]


def phase(scope: str) -> str:
  """Returns which part of a step a scope belongs to."""
  if 'rematted_computation' in scope:
    return 'again'
  if 'transpose(' in scope:
    return 'backward'
  return 'forward' if 'jvp(' in scope else 'update'


# What JAX puts between the scopes that the code names.
_NOISE = re.compile(
  r'^(jit\(.*\)|while|body|cond|closed_call|shard_map|checkpoint|'
  r'rematted_computation|branch_\d+_fun|pallas_call|jvp\(\)|'
  r'transpose\(jvp\(\)\))$'
)


def place(scope: str) -> str:
  """Returns the scopes that the code names, without what JAX puts between."""
  words = (w for w in scope.split('/') if w and not _NOISE.match(w))
  return '/'.join(
    dict.fromkeys(re.sub(r'^.*\((\w+)\)+$', r'\1', w) for w in words)
  )


class _Reading:
  """A compiled step, counted and put on the clock once."""

  def __init__(self, case: cases.Case, compiled: aot.Compiled):
    self.case, self.compiled = case, compiled
    self.dynamic: dict[str, None] = {}

    def once(scope: str) -> float:
      self.dynamic[place(scope)] = None
      return 1.0

    events = overlap.events(compiled.text, dynamic_trips=once)
    self.rates = cost.BY_NAME[case.machine]
    self.program = overlap.count(events)
    self.line = timeline.run(events, self.rates)
    self.hbm = compiled.limit or topologies.MACHINES[case.machine].hbm

  @property
  def fits(self) -> bool:
    return self.hbm is None or self.compiled.peak <= self.hbm

  def summary(self) -> dict[str, Any]:
    made, line = self.compiled, self.line
    return {
      'devices': self.case.mesh.size,
      'tokens': made.traced.num_tokens,
      'compile_seconds': made.seconds,
      'has_code': made.has_code,
      'arguments': made.traced.arguments,
      'temporaries': made.temporaries,
      'peak': made.peak,
      'hbm': self.hbm,
      'fits': self.fits,
      'flops': self.program.flops,
      'unknown_kernels': sorted(self.program.unknown),
      'dynamic_loops': [*self.dynamic],
      'wire_bytes': self.program.wire_bytes,
      'wire_seconds': line.wire,
      'hidden_share': line.hidden_share,
      'modelled_seconds': line.seconds,
      'rematerialisation_warnings': len(made.warnings),
    }

  def step(self) -> report.Table:
    made = self.compiled
    peak, hbm = made.peak, self.hbm
    rows: list[tuple[Any, ...]] = [
      ('tokens of a step', made.traced.num_tokens, ''),
      ('seconds to trace', made.traced.seconds, ''),
      (
        'seconds to compile',
        made.seconds,
        '' if made.has_code else 'to the schedule; code was not waited for',
      ),
      ('GiB of state and batch', made.traced.arguments / _GIB, 'donated'),
      ('GiB of temporaries', made.temporaries / _GIB, ''),
      ('GiB in all', peak / _GIB, ''),
    ]
    if hbm is not None:
      left = (hbm - peak) / _GIB
      verdict = 'fits' if self.fits else 'does NOT fit'
      rows.append(('GiB there are', hbm / _GIB, f'{verdict}; {left:.1f} left'))
    return report.Table(
      title=f'One step on {self.case.where}; bytes of a device',
      columns=('what', 'value', 'remark'),
      rows=rows,
    )

  def work(self, seq_len: int) -> report.Table:
    made, program, rates = self.compiled, self.program, self.rates
    tokens = made.traced.num_tokens / self.case.mesh.size

    def model(causal: bool) -> float:
      each = flops.train_per_token(self.case.model, seq_len, causal=causal)
      return each * tokens

    whole, causal = model(False), model(True)
    kernels = sum(program.kernels.values())
    rows = [
      ('products of the program', program.flops),
      ('of them in kernels, by the cost they state', kernels),
      ('of them beside a collective', program.overlapped),
      ('the model, every query meets every key', whole),
      ('the model, a query meets those up to itself', causal),
    ]
    unknown = ', '.join(
      f'{name} ({number:g})' for name, number in program.unknown.items()
    )
    title = f'TFLOP of a device; {rates.name} makes {rates.flops / 1e12:g} a s'
    if unknown:
      title += f'; not counted: kernels {unknown}'
    if self.dynamic:
      title += f'; counted once: loops the data end, {", ".join(self.dynamic)}'
    return report.Table(
      title=title,
      columns=('what', 'tflop', 'seconds_at_peak', 'of_the_model'),
      rows=[
        (name, value / 1e12, value / rates.flops, value / whole)
        for name, value in rows
      ],
    )

  def kinds(self) -> report.Table:
    """Adds collectives up by kind."""
    rows = []
    groups = _grouped(self.line.transfers, lambda t: (t.collective.kind,))
    for (kind,), found in [*groups.items(), (('total',), self.line.transfers)]:
      seconds = sum(t.seconds for t in found)
      rows.append(
        (
          kind,
          round(_count(found)),
          round(_count([t for t in found if t.collective.is_async])),
          _bytes(found) / 1e9,
          1e3 * seconds,
          1e3 * sum(t.waited for t in found),
          sum(t.hidden for t in found) / seconds if seconds else None,
        )
      )
    line, rates = self.line, self.rates
    return report.Table(
      title=(
        'Collectives; modelled: bytes into a device over '
        f'{rates.within / 1e9:g} GB/s within {rates.node} devices, '
        f'{rates.across / 1e9:g} beyond, and {1e6 * rates.latency:g} us each, '
        f'one after another; products at peak: {line.busy:.3g} s of '
        f'{line.seconds:.3g}'
      ),
      columns=(
        *('kind', 'number', 'asynchronous', 'GB', 'ms', 'waited_ms', 'hidden'),
      ),
      rows=rows,
    )

  def exposed(self) -> report.Table:
    """Says which collectives products wait for, and why."""
    groups = _grouped(
      self.line.transfers,
      lambda t: (
        t.collective.kind,
        phase(t.collective.scope),
        place(t.collective.scope),
        t.why,
      ),
    )
    rows = [
      (
        *key,
        round(_count(found)),
        max(map(len, found[0].collective.groups)),
        _bytes(found) / 1e6,
        1e3 * sum(t.seconds for t in found),
        1e3 * sum(t.waited for t in found),
      )
      for key, found in groups.items()
      if key[-1]
    ]
    rows.sort(key=lambda row: -row[-1])
    return report.Table(
      title=f'Waited for longest ({min(len(rows), _MOST_ROWS)} of {len(rows)})',
      columns=(
        *('kind', 'phase', 'where', 'why', 'number', 'devices', 'MB', 'ms'),
        'waited_ms',
      ),
      rows=rows[:_MOST_ROWS],
    )

  def live(self) -> report.Table:
    found = self.compiled.live
    return report.Table(
      title='Largest arrays when memory is fullest',
      columns=('MiB', 'name', 'phase', 'where'),
      rows=[
        (
          array.bytes / (1 << 20),
          array.name,
          'state' if array.scope.startswith('state') else phase(array.scope),
          place(array.scope),
        )
        for array in found[:_MOST_ROWS]
      ],
    )

  def remarks(self) -> report.Table:
    made = self.compiled
    rows = [('chosen', line) for line in made.traced.lines]
    if made.error:
      rows.append(('compiler', made.error.splitlines()[0]))
    return report.Table(title='Remarks', columns=('what', 'text'), rows=rows)

  def failures(self) -> report.Table:
    """Says where the compiler found no way but to gather a whole array."""
    return report.Table(
      title=FAILED,
      columns=('what the compiler prints',),
      rows=[(line,) for line in self.compiled.warnings],
    )


def _count(transfers: Iterable[timeline.Transfer]) -> float:
  return sum(t.collective.count for t in transfers)


def _bytes(transfers: Iterable[timeline.Transfer]) -> float:
  return sum(t.collective.bytes * t.collective.count for t in transfers)


def _grouped(
  transfers: Iterable[timeline.Transfer], key: Any
) -> dict[tuple[str, ...], list[timeline.Transfer]]:
  groups: dict[tuple[str, ...], list[timeline.Transfer]] = {}
  for transfer in transfers:
    groups.setdefault(key(transfer), []).append(transfer)
  return groups
