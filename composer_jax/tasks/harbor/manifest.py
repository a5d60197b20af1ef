"""Reads a task directory of Harbor, of schema 1.0 to 1.4.

  task.toml  instruction.md  environment/  tests/test.sh  solution/solve.sh
  steps/NAME/{instruction.md, tests/, solution/}, for tasks of several steps

What the sections mean is Harbor's documented schema; fields without a meaning
in a box are ignored, as Harbor ignores fields that it does not know. A task
that needs an image to be built, several containers, an accelerator, the network
or a secret of the host is refused with the reason.
"""

import dataclasses
import math
import pathlib
import re
import tomllib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.tasks.harbor import folders, prepared

SCHEMAS = ('1.0', '1.1', '1.2', '1.3', '1.4')
TOML, INSTRUCTION = 'task.toml', 'instruction.md'
_NAME = re.compile(r'[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*', re.ASCII)
# Marks against contamination, which are not for the agent.
_CANARY = re.compile(r'(<!--.*canary.*-->|#.*canary.*)', re.IGNORECASE)
_BAD_STEP = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_MAX_STEPS, _MAX_S = 100, 24 * 3600.0
_MAX_TOML, _MAX_DOTS = 1 << 16, 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Artifact:
  """A file or folder of the box that is kept: its parts, and its new name."""

  source: tuple[str, ...]
  destination: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """One instruction, and how its outcome is verified.

  Attributes:
    name: name of the step; '' for a task of one step.
    instruction: text for the agent.
    tests: contents of /tests by relative path.
    solution: contents of /solution by relative path; {} without one.
    is_separate: true if the verifier begins with a fresh file system, to which
      artefacts alone are brought.
    environment: file system of a separate verifier.
    variables: variables of the verifier.
    timeout_s: most seconds of the verifier.
    artifacts: what is kept, and brought to a separate verifier.
    least: rewards by name below which no further step is played.
  """

  name: str
  instruction: str
  tests: Mapping[str, bytes]
  solution: Mapping[str, bytes]
  is_separate: bool
  environment: prepared.Prepared
  variables: Mapping[str, str]
  timeout_s: float
  artifacts: tuple[Artifact, ...] = ()
  least: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HarborTask:
  """A task directory.

  Attributes:
    task_id: name of the task.
    environment: file system that the agent finds.
    steps: steps in order.
    solution_variables: variables of the solution.
    strategy: 'mean' or 'final': the rewards of a task of several steps.
    memory_mb: memory that the task asks for; 0 where it says nothing.
    metadata: section of the author's own, for people.
  """

  task_id: str
  environment: prepared.Prepared
  steps: tuple[Step, ...]
  solution_variables: Mapping[str, str]
  strategy: str
  memory_mb: int
  metadata: Mapping[str, Any]

  @property
  def packages(self) -> set[str]:
    held = [self.environment, *(s.environment for s in self.steps)]
    return {name for place in held for name in place.packages}

  @property
  def root_folders(self) -> set[str]:
    held = [self.environment, *(s.environment for s in self.steps)]
    return set().union(*(place.root_folders for place in held))


def read(folder: pathlib.Path, bases: Sequence[str] = ()) -> HarborTask:
  """Reads a directory; a folders.TaskRefused names what is wrong."""
  path = folder / TOML
  text = folders.read_text(path, _MAX_TOML)
  # A key of many parts takes time and memory by the square of their number.
  if any(x.partition('=')[0].count('.') > _MAX_DOTS for x in text.splitlines()):
    raise folders.malformed(f'{path} has a key of over {_MAX_DOTS} parts.')
  try:
    config = tomllib.loads(text)
  except (ValueError, RecursionError) as error:
    raise folders.malformed(f'{path} is no TOML: {error}.') from error
  fields = _Fields(config, str(path))
  version = fields.text('schema_version', fields.text('version', '1.4'))
  if version not in SCHEMAS:
    raise folders.malformed(
      f'{path}: schema_version is {version!r} and must be one of {SCHEMAS}.'
    )
  environment = _environment(
    fields.table('environment'), folder / 'environment', bases
  )
  listed = fields.tables('steps')
  if len(listed) > _MAX_STEPS:
    raise folders.malformed(f'{path} has more than {_MAX_STEPS} steps.')
  reader = _Steps(folder, fields, environment, bases)
  steps = [reader.step(each) for each in listed] or [reader.only()]
  names = [unicodedata.normalize('NFC', s.name).casefold() for s in steps]
  if len(set(names)) < len(names):
    raise folders.malformed(f'{path} has two steps of one name.')
  strategy = fields.text('multi_step_reward_strategy', 'mean')
  if strategy not in ('mean', 'final'):
    raise folders.malformed(
      f'{path}: multi_step_reward_strategy must be mean or final.'
    )
  memory_mb = fields.table('environment').number('memory_mb', 0.0)
  return HarborTask(
    task_id=_task_id(fields.table('task'), folder),
    environment=environment,
    steps=tuple(steps),
    solution_variables=fields.table('solution').variables('env'),
    strategy=strategy,
    memory_mb=int(memory_mb),
    metadata=fields.table('metadata').values,
  )


def _task_id(table: '_Fields', folder: pathlib.Path) -> str:
  name = table.text('name', '')
  if name and (not _NAME.fullmatch(name) or '..' in name):
    raise folders.malformed(
      f'{table.place}.name is {name!r} and must be ORGANISATION/NAME.'
    )
  return name or folder.resolve().name


def _environment(
  table: '_Fields', folder: pathlib.Path, bases: Sequence[str]
) -> prepared.Prepared:
  table.refuse_needs()
  checked = {
    'docker_image': table.text('docker_image', '') or None,
    'workdir': table.text('workdir', ''),
    'env': table.variables('env'),
  }
  return prepared.read(folder, checked, bases)


class _Steps:
  """Reads the steps of a directory."""

  def __init__(
    self,
    folder: pathlib.Path,
    fields: '_Fields',
    environment: prepared.Prepared,
    bases: Sequence[str],
  ):
    self._folder, self._fields = folder, fields
    self._environment, self._bases = environment, bases
    self._tests = folders.read_tree(folder / 'tests')

  def only(self) -> Step:
    """Returns the step of a task without steps."""
    solution = folders.read_tree(self._folder / 'solution')
    return self._made(_Fields({}, ''), '', self._folder, self._tests, solution)

  def step(self, table: '_Fields') -> Step:
    name = table.text('name', '')
    if (
      not name.strip()
      or name.endswith(('.', ' '))
      or _BAD_STEP.search(name)
      or len(name.encode()) > 255
    ):
      raise folders.malformed(
        f'{table.place}.name is {name!r} and must be the name of one folder.'
      )
    folder = self._folder / 'steps' / name
    links = folder.is_symlink() or folder.parent.is_symlink()
    if links or not folder.is_dir():
      raise folders.malformed(f'{folder} is no folder.')
    tests = {**self._tests, **folders.read_tree(folder / 'tests')}
    solution = folders.read_tree(folder / 'solution')
    return self._made(table, name, folder, tests, solution)

  def _made(
    self,
    table: '_Fields',
    name: str,
    folder: pathlib.Path,
    tests: Mapping[str, bytes],
    solution: Mapping[str, bytes],
  ) -> Step:
    verifier, own = self._fields.table('verifier'), table.table('verifier')
    for each in (verifier, own, self._fields.table('agent')):
      each.refuse_network()
    if 'test.sh' not in tests:
      raise folders.malformed(f'{folder / "tests"} has no test.sh.')
    mode = own.mode() or verifier.mode() or 'shared'
    section = own.table('environment') or verifier.table('environment')
    environment = self._environment
    if mode == 'separate' and section:
      place = self._folder / 'environment'
      if {'Dockerfile', 'docker-compose.yaml'} & {*tests}:
        place = folder / 'tests'
      environment = _environment(section, place, self._bases)
    timeout_s = own.number('timeout_sec', verifier.number('timeout_sec', 600.0))
    if not 0 < timeout_s <= _MAX_S:
      raise folders.malformed(
        f'{verifier.place}.timeout_sec ({timeout_s:g}) must lie in 0 to '
        f'{_MAX_S:g} seconds.'
      )
    lines = folders.read_text(folder / INSTRUCTION).split('\n')
    while lines and (_CANARY.fullmatch(lines[0].strip()) or not lines[0]):
      del lines[0]
    return Step(
      name=name,
      instruction='\n'.join(lines).strip(),
      tests=tests,
      solution=solution,
      is_separate=mode == 'separate',
      environment=environment,
      variables={**verifier.variables('env'), **own.variables('env')},
      timeout_s=timeout_s,
      artifacts=(*self._fields.artifacts(), *table.artifacts()),
      least=table.least(),
    )


class _Fields:
  """A table of a TOML file, and where it stands; false if it is empty."""

  def __init__(self, values: Mapping[str, Any], place: str):
    self.values, self.place = values, place

  def __bool__(self) -> bool:
    return bool(self.values)

  def _wrong(self, name: str, rule: str) -> folders.TaskRefused:
    return folders.malformed(
      f'{self.place}.{name} is {self.values[name]!r:.80} and must be {rule}.'
    )

  def table(self, name: str) -> '_Fields':
    value = self.values.get(name, {})
    if not isinstance(value, dict):
      raise self._wrong(name, 'a table')
    return _Fields(value, f'{self.place}.{name}')

  def tables(self, name: str) -> list['_Fields']:
    value = self.values.get(name, [])
    if not isinstance(value, list) or not all(
      isinstance(each, dict) for each in value
    ):
      raise self._wrong(name, 'a list of tables')
    places = (f'{self.place}.{name}.{i}' for i in range(len(value)))
    return [_Fields(*pair) for pair in zip(value, places, strict=True)]

  def text(self, name: str, default: str) -> str:
    value = self.values.get(name, default)
    if not isinstance(value, str):
      raise self._wrong(name, 'a text')
    return value

  def number(self, name: str, default: float) -> float:
    value = self.values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise self._wrong(name, 'a number')
    # Integers of TOML may exceed floats.
    if isinstance(value, int) and abs(value) > 1 << 53:
      raise self._wrong(name, 'a number below 2^53')
    if not math.isfinite(value) or value < 0:
      raise self._wrong(name, 'finite and not negative')
    return float(value)

  def variables(self, name: str) -> dict[str, str]:
    table = self.table(name).values
    for key, value in table.items():
      if not isinstance(value, str) or '\0' in value or '=' in key or not key:
        raise self._wrong(name, 'a table of texts by names')
      if '${' in value:
        raise folders.TaskRefused(
          'secret',
          f'{self.place}.{name}.{key} takes a variable of the host '
          f'({value[:40]}), and nothing of the host is given to a box.',
        )
    return dict(table)

  def mode(self) -> str:
    """Returns 'shared', 'separate', or '' where a verifier says neither."""
    value = self.text('environment_mode', '')
    if value not in ('', 'shared', 'separate'):
      raise self._wrong('environment_mode', 'shared or separate')
    return value or ('separate' if self.table('environment') else '')

  def least(self) -> dict[str, float]:
    value = self.values.get('min_reward')
    if value is None:
      return {}
    table = value if isinstance(value, dict) else {'reward': value}
    names = _Fields(table, f'{self.place}.min_reward')
    return {name: names.number(name, 0.0) for name in table}

  def artifacts(self) -> tuple[Artifact, ...]:
    listed = self.values.get('artifacts', [])
    if not isinstance(listed, list):
      raise self._wrong('artifacts', 'a list')
    return tuple(self._artifact(each) for each in listed)

  def _artifact(self, value: Any) -> Artifact:
    table = {'source': value} if isinstance(value, str) else value
    if not isinstance(table, dict):
      raise self._wrong('artifacts', 'a list of paths or tables')
    fields = _Fields(table, f'{self.place}.artifacts')
    if fields.text('service', 'main') != 'main':
      raise folders.TaskRefused(
        'compose', f'{fields.place} names a service; a box is one.'
      )
    source = folders.inside(fields.text('source', ''), fields.place)
    name = fields.text('destination', '') or '/'.join(source)
    parts = name.split('/')
    if name.startswith('/') or '..' in parts or '' in parts or '\\' in name:
      raise folders.malformed(
        f'{fields.place}: destination {name!r} must be relative, without "..".'
      )
    return Artifact(source=source, destination=name)

  def refuse_network(self) -> None:
    """Refuses what asks for the network; Harbor's default asks for nothing."""
    mode = self.text('network_mode', '')
    if mode not in ('', 'no-network', 'public', 'allowlist'):
      raise self._wrong('network_mode', 'no-network, public or allowlist')
    if mode in ('public', 'allowlist') or self.values.get('allow_internet'):
      raise folders.TaskRefused(
        'network', f'{self.place} asks for the network, which no box has.'
      )

  def refuse_needs(self) -> None:
    """Refuses what no box has."""
    self.refuse_network()
    if self.text('os', 'linux').lower() != 'linux':
      raise folders.TaskRefused('os', f'{self.place}.os must be linux.')
    if self.number('gpus', 0.0) or self.table('tpu'):
      raise folders.TaskRefused(
        'gpu', f'{self.place} asks for an accelerator, which no box has.'
      )
    for name in ('healthcheck', 'mcp_servers'):
      if self.values.get(name):
        raise folders.TaskRefused(
          'service',
          f'{self.place}.{name} needs a service that goes on running; in a box '
          'nothing outlives a command.',
        )
