"""Plays pinned suites with each policy version that a run publishes.

A file pins the suites, so that versions compare; other models behind endpoints
may play them, too:

  [[suites]]
  name = "compositions"
  config = "configs/composer/tiny.py"
  fields = {"sandbox.level" = "static"}
  split = "unseen_compositions"
  tasks = 100

  [[models]]
  name = "other"
  url = "http://localhost:8001/v1"
  model = "NAME"

Consumes: policies, the newest at a time; versions that come while suites are
  played are passed over.
Waits for: a version that is newer than the last one played.
Woken by: its own looks at the store.
Produces: a folder of `practice.evaluation` for each version and suite, and a
  line of versions.jsonl for each version once all of its suites are played.
"""

import collections
import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from composer_jax.core import checks, files, records
from composer_jax.tasks.practice import conversation, evaluation
from composer_jax.telemetry import append, writer

VERSIONS, PINNED = 'versions.jsonl', 'suites.json'
MODELS, ENDPOINTS = 'models.json', 'endpoints.json'
_NAME = re.compile(r'[a-zA-Z0-9][\w.-]{0,59}')
_DRAWS = 4000  # of a bootstrap
# Columns of a row that are averaged beside correctness.
COSTS = ('tokens_out', 'num_turns', 'seconds', 'cost_usd')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
  """Tasks that every version plays.

  Attributes:
    name: name of the suite, and of its folders.
    config: config file of a run, with its argument, which gives the tasks, the
      sandbox, rewards, rubric and limits.
    fields: values that replace those of the config, by dotted name.
    split: 'train' or an axis of the task family; '' for its first.
    tasks: number of tasks; 0 for all of a folder.
    samples: episodes of each task.
  """

  name: str
  config: str
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  split: str = ''
  tasks: int = 0
  samples: int = 1

  def __post_init__(self):
    _check_name(self)
    for name, kind in (('config', str), ('split', str), ('fields', dict)):
      is_right = isinstance(getattr(self, name), kind)
      checks.require(self, name, is_right, f'be a {kind.__name__}')
    checks.at_least(self, 0, 'tasks')
    checks.at_least(self, 1, 'samples')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedModel:
  """A model behind an endpoint of OpenAI's form that plays the suites once.

  Attributes:
    name: name of the model in tables, and of its folders.
    url: address of the endpoint, up to /v1.
    model: name by which the endpoint knows the model.
    native_tools: as in `conversation.ChatOptions`; so are both prices.
  """

  name: str
  url: str
  model: str
  native_tools: bool = False
  price_in: float = 0.0
  price_out: float = 0.0

  def __post_init__(self):
    _check_name(self)
    # A version has a number for a name.
    checks.require(self, 'name', not self.name.isdigit(), 'be no number')
    checks.number(self, 0, 'price_in', 'price_out')
    checks.boolean(self, 'native_tools')

  @property
  def chat(self) -> conversation.ChatOptions:
    return conversation.ChatOptions(
      native_tools=self.native_tools,
      price_in=self.price_in,
      price_out=self.price_out,
    )


def _check_name(owner: Any) -> None:
  is_name = isinstance(owner.name, str) and _NAME.fullmatch(owner.name)
  checks.require(owner, 'name', is_name, 'be the name of a folder')


def load(path: str) -> tuple[list[Suite], list[ComparedModel]]:
  """Reads a file of suites and models.

  Raises:
    ValueError: it is missing or no such file; names the entry.
  """
  try:
    content = tomllib.loads(pathlib.Path(path).read_text())
    for name in content:
      checks.known_name(name, ('suites', 'models'), 'suites')
    suites = [_made(Suite, entry) for entry in content.get('suites', ())]
    models = [
      _made(ComparedModel, entry) for entry in content.get('models', ())
    ]
    names = [s.name.lower() for s in suites], [m.name.lower() for m in models]
    if not suites or any(len(set(n)) < len(n) for n in names):
      raise ValueError('it must name a suite or more, and no name twice')
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(f'--suites={path!r} cannot be used: {error}') from error
  return suites, models


def _made(cls: Any, entry: Any) -> Any:
  if not isinstance(entry, dict):
    raise ValueError(f'an entry must be a table, not {entry!r}')
  for name in entry:
    known = [f.name for f in dataclasses.fields(cls)]
    checks.known_name(name, known, cls.__name__)
  return cls(**entry)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
  """How one domain changed between two versions.

  Attributes:
    domain: suite, or suite and tier or package.
    pairs: number of episodes that both judged, of the same tasks.
    missing: number of episodes that only one of them judged.
    change: difference of the pass rates.
    low, high: its 95 % interval, by a paired bootstrap over tasks.
    verdict: 'better' or 'worse' where a change by luck alone would be as large
      in at most one of twenty cases, else ''.
  """

  domain: str
  pairs: int
  missing: int
  change: float
  low: float
  high: float
  verdict: str


def compare(
  domain: str,
  before: Sequence[Mapping[str, Any]],
  after: Sequence[Mapping[str, Any]],
) -> Change:
  """Compares the episodes of the same tasks and samples.

  Samples of a task are not independent, so that tasks are drawn for the
  interval. The verdict is that of a permutation test: if nothing changed, the
  versions of a task's episodes might as well be exchanged.
  """
  judged = lambda rows: {
    (r['task_id'], r['sample']): float(r['passed'])
    for r in rows
    if r['status'] != records.INFRASTRUCTURE
  }
  old, new = judged(before), judged(after)
  by_task = collections.defaultdict(list)
  for key in sorted(old.keys() & new.keys()):
    by_task[key[0]].append(new[key] - old[key])
  missing = len(old.keys() ^ new.keys())
  if not by_task:
    return Change(
      domain=domain, pairs=0, missing=missing, change=0.0, low=0.0, high=0.0,
      verdict='',
    )  # fmt: skip
  sums = np.array([sum(v) for v in by_task.values()])
  sizes = np.array([len(v) for v in by_task.values()])
  rng = np.random.default_rng(0)
  drawn = rng.integers(len(sums), size=(_DRAWS, len(sums)))
  means = sums[drawn].sum(1) / sizes[drawn].sum(1)
  low, high = np.quantile(means, (0.025, 0.975))
  signs = rng.choice((-1, 1), size=(_DRAWS, len(sums)))
  # With itself among them, the share is never below that of so many draws.
  as_large = (abs(signs @ sums) >= abs(sums.sum()) - 1e-9).sum() + 1
  change = float(sums.sum() / sizes.sum())
  is_told = as_large / (_DRAWS + 1) <= 0.05
  return Change(
    domain=domain,
    pairs=int(sizes.sum()),
    missing=missing,
    change=change,
    low=float(low),
    high=float(high),
    verdict=('worse' if change < 0 else 'better') if is_told else '',
  )


def changes(
  suite: str,
  before: Sequence[Mapping[str, Any]],
  after: Sequence[Mapping[str, Any]],
) -> list[Change]:
  """Compares two versions on a suite, and on its tiers and packages."""
  domains = [(suite, lambda row: True)]
  for field in ('tier', 'package'):
    values = sorted({r[field] for r in after if r[field]})
    if len(values) > 1:
      domains += [
        (f'{suite} {v}', lambda row, f=field, v=v: row[f] == v) for v in values
      ]
  return [
    compare(
      domain, *([r for r in rows if is_in(r)] for rows in (before, after))
    )
    for domain, is_in in domains
  ]


def measured(
  rows: Sequence[Mapping[str, Any]], overall: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns what a version did on a suite.

  Args:
    rows: rows of its episodes.
    overall: rates of all of them, as `evaluation.summarise` gives them.

  Returns:
    The rates; `loose`, the share that passes hidden tests whatever monitors,
    held-out calls or a missing finish say; and means of `COSTS` an episode.
    Rates of nothing are None.
  """
  judged = [r for r in rows if r['status'] != records.INFRASTRUCTURE]
  loose = [0 < r['num_tests'] == r['num_passed'] for r in judged]
  means = {
    f'mean_{name}': float(np.mean([r.get(name) or 0 for r in judged]))
    for name in COSTS
    if judged and any(name in r for r in judged)
  }
  if not judged:
    return {**overall, **dict.fromkeys(('pass_rate', 'low', 'high', 'loose'))}
  return {**overall, 'loose': sum(loose) / len(loose), **means}


def is_measured(suites: Mapping[str, Mapping[str, Any]]) -> bool:
  """Returns whether each suite of a player has episodes that were judged."""
  return all(result['episodes'] for result in suites.values())


# (suite, folder, policy or model) -> summary of the evaluation.
Play = Callable[[Suite, pathlib.Path, Any], Mapping[str, Any]]


class SuiteService:
  """Has suites played, and keeps what came of it."""

  def __init__(self, suites: Sequence[Suite], out: pathlib.Path, play: Play):
    """Continues in a folder, whose finished versions are not played again.

    Args:
      play: plays the missing episodes of a suite in a folder.
    """
    self._suites, self._out, self._play = suites, out, play
    out.mkdir(parents=True, exist_ok=True)
    pinned = {s.name: dataclasses.asdict(s) for s in suites}
    known = out / PINNED
    if known.exists() and (there := files.read_json(known)) != pinned:
      other = [n for n in {*pinned, *there} if pinned.get(n) != there.get(n)]
      raise ValueError(
        f'{out} has versions that played other suites: {sorted(other)} differ. '
        'Versions compare on the same suites alone; name another --out.'
      )
    files.write_json(known, pinned)
    with append.AppendFile(out / VERSIONS, 'a version') as lines:
      lines.cut_torn_line()
    # The last line of a version that was played again counts.
    rows = {r['version']: r for r in writer.read(out / VERSIONS)}
    self.versions = list(rows.values())

  def is_due(self, version: int, target_id: str) -> bool:
    """False for a version that was measured; refuses that of another run."""
    for row in self.versions:
      if row['version'] == version:
        if row['target_id'] != target_id:
          raise ValueError(
            f'{self._out} has version {version} with the weights '
            f'{row["target_id"]!r}, and now it comes with {target_id!r}: it is '
            'of another run, or this one was rewound. Name another --out.'
          )
        return not is_measured(row['suites'])
    return True

  def play(self, version: int, target_id: str, policy: Any) -> dict[str, Any]:
    """Plays all suites with a version; returns its line.

    Each suite is compared with the last version that was measured on it.

    Args:
      target_id: identity of the version's weights, or '' if unknown.
    """
    results = self._played(str(version), policy)
    others = [r for r in self.versions if r['version'] != version]
    found: list[dict[str, Any]] = []
    for suite in self._suites:
      known = [r for r in others if r['suites'][suite.name]['episodes']]
      if not known:
        continue
      before = known[-1]['version']
      pair = [
        list(evaluation.read(self._out / str(v) / suite.name).values())
        for v in (before, version)
      ]
      found += [
        {**dataclasses.asdict(c), 'before': before}
        for c in changes(suite.name, *pair)
      ]
    row = {
      'version': version,
      'target_id': target_id,
      'suites': results,
      'changes': found,
    }
    with append.AppendFile(self._out / VERSIONS, 'a version') as lines:
      lines.add(row)
    self.versions = [*others, row]
    return row

  def pin(self, models: Sequence[ComparedModel]) -> None:
    """Fixes what is behind each name; a ValueError names those that differ."""
    path = self._out / ENDPOINTS
    there = files.read_json(path) if path.exists() else {}
    new = {m.name: dataclasses.asdict(m) for m in models}
    if other := [n for n in new if there.get(n, new[n]) != new[n]]:
      raise ValueError(
        f'{self._out} has other models by the names {other}: url, model, tools '
        'or prices differ. Name them otherwise, or another --out.'
      )
    files.write_json(path, {**there, **new})

  def play_model(self, model: ComparedModel) -> None:
    """Plays all suites with a model behind an endpoint, until measured."""
    self.pin([model])
    path = self._out / MODELS
    known = files.read_json(path) if path.exists() else {}
    if not is_measured(known.get(model.name, {'': {'episodes': 0}})):
      known[model.name] = self._played(model.name, model)
      files.write_json(path, known)

  def _played(self, name: str, policy: Any) -> dict[str, Any]:
    results = {}
    for suite in self._suites:
      folder = self._out / name / suite.name
      summary = self._play(suite, folder, policy)
      rows = list(evaluation.read(folder).values())
      results[suite.name] = measured(rows, summary['overall'])
    return results
