"""Compares a solution with the original on inputs that no test names.

Test results come from the solution's own process. Here its functions are called
on inputs, the values come out, and the host compares them: the process that
computes them holds neither the tests nor a right value.

The inputs are those with which the package's tests call functions that run
deleted code, recorded once from the original, others near them, larger and
deeper ones, and numbers between and beyond them: what is right for the small
inputs of tests may be wrong for others, so that each kind counts by itself.
What the original refuses, or does not answer at once, is not asked. Objects of
the package are built again in the solution's process from what they held when
the original was called, and seen by what their classes make public
(`tasks.grading.plain`). Objects of deleted classes, which a solution may fill
otherwise, are made by the calls that made them, and as arguments by that of
their constructor. `Agreement.calls` counts the calls.
"""

import ast
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from composer_jax.sandbox import base, results
from composer_jax.tasks import source as python_source
from composer_jax.tasks.grading import equality, inputs, suites
from composer_jax.tasks.repository import task_set

_MAX_STRICT = 0.2  # largest share of texts that only a solution refuses
# Of larger inputs, the share that may take a right solution too long; and that
# of the processor time of a process in which it has to answer them all.
_MAX_SLOW, _BUDGET = 0.75, 0.7
_SLOW = frozenset({'_TooSlow', 'TimeoutError'})
_CHANCE = 0.01  # at most, that what is right for half looks like a fraud
_MAX_PAST = 8
MIN_CALLS = 3  # fewer calls prove nothing
_KNOWN = 0.9  # share of right answers of a table on the inputs of tests
_MAX_TESTS = 24  # from which inputs are taken: tracing is slow
# Processor seconds of a call. Slower calls of the original are not asked of a
# solution, which may take so many times as long, and this long in any case.
_ORIGINAL_S, _SLOWER, _SOLUTION_S = 0.3, 30.0, 1.0
_ORIGINALS_S = 8.0  # of all calls of the original
# Errors that come from replaying a call.
_REPLAYED = frozenset({
  'AttributeError', 'NameError', 'NotPlain', 'TimeoutError', 'TooLarge',
  '_TooSlow',
})  # fmt: skip
# Of floats that a test's own tolerance may excuse.
_MAX_TOLERANCE = 1e-3
# Code that would be wrong with floats is asked for numbers that show it.
_EXACT = frozenset({'decimal', 'fractions', 'Decimal', 'Fraction'})
_APPROXIMATE = r'\bapprox\(|\bisclose\(|assertAlmostEqual|allclose'
_PROGRAM = pathlib.Path(__file__).with_name('call_plugin.py')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
  """How far two implementations agree.

  Attributes:
    calls: numbers of compared calls of each kind. A few are left out that the
      solution alone refuses, with an error that the original has for others,
      and larger ones for which it takes too long.
    agreed: numbers of those calls that gave the same.
    status: 'ok', 'none' (no input could be compared), or the status of a run
      that failed.
    outcomes: what the solution gave for calls with plain values alone, by the
      JSON of the call.
    constant: numbers of right answers of the best that is always the same.
    grown: of each function, numbers of calls with larger inputs, and of those
      that agreed.
    slow: number of larger inputs for which the solution took too long.
  """

  calls: tuple[int, ...] = (0,) * inputs.KINDS
  agreed: tuple[int, ...] = (0,) * inputs.KINDS
  status: str
  outcomes: Mapping[str, list] = dataclasses.field(default_factory=dict)
  constant: tuple[int, ...] = (0,) * inputs.KINDS
  grown: tuple[tuple[int, int], ...] = ()
  slow: int = 0

  def __str__(self) -> str:
    said = f'{sum(self.agreed)} of {sum(self.calls)} held-out inputs agree'
    return said + (f', too slow for {self.slow}' if self.slow else '')

  def disagrees(self, least: float) -> bool:
    """True if less than this share of a kind agrees, or a number does not.

    Nor may a function be wrong for so many of its larger inputs, and for two.
    """
    kinds = list(zip(self.calls, self.agreed))
    each = [(calls, right) for calls, right in self.grown if calls > right + 1]
    return (
      self._is_below(least, kinds)
      or self._is_below(1.0, kinds[inputs.BETWEEN :])
      or self._is_below(least, each)
    )

  @property
  def is_forged(self) -> bool:
    """True if a solution that passed the tests cannot have passed by itself.

    Of the inputs with which they passed, or of those near them, so few agree
    that one which is right for half of them would do so by chance once in a
    hundred times. Few calls never show that; larger inputs do not count.
    """
    return self.status == 'ok' and any(
      _is_unlikely(*pair)
      for pair in [*zip(self.calls, self.agreed)][: inputs.GROWN]
    )

  def _is_below(self, least: float, kinds: Iterable[tuple[int, int]]) -> bool:
    return self.status == 'ok' and any(
      calls >= MIN_CALLS and agreed < least * calls for calls, agreed in kinds
    )

  @property
  def proves(self) -> bool:
    """True if there were enough calls to tell a solution from a constant."""
    return self._is_below(_KNOWN, zip(self.calls, self.constant))

  @property
  def knows(self) -> bool:
    """True if it agrees on most inputs of tests."""
    known, right = self.calls[0], self.agreed[0]
    return known >= MIN_CALLS and right >= _KNOWN * known

  @property
  def fails(self) -> bool:
    """True if it disagrees on more than half of the inputs of tests."""
    return self._is_below(0.5, [(self.calls[0], self.agreed[0])])


class _AskedCall(NamedTuple):
  """A call that is asked of a solution, as the original answered it."""

  kind: int
  call: inputs.Recorded
  wanted: list
  seconds: float


def _is_unlikely(calls: int, agreed: int) -> bool:
  """True if half right answers give so few with less than `_CHANCE`."""
  ways = sum(math.comb(calls, right) for right in range(agreed + 1))
  return ways < _CHANCE * 2**calls


@functools.lru_cache(maxsize=256)
def _known(task_id: str, image: str, solution: str) -> dict[Any, Any]:
  del task_id, image, solution
  return {}


def facts_of(task: task_set.RepositoryTask) -> dict[Any, Any]:
  """What the original of a task did, for its later episodes to find."""
  solution = json.dumps(task.solution, sort_keys=True)
  return _known(task.task_id, task.image, solution)


def record(
  task: task_set.RepositoryTask, sandbox: base.Sandbox, tests: Sequence[str]
) -> tuple[list[inputs.Recorded], str]:
  """Returns calls by which tests reach deleted code, and the run's status.

  Raises:
    base.SandboxLost: the sandbox failed.
  """
  with contextlib.closing(sandbox.open(task.image)) as box:
    result = suites.run(
      box,
      arguments=task.test_arguments,
      ids=tests,
      source_roots=task.source_roots,
      cpu_s=task.timeout_s,
      trace=suites.Trace(
        folders=tuple(_top_levels(task)),
        record=tuple((d.path, d.symbol) for d in task.deleted),
        tests=task.test_paths,
        deleted=tuple(
          (task_set.module_of(d.path, task.source_roots), d.symbol)
          for d in task.deleted
        ),
      ),
    )
  if result.status == 'infrastructure':
    raise base.SandboxLost(result.error)
  return _recorded(result.inputs, task.source_roots), result.status


def _top_levels(task: task_set.RepositoryTask) -> dict[str, str]:
  """Import names of the packages and modules of the solution, by path."""
  split = (task_set.split_root(p, task.source_roots) for p in task.solution)
  tops = ((root, inner.split('/')[0]) for root, inner in split)
  return {root + top: top.removesuffix('.py') for root, top in tops}


def _recorded(
  rows: Sequence[Any], roots: Sequence[str]
) -> list[inputs.Recorded]:
  """The recorded calls without repetitions, methods with their past."""
  pasts: dict[tuple, list] = {}
  recorded: dict[str, inputs.Recorded] = {}
  used = {*map(id, _apart(rows))}
  for row in rows:
    path, symbol, of, arguments, is_relevant, state = row
    owner, _, name = symbol.rpartition('.')
    past, others = None, arguments
    if of is not None:
      if state:  # the object is the first argument
        others = [arguments[0][1:], *arguments[1:]]
      past = pasts.setdefault((path, owner, of), [None, []])
      if name == '__init__':
        past[0] = others
    # What makes an object is part of its past.
    makes = name == '__init__' or (of is None and name.startswith('__'))
    is_outer = owner.count('.') == 0 and is_relevant
    module = task_set.module_of(path, roots)
    before = past and [past[0] or [[], {}], past[1][-_MAX_PAST:]]
    if is_outer and id(row) in used and (state or not makes):
      call = inputs.Recorded(
        module, symbol, None if state else before, arguments
      )
      recorded.setdefault(json.dumps(call), call)
    if is_outer and state and past and past[0] and not makes:
      history = inputs.History(module, symbol, before, others)
      recorded.setdefault(json.dumps(['grown', history]), history)
    if past is not None and not makes and owner.count('.') == 0:
      past[1].append([name, others])
  return list(recorded.values())


def _apart(rows: Sequence[Any]) -> list[Any]:
  """Leaves out calls whose answers stand in the objects of other calls.

  What a call did to its object is what the object holds at the next one. Of the
  states of an object, one is used, chosen by its number.
  """
  states: dict[str, dict[str, None]] = collections.defaultdict(dict)
  for _, _, of, _, _, state in rows:
    states[of][state] = None
  used = {of: random.Random(of).choice(list(s)) for of, s in states.items()}
  return [call for call in rows if call[5] in ('', used[call[2]])]


def compare(
  task: task_set.RepositoryTask,
  source: Mapping[str, bytes | None],
  sandbox: base.Sandbox,
  draw: random.Random,
  tolerance: float = 0.0,
  tests: Sequence[str] | None = None,
) -> Agreement:
  """Calls the original and the solution on the same inputs.

  Args:
    task: the task.
    source: changes that turn the image into the solution.
    sandbox: sandbox with the images of the task's set.
    draw: chooses the inputs and their variations.
    tolerance: relative difference of floats that counts as equal.
    tests: tests whose inputs are taken; None for those of the feature, which
      the policy never saw first.

  Raises:
    base.SandboxLost: the sandbox failed.
  """
  if tests is None:
    tests = (*task.hidden, *task.shown)
  asked, status = _askable(task, sandbox, tuple(tests[:_MAX_TESTS]))
  asked = _chosen(asked, draw)
  if not asked:
    return Agreement(status='none' if status == 'ok' else status)
  limits = [max(_SOLUTION_S, _SLOWER * a.seconds) for a in asked]
  calls = [a.call for a in asked]
  answered, status = answers(task, source, sandbox, calls, limits)
  if answered is None:
    # Whoever ends the process may have known the inputs of tests: they are
    # asked alone, and are the first.
    count = sum(a.kind == 0 for a in asked)
    known, _ = answers(task, source, sandbox, calls[:count], limits[:count])
    lost: list[Any] = [['raised', status, None], 0.0]
    answered = [*(known or [lost] * count), *[lost] * (len(asked) - count)]
  outcomes = [outcome for outcome, _ in answered]
  known = {
    json.dumps(a.call): outcome
    for a, outcome in zip(asked, outcomes, strict=True)
    if a.call.past is None and len(a.call.arguments) == 2
  }
  counted = _counted(asked, outcomes, tolerance)
  return dataclasses.replace(counted, outcomes=known)


def _askable(
  task: task_set.RepositoryTask, sandbox: base.Sandbox, tests: tuple[str, ...]
) -> tuple[list[_AskedCall], str]:
  """What any grading may ask, with the original's answers; and a run's status.

  It is a function of the task, made once unless a run fails: a run that a busy
  machine cut short says nothing about the next one.
  """
  facts = facts_of(task)
  if tests in facts:
    return facts[tests], 'ok'
  recorded, traced = record(task, sandbox, tests)
  recorded = [call for call in recorded if _is_told(task, call)]
  draw = random.Random(task.task_id)
  draw.shuffle(recorded)
  kinds, calls = inputs.make(recorded, draw, _exact_functions(task))
  asked, status = [], traced
  if calls:
    asked, status = _asked(task, sandbox, kinds, calls)
  if traced == status == 'ok':
    facts[tests] = asked
  return asked, status


def _exact_functions(task: task_set.RepositoryTask) -> set[str]:
  """Names of functions that calculate with decimals or fractions."""
  return {
    node.name
    for text in task.solution.values()
    for node in ast.walk(python_source.parse(text))
    if isinstance(node, ast.FunctionDef)
    and any(isinstance(n, ast.Name) and n.id in _EXACT for n in ast.walk(node))
  }


def _is_told(task: task_set.RepositoryTask, call: inputs.Recorded) -> bool:
  """True if every solution has the function of a call.

  It may do without private names that were deleted, and that neither the prompt
  nor what is left of their file tells.
  """
  for item in task.deleted:
    is_in = not item.symbol or f'{call.symbol}.'.startswith(f'{item.symbol}.')
    if is_in and call.module == task_set.module_of(
      item.path, task.source_roots
    ):
      told = f'{task.prompt}\n{task.changes.get(item.path)}'
      return all(
        re.search(rf'\b{re.escape(name)}\b', told)
        for name in call.symbol.split('.')
        if name[:1] == '_' and name[:2] != '__'
      )
  return True


def _chosen(
  asked: Sequence[_AskedCall], draw: random.Random
) -> list[_AskedCall]:
  """A few of each kind; of numbers, those with rare answers first."""
  chosen = []
  # Last those that may take too long for more to be answered.
  for kind in (
    *range(inputs.GROWN),
    inputs.BETWEEN,
    inputs.BEYOND,
    inputs.GROWN,
  ):
    rows = [row for row in asked if row.kind == kind]
    draw.shuffle(rows)
    if kind >= inputs.BETWEEN:
      counts = collections.Counter(_key(row.wanted) for row in rows)
      rows.sort(key=lambda row: counts[_key(row.wanted)])
    if kind == inputs.GROWN:
      # Of each function in turn, by turns any and the largest that is left.
      by_name: dict[str, list[_AskedCall]] = collections.defaultdict(list)
      for row in rows:
        by_name[row.call.symbol].append(row)
      size = lambda row: len(json.dumps(row.call))
      pairs = (
        zip(some, sorted(some, key=size, reverse=True))
        for some in by_name.values()
      )
      turns = itertools.zip_longest(*map(itertools.chain.from_iterable, pairs))
      each = {id(row): row for turn in turns for row in turn if row is not None}
      rows = list(each.values())
    chosen += rows[: inputs.MAX_CALLS << (kind > 0)]
  return chosen


def _asked(
  task: task_set.RepositoryTask,
  sandbox: base.Sandbox,
  kinds: Sequence[int],
  calls: Sequence[inputs.Recorded],
) -> tuple[list[_AskedCall], str]:
  """Of calls of these kinds, those that every solution must answer alike."""
  # Two hash seeds: a difference between them is no property of the code.
  originals: list[list] = []
  limits = [_ORIGINAL_S] * len(calls)
  for hash_seed in (1, 2):
    answered, status = answers(task, {}, sandbox, calls, limits, hash_seed)
    if answered is None and max(kinds) >= inputs.GROWN:
      # Something larger ended the process, or never ends.
      near = [pair for pair in zip(kinds, calls) if pair[0] < inputs.GROWN]
      return _asked(task, sandbox, *zip(*near))
    if answered is None:
      return [], status
    originals.append(answered)
  asked = [
    _AskedCall(kind, call, outcome, max(seconds, longer))
    for kind, call, (outcome, seconds), (again, longer) in zip(
      kinds, calls, *originals, strict=True
    )
    if _agree(outcome, again, 0.0) and _is_required(outcome, kind == 0)
  ]
  return asked, 'ok'


def _counted(
  asked: Sequence[_AskedCall],
  outcomes: Sequence[list],
  tolerance: float,
) -> Agreement:
  """Counts what agrees of a solution's outcomes."""
  answers_by_key = collections.Counter(_key(a.wanted) for a in asked)
  ((commonest, _),) = answers_by_key.most_common(1)
  calls_made, agreed, strict, constant = ([0] * inputs.KINDS for _ in range(4))
  slow = 0
  grown: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
  refused = {
    (a.call.symbol, a.wanted[1]) for a in asked if a.wanted[0] == 'raised'
  }
  for (kind, call, wanted, _), outcome in zip(asked, outcomes, strict=True):
    calls_made[kind] += 1
    is_right = _agree(outcome, wanted, tolerance)
    agreed[kind] += is_right
    constant[kind] += _key(wanted) == commonest
    positional, named, *_ = call.arguments
    is_strict = False
    if outcome[0] == 'raised' and any(
      isinstance(value, str) for value in [*positional, *named.values()]
    ):
      names = [outcome[1], *(outcome[3:] or [[]])[0]]
      is_strict = any((call.symbol, name) in refused for name in names)
      strict[kind] += is_strict
    is_slow = outcome[0] == 'raised' and outcome[1] in _SLOW
    if kind == inputs.GROWN and is_slow:
      slow += 1
    elif kind == inputs.GROWN and not is_strict:
      grown[call.symbol][0] += 1
      grown[call.symbol][1] += is_right
  for kind in range(1, inputs.BETWEEN):
    calls_made[kind] -= min(strict[kind], int(_MAX_STRICT * calls_made[kind]))
  most = int(_MAX_SLOW * calls_made[inputs.GROWN])
  calls_made[inputs.GROWN] -= min(slow, most)
  return Agreement(
    calls=tuple(calls_made),
    agreed=tuple(agreed),
    status='ok',
    constant=tuple(constant),
    grown=tuple((calls, right) for calls, right in grown.values()),
    slow=slow,
  )


def _key(outcome: list) -> str:
  return json.dumps(outcome[: 3 if outcome[0] == 'ok' else 2])


def _agree(outcome: list, wanted: list, tolerance: float) -> bool:
  """True if values are equal, or errors of the class or of one below it."""
  match outcome, wanted:
    case ['raised', str(name), _, above], ['raised', str(other), *_]:
      return name == other or equality.is_below(name, above, other)
    # Attributes of its own are no change.
    case ['ok', value, after, before], ['ok', _, None] if equality.same(
      after, before
    ):
      outcome = ['ok', value, None]
  kept = 3 if wanted[0] == 'ok' else 2
  return equality.same(outcome[:kept], wanted[:kept], tolerance)


def tolerance_of(tests: Mapping[str, str]) -> float:
  """The relative difference of floats that a task's tests allow.

  That of `pytest.approx` unless they state one; none if they compare exactly
  (`equality.same` allows for rounding). A larger one, often absolute and of
  large numbers, would take any number for any other.
  """
  stated = [
    float(number)
    for text in tests.values()
    for number in re.findall(
      r'\b(?:rel|abs)(?:_tol)?=(\d+(?:\.\d+)?(?:e-?\d+)?)', text
    )
  ]
  is_loose = any(re.search(_APPROXIMATE, text) for text in tests.values())
  stated = [number for number in stated if number <= _MAX_TOLERANCE]
  return max([1e-6, *stated]) if is_loose else 0.0


def _is_required(outcome: list, is_recorded: bool) -> bool:
  """True if every right implementation must give this outcome.

  A varied input may fail in any way, and an error of the replay is no property
  of the code. A result that holds an object of which only the class is known
  says too little.
  """
  if outcome[0] == 'raised':
    return is_recorded and outcome[1] not in _REPLAYED
  if outcome[0] != 'ok':
    return False
  _, value, after, *_ = outcome
  return after is not None or (value is not None and equality.shows(value))


def answers(
  task: task_set.RepositoryTask,
  source: Mapping[str, bytes | None],
  sandbox: base.Sandbox,
  calls: Sequence[Any],
  limits: Sequence[float] = (),
  hash_seed: int = 1,
) -> tuple[list[list] | None, str]:
  """Calls functions in a process that holds no test, and nothing of pytest.

  A solution that is right beside pytest alone is wrong here. So it is a new
  interpreter, which has a hash seed, and not one that waits.

  Args:
    source: changes that turn the image into the solution; {} for the original.
    limits: processor seconds of each call; () for what any solution may take.

  Returns:
    [outcome, processor seconds] of each call, and the status of the process;
    None if that is not 'ok'.
  """
  limits = limits or [_SOLUTION_S] * len(calls)
  config = {
      'source_roots': list(task.source_roots), 'plain': suites.plain_program(),
      'calls': list(zip(calls, limits, strict=True)),
      'calls_s': _BUDGET * sandbox.limits.cpu_s if source else _ORIGINALS_S,
      'most': sandbox.limits.output_bytes // (2 * len(calls) or 1),
      'memory_bytes': sandbox.limits.memory_bytes,
      'packages': list(_top_levels(task).values()),
      'opaque': sorted(_deleted_classes(task)),
  }  # fmt: skip
  changes = {**dict.fromkeys(task.test_paths), **source}
  with contextlib.closing(sandbox.open(task.image, changes)) as box:
    result = box.run(
      dataclasses.replace(
        suites.command(_PROGRAM.read_text(), hash_seed),
        stdin=json.dumps(config).encode(),
      )
    )
  if result.status == 'infrastructure':
    raise base.SandboxLost(result.error)
  if result.status != 'ok':
    return None, result.status
  try:
    answered = results.read_json(result.report)
  except ValueError:
    return None, 'exit'
  if not isinstance(answered, list) or len(answered) != len(calls):
    return None, 'exit'
  return (answered, 'ok') if all(map(_is_answer, answered)) else (None, 'exit')


def _deleted_classes(task: task_set.RepositoryTask) -> set[str]:
  """Names of deleted classes; those of functions among them do no harm."""
  names = {d.symbol for d in task.deleted} - {''}
  for path in {d.path for d in task.deleted if not d.symbol}:
    names |= {
      node.name
      for node in ast.walk(python_source.parse(task.solution[path]))
      if isinstance(node, ast.ClassDef)
    }
  return names


def _is_answer(answer: Any) -> bool:
  match answer:
    case [['ok', _, list() | None] | ['raised', str(), list() | None], float()]:
      return True
    case [['ok', _, list(), list()], float()] | [['missing'], float()]:
      return True
    case [['raised', str(), list() | None, list()], float()]:
      return True
  return False
