"""Tasks whose missing body is an aggregate of a map of a filter of a list.

The docstring of the function describes it in English; the body is one line of
Python. Names come from an open set (`names`), so that they must be copied from
the prompt and the file, in which up to two finished functions stand beside the
missing one. Three things are held out, each in a split of its own, and all in a
fourth: a fifth of the (aggregate, map, filter) kinds, such that every pair of
components stays in training; a fifth of the stems of names; and a wording of
every part. No two compositions compute the same function, and the hidden inputs
tell the right one from every other.
"""

import dataclasses
import functools
import operator
import random
import re
from typing import Any

import numpy as np

from composer_jax.tasks import source
from composer_jax.tasks.list_functions import compositions, names

FAMILY = 'list_functions'
# Held-out splits: what each has that training never sees. The rest is as in
# training.
AXES = {
  'unseen_compositions': frozenset({'compositions'}),
  'unseen_names': frozenset({'names'}),
  'unseen_wordings': frozenset({'wordings'}),
  'unseen_all': frozenset({'compositions', 'names', 'wordings'}),
}
SPLITS = ('train', *AXES)

# Prompts; the last is an unseen wording. Names stand after a space, as in code
# and in calls: there the tokenizer gives a name the same pieces, so that it can
# be copied without knowing how its pieces are spelt.
PROMPTS = (
  'Restore {function} in {path}.',
  'In {path} the body of {function} is missing.',
  'The file {path} lacks the body of {function}.',
  'Complete {function} in {path}.',
  'Implement {function} as {path} describes it.',
  'Look at {path} and fill in {function}.',
  'Please add the missing body of {function} to {path}.',
  'Function {function} of {path} has no body yet.',
  'Fill in the body of {function} in {path}.',
  'Supply what {function} of {path} lacks.',
  'Finish {path}; only {function} is missing.',
  'Someone deleted {function} from {path}; restore it.',
  'Write the body of {function} in {path}.',
)
# Names under which the corpus is searched for held-out bodies.
_COMMON_ARGUMENTS = ('values', 'numbers', 'items', 'counts')
_COMMON_VARIABLES = ('v', 'x', 'n', 'i')

# Share of finished functions that only filter and aggregate: next to few other
# words, the operator that a filter's words stand for is learnt sooner.
_SIMPLE_SHARE = 0.6

# Numbers of finished functions beside a missing one; one is drawn.
_NUM_NEIGHBOURS = (0, 1, 1, 1, 2)

# Constants of finished functions: of four a policy may guess one for long
# before it copies.
_WIDE_CONSTANTS = (*range(2, 10), *range(10, 100, 11))

_NUM_HIDDEN = 8
_NUM_VISIBLE = 2
_NUM_PAIRS = 8  # Pairs of visible inputs, of which one is chosen.
_BANK_SIZE = 96
# Hidden answers that are nearly all alike could be guessed.
_MIN_DISTINCT_ANSWERS = 3


# Positional arguments and the value they must give. JSON values only, so that
# values are compared outside the sandbox that ran the code.
Example = tuple[tuple[Any, ...], Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FunctionTask:
  """A package in which the body of one function has been deleted.

  Attributes:
    task_id: permanent name, from which `from_id` rebuilds the task.
    files: path from the folder that holds the package -> text.
    path: file to restore, relative to the package, as tools name it.
    module: dotted name of the file to restore.
    visible: examples that the `test` tool runs.
    hidden: examples that decide the verdict, on inputs that are not visible.
    reference: a right body, unindented.
    held_out: true if training must never see the task.
  """

  task_id: str
  prompt: str
  files: dict[str, str]
  path: str
  module: str
  function: str
  visible: tuple[Example, ...]
  hidden: tuple[Example, ...]
  reference: str
  held_out: bool

  @property
  def package(self) -> str:
    return self.module.split('.')[0]


def unseen_of(split: str) -> frozenset[str]:
  """Returns what of a split's tasks training never sees."""
  if split not in SPLITS:
    raise ValueError(f'split must be one of {SPLITS}; got {split!r}.')
  return AXES.get(split, frozenset())


@functools.cache
def _kinds_of(held_out: bool) -> tuple[tuple[str, str, str], ...]:
  """Returns the kinds of train tasks, or of unseen compositions.

  A held-out kind whose body is part of a train body, such as a list that train
  tasks reverse, is in neither.
  """
  if not held_out:
    return tuple(
      k for k in compositions.KINDS if not compositions.is_held_out(k)
    )
  everything = compositions.everything()
  shown = '\n'.join(c.body('a', 'v') for c in everything if not c.held_out)
  contained = {c.kinds for c in everything if c.body('a', 'v') in shown}
  return tuple(
    k
    for k in compositions.KINDS
    if compositions.is_held_out(k) and k not in contained
  )


@functools.cache
def _bank() -> tuple[tuple[int, ...], ...]:
  """Returns the input lists, short ones first, alike on every machine."""
  draw = random.Random('inputs of list_functions')
  lists: dict[tuple[int, ...], None] = {(): None}
  while len(lists) < _BANK_SIZE:
    length = draw.randint(1, 6)
    lists[tuple(draw.randint(-6, 9) for _ in range(length))] = None
  return tuple(sorted(lists, key=lambda values: (len(values), values)))


@functools.cache
def _answers() -> np.ndarray:
  """Returns integers [compositions, inputs]; equal ones are equal answers."""
  numbers: dict[str, int] = {}

  def number(composition: compositions.Composition, values: tuple) -> int:
    answer = repr(composition.evaluate(list(values)))
    return numbers.setdefault(answer, len(numbers))

  everything = compositions.everything()
  return np.array([[number(c, x) for x in _bank()] for c in everything])


def _choose_hidden(
  index: int, same: np.ndarray, allowed: list[int], draw: random.Random
) -> list[int]:
  """Chooses inputs that rule out all other compositions, then random ones.

  Args:
    index: index of the composition.
    same: bool [compositions, inputs], true for answers like the composition's.
    allowed: inputs to choose from.
  """
  same = same[:, allowed]
  rivals = np.arange(len(same)) != index
  # Random order, so that equally good inputs take turns.
  order = np.asarray(draw.sample(range(len(allowed)), len(allowed)))
  chosen: list[int] = []
  while rivals.any():
    best = int(order[np.argmin(same[rivals].sum(0)[order])])
    chosen.append(best)
    rivals &= same[:, best]
  others = [i for i in order.tolist() if i not in chosen]
  chosen += others[: max(_NUM_HIDDEN - len(chosen), 0)]
  return [allowed[i] for i in chosen]


@functools.lru_cache(maxsize=64)
def _round(split: str, seed: int, number: int) -> tuple[tuple, ...]:
  """Returns the kinds of a split's tasks of one round, in random order."""
  kinds = _kinds_of('compositions' in unseen_of(split))
  draw = random.Random(f'{FAMILY}/{split}/{seed}/round {number}')
  return tuple(draw.sample(kinds, len(kinds)))


def draw_composition(
  draw: random.Random, like: compositions.Composition
) -> compositions.Composition:
  """Returns a train composition that differs in exactly one kind."""
  near = [
    k for k in _kinds_of(False) if sum(map(operator.ne, k, like.kinds)) == 1
  ]
  constants = like.map_constant, like.filter_constant
  return _with_constants(draw.choice(near), draw, constants)


def _draw_neighbour(
  draw: random.Random, constants: tuple[int | None, int | None] = (None, None)
) -> compositions.Composition:
  kinds = _kinds_of(False)
  if draw.random() < _SIMPLE_SHARE:
    kinds = [k for k in kinds if k[1] == 'itself' and k[2] != 'all']
  return _with_constants(draw.choice(kinds), draw, constants)


def _with_constants(
  kinds: tuple[str, str, str],
  draw: random.Random,
  preferred: tuple[int | None, int | None] = (None, None),
) -> compositions.Composition:
  return compositions.Composition(
    *kinds,
    _constant(compositions.MAPS[kinds[1]], preferred[0], draw),
    _constant(compositions.FILTERS[kinds[2]], preferred[1], draw),
  )


def _constant(
  component: compositions.Component, preferred: int | None, draw: random.Random
) -> int | None:
  if not component.has_constant:
    return None
  if preferred is not None:
    return preferred
  return draw.choice(compositions.CONSTANTS)


def _definition(function: str, argument: str, docstring: str, body: str) -> str:
  return (
    f'def {function}({argument}):\n'
    f'{source.INDENT}"""{docstring}"""\n'
    f'{source.INDENT}{body}\n'
  )


def finished_function(index: int, seed: int) -> str:
  """Returns a function of train wordings and kinds, alike everywhere.

  Its names are as short as variables: its words' meaning is what it teaches.
  """
  draw = random.Random(f'{FAMILY}/finished/{seed}/{index}')
  taken: set[str] = set()
  function, argument, variable = (
    names.draw_name('variable', draw, unseen=False, taken=taken)
    for _ in range(3)
  )
  constants = draw.choice(_WIDE_CONSTANTS), draw.choice(_WIDE_CONSTANTS)
  composition = _draw_neighbour(draw, constants)
  words = composition.docstring(argument, draw)
  return _definition(
    function, argument, words, composition.body(argument, variable)
  )


def kinds_of(
  index: int, split: str, seed: int
) -> tuple[str, tuple[str, str, str]]:
  """Returns the id and kinds of a task without making it.

  Tasks take turns through all kinds of the split, so that no answer is right
  more often than others.
  """
  count = len(_kinds_of('compositions' in unseen_of(split)))
  number, place = divmod(index, count)
  return f'{FAMILY}/{split}/{seed}/{index}', _round(split, seed, number)[place]


def generate(index: int, split: str, seed: int = 0) -> FunctionTask:
  """Makes a task, alike for the same arguments on every machine."""
  task_id, kinds = kinds_of(index, split, seed)
  unseen, draw = unseen_of(split), random.Random(task_id)
  composition = _with_constants(kinds, draw)
  taken: set[str] = set()
  name = functools.partial(
    names.draw_name, draw=draw, unseen='names' in unseen, taken=taken
  )
  words = functools.partial(
    compositions.Composition.docstring, draw=draw, unseen='wordings' in unseen
  )
  package, module, variable = map(name, ('package', 'module', 'variable'))
  function, argument = name('function'), name('argument')
  stub = 'raise NotImplementedError'
  definitions = [
    _definition(function, argument, words(composition, argument), stub)
  ]
  # Neighbours must stay as they are, and show the module's loop variable.
  for _ in range(draw.choice(_NUM_NEIGHBOURS)):
    other, neighbour = name('argument'), _draw_neighbour(draw)
    body = neighbour.body(other, variable)
    described = words(neighbour, other)
    definitions.append(_definition(name('function'), other, described, body))
  draw.shuffle(definitions)
  visible, hidden = _examples(composition, draw)
  path = f'{module}.py'
  prompts = PROMPTS[-1:] if 'wordings' in unseen else PROMPTS[:-1]
  return FunctionTask(
    task_id=task_id,
    prompt=draw.choice(prompts).format(function=function, path=path),
    files={
      f'{package}/__init__.py': '',
      f'{package}/{path}': '\n\n'.join(definitions),
    },
    path=path,
    module=f'{package}.{module}',
    function=function,
    visible=visible,
    hidden=hidden,
    reference=composition.body(argument, variable),
    held_out=bool(unseen),
  )


def _examples(
  composition: compositions.Composition, draw: random.Random
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
  """Returns visible and hidden examples, which share no input."""
  bank, answers = _bank(), _answers()
  index = compositions.everything().index(composition)
  same = answers == answers[index]
  # The `test` tool prints visible inputs, so they are short.
  short = [i for i, values in enumerate(bank) if 2 <= len(values) <= 3]
  while True:
    # The pair that most compositions fail; about one near one in thirteen
    # passes.
    pairs = [draw.sample(short, _NUM_VISIBLE) for _ in range(_NUM_PAIRS)]
    visible = min(pairs, key=lambda pair: same[:, pair].all(1).sum())
    allowed = [i for i in range(len(bank)) if i not in visible]
    hidden = _choose_hidden(index, same, allowed, draw)
    if len(set(answers[index, hidden].tolist())) >= _MIN_DISTINCT_ANSWERS:
      break

  def examples(indices: list[int]) -> tuple[Example, ...]:
    inputs = [list(bank[i]) for i in indices]
    return tuple(((x,), composition.evaluate(x)) for x in inputs)

  return examples(visible), examples(hidden)


def from_id(task_id: str) -> FunctionTask:
  """Makes the task that `generate` gave this id."""
  parts = task_id.split('/')
  if len(parts) != 4 or parts[0] != FAMILY or parts[1] not in SPLITS:
    raise ValueError(
      f'task id {task_id!r} is not {FAMILY}/<split>/<seed>/<index>.'
    )
  return generate(int(parts[3]), parts[1], int(parts[2]))


def names_of(task: FunctionTask) -> tuple[str, str]:
  """Returns the argument and loop variable of a task of this family."""
  text = task.files[f'{task.package}/{task.path}']
  argument = re.search(rf'def {task.function}\((\w+)\)', text)
  variable = re.search(r'for (\w+) in', task.reference)
  assert argument and variable, task.task_id
  return argument[1], variable[1]


def composition_of(task: FunctionTask) -> compositions.Composition:
  """Returns the composition that a task of this family asks for."""
  form = source.normal_body(task.reference, names_of(task)[0])
  composition = compositions.recognise(form)
  assert composition is not None, task.task_id
  return composition


def holdout() -> tuple[str, ...]:
  """Returns bodies that no corpus may contain.

  Names are open, so these are the held-out bodies under common names; the
  corpus also refuses code that shares half of its 5-grams with one.
  """
  return tuple(
    c.body(argument, variable)
    for c in compositions.everything()
    if c.held_out
    for argument in _COMMON_ARGUMENTS
    for variable in _COMMON_VARIABLES
  )
