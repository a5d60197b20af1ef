"""The file system of a task, where it needs no image to be built.

A Dockerfile that only names a base, copies files and installs pinned packages
says what a box shall hold: nothing of it is executed. Any other instruction
needs a build, and the task is refused with the line. What the base has beside
Python and a shell is not known here, so the user says which bases a box stands
for (`bases`).
"""

import dataclasses
import fnmatch
import json
import pathlib
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from composer_jax.tasks.harbor import folders

# Of any prepared file system; beside them the folders of single tasks.
ROOT_FOLDERS = ('app', 'logs', 'solution', 'tests')
_IGNORED = ('LABEL', 'MAINTAINER', 'CMD', 'ENTRYPOINT', 'EXPOSE', 'STOPSIGNAL')
_NAME = r'[A-Za-z0-9][A-Za-z0-9._-]*'
_REQUIREMENT = re.compile(rf'({_NAME})(\[[\w,-]+\])?([=<>~!]=?[\w.*,=<>~!]+)?')
_PIP = re.compile(r'(?:python3? -m )?pip3? install (.+)')
_PIP_FLAGS = {'--no-cache-dir', '-q', '--quiet', '--upgrade', '-U'}
_VARIABLE = re.compile(r'[A-Za-z_][A-Za-z0-9_]*')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
  """What a box begins with.

  Attributes:
    workdir: parts of the folder in which commands run: ('app',) for /app.
    files: contents by path relative to the root.
    environment: variables of every command.
    packages: distributions that programs can import.
  """

  workdir: tuple[str, ...] = ('app',)
  files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  packages: tuple[str, ...] = ()

  @property
  def root_folders(self) -> set[str]:
    """Names at the root that programs look for."""
    tops = {path.split('/')[0] for path in self.files}
    return {*ROOT_FOLDERS, self.workdir[0], *tops}


def read(
  folder: pathlib.Path, table: Mapping[str, Any], bases: Sequence[str]
) -> Prepared:
  """Returns the file system that a folder and its section describe.

  Args:
    folder: `environment/` of a task, or `tests/` of a verifier's own.
    table: the section `environment` of task.toml, checked.
    bases: patterns of base images that a box stands for.

  Raises:
    folders.TaskRefused: it takes more than copying files.
  """
  for name in ('docker-compose.yaml', 'docker-compose.yml'):
    if (folder / name).exists():
      raise folders.TaskRefused(
        'compose', f'{folder / name} needs several containers; a box is one.'
      )
  contents = folders.read_tree(folder)
  image = table.get('docker_image')
  dockerfile = contents.pop('Dockerfile', None)
  if image is not None:
    _check_base(image, bases, 'environment.docker_image')
    prepared = Prepared(
      files={f'app/{path}': data for path, data in contents.items()}
    )
  elif dockerfile is None:
    prepared = Prepared(
      files={f'app/{path}': data for path, data in contents.items()}
    )
  else:
    prepared = _interpret(dockerfile, contents, bases, folder / 'Dockerfile')
  fields: dict[str, Any] = {}
  if workdir := table.get('workdir'):
    fields['workdir'] = folders.inside(workdir, 'environment.workdir')
  if variables := table.get('env'):
    fields['environment'] = {**prepared.environment, **variables}
  return dataclasses.replace(prepared, **fields)


def _check_base(image: str, bases: Sequence[str], what: str) -> None:
  if image != 'scratch' and not any(
    fnmatch.fnmatchcase(image, pattern) for pattern in bases
  ):
    raise folders.TaskRefused(
      'image',
      f'{what} is {image!r}, and a box stands for {list(bases) or "no base"}. '
      'If the task needs no more of it than Python and a shell, name it in '
      '--config.tasks.harbor.bases.',
    )


def _lines(text: str) -> Iterator[tuple[str, str]]:
  """Yields instructions with their arguments, continued lines joined."""
  joined = re.sub(r'\\[ \t]*\n', ' ', text)
  for line in joined.splitlines():
    line = line.strip()
    if line and not line.startswith('#'):
      word, _, rest = line.partition(' ')
      yield word.upper(), rest.strip()


def _interpret(
  data: bytes,
  contents: Mapping[str, bytes],
  bases: Sequence[str],
  path: pathlib.Path,
) -> Prepared:
  """Carries out the instructions of a Dockerfile that only place files."""
  try:
    text = data.decode()
  except UnicodeDecodeError as error:
    raise folders.malformed(f'{path} is not UTF-8.') from error
  workdir: tuple[str, ...] = ('app',)
  files: dict[str, bytes] = {}
  environment: dict[str, str] = {}
  packages: list[str] = []
  num_bases = 0
  for word, rest in _lines(text):
    if word == 'FROM':
      num_bases += 1
      _check_base(rest.split(' ')[0], bases, f'{path}: FROM')
    elif word == 'WORKDIR':
      workdir = folders.inside(_joined(workdir, rest), f'{path}: WORKDIR')
    elif word == 'ENV':
      environment |= _variables(rest, path)
    elif word in ('COPY', 'ADD'):
      files |= _copied(rest, contents, workdir, path)
    elif word == 'RUN' and (names := _installed(rest)):
      packages += names
    elif word not in _IGNORED:
      raise folders.TaskRefused(
        'build',
        f'{path}: `{word} {rest[:80]}` needs an image to be built. A box takes '
        'FROM, WORKDIR, ENV, COPY, and RUN pip install of names alone.',
      )
  if num_bases != 1:
    raise folders.TaskRefused(
      'build', f'{path} has {num_bases} FROM instructions; a box takes one.'
    )
  return Prepared(
    workdir=workdir,
    files=files,
    environment=environment,
    packages=tuple(dict.fromkeys(packages)),
  )


def _joined(workdir: tuple[str, ...], path: str) -> str:
  return posixpath.join('/', *workdir, path.strip('\'"'))


def _split(rest: str, path: pathlib.Path) -> list[str]:
  try:
    if rest.startswith('['):
      words = json.loads(rest)
      if all(isinstance(word, str) for word in words):
        return words
      raise ValueError('no list of texts')
    return shlex.split(rest)
  except (ValueError, TypeError, RecursionError) as error:
    raise folders.malformed(f'{path}: {rest[:80]!r}: {error}.') from error


def _variables(rest: str, path: pathlib.Path) -> dict[str, str]:
  words = _split(rest, path)
  if words and '=' not in words[0]:
    words = [f'{words[0]}={" ".join(words[1:])}']
  pairs = {word.partition('=')[0]: word.partition('=')[2] for word in words}
  for name, value in pairs.items():
    if not _VARIABLE.fullmatch(name) or '$' in value:
      raise folders.TaskRefused(
        'build', f'{path}: ENV {name[:40]}={value[:40]} needs a build.'
      )
  return pairs


def _copied(
  rest: str,
  contents: Mapping[str, bytes],
  workdir: tuple[str, ...],
  path: pathlib.Path,
) -> dict[str, bytes]:
  """Returns the files of a COPY by their paths relative to the root."""
  words = _split(rest, path)
  if len(words) < 2 or any(word.startswith('--') for word in words):
    raise folders.TaskRefused(
      'build', f'{path}: COPY {rest[:80]} takes more than files and a place.'
    )
  *sources, place = words
  target = '/'.join(folders.inside(_joined(workdir, place), f'{path}: COPY'))
  is_folder = place.endswith('/') or place in ('.', './') or len(sources) > 1
  copied: dict[str, bytes] = {}
  for source in sources:
    name = posixpath.normpath(source.strip('/') or '.')
    if name.startswith('..') or '://' in source or '*' in source:
      raise folders.TaskRefused('build', f'{path}: COPY of {source[:80]!r}.')
    if name in contents:
      into = f'{target}/{posixpath.basename(name)}' if is_folder else target
      copied[into] = contents[name]
      continue
    prefix = '' if name == '.' else f'{name}/'
    below = [p for p in contents if p.startswith(prefix)]
    if not below:
      raise folders.malformed(
        f'{path}: COPY of {source!r}, which is not there.'
      )
    for each in below:
      copied[f'{target}/{each[len(prefix) :]}'] = contents[each]
  return copied


def _installed(rest: str) -> list[str]:
  """Returns the names that `pip install` would install; [] for other lines."""
  match = _PIP.fullmatch(' '.join(rest.split()))
  if match is None:
    return []
  names = []
  for word in match[1].split(' '):
    requirement = _REQUIREMENT.fullmatch(word.strip('\'"'))
    if word in _PIP_FLAGS:
      continue
    if requirement is None:
      return []
    names.append(requirement[1])
  return names
