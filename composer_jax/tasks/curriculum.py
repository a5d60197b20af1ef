"""Which tasks a run trains on next: more of what is hard, none of what is done.

Composer 2 upsamples harder data by turns and thinking tokens, drops what is
solved, and trains on no prompt twice. So nothing is known of a task before it
is drawn but of what kind it is: its labels, such as the parts of a composition
or a tier and a package. A label's difficulty is what groups that bore it took,
relative to all; it is solved once nearly all of its rollouts pass.

The tasks of a step are a function of the seed and of the outcomes of all steps
that were trained before any of its groups could be started, which the staleness
bound tells. Timing has no part in it: a resumed run draws what the killed one
drew, and so does a worker that starts again.
"""

import collections
import dataclasses
import math
import pathlib
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from composer_jax.core import files, records

# Folder of the workdir with what every trained step showed of its tasks.
LEDGER = 'curriculum'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumOptions:
  """How strongly difficulty decides.

  Attributes:
    enabled: False draws tasks in order, or in the order of a seed.
    candidates: of an endless family, drawn for each group; the others of a
      step are never seen again.
    turns_power, tokens_power: a label's weight is (its turns / those of all)
      ** turns_power * (its sampled tokens / those of all) ** tokens_power; 0
      and 0 treat all alike.
    max_weight: largest of a label's weight, whose inverse is the smallest.
    prior_groups: so many groups of average difficulty are believed of a label
      before the first is seen.
    solved_rate: share of rollouts that pass from which a label is solved.
    solved_groups: seen before that is believed.
    solved_weight: of a task all of whose labels are solved; 0 drops it while
      there are others.
  """

  enabled: bool = False
  candidates: int = 4
  turns_power: float = 1.0
  tokens_power: float = 1.0
  max_weight: float = 4.0
  prior_groups: float = 4.0
  solved_rate: float = 0.97
  solved_groups: int = 8
  solved_weight: float = 0.0

  def __post_init__(self):
    for name, lowest in (
      ('candidates', 1), ('turns_power', 0), ('tokens_power', 0),
      ('max_weight', 1), ('prior_groups', 0), ('solved_groups', 1),
      ('solved_weight', 0),
    ):  # fmt: skip
      value = getattr(self, name)
      if not lowest <= value < math.inf:
        raise ValueError(
          f'--config.curriculum.{name} must be at least {lowest}, not {value}.'
        )
    if not 0 < self.solved_rate <= 1:
      raise ValueError(
        '--config.curriculum.solved_rate must lie above 0 and at most at 1, '
        f'not {self.solved_rate}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
  """A task that could be drawn, and what kind it is of."""

  task_id: str
  labels: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
  """What a trained group showed of its task.

  Attributes:
    judged: rollouts that a sandbox judged; the others say nothing.
    passed: of those, the ones that passed and were not flagged.
    turns: of the judged, in all.
    tokens: that the policy sampled in the judged, in all.
  """

  group: int
  task_id: str
  judged: int
  passed: int
  turns: int
  tokens: int


def outcome_of(group: records.Group) -> Outcome:
  judged = [
    r
    for r in group.rollouts
    if r.verdict.status != records.INFRASTRUCTURE
  ]  # fmt: skip
  return Outcome(
    group=group.group,
    task_id=group.task_id,
    judged=len(judged),
    passed=sum(r.verdict.passed and not r.flags for r in judged),
    turns=sum(r.num_turns for r in judged),
    tokens=sum(
      int(t.loss_mask_T.sum()) for r in judged for t in r.trajectories
    ),
  )


class Ledger:
  """Outcomes of the steps of a run, one file a step, whole or absent.

  A step's file is written before the policy that it gives is published, and
  writing it again replaces it, so that every group counts exactly once.
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
        f'{path} is missing: the tasks after step {step} depend on what its '
        'groups showed. Put it back, or begin a new --workdir.'
      )
    try:
      return [Outcome(**row) for row in files.read_json(path)]
    except TypeError as error:
      raise ValueError(f'{path} is damaged ({error}).') from error

  def truncate(self, steps: int) -> None:
    """Forgets steps from this one on, which will be trained again."""
    for path in self._folder.glob('[0-9]*.json'):
      if int(path.stem) >= steps:
        path.unlink()


_COUNTED = ('judged', 'passed', 'turns', 'tokens')
# Sums of `_COUNTED`, and the number of 'groups', over the groups of a label.
_Tally = collections.Counter[str]


class Difficulty:
  """What is known of labels from outcomes; order does not matter."""

  def __init__(self, options: CurriculumOptions):
    self._options = options
    self._all: _Tally = _Tally()
    self._of: dict[str, _Tally] = {}

  def add(self, outcome: Outcome, labels: Sequence[str]) -> None:
    if not outcome.judged:
      return
    counts = {name: getattr(outcome, name) for name in _COUNTED}
    for tally in (
      self._all,
      *(self._of.setdefault(x, _Tally()) for x in labels),
    ):
      tally.update(counts, groups=1)

  def _relative(self, tally: _Tally, name: str) -> float:
    """A label's mean per rollout over that of all, drawn towards 1."""
    mean = self._all[name] / self._all['judged']
    if not mean:
      return 1.0
    own = tally[name] / tally['judged'] / mean
    prior = self._options.prior_groups
    return (prior + tally['groups'] * own) / (prior + tally['groups'])

  def weight(self, label: str) -> float:
    """Of the label's effort alone; 1 for one that was never seen."""
    tally, o = self._of.get(label), self._options
    if tally is None:
      return 1.0
    weight = self._relative(tally, 'turns') ** o.turns_power
    weight *= self._relative(tally, 'tokens') ** o.tokens_power
    return min(max(weight, 1 / o.max_weight), o.max_weight)

  def is_solved(self, label: str) -> bool:
    tally = self._of.get(label)
    return (
      tally is not None
      and tally['groups'] >= self._options.solved_groups
      and tally['passed'] >= self._options.solved_rate * tally['judged']
    )

  def task_weight(self, labels: Sequence[str]) -> float:
    """Geometric mean of the labels' weights, times solved_weight if solved."""
    weights = [self.weight(label) for label in labels]
    weight = math.prod(weights) ** (1 / len(weights))
    if all(self.is_solved(label) for label in labels):
      weight *= self._options.solved_weight
    return weight

  @property
  def solved(self) -> list[str]:
    return sorted(label for label in self._of if self.is_solved(label))


def draw(
  candidates: Sequence[Candidate],
  weights: Sequence[float],
  count: int,
  seed: tuple[int, ...],
) -> list[Candidate]:
  """Draws without replacement, each next one in proportion to its weight.

  Efraimidis and Spirakis' exponential keys: the smallest of e / weight, with e
  exponential, come first. Weight 0 comes after all others.
  """
  if len(candidates) < count:
    raise ValueError(
      f'{count} tasks are due and {len(candidates)} are left: no task is '
      'trained on twice. Lower --config.rl.steps or --config.rl.prompts, or '
      'make more tasks.'
    )
  waits = np.random.default_rng(seed).exponential(size=len(candidates))
  order = sorted(
    range(len(candidates)),
    key=lambda i: (
      (0, waits[i] / weights[i]) if weights[i] > 0 else (1, waits[i])
    ),
  )
  return [candidates[i] for i in order[:count]]


class DifficultyCurriculum:
  """The tasks of a run's groups, by id.

  Consumes: the ledger's steps in order, each once.
  Waits for: nothing; a step that is asked for before the ledger can tell its
    tasks is an error, since admission never does.
  Woken by: whoever admits a group.
  Produces: task ids, none of them twice.
  """

  def __init__(
    self,
    pool: Callable[[int], Sequence[Candidate]],
    ledger: Ledger,
    options: CurriculumOptions,
    *,
    prompts: int,
    max_staleness: int,
    seed: int,
  ):
    """Begins at step 0, whatever the ledger holds.

    Args:
      pool: step -> what may be drawn for it; ids drawn before are left out.
      prompts: groups of a step.
      max_staleness: steps that groups may be started ahead of their training.
    """
    self._pool, self._ledger, self._options = pool, ledger, options
    self._prompts, self._lag, self._seed = prompts, max_staleness, seed
    self._difficulty = Difficulty(options)
    self._num_known = 0
    self._drawn: list[list[Candidate]] = []
    self._weights: list[list[float]] = []
    self._used: set[str] = set()
    self._lock = threading.Lock()

  def task_of(self, group: int) -> str:
    return self._at(group // self._prompts)[group % self._prompts].task_id

  def weights_of(self, step: int) -> list[float]:
    """What the tasks of a step weighed when they were drawn."""
    self._at(step)
    return self._weights[step]

  def record(self, step: int, groups: Iterable[records.Group]) -> None:
    """Puts a trained step into the ledger."""
    self._ledger.put(step, [outcome_of(g) for g in groups])

  def truncate(self, steps: int) -> None:
    """Forgets steps from this one on; before any is asked for."""
    assert not self._drawn
    self._ledger.truncate(steps)

  def measure(self, step: int) -> dict[str, float]:
    """How hard the tasks of a step were held to be, for its metrics."""
    weights = self.weights_of(step)
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
    left = [c for c in self._pool(step) if c.task_id not in self._used]
    weights = [self._difficulty.task_weight(c.labels) for c in left]
    drawn = draw(left, weights, self._prompts, (self._seed, step))
    of_task = dict(zip((c.task_id for c in left), weights, strict=True))
    self._used |= {c.task_id for c in drawn}
    self._drawn.append(drawn)
    self._weights.append([of_task[c.task_id] for c in drawn])

  def _learn(self, step: int) -> None:
    for place, outcome in enumerate(self._ledger.get(step)):
      expected = self._drawn[step][place]
      group = step * self._prompts + place
      if (outcome.group, outcome.task_id) != (group, expected.task_id):
        raise ValueError(
          f'{self._ledger.path(step)} tells of group {outcome.group} on task '
          f'{outcome.task_id!r} where group {group} was drawn to be on '
          f'{expected.task_id!r}: it is of another run.'
        )
      self._difficulty.add(outcome, expected.labels)
