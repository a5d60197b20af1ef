"""Several task families in one run, each with its own tools: mixed harnesses.

  --config.tasks.family=mixed \\
  --config.tasks.mixture="('pivots:3:runs/expert.jsonl', \\
      'deletion:2:runs/tasks', 'deletion:1:runs/tasks:run,finish')"

A part is FAMILY:WEIGHT:FOLDER, or with :TOOL,TOOL... the same tasks through
other tools. Groups are dealt to parts by their weights, in a fixed order, so
that every stretch of groups has its share of each.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from composer_jax.agent import environment as environments
from composer_jax.core import checks
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import spec as specs
from composer_jax.tasks import curriculum

MakeFamily = Callable[[specs.Spec], environments.TaskFamily]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedTask:
  """A task of a part; its id begins with the part's name."""

  task_id: str
  part: str
  task: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixturePart:
  """A family of the mixture."""

  name: str
  weight: float
  family: environments.TaskFamily


class Mixed(environments.TaskFamily):
  """An `agent.environment.TaskFamily` of several others."""

  def __init__(self, spec: specs.Spec, makes: Mapping[str, MakeFamily]):
    """Makes the families of the mixture.

    Args:
      makes: functions that make a family, by the names that parts may have.
    """
    written = spec.systems['tasks'].mixture
    if not written:
      raise ValueError(
        "--config.tasks.mixture is needed by family 'mixed': parts in the form "
        'FAMILY:WEIGHT:FOLDER.'
      )
    parts = [
      _part(text, place, spec, makes) for place, text in enumerate(written)
    ]
    self._spec, self._parts = spec, {part.name: part for part in parts}
    self.axes = tuple(
      f'{part.name}/{axis}' for part in parts for axis in part.family.axes
    )
    self.needs_execution = any(p.family.needs_execution for p in parts)
    self.finish_call = parts[0].family.finish_call
    self.max_windows = max(p.family.max_windows for p in parts)
    if len({p.family.finish_call for p in parts}) > 1:
      raise ValueError(
        'The families of --config.tasks.mixture end episodes by different '
        'calls: mix families whose calls are JSON.'
      )

  def _each(self) -> list[environments.TaskFamily]:
    return [part.family for part in self._parts.values()]

  def images(self) -> str:
    folders = {f.images() for f in self._each()} - {''}
    if len(folders) > 1:
      raise ValueError(
        f'--config.tasks.mixture names {len(folders)} folders of images, '
        f'{sorted(folders)}; a sandbox has one.'
      )
    return next(iter(folders), '')

  def requirements(self) -> list[str]:
    return sorted({name for f in self._each() for name in f.requirements()})

  def root_folders(self) -> tuple[str, ...]:
    return tuple(
      sorted({name for f in self._each() for name in f.root_folders()})
    )

  def held_out_packages(self) -> tuple[str, ...]:
    names = {name for f in self._each() for name in f.held_out_packages()}
    return tuple(sorted(names))

  def functions(self) -> list[Any]:
    """Returns the tools that all parts share; [] where they differ.

    A chat template lists the same tools in every prompt. Where parts differ,
    each prompt tells of its own as text, and calls are text.
    """
    first, *others = (family.functions() for family in self._each())
    return first if all(other == first for other in others) else []

  def check(self) -> None:
    for family in self._each():
      family.check()

  def check_files(self) -> None:
    for family in self._each():
      family.check_files()
    self.images()

  def identity(self) -> str:
    digest = hashlib.sha256()
    for part in self._parts.values():
      digest.update(f'{part.name} {part.family.identity()}\n'.encode())
    return digest.hexdigest()

  def texts(self) -> list[str]:
    return [text for family in self._each() for text in family.texts()]

  @functools.cached_property
  def _deal(self) -> 'Deal':
    return Deal([part.weight for part in self._parts.values()])

  def tasks(
    self, tokenizer: Any, *, split: str, seed: int
  ) -> environments.TaskSource:
    if split != 'train':
      name, _, axis = split.rpartition('/')
      part = self._parts[name]
      source = part.family.tasks(tokenizer, split=axis, seed=seed)
      return self._named(part, source)
    sources = [
      self._named(p, p.family.tasks(tokenizer, split='train', seed=seed))
      for p in self._parts.values()
    ]
    by_name = dict(zip(self._parts, sources, strict=True))

    def of_group(group: int) -> MixedTask:
      place, index = self._deal.of(group)
      return sources[place].of_group(index)

    return environments.TaskSource(
      of_group=of_group,
      of_id=lambda task_id: by_name[_split(task_id)[0]].of_id(task_id),
      pool=lambda step: [c for source in sources for c in source.pool(step)],
    )

  def _named(
    self, part: MixturePart, source: environments.TaskSource
  ) -> environments.TaskSource:
    """Returns a part's source with the part's name before every id."""

    def pool(step: int) -> list[curriculum.Candidate]:
      return [
        dataclasses.replace(
          c,
          task_id=f'{part.name}/{c.task_id}',
          labels=(*c.labels, f'family:{part.name}'),
        )
        for c in source.pool(step)
      ]

    return environments.TaskSource(
      of_group=lambda group: _mixed(part, source.of_group(group)),
      of_id=lambda name: _mixed(part, source.of_id(_split(name)[1])),
      pool=pool,
    )

  def listed(self, split: str, count: int) -> list[MixedTask]:
    if split != 'train':
      name, _, axis = split.rpartition('/')
      part = self._parts[name]
      return [_mixed(part, task) for task in part.family.listed(axis, count)]
    if not count:
      parts = self._parts.values()
      return [_mixed(p, t) for p in parts for t in p.family.listed('train', 0)]
    counts = self._deal.counts(count)
    return [
      _mixed(part, task)
      for part, most in zip(self._parts.values(), counts, strict=True)
      if most
      for task in part.family.listed('train', most)
    ]

  def gold(self, task: MixedTask, tokenizer: Any) -> environments.Policy:
    return self._parts[task.part].family.gold(task.task, tokenizer)

  def is_right_edit(self, task_id: str, call: str) -> bool | None:
    name, inner = _split(task_id)
    return self._parts[name].family.is_right_edit(inner, call)

  def environment(
    self, task: MixedTask, runner: Any
  ) -> environments.Environment:
    made = self._parts[task.part].family.environment(task.task, runner)
    made.task_id = task.task_id
    return made

  def demonstrations(self, job: jobs.Job) -> tuple[list, list]:
    """Returns the demonstrations of the parts that have some."""
    learnt, held_out, reasons = [], [], []
    for family in self._each():
      try:
        shown = family.demonstrations(job)
      except ValueError as error:
        reasons.append(str(error))
        continue
      learnt += shown[0]
      held_out += shown[1]
    if len(reasons) == len(self._parts):
      raise ValueError(reasons[0])
    return learnt, held_out


class Deal:
  """Deals numbers to places by weights: 2 and 1 give 0 1 0 0 1 0 ..."""

  def __init__(self, weights: list[float]):
    total = sum(weights)
    self._shares = [weight / total for weight in weights]
    self._dealt: list[tuple[int, int]] = []
    self._counts = [0] * len(weights)

  def of(self, number: int) -> tuple[int, int]:
    """Returns the place of a number, and its number there."""
    while len(self._dealt) <= number:
      # To the place that lags furthest behind its share.
      due = len(self._dealt) + 1
      lags = [
        s * due - c for s, c in zip(self._shares, self._counts, strict=True)
      ]
      place = max(range(len(lags)), key=lambda i: (round(lags[i], 9), -i))
      self._dealt.append((place, self._counts[place]))
      self._counts[place] += 1
    return self._dealt[number]

  def counts(self, total: int) -> list[int]:
    """Returns how many of the first numbers each place gets."""
    places = [self.of(number)[0] for number in range(total)]
    return [places.count(i) for i in range(len(self._shares))]


def _mixed(part: MixturePart, task: Any) -> MixedTask:
  return MixedTask(
    task_id=f'{part.name}/{task.task_id}', part=part.name, task=task
  )


def _split(task_id: str) -> tuple[str, str]:
  name, _, inner = task_id.partition('/')
  return name, inner


def _part(
  text: str, place: int, spec: specs.Spec, makes: Mapping[str, MakeFamily]
) -> MixturePart:
  words = text.split(':')
  try:
    kind, weight, folder = words[0], float(words[1]), words[2]
    tools = words[3].split(',') if len(words) == 4 else []
    if not 0 < weight < 1e9 or len(words) > 4:
      raise ValueError('a weight is positive')
  except (IndexError, ValueError) as error:
    raise ValueError(
      f'--config.tasks.mixture: {text!r} must be FAMILY:WEIGHT:FOLDER or '
      f'FAMILY:WEIGHT:FOLDER:TOOL,TOOL ({error}).'
    ) from error
  checks.known_name(kind, [*makes], '--config.tasks.mixture')
  options = dataclasses.replace(
    spec.systems['tasks'], family=kind, folder=folder, mixture=()
  )
  if tools:
    repository = dataclasses.replace(options.repository, tools=tuple(tools))
    options = dataclasses.replace(options, repository=repository)
  inner = dataclasses.replace(spec, systems={**spec.systems, 'tasks': options})
  return MixturePart(
    name=f'{kind}-{place}', weight=weight, family=makes[kind](inner)
  )
