"""Chooses the tasks of each step: more of the hard ones, none that are solved.

Composer 2 upsamples harder data by turns and thinking tokens, drops what is
solved, and trains on no prompt twice. So all that is known of a task before it
is drawn are its labels, such as the parts of a composition or a tier and a
package. A label's difficulty is the effort of the groups that bore it, relative
to all groups; it is solved once nearly all of its rollouts pass.

The tasks of a step are a function of the seed and of the outcomes of all steps
that were trained before any group of this step could start (the staleness
bound). Timing has no part in it: a resumed run draws the same tasks.
"""

import collections
import dataclasses
import itertools
import math
import pathlib
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from composer_jax.core import checks, files, records

# Folder of the workdir that holds the outcomes of every trained step.
LEDGER = 'curriculum'
_MAX_WEIGHT = 4.0  # of a label; the smallest is its inverse
_PRIOR_GROUPS = 4  # of average difficulty, assumed for each label
# Groups of a label, and share of their rollouts that pass, once it is solved.
_SOLVED_GROUPS, _SOLVED_RATE = 8, 0.97


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumOptions:
  """The influence of difficulty on the draw of tasks.

  Attributes:
    enabled: true to draw by difficulty; false to draw in order, or in the order
      of a seed.
    candidates: tasks of an endless family from which each group's is drawn; the
      others are never seen again.
  """

  enabled: bool = False
  candidates: int = 4

  def __post_init__(self):
    checks.at_least(self, 1, 'candidates')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
  """A task that could be drawn, with its labels."""

  task_id: str
  labels: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
  """Counts over the rollouts of a trained group.

  Attributes:
    judged: number of rollouts that a sandbox judged; only they count.
    passed: number of rollouts that passed without a flag.
    turns: number of turns in all rollouts.
    tokens: number of tokens that the policy sampled in all rollouts.
  """

  group: int
  task_id: str
  judged: int
  passed: int
  turns: int
  tokens: int


def outcome_of(group: records.Group) -> Outcome:
  judged = [r for r in group.rollouts if r.is_judged]
  return Outcome(
    group=group.group,
    task_id=group.task_id,
    judged=len(judged),
    passed=sum(r.verdict.passed and not r.flags for r in judged),
    turns=sum(r.num_turns for r in judged),
    tokens=sum(r.num_sampled for r in judged),
  )


class Ledger:
  """Outcomes of the steps of a run, in one file per step, whole or absent.

  A step's file is written before its policy is published, and writing it again
  replaces it, so that every group counts exactly once.
  """

  def __init__(self, folder: str | pathlib.Path):
    self._folder = pathlib.Path(folder)

  def path(self, step: int) -> pathlib.Path:
    return self._folder / f'{step:06d}.json'

  def put(self, step: int, outcomes: Iterable[Outcome]) -> None:
    rows = [dataclasses.asdict(o) for o in outcomes]
    files.write_json(self.path(step), sorted(rows, key=lambda r: r['group']))

  def get(self, step: int) -> list[Outcome]:
    path = self.path(step)
    if not path.exists():
      raise ValueError(
        f'{path} is missing: the tasks after step {step} depend on the '
        'outcomes of its groups. Put it back, or begin a new --workdir.'
      )
    try:
      return [Outcome(**row) for row in files.read_json(path)]
    except TypeError as error:
      raise ValueError(
        f'{path} is damaged ({error}). Put it back, or begin a new --workdir.'
      ) from error

  def truncate(self, steps: int) -> None:
    """Deletes the files of step `steps` and later, to be trained again."""
    for path in self._folder.glob('[0-9]*.json'):
      if int(path.stem) >= steps:
        path.unlink()


_COUNTED = ('judged', 'passed', 'turns', 'tokens')
# Sums of `_COUNTED` over groups, and the number of 'groups'.
_Tally = collections.Counter[str]


class Difficulty:
  """Estimates of labels from outcomes, in any order.

  A label weighs (turns / mean turns) (sampled tokens / mean tokens).
  """

  def __init__(self):
    self._all = _Tally()
    self._by_label: dict[str, _Tally] = collections.defaultdict(_Tally)

  def add(self, outcome: Outcome, labels: Sequence[str]) -> None:
    if not outcome.judged:
      return
    counts = {name: getattr(outcome, name) for name in _COUNTED}
    for tally in (self._all, *(self._by_label[label] for label in labels)):
      tally.update(counts, groups=1)

  def _relative(self, tally: _Tally, name: str) -> float:
    """Mean per rollout of a label over that of all, drawn towards 1."""
    mean = self._all[name] / self._all['judged']
    if not mean:
      return 1.0
    ratio = tally[name] / tally['judged'] / mean
    groups = tally['groups']
    return (_PRIOR_GROUPS + groups * ratio) / (_PRIOR_GROUPS + groups)

  def weight(self, label: str) -> float:
    """Returns the weight of a label's effort; 1 if it was never seen."""
    tally = self._by_label.get(label)
    if tally is None:
      return 1.0
    weight = self._relative(tally, 'turns') * self._relative(tally, 'tokens')
    return min(max(weight, 1 / _MAX_WEIGHT), _MAX_WEIGHT)

  def is_solved(self, label: str) -> bool:
    tally = self._by_label.get(label, _Tally())
    is_known = tally['groups'] >= _SOLVED_GROUPS
    return is_known and tally['passed'] >= _SOLVED_RATE * tally['judged']

  def task_weight(self, labels: Sequence[str]) -> float:
    """Geometric mean of the labels' weights; 0 if all labels are solved."""
    if all(self.is_solved(label) for label in labels):
      return 0.0
    return math.prod(map(self.weight, labels)) ** (1 / len(labels))

  @property
  def solved(self) -> list[str]:
    return sorted(label for label in self._by_label if self.is_solved(label))


def draw(
  candidates: Sequence[Candidate],
  weights: Sequence[float],
  count: int,
  seed: tuple[int, ...],
) -> list[Candidate]:
  """Draws without replacement, each time in proportion to the weights.

  Sorts by e / weight with e exponential (Efraimidis and Spirakis 2006);
  candidates of weight 0 come last.
  """
  if len(candidates) < count:
    raise ValueError(
      f'{count} tasks are due and {len(candidates)} are left: no task is '
      'trained on twice. Lower --config.rl.steps or --config.rl.prompts, or '
      'make more tasks.'
    )
  waits = np.random.default_rng(seed).exponential(size=len(candidates))
  keys = [
    (w <= 0, e / w if w > 0 else e) for e, w in zip(waits, weights, strict=True)
  ]
  order = sorted(range(len(keys)), key=keys.__getitem__)
  return [candidates[i] for i in order[:count]]


class DifficultyCurriculum:
  """Assigns task ids to the groups of a run.

  Consumes: the ledger's steps in order, each once.
  Waits for: nothing; asking for a step whose outcomes the ledger lacks is an
    error, which the staleness bound of admission rules out.
  Woken by: the admission of a group.
  Produces: task ids, none of them twice.
  """

  def __init__(
    self,
    pool: Callable[[int], Sequence[Candidate]],
    ledger: Ledger,
    *,
    prompts: int,
    lag: int,
    seed: int,
  ):
    """Begins at step 0, whatever the ledger holds.

    Args:
      pool: step -> candidates for it; ids drawn before are left out.
      prompts: number of groups in a step.
      lag: number of steps by which groups may start before training.
    """
    self._pool, self._ledger = pool, ledger
    self._prompts, self._lag, self._seed = prompts, lag, seed
    self._difficulty = Difficulty()
    self._num_known = 0
    self._drawn: list[list[Candidate]] = []
    self._weights: list[list[float]] = []
    self._used: set[str] = set()
    self._lock = threading.Lock()

  def task_of(self, group: int) -> str:
    return self._at(group // self._prompts)[group % self._prompts].task_id

  def record(self, step: int, groups: Iterable[records.Group]) -> None:
    """Puts a trained step into the ledger."""
    self._ledger.put(step, [outcome_of(g) for g in groups])

  def truncate(self, steps: int) -> None:
    """Forgets step `steps` and later; call it before any draw."""
    assert not self._drawn
    self._ledger.truncate(steps)

  def measure(self, step: int) -> dict[str, float]:
    """Returns metrics of the difficulty of a step's tasks."""
    self._at(step)
    weights = self._weights[step]
    return {
      'difficulty': sum(weights) / len(weights),
      'solved_labels': len(self._difficulty.solved),
    }

  def _at(self, step: int) -> list[Candidate]:
    with self._lock:
      while len(self._drawn) <= step:
        self._draw(len(self._drawn))
      return self._drawn[step]

  def _draw(self, step: int) -> None:
    while self._num_known < step - self._lag:
      self._learn(self._num_known)
      self._num_known += 1
    unused = [c for c in self._pool(step) if c.task_id not in self._used]
    weights = [self._difficulty.task_weight(c.labels) for c in unused]
    drawn = draw(unused, weights, self._prompts, (self._seed, step))
    by_id = {c.task_id: w for c, w in zip(unused, weights, strict=True)}
    self._used |= {c.task_id for c in drawn}
    self._drawn.append(drawn)
    self._weights.append([by_id[c.task_id] for c in drawn])

  def _learn(self, step: int) -> None:
    drawn = [*itertools.chain.from_iterable(self._drawn)]
    # A group that the fleet gave up has no outcome.
    for outcome in self._ledger.get(step):
      is_drawn = 0 <= outcome.group < len(drawn)
      expected = drawn[outcome.group] if is_drawn else None
      if expected is None or outcome.task_id != expected.task_id:
        raise ValueError(
          f'{self._ledger.path(step)} has group {outcome.group} on task '
          f'{outcome.task_id!r}, but it was drawn on '
          f'{expected and expected.task_id!r}: it is of another run. Begin a '
          'new --workdir.'
        )
      self._difficulty.add(outcome, expected.labels)
