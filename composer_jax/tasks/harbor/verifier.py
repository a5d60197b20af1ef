"""Verifies what an agent left, in a second box, and collects artefacts.

The second box begins with the regular files of the first, its links and the
files that are executable, or for a separate verifier with a fresh file system
and the artefacts. The agent's /tests, /solution and /logs/verifier never get
there, and no process of the agent lives on.
"""

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Mapping

from composer_jax.sandbox import base
from composer_jax.tasks.harbor import manifest, prepared, rewards

_MAX_FILE, _MAX_BYTES = 16 << 20, 128 << 20
_OWNED = ('tests/', 'solution/', 'logs/verifier/')
# Folders that programs expect, though they be empty.
KEEP = ('logs/agent/.keep', 'logs/artifacts/.keep', 'logs/verifier/.keep')
_ARTIFACTS = manifest.Artifact(
  source=('logs', 'artifacts'), destination='logs/artifacts'
)
# Prints executables and links, each field ended by a null byte.
_LIST = (
  "find . -type f -perm -u+x -printf 'x\\0%P\\0' -o "
  "-type l -printf 'l\\0%P\\0%l\\0' >&3"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left:
  """What an agent left: files, executables, and links with their targets."""

  files: Mapping[str, bytes]
  executables: tuple[str, ...] = ()
  links: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
  """The outcome of a verifier.

  Attributes:
    rewards: rewards by name; {} if there are none.
    fault: reason why there are none; ''.
    output: what the verifier printed, capped.
    wall_s: seconds that it took.
  """

  rewards: Mapping[str, float]
  fault: str = ''
  output: str = ''
  wall_s: float = 0.0


class Within(base.Box):
  """A box whose paths and commands are relative to a folder of it."""

  def __init__(self, box: base.Box, place: prepared.Prepared):
    self.level, self._box = box.level, box
    self._folder = '/'.join(place.workdir)
    self._environment = dict(place.environment)

  def run(self, command: base.Command) -> base.CommandResult:
    folder = shlex.quote(self._folder)
    argv = (
      *('/bin/sh', '-c', f'mkdir -p {folder} && cd {folder} && exec "$@"'),
      *('sh', *command.argv),
    )
    return self._box.run(
      dataclasses.replace(
        command,
        argv=argv,
        environment={**self._environment, **command.environment},
      )
    )

  def read(self, path: str, max_bytes: int) -> bytes:
    return self._box.read(f'{self._folder}/{path}', max_bytes)

  def write(self, path: str, data: bytes) -> None:
    self._box.write(f'{self._folder}/{path}', data)

  def remove(self, path: str) -> None:
    self._box.remove(f'{self._folder}/{path}')

  def files(self, folder: str = '.') -> tuple[str, ...]:
    prefix = f'{self._folder}/'
    try:
      found = self._box.files(f'{prefix}{folder}')
    except base.FileRefused:
      if folder != '.':
        raise
      return ()  # A working folder that nothing was copied to.
    return tuple(path.removeprefix(prefix) for path in found)

  def changes(self) -> dict[str, str]:
    return self._box.changes()

  def close(self) -> None:
    self._box.close()


def open_box(sandbox: base.Sandbox, place: prepared.Prepared) -> base.Box:
  """Opens the box that an agent begins with."""
  return sandbox.open('', {**place.files, **dict.fromkeys(KEEP, b'')})


def _is_owned(path: str) -> bool:
  """True for paths of the verifier, and for what would stand in their way."""
  return any(
    f'{path}/'.startswith(owned) or owned.startswith(f'{path}/')
    for owned in _OWNED
  )


def left_in(box: base.Box) -> Left:
  """Reads what is in an agent's box; no link is followed."""
  files, room = {}, _MAX_BYTES
  for path in box.files():
    if _is_owned(path):
      continue
    # A file that has become too large, or is gone, counts as absent.
    with contextlib.suppress(base.FileRefused):
      files[path] = box.read(path, min(_MAX_FILE, room))
      room -= len(files[path])
  result = box.run(base.Command(argv=('/bin/sh', '-c', _LIST)))
  executables, links = [], []
  words = iter(result.report.decode('utf-8', 'surrogateescape').split('\0'))
  for kind in words:
    path = next(words, '')
    if kind == 'x' and path in files:
      executables.append(path)
    elif kind == 'l':
      target = next(words, '')
      if not _is_owned(path):
        links.append((path, target))
  return Left(files=files, executables=tuple(executables), links=tuple(links))


def artifacts(step: manifest.Step, left: Left) -> dict[str, bytes]:
  """Returns the artefacts by the names under which they are kept."""
  kept: dict[str, bytes] = {}
  for artifact in (_ARTIFACTS, *step.artifacts):
    source = '/'.join(artifact.source)
    for path, data in left.files.items():
      if path == source:
        kept.setdefault(artifact.destination, data)
      elif path.startswith(f'{source}/') and path not in KEEP:
        name = f'{artifact.destination}{path[len(source) :]}'
        kept.setdefault(name, data)
  return kept


def _beginning(step: manifest.Step, left: Left) -> Left:
  """Returns what the verifier's box begins with, without tests."""
  if not step.is_separate:
    return left
  sources = ['/'.join(a.source) for a in (_ARTIFACTS, *step.artifacts)]
  brought = {
    path: data
    for path, data in left.files.items()
    if any(path == s or path.startswith(f'{s}/') for s in sources)
  }
  return Left(files={**step.environment.files, **brought})


def verify(step: manifest.Step, left: Left, sandbox: base.Sandbox) -> Verified:
  """Runs a step's tests against what an agent left.

  Raises:
    base.SandboxLost: the sandbox failed, not the agent.
  """
  begun = _beginning(step, left)
  tests = {f'tests/{path}': data for path, data in step.tests.items()}
  files = {**begun.files, **dict.fromkeys(KEEP, b''), **tests}
  try:
    with contextlib.closing(sandbox.open('', files)) as box:
      _restore(box, begun)
      command = base.Command(
        argv=('/bin/bash', '/tests/test.sh'),
        environment=step.variables,
        wall_s=min(step.timeout_s, sandbox.limits.wall_s),
      )
      result = Within(box, step.environment).run(command)
      if result.status == 'infrastructure':
        raise base.SandboxLost(result.error)
      outcome = Verified(rewards={}, output=result.output, wall_s=result.wall_s)
      if result.status != 'ok':
        return dataclasses.replace(outcome, fault=result.error)
      try:
        return dataclasses.replace(outcome, rewards=rewards.read(box))
      except rewards.NoReward as error:
        return dataclasses.replace(outcome, fault=str(error))
  except base.FileRefused as error:
    return Verified(rewards={}, fault=f'no box holds what was left: {error}')


def _words(left: Left) -> Iterator[str]:
  for path in left.executables:
    yield from ('x', path, '')
  for path, target in left.links:
    yield from ('l', path, target)


def _restore(box: base.Box, left: Left) -> None:
  """Makes files executable again and places links, inside the box."""
  if not (left.executables or left.links):
    return
  script = (
    'while IFS= read -r -d "" kind && IFS= read -r -d "" path && '
    'IFS= read -r -d "" target; do '
    'if [ "$kind" = x ]; then chmod u+x -- "$path"; else '
    'mkdir -p -- "$(dirname -- "$path")" && ln -sfn -- "$target" "$path"; fi; '
    'done'
  )
  text = ''.join(f'{word}\0' for word in _words(left))
  box.run(
    base.Command(
      argv=('/bin/bash', '-c', script),
      stdin=text.encode('utf-8', 'surrogateescape'),
    )
  )
