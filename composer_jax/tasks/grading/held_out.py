"""Compares a solution with the original on inputs that no test names.

What tests say happens inside the solution's own process. Here its functions
are called on inputs, the values come out, and the comparison is the host's:
the process that computes them holds neither the tests nor a right value.

Inputs are those with which the package's tests call functions in which deleted
code runs, recorded once from the original, and variations of them. What is
only ever given objects, or gives objects alone, is not reached by this;
`Agreement.calls` says how much there was.
"""

import contextlib
import dataclasses
import json
import pathlib
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from composer_jax.sandbox import base
from composer_jax.tasks.grading import plain, suites
from composer_jax.tasks.repository import task_set

_MAX_CALLS = 24  # recorded ones and as many variations
_MAX_PAST = 8
_LEAST_CALLS = 3  # fewer do not tell
_MAX_TESTS = 24  # from which inputs are taken
_MAX_TASKS = 256
# The original's calls that take longer are not asked of a solution, which may
# be slower.
_ORIGINAL_S, _SOLUTION_S = 0.3, 3.0
_REPLAYED = frozenset({
  'AttributeError', 'NameError', 'NotPlain', 'TimeoutError', '_TooSlow',
})  # fmt: skip
_PROGRAM = pathlib.Path(__file__).with_name('call_plugin.py')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
  """How far two implementations agree.

  Attributes:
    calls: compared, of those inputs that tests use and of variations.
    agreed: gave the same.
    status: 'ok', 'unresolved' (none of the functions is there), 'none' (no
      input could be compared), or what became of the process.
  """

  calls: tuple[int, int]
  agreed: tuple[int, int]
  status: str

  def disagrees(self, least: float) -> bool:
    """Whether either kind of input was answered right too rarely."""
    return self.status == 'ok' and any(
      calls >= _LEAST_CALLS and agreed < least * calls
      for calls, agreed in zip(self.calls, self.agreed)
    )


class Recorded(NamedTuple):
  """One way to call a function, in the encoding of `tasks.grading.plain`.

  Attributes:
    past: of the object of a method: [arguments that make it, [method,
      arguments] that were called of it before]; None for functions.
    arguments: [positional, named].
  """

  module: str
  symbol: str
  past: Any
  arguments: Any


# What was recorded for the last tasks.
_memory: dict[Any, tuple[Recorded, ...]] = {}
_memory_lock = threading.Lock()


def module_of(path: str, roots: Sequence[str]) -> str:
  """The dotted name under which a file is imported."""
  _, path = task_set.split_root(path, roots)
  return path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')


def record(
  task: task_set.RepositoryTask, sandbox: base.Sandbox
) -> tuple[tuple[Recorded, ...], str]:
  """Calls that reach what was deleted, () when none is plain; and the status.

  Runs the original in a box of its own, once per task unless that run fails.
  """
  key = (task.task_id, task.image, json.dumps(task.solution, sort_keys=True))
  if (found := _memory.get(key)) is not None:
    return found, 'ok'
  with contextlib.closing(sandbox.open(task.image)) as box:
    result = suites.run(
      box,
      arguments=task.test_arguments,
      # Tracing is slow; those that the policy never saw come first.
      ids=(*task.hidden, *task.shown)[:_MAX_TESTS],
      source_roots=task.source_roots,
      wall_s=task.timeout_s,
      trace=suites.Trace(
        folders=_folders(task),
        packages=tuple(_stem(folder) for folder in _folders(task)),
        record=tuple((d.path, d.symbol) for d in task.deleted),
      ),
    )
  found = tuple(_recorded(result.inputs, task.source_roots))
  if result.status == 'ok':
    # A run that a busy machine cut short says nothing of the next one.
    with _memory_lock:
      _memory[key] = found
      if len(_memory) > _MAX_TASKS:
        del _memory[next(iter(_memory))]
  return found, result.status


def _folders(task: task_set.RepositoryTask) -> tuple[str, ...]:
  """The importable package, or the modules, that the task is about."""
  split = (task_set.split_root(p, task.source_roots) for p in task.solution)
  return tuple(dict.fromkeys(r + inner.split('/')[0] for r, inner in split))


def _stem(folder: str) -> str:
  return folder.rpartition('/')[2].removesuffix('.py')


def _recorded(inputs: Sequence[Any], roots: Sequence[str]) -> list[Recorded]:
  """The recorded calls without repetitions, methods with their past."""
  pasts: dict[tuple, list] = {}
  found: dict[str, Recorded] = {}
  for path, symbol, of, arguments, is_relevant in inputs:
    owner, _, name = symbol.rpartition('.')
    past = None
    if of is not None:
      past = pasts.setdefault((path, owner, of), [[[], {}], []])
      if name == '__init__':
        past[0] = arguments
    # Special methods are reached through what uses them.
    if name.startswith('__') or owner.count('.') > 0:
      continue
    call = Recorded(
        module=module_of(path, roots), symbol=symbol,
        past=past and [past[0], past[1][-_MAX_PAST:]], arguments=arguments,
    )  # fmt: skip
    if is_relevant:
      found.setdefault(json.dumps(call), call)
    if past is not None:
      past[1].append([name, arguments])
  return list(found.values())


def compare(
  task: task_set.RepositoryTask,
  source: Mapping[str, bytes | None],
  sandbox: base.Sandbox,
  draw: random.Random,
) -> Agreement:
  """Calls the original and the solution on the same inputs.

  Args:
    source: path -> content: what makes the solution of the image.
    sandbox: in which each of the two has boxes of its own.
    draw: decides which inputs, and their variations.
  """
  calls_of_tests, status = record(task, sandbox)
  if status == 'infrastructure':
    return Agreement(calls=(0, 0), agreed=(0, 0), status=status)
  recorded = list(calls_of_tests)
  draw.shuffle(recorded)
  varied = _variations(recorded, draw)
  calls = [*recorded[:_MAX_CALLS], *varied]
  if not calls:
    status = 'none' if status == 'ok' else status
    return Agreement(calls=(0, 0), agreed=(0, 0), status=status)
  without_tests = dict.fromkeys(task.test_paths)
  # Two processes with other hashes: what differs is no property of the code.
  right: list[list] = []
  for hash_seed in (0, 1):
    outcomes, status = _call(
        task, without_tests, calls, sandbox, hash_seed=hash_seed,
        call_s=_ORIGINAL_S,
    )  # fmt: skip
    if outcomes is None:
      return Agreement(calls=(0, 0), agreed=(0, 0), status=status)
    right.append(outcomes)
  num_recorded = min(len(recorded), _MAX_CALLS)
  asked = [
    (int(index >= num_recorded), call, a)
    for index, (call, a, b) in enumerate(zip(calls, *right, strict=True))
    if a == b and _tells(a, is_recorded=index < num_recorded)
  ]
  if not asked:
    return Agreement(calls=(0, 0), agreed=(0, 0), status='none')
  given, status = _call(
      task, {**without_tests, **source}, [call for _, call, _ in asked],
      sandbox, hash_seed=0, call_s=_SOLUTION_S,
  )  # fmt: skip
  if given is None:
    if status == 'infrastructure':
      return Agreement(calls=(0, 0), agreed=(0, 0), status=status)
    given = [['raised', status]] * len(asked)
  used = _used_names(task)
  count, agreed = [0, 0], [0, 0]
  for (kind, call, wanted), outcome in zip(asked, given, strict=True):
    if outcome == ['missing'] and call.symbol.split('.')[0] not in used:
      continue  # a helper that another implementation does not need
    count[kind] += 1
    agreed[kind] += outcome == wanted
  return Agreement(
    calls=(count[0], count[1]),
    agreed=(agreed[0], agreed[1]),
    status='ok' if any(count) else 'unresolved',
  )


def _used_names(task: task_set.RepositoryTask) -> set[str]:
  """Deleted names that belong to the interface: the prompt tells them."""
  return {
    deleted.symbol.split('.')[0]
    for deleted in task.deleted
    if deleted.symbol and not deleted.symbol.startswith('_')
  }


def _tells(outcome: list, is_recorded: bool) -> bool:
  """Whether another implementation has to give the same.

  A failure on an input that nobody asked for may be any failure; one that says
  how the call was replayed is no property of the code. Of an object, only the
  class may be known.
  """
  if outcome[0] == 'raised':
    return is_recorded and outcome[1] not in _REPLAYED
  if outcome[0] != 'ok':
    return False
  _, value, after = outcome
  empty = value is None or (
    isinstance(value, dict) and 'object' in value and not value['text']
  )
  return not empty or after is not None


def _call(
  task: task_set.RepositoryTask,
  changes: Mapping[str, bytes | None],
  calls: Sequence[Recorded],
  sandbox: base.Sandbox,
  *,
  hash_seed: int,
  call_s: float,
) -> tuple[list | None, str]:
  """Outcomes of the calls, or None and what became of the process."""
  config = {
      'source_roots': list(task.source_roots), 'plain': suites.plain_program(),
      'calls': calls, 'call_s': call_s,
      'packages': [_stem(folder) for folder in _folders(task)],
      'opaque': sorted({d.symbol.split('.')[0] for d in task.deleted}),
  }  # fmt: skip
  with contextlib.closing(sandbox.open(task.image, changes)) as box:
    result = box.run(
      dataclasses.replace(
        suites.command(_PROGRAM.read_text(), hash_seed),
        stdin=json.dumps(config).encode(),
        wall_s=task.timeout_s,
      )
    )
  if result.status != 'ok':
    return None, result.status
  try:
    outcomes = json.loads(result.report)
  except (ValueError, RecursionError):
    return None, 'exit'
  if not isinstance(outcomes, list) or len(outcomes) != len(calls):
    return None, 'exit'
  return outcomes, 'ok'


def _variations(
  recorded: Sequence[Recorded], draw: random.Random
) -> list[Recorded]:
  """Calls like the recorded ones, but none of them."""
  seen = {json.dumps(call) for call in recorded}
  found: list[Recorded] = []
  for _ in range(4 * _MAX_CALLS):
    if not recorded or len(found) == _MAX_CALLS:
      break
    call = _varied(draw.choice(recorded), draw)
    key = json.dumps(call)
    if key not in seen:
      seen.add(key)
      found.append(call)
  return found


def _varied(call: Recorded, draw: random.Random) -> Recorded:
  """The call with one value changed, its own or one of its object's past."""
  past, arguments = call.past, call.arguments
  place = draw.randrange(len(past[1]) + 2) if past is not None else 0
  if place == 0:
    arguments = _varied_arguments(arguments, draw)
  elif place == 1:
    past = [_varied_arguments(past[0], draw), past[1]]
  else:
    before = list(past[1])
    name, given = before[place - 2]
    before[place - 2] = [name, _varied_arguments(given, draw)]
    past = [past[0], before]
  return call._replace(past=past, arguments=arguments)


def _varied_arguments(arguments: list, draw: random.Random) -> list:
  positional, named = arguments
  places = [*range(len(positional)), *named]
  if not places:
    return arguments
  place = draw.choice(places)
  if isinstance(place, int):
    changed = plain.vary(positional[place], draw)
    return [[*positional[:place], changed, *positional[place + 1 :]], named]
  return [positional, {**named, place: plain.vary(named[place], draw)}]
