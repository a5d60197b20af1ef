"""`--what=compile`: a program of a run as compiled for the machines.

Memory, collectives and their order are the compiler's. Seconds are modelled by
`plan.timeline`, not measured.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from composer_jax.models import flops
from composer_jax.optim.muon import cost
from composer_jax.parallel import rounds
from composer_jax.plan import (
  aot,
  network,
  programs,
  report,
  skew,
  timeline,
  topologies,
)
from composer_jax.plan import case as cases
from composer_jax.plan.hlo import narrow, overlap

# Title of the table whose presence means failure.
FAILED = (
  'FAILED: involuntary full rematerialisation, widened products, or ragged_dot'
)
_EXPANDS = 'which multiplies by every expert here; see kernels.grouped.matmul'
_MOST_ROWS = 16
_GIB = 1 << 30


def summary(case: cases.Case, compiled: aot.Compiled) -> dict[str, Any]:
  """Returns the numbers of the tables by name, for one device.

  `hidden_share` is the share of the collectives' modelled time in which matrix
  products run. `flops` excludes `unknown_kernels`, and counts loops with a
  data-dependent end (`dynamic_loops`) once.
  """
  return _Reading(case, compiled).summary()


def tables(
  case: cases.Case, compiled: aot.Compiled, seq_len: int
) -> list[report.Table]:
  reading = _Reading(case, compiled)
  candidates = [
    reading.step(),
    reading.work(seq_len),
    reading.kinds(),
    reading.routings(),
    reading.exposed(),
    reading.live(),
    reading.remarks(),
    reading.failures(),
  ]
  return [table for table in candidates if table.rows]


def largest(compiled: aot.Compiled) -> str:
  """Returns what takes most of a device's memory."""
  return max(compiled.terms, key=lambda name: compiled.terms[name])


def overview(
  readings: list[tuple[cases.Case, aot.Compiled]],
) -> report.Table:
  """Returns a line for each program: whether it fits, and what takes most."""
  rows = []
  for case, compiled in readings:
    facts = summary(case, compiled)
    name = facts['largest']
    rows.append(
      (
        facts['program'],
        facts['peak'] / _GIB,
        'yes' if facts['fits'] else 'no',
        name,
        compiled.terms[name] / _GIB,
        facts['modelled_seconds'],
        facts['hidden_share'],
      )
    )
  return report.Table(
    title='Programs; GiB of one device, modelled seconds',
    columns=(
      *('program', 'GiB', 'fits', 'most', 'its_GiB', 'seconds', 'hidden'),
    ),
    rows=rows,
  )


def phase(scope: str) -> str:
  """Returns the part of a step that a scope belongs to."""
  if 'rematted_computation' in scope:
    return 'again'
  if 'transpose(' in scope:
    return 'backward'
  return 'forward' if 'jvp(' in scope else 'update'


# Parts of a scope that JAX adds to the names in the code.
_NOISE = re.compile(
  r'^(jit\(.*\)|while|body|cond|closed_call|shard_map|checkpoint|'
  r'rematted_computation|branch_\d+_fun|pallas_call|jvp\(\)|'
  r'transpose\(jvp\(\)\))$'
)


def place(scope: str) -> str:
  """Returns a scope without the parts that JAX adds."""
  words = (w for w in scope.split('/') if w and not _NOISE.match(w))
  return '/'.join(
    dict.fromkeys(re.sub(r'^.*\((\w+)\)+$', r'\1', w) for w in words)
  )


class _Reading:
  def __init__(self, case: cases.Case, compiled: aot.Compiled):
    self.case, self.compiled = case, compiled
    self.dynamic: dict[str, None] = {}
    events = self._events(0)  # Even load needs no round of the loop.
    self.program = overlap.count(events)
    self.machine = _machine(case, compiled.traced)
    self.line = timeline.run(events, self.machine)
    self.hbm = compiled.limit or topologies.MACHINES[case.machine].hbm

  def _events(self, num_rounds: int) -> Any:
    """Returns the program's events with exchanges of so many rounds."""
    shards = self.compiled.traced.shards
    further = max(0, num_rounds - shards.parts) if shards else 0

    def trips(scope: str) -> float:
      if rounds.FURTHER in scope:
        return float(further)
      self.dynamic[place(scope)] = None
      return 1.0

    return overlap.events(self.compiled.text, dynamic_trips=trips)

  @property
  def fits(self) -> bool:
    return self.hbm is None or self.compiled.peak <= self.hbm

  def summary(self) -> dict[str, Any]:
    compiled, line = self.compiled, self.line
    return {
      'program': compiled.traced.program,
      'devices': self.case.mesh.size,
      'tokens': compiled.traced.num_tokens,
      'compile_seconds': compiled.seconds,
      'has_code': compiled.has_code,
      'arguments': compiled.traced.arguments,
      'temporaries': compiled.temporaries,
      'terms': compiled.terms,
      'largest': largest(compiled),
      'peak': compiled.peak,
      'hbm': self.hbm,
      'fits': self.fits,
      'flops': self.program.flops,
      'unknown_kernels': sorted(self.program.unknown),
      'dynamic_loops': [*self.dynamic],
      'wire_bytes': self.program.wire_bytes,
      'wire_seconds': line.wire,
      'hidden_share': line.hidden_share,
      'modelled_seconds': line.seconds,
      'rematerialisation_warnings': len(compiled.warnings),
    }

  def step(self) -> report.Table:
    compiled, traced = self.compiled, self.compiled.traced
    until = '' if compiled.has_code else 'until the schedule, without code'
    rows: list[tuple[Any, ...]] = [
      ('tokens', traced.num_tokens, ''),
      ('seconds to trace', traced.seconds, ''),
      ('seconds to compile', compiled.seconds, until),
      *(
        (f'GiB of {name}', size / _GIB, self._remark(name))
        for name, size in compiled.terms.items()
        if size > 1e-6 * compiled.peak  # Without counters.
      ),
      ('GiB in all', compiled.peak / _GIB, f'most: {largest(compiled)}'),
    ]
    if self.hbm is not None:
      free = (self.hbm - compiled.peak) / _GIB
      verdict = 'fits' if self.fits else 'does NOT fit'
      remark = f'{verdict}; {free:.1f} free'
      rows.append(('GiB of a device', self.hbm / _GIB, remark))
    return report.Table(
      title=f'{traced.program} on {self.case.where}; bytes of one device',
      columns=('what', 'value', 'remark'),
      rows=rows,
    )

  def _remark(self, name: str) -> str:
    return 'held meanwhile' if name in self.compiled.traced.beside else ''

  def work(self, seq_len: int) -> report.Table:
    program, rates = self.program, self.machine.rates
    tokens = self.compiled.traced.num_tokens / self.case.mesh.size
    forwards, model = self.compiled.traced.forwards, self.case.model
    whole, causal = (
      tokens
      * (
        forwards * flops.forward_per_token(model, seq_len, causal=causal)
        + (forwards >= 3) * flops.heads_per_token(model, seq_len, causal=causal)
      )
      for causal in (False, True)
    )
    rows = [
      ('products of the program', program.flops),
      ('products inside kernels', sum(program.kernels.values())),
      ('products while a collective is in flight', program.overlapped),
      ('the model, if queries meet all keys', whole),
      ('the model, if queries meet the keys up to themselves', causal),
    ]
    title = f'TFLOP of one device; {rates.name} peaks at '
    title += f'{rates.flops / 1e12:g} TFLOP/s'
    if program.unknown:
      unknown = (f'{name} ({n:g})' for name, n in program.unknown.items())
      title += f'; kernels not counted: {", ".join(unknown)}'
    if self.dynamic:
      title += f'; data-dependent loops counted once: {", ".join(self.dynamic)}'
    return report.Table(
      title=title,
      columns=('what', 'tflop', 'seconds_at_peak', 'of_the_model'),
      rows=[
        (
          name,
          value / 1e12,
          value / rates.flops,
          value / whole if whole else None,
        )
        for name, value in rows
        if program.flops
      ],
    )

  def kinds(self) -> report.Table:
    rows = []
    line, machine = self.line, self.machine
    groups = _grouped(line.transfers, lambda t: (t.collective.kind,))
    if groups:
      groups['total',] = [*line.transfers]
    for (kind,), group in groups.items():
      seconds = sum(t.seconds for t in group)
      rows.append(
        (
          kind,
          round(_count(group)),
          round(_count(t for t in group if t.collective.is_async)),
          _bytes(group) / 1e9,
          1e3 * seconds,
          1e3 * sum(t.waited for t in group),
          sum(t.hidden for t in group) / seconds if seconds else None,
        )
      )
    return report.Table(
      title=(
        f'Collectives; modelled on {machine.wires.words}, with '
        f'{1e6 * machine.rates.latency:g} us each; products at peak take '
        f'{line.busy:.3g} s of {line.seconds:.3g}'
      ),
      columns=(
        *('kind', 'number', 'asynchronous', 'GB', 'ms', 'waited_ms', 'hidden'),
      ),
      rows=rows,
    )

  def routings(self) -> report.Table:
    """Returns the program by how uneven its routing is.

    Further rounds repeat the transfers of a whole round, and the products of
    the busiest device are added at peak speed: both too much.
    """
    traced, model, rows = self.compiled.traced, self.case.model, []
    if traced.shards is not None:
      forwards, tokens = traced.forwards, traced.micro_tokens
      layers = model.num_layers - model.num_dense_layers
      layers *= traced.num_tokens // (tokens * self.case.mesh.size)
      copies = tokens * model.moe.num_active
      rates = self.machine.rates
      row_seconds = skew.row_flops(model, forwards) / rates.flops
      even = layers * skew.row_bytes(model, traced.shards, tokens, forwards)
      routed_tokens = traced.shards.copies // model.moe.num_active
      routed = skew.effects(model.moe, traced.shards, routed_tokens)
      for routing, e in routed:
        parts = max(traced.shards.parts, 1)
        filled = parts / max(e.rounds, parts)
        machine = dataclasses.replace(
          self.machine,
          used=self.machine.used * filled,
          sent=self.machine.sent * filled,
        )
        line = timeline.run(self._events(e.rounds), machine)
        more = layers * (e.busiest - 1) * copies * row_seconds
        busy = e.sent if traced.shards.transport == 'a2a' else e.busiest
        peak, seconds = self.compiled.peak / _GIB, line.seconds + more
        rows.append((routing.name, e.rounds, even * busy / 1e9, peak, seconds))
    return report.Table(
      title=(
        'By how uneven routing is; rows into the busiest device and seconds '
        'are modelled, see --what=routing'
      ),
      columns=('routing', 'rounds', 'rows_GB', 'GiB', 'seconds'),
      rows=rows,
    )

  def exposed(self) -> report.Table:
    """Returns what products wait for, but for rows below 1 % of it."""
    groups = _grouped(
      self.line.transfers,
      lambda t: (
        phase(t.collective.scope),
        place(t.collective.scope),
        t.collective.kind,
        t.why,
      ),
    )
    waited = {
      key: sum(t.waited for t in group) for key, group in groups.items()
    }
    total = sum(waited.values())
    rows = [
      (
        *key,
        round(_count(group)),
        max(map(len, group[0].collective.groups)),
        _bytes(group) / 1e6,
        1e3 * sum(t.seconds for t in group),
        1e3 * waited[key],
      )
      for key, group in groups.items()
      if waited[key] > 0.01 * total
    ]
    rows.sort(key=lambda row: -row[-1])
    return report.Table(
      title=f'Exposed transfers; products wait {1e3 * total:.4g} ms in all',
      columns=(
        *('phase', 'layer and place', 'kind', 'why', 'number', 'devices'),
        *('MB', 'ms', 'exposed_ms'),
      ),
      rows=rows,
    )

  def live(self) -> report.Table:
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
        for array in self.compiled.live[:_MOST_ROWS]
      ],
    )

  def remarks(self) -> report.Table:
    rows = [('chosen', line) for line in self.compiled.traced.lines]
    if self.compiled.error:
      rows.append(('compiler', self.compiled.error.splitlines()[0]))
    return report.Table(title='Remarks', columns=('what', 'text'), rows=rows)

  def failures(self) -> report.Table:
    rows = [(line,) for line in self.compiled.warnings]
    is_whole = self.case.machine not in ('v5e', 'v5p', 'v6e')
    if (count := self.compiled.traced.ragged_dots) and is_whole:
      rows.append((f'{count} calls of ragged_dot, {_EXPANDS}',))
    if self.case.model.precision.products == 'codes':
      try:
        narrow.check(self.compiled.text)
      except narrow.Widened as error:
        rows.append((str(error),))
    return report.Table(title=FAILED, columns=('compiler',), rows=rows)


def _machine(case: cases.Case, traced: programs.Traced) -> timeline.Speeds:
  """Returns the machine at even load of the experts."""
  rows, used, sent = 0, 1.0, 1.0
  if traced.shards is not None:
    rows, copies = traced.shards.buffer, traced.shards.copies
    in_round = copies / max(traced.shards.parts, 1)
    used = min(1.0, in_round / rows)
    sent = in_round / max(min(copies, rows), in_round)
  return timeline.Speeds(
    rates=cost.BY_NAME[case.machine],
    wires=network.of(case.topology, tuple(case.mesh.shape.values())),
    rows=rows,
    used=used,
    sent=sent,
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
