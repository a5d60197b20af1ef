"""Rubrics: what episodes are scored by beside their tests.

A rubric is a TOML or JSON file with a list `criteria`, of the form that
verifiers reads (v1, `judges/rubric.py`): name, text, weight, and choices from
the worst to the best, evenly spaced from 0 to 1. Three keys are ours. `rule`
names a function of `tasks.rules`, or MODULE:FUNCTION, that answers in place of
a model. A `gate` whose answer is not its best one makes the whole score 0, as
code that does not compile has no style. A `relative` criterion ranks the
episodes of a group.

  [[criteria]]
  name = "passes"
  text = "Do the hidden tests pass?"
  rule = "passed"
  gate = true
  weight = 0

  [[criteria]]
  name = "names"
  text = "Do names in the new code say what they hold?"
  choices = ["no", "some", "all"]
"""

import dataclasses
import json
import math
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from composer_jax.core import checks, files
from composer_jax.tasks import judges, rules

_NAME = re.compile(r'[a-z][a-z0-9_]{0,39}')
_MAX_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
  """One question of a rubric.

  Attributes:
    name: key of the score, in small letters, digits and underscores.
    text: the question, as a model reads it.
    weight: share of the rubric's score, relative to the other weights.
    choices: answers from the worst, which scores 0, to the best, 1.
    rule: function that answers; '' to ask a model.
    gate: true if any answer but the best makes the rubric's score 0.
    relative: true to rank the episodes of a group instead.
  """

  name: str
  text: str
  weight: float = 1.0
  choices: tuple[str, ...] = ('no', 'yes')
  rule: str = ''
  gate: bool = False
  relative: bool = False

  def __post_init__(self):
    is_name = isinstance(self.name, str) and _NAME.fullmatch(self.name)
    checks.require(self, 'name', is_name, 'be like no_dead_code')
    for name in ('text', 'rule'):
      is_text = isinstance(getattr(self, name), str)
      checks.require(self, name, is_text, 'be a text')
    checks.require(self, 'text', self.text.strip(), 'be a question')
    checks.number(self, 0, 'weight', highest=1e6)
    checks.boolean(self, 'gate', 'relative')
    is_right = isinstance(self.choices, tuple) and len(self.choices) > 1
    is_right = is_right and all(isinstance(c, str) and c for c in self.choices)
    is_right = is_right and len(set(self.choices)) == len(self.choices)
    checks.require(self, 'choices', is_right, 'list 2 or more different texts')
    if self.relative and (self.rule or self.gate):
      raise ValueError(
        f'Criterion {self.name!r} ranks episodes (relative = true): it can '
        'have no rule and be no gate.'
      )

  def score(self, choice: str) -> float:
    return self.choices.index(choice) / (len(self.choices) - 1)

  @property
  def question(self) -> judges.Question:
    return judges.Question(name=self.name, text=self.text, choices=self.choices)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rubric:
  """The criteria of a file.

  Attributes:
    identity: first 12 hexadecimal digits of the SHA-256 of the criteria,
      and of the modules of rules of one's own.
  """

  criteria: tuple[Criterion, ...]
  identity: str

  def asked(self, *, relative: bool) -> list[Criterion]:
    """Returns the criteria that a model answers, or those that it ranks by."""
    return [c for c in self.criteria if not c.rule and c.relative == relative]

  def score(self, scores: Mapping[str, float]) -> float:
    """Returns the weighted mean of scores, 0 behind a gate that is not passed.

    Args:
      scores: scores from 0 to 1 by criterion; criteria without one, such as
        rankings of a single episode, do not count.
    """
    known = [c for c in self.criteria if c.name in scores]
    if any(c.gate and scores[c.name] < 1 for c in known):
      return 0.0
    total = sum(c.weight for c in known)
    return sum(c.weight * scores[c.name] for c in known) / (total or 1.0)


def load(path: str) -> Rubric:
  """Reads a rubric.

  Raises:
    ValueError: the file is missing, too large or no rubric; names the entry.
  """
  try:
    file = pathlib.Path(path)
    if file.stat().st_size > _MAX_BYTES:
      raise ValueError(f'it has more than {_MAX_BYTES} bytes')
    data = file.read_bytes()
    read = tomllib.loads if file.suffix.lower() == '.toml' else json.loads
    content: Any = read(data.decode())
    if isinstance(content, dict):
      content = content.get('criteria')
    criteria = _criteria(content)
    own = [rules.source_of(c.rule) for c in criteria if ':' in c.rule]
  except (OSError, ValueError, TypeError, RecursionError) as error:
    raise ValueError(f'The rubric {path!r} cannot be used: {error}') from error
  listed = [*(dataclasses.asdict(c) for c in criteria), *own]
  identity = files.sha256(json.dumps(listed).encode())[:12]
  return Rubric(criteria=criteria, identity=identity)


def _criteria(entries: Any) -> tuple[Criterion, ...]:
  if not isinstance(entries, list) or not entries:
    raise ValueError('it must list criteria, each with a name and a text')
  known = {f.name for f in dataclasses.fields(Criterion)}
  made: list[Criterion] = []
  for entry in entries:
    if not isinstance(entry, dict):
      raise ValueError(f'a criterion must be a table, not {entry!r}')
    for name in entry:
      checks.known_name(name, known, 'a criterion')
    fields = dict(entry)
    if isinstance(fields.get('choices'), list):
      fields['choices'] = tuple(fields['choices'])
    made.append(Criterion(**fields))
  names = [c.name for c in made]
  if len(set(names)) < len(names):
    raise ValueError(f'two criteria share a name: {sorted(names)}')
  total = sum(c.weight for c in made)
  if not 0 < total < math.inf:
    raise ValueError(f'the sum of its weights ({total}) must be positive')
  return tuple(made)
