"""Where a compiled step spends its time, by named scope, from JAX's profiler.

XLA names its events after instructions of the compiled program, whose metadata
names the `jax.named_scope` of origin; a fusion counts for the scope of its last
operation. An operation's time is the median over its runs, times their number,
because on a busy machine some runs wait.
"""

import collections
import dataclasses
import glob
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

# The innermost scope counts: 'norm' within 'attention' is a norm.
_SCOPES = {
  'head': 'head and loss',
  'attention': 'attention',
  'norm': 'norms',
  'rope': 'rotation',
  'route': 'router',
  'experts': 'experts',
  'swiglu': 'swiglu',
  'dispatch': 'dispatch and combine',
  'combine': 'dispatch and combine',
  'embedding': 'embedding',
  'update': 'optimizer',
  'policy_values': 'rounding to the policy',
  'gather_weights': 'collectives of weights',
  'scatter_gradients': 'collectives of weights',
}
# Scopes whose products are listed apart from their other operations.
CPU_PARTS = ('head and loss', 'attention', 'experts', 'router')
_INSTRUCTION = re.compile(r'\s*(?:ROOT )?%?([\w.\-]+) = \S+ ([\w\-]+)\(')


class Part(NamedTuple):
  """A share of a step.

  Attributes:
    name: name of the scope, in words.
    is_product: true for matrix products.
    seconds: seconds of one step.
    share: share of all parts.
  """

  name: str
  is_product: bool
  seconds: float
  share: float

  def line(self, benchmark: str, case: str) -> str:
    """Returns the part as a JSON line."""
    name = self.name + (', products' if self.is_product else '')
    fields = {
      'benchmark': benchmark,
      'case': case,
      'part': name,
      'ms': float(f'{1e3 * self.seconds:.3g}'),
      'share': round(self.share, 3),
    }
    return json.dumps(fields)


@dataclasses.dataclass
class _Event:
  """An event, in nanoseconds; `inside` is the time of events within it."""

  start: float
  duration: float
  name: str
  inside: float = 0.0

  @property
  def end(self) -> float:
    return self.start + self.duration


def split(
  compiled: Any,
  run: Callable[[], Any],
  steps: int,
  *,
  folder: str | None = None,
) -> list[Part]:
  """Returns the parts of a step, largest first.

  Args:
    compiled: program of the step.
    run: function that takes one step and waits for it.
    steps: profiled steps; one warm-up step comes before them.
    folder: folder that keeps the trace; None keeps none.
  """
  run()
  with tempfile.TemporaryDirectory() as temporary:
    folder = folder or temporary
    with jax.profiler.trace(folder):
      for _ in range(steps):
        run()
    spent = _own_times(folder)
  origins = _origins(compiled.as_text())
  seconds: dict[tuple[str, bool], float] = collections.defaultdict(float)
  for name, times in spent.items():
    if name in origins:
      median = statistics.median(times)
      seconds[origins[name]] += 1e-9 * median * len(times) / steps
  return _parts(seconds)


def joined(parts: Iterable[Part], apart: tuple[str, ...]) -> list[Part]:
  """Returns parts; products are listed separately only for names in `apart`."""
  seconds: dict[tuple[str, bool], float] = collections.defaultdict(float)
  for part in parts:
    seconds[part.name, part.is_product and part.name in apart] += part.seconds
  return _parts(seconds)


def _parts(seconds):
  total = sum(seconds.values())
  parts = [
    Part(name, is_product, spent, spent / total)
    for (name, is_product), spent in seconds.items()
  ]
  return sorted(parts, key=lambda part: -part.seconds)


def _own_times(folder: str) -> dict[str, list[float]]:
  """Returns nanoseconds of each operation's runs, without events within them.

  Raises:
    ValueError: if the profiler wrote no trace.
  """
  files = glob.glob(f'{folder}/**/*.xplane.pb', recursive=True)
  if not files:
    raise ValueError(f'The profiler left no *.xplane.pb under {folder}.')
  times: dict[str, list[float]] = collections.defaultdict(list)
  data = jax.profiler.ProfileData.from_file(max(files))
  for plane in data.planes:
    for line in plane.lines:
      if 'python' in line.name:
        continue
      events = [
        _Event(event.start_ns, event.duration_ns, _operation(event))
        for event in line.events
      ]
      events.sort(key=lambda event: (event.start, -event.duration))
      around: list[_Event] = []
      for event in events:
        while around and around[-1].end <= event.start:
          around.pop()
        if around:
          around[-1].inside += event.duration
        around.append(event)
      for event in events:
        times[event.name].append(event.duration - event.inside)
  return times


def _operation(event: Any) -> str:
  # A GPU's kernel names its instruction; on a CPU the event is the instruction.
  stats = dict(event.stats)
  return str(stats.get('hlo_op', event.name))


def _origins(text: str) -> dict[str, tuple[str, bool]]:
  """Returns, by instruction, its scope and true if it is a product."""
  products, bodies = set(), {}
  body = ''
  lines = text.splitlines()
  for line in lines:
    if line.endswith('{') and not line.startswith(' '):
      body = line.removeprefix('ENTRY ').split(' ', 1)[0].lstrip('%')
    elif ' dot(' in line or 'matmul' in line:
      products.add(body)
  for line in lines:
    match = _INSTRUCTION.match(line)
    if match is None or not line.startswith(' '):
      continue
    name, kind = match.groups()
    if kind in ('while', 'conditional', 'call', 'parameter', 'tuple'):
      continue
    called = re.search(r'calls=%?([\w.\-]+)', line)
    is_product = kind == 'dot' or 'matmul' in line
    is_product |= called is not None and called[1] in products
    origin = re.search(r'op_name="([^"]*)"', line)
    bodies[name] = (_scope(origin[1] if origin else ''), is_product)
  return bodies


def _scope(path: str) -> str:
  for step in reversed(path.split('/')):
    # transpose(jvp(head)) is the gradient of head.
    inner = re.sub(r'^(?:[\w<>]+\()*|\)*$', '', step)
    if inner in _SCOPES:
      return _SCOPES[inner]
  return 'the rest'
