"""The tools that act on a box with a repository, and their answers.

Each tool returns `(text, outcome)`, or raises `calls.InvalidCall` for arguments
that it cannot use. Answers are bounded, and say what they leave out. Work that
could take long on a policy's word, such as matching a regular expression, runs
inside the box.
"""

import collections
import dataclasses
import json
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from composer_jax.core import checks
from composer_jax.core import turns as turns_lib
from composer_jax.sandbox import base
from composer_jax.tasks import calls
from composer_jax.tasks.repository import schemas

Answer = tuple[str, str]
# Runs a command in the box; raises SandboxLost.
Run = Callable[[base.Command], base.CommandResult]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
  """Bounds of one tool call.

  Attributes:
    answer_chars: most characters of an answer; the others are counted.
    file_bytes: most bytes of a file that is read or written.
    matches: most matches that a search shows.
    paths: most paths that a list shows.
    run_s: most seconds of `run`.
    search_s: most seconds of `search`.
  """

  answer_chars: int = 8000
  file_bytes: int = 1 << 20
  matches: int = 50
  paths: int = 200
  run_s: float = 60.0
  search_s: float = 20.0

  def __post_init__(self):
    # Shorter answers cannot say what they leave out.
    checks.at_least(self, 200, 'answer_chars')
    checks.at_least(self, 1, 'file_bytes', 'matches', 'paths')
    checks.positive(self, 'run_s', 'search_s')


def clip(text: str, most: int) -> str:
  """Returns a text without its middle if it has more than `most` characters."""
  if len(text) <= most:
    return text
  note = f'\n[... {len(text) - most} characters are left out ...]\n'
  kept = most - len(note)
  head = kept * 2 // 3
  # The final count includes the characters that the note replaces.
  note = f'\n[... {len(text) - kept} characters are left out ...]\n'
  return text[:head] + note + text[len(text) - (kept - head) :]


def _refused(tool: str, fault: str) -> calls.InvalidCall:
  return schemas.bad_arguments(schemas.TOOLS[tool], fault)


def _inside(tool: str, path: str) -> str:
  """Returns a path below the workspace in its shortest form."""
  normal = posixpath.normpath(path)
  shown = schemas.shown(path)
  if normal.startswith('/') or normal.split('/')[0] == '..':
    raise _refused(
      tool,
      f'path "{shown}" leaves the workspace; it must be relative to its root',
    )
  # No file system has such names.
  parts = normal.encode().split(b'/')
  if '\0' in normal or len(normal) > 1000 or max(map(len, parts)) > 255:
    raise _refused(tool, f'path "{shown}" cannot be the name of a file')
  return normal


def _text(tool: str, box: base.Box, path: str, bounds: Bounds) -> str:
  try:
    return box.read(path, bounds.file_bytes).decode()
  except base.FileRefused as error:
    raise _refused(tool, str(error).rstrip('.')) from error
  except UnicodeDecodeError as error:
    raise _refused(tool, f'"{path}" is no text: it is not UTF-8') from error


def read(box: base.Box, arguments: Mapping[str, Any], bounds: Bounds) -> Answer:
  """Returns lines of a file as they are."""
  path = _inside('read', arguments['path'])
  lines = _text('read', box, path, bounds).removesuffix('\n').split('\n')
  if lines == ['']:
    return f'{path} is empty', turns_lib.OK
  first = arguments.get('first', 1)
  last = min(arguments.get('last', len(lines)), len(lines))
  if first > last:
    raise _refused(
      'read', f'{path} has {len(lines)} lines: none are {first} to {last}'
    )
  room, stop = bounds.answer_chars - 100, first - 1
  while stop < last and len(lines[stop]) < room:
    room -= len(lines[stop]) + 1
    stop += 1
  shown = lines[first - 1 : stop]
  if not shown:
    return clip(lines[first - 1], bounds.answer_chars), turns_lib.OK
  if (first, stop) == (1, len(lines)):
    return '\n'.join(shown), turns_lib.OK
  head = f'[lines {first} to {stop} of {len(lines)}]'
  if stop < last:
    head = f'{head[:-1]}; read on with "first": {stop + 1}]'
  return '\n'.join([head, *shown]), turns_lib.OK


def list_files(
  box: base.Box, arguments: Mapping[str, Any], bounds: Bounds
) -> Answer:
  """Lists paths below a folder, or its children alone if there are too many."""
  folder = _inside('list', arguments.get('path', '.'))
  try:
    rows = [p for p in box.files(folder) if '__pycache__' not in p]
  except base.FileRefused as error:
    raise _refused('list', f'there is no folder "{folder}"') from error
  if not rows:
    return f'no files below {folder}', turns_lib.OK
  if len(rows) > bounds.paths:
    rows = _children(rows, '' if folder == '.' else f'{folder}/')
  num_hidden = len(rows) - bounds.paths
  rows = rows[: bounds.paths]
  if num_hidden > 0:
    rows.append(f'[{num_hidden} more; list a folder, or search]')
  return clip('\n'.join(rows), bounds.answer_chars), turns_lib.OK


def _children(paths: list[str], prefix: str) -> list[str]:
  parts = [path.removeprefix(prefix).partition('/') for path in paths]
  rows = [prefix + name for name, slash, _ in parts if not slash]
  counts = collections.Counter(name for name, slash, _ in parts if slash)
  rows += [f'{prefix}{name}/ ({n} files)' for name, n in counts.items()]
  return sorted(rows)


# Runs in the box, since a pattern may take any time to match.
_SEARCH = r"""
import json, os, re, sys
query = json.load(sys.stdin)
try:
  pattern = re.compile(query['pattern'])
except (re.error, RecursionError, OverflowError) as error:
  os.write(3, json.dumps({'error': str(error)}).encode())
  sys.exit()
root = query['path']
paths = [root]
if not os.path.isfile(root):
  paths = []
  for folder, folders, names in os.walk(root):
    folders[:] = sorted(set(folders) - {'.git', '__pycache__'})
    paths += [os.path.join(folder, name) for name in sorted(names)]
shown, count, skipped, room = [], 0, 0, query['chars']
for path in paths:
  if os.path.islink(path) or not os.path.isfile(path):
    continue
  if os.path.getsize(path) > query['file_bytes']:
    skipped += 1
    continue
  try:
    with open(path, 'rb') as file:
      data = file.read()
  except OSError:
    continue
  if b'\0' in data[:4096]:
    continue
  lines = data.decode('utf-8', 'replace').split('\n')
  for number, line in enumerate(lines, 1):
    match = pattern.search(line)
    if match is None:
      continue
    count += 1
    if len(shown) < query['matches'] and room > 0:
      start = max(0, match.start() - 60)
      text = line[start : start + 200]
      room -= len(text)
      shown.append([os.path.relpath(path), number, text])
answer = {'shown': shown, 'count': count, 'skipped': skipped,
          'exists': os.path.exists(root)}
os.write(3, json.dumps(answer).encode())
"""


def search(run_in: Run, arguments: Mapping[str, Any], bounds: Bounds) -> Answer:
  """Returns lines that match a pattern."""
  query = {
    'pattern': arguments['pattern'],
    'path': _inside('search', arguments.get('path', '.')),
    'file_bytes': bounds.file_bytes,
    'matches': bounds.matches,
    'chars': bounds.answer_chars,
  }
  result = run_in(
    base.Command(
      argv=('python', '-I', '-c', _SEARCH),
      stdin=json.dumps(query).encode(),
      wall_s=bounds.search_s,
    )
  )
  stopped = 'error: the search was stopped: it '
  if result.status == 'timeout':
    return f'{stopped}took over {bounds.search_s:g} s', turns_lib.FAILED
  try:
    answer = json.loads(result.report)
  except ValueError:  # Killed before it wrote, or while it did.
    return f'{stopped}takes more memory than there is', turns_lib.FAILED
  if 'error' in answer:
    fault = f'is no regular expression: {clip(answer["error"], 200)}'
    raise _refused('search', f'argument "pattern" {fault}')
  if not answer['exists']:
    shown = schemas.shown(arguments['path'])
    raise _refused('search', f'there is no file or folder "{shown}"')
  rows = [f'{path}:{line}: {text}' for path, line, text in answer['shown']]
  if not rows:
    rows.append('no match')
  if num_hidden := answer['count'] - len(answer['shown']):
    rows.append(f'[{num_hidden} more matches; search for less, or in a "path"]')
  if answer['skipped']:
    rows.append(f'[{answer["skipped"]} files are too large and left out]')
  return clip('\n'.join(rows), bounds.answer_chars), turns_lib.OK


def edit(box: base.Box, arguments: Mapping[str, Any], bounds: Bounds) -> Answer:
  """Replaces a text that occurs in the file exactly once."""
  path = _inside('edit', arguments['path'])
  text = _text('edit', box, path, bounds)
  old, new = arguments['old'], arguments['new']
  if old == new:
    return 'error: "old" and "new" are the same', turns_lib.FAILED_EDIT
  if '\r\n' in text and '\r' not in old:
    # Policies rarely write the carriage returns of a file.
    old, new = old.replace('\n', '\r\n'), new.replace('\r\n', '\n')
    new = new.replace('\n', '\r\n')
  at = text.find(old)
  # `count` would overlook matches that overlap.
  if at < 0 or at != text.rfind(old):
    fault = _not_found(text, old) if at < 0 else _ambiguous(text, old)
    return f'error: {path}: "old" {fault}', turns_lib.FAILED_EDIT
  start = text[:at].count('\n') + 1
  _put('edit', box, path, text.replace(old, new), bounds)
  lines = new.count('\n')
  return f'edited {path} at lines {start} to {start + lines}', turns_lib.OK


def _not_found(text: str, old: str) -> str:
  """Describes a text that does not occur, by a line like its first if any."""
  lines = [line.strip() for line in old.split('\n') if line.strip()]
  for number, line in enumerate(text.split('\n'), 1):
    if lines and line.strip() == lines[0]:
      return (
        f'does not occur; line {number} is like its first line: compare the '
        'white space and the lines after it'
      )
  return 'does not occur; read the file and copy the text as it stands there'


def _ambiguous(text: str, old: str) -> str:
  lines, at = [], text.find(old)
  while at >= 0 and len(lines) < 5:
    lines.append(str(text[:at].count('\n') + 1))
    at = text.find(old, at + 1)
  more = ', ...' if at >= 0 else ''
  return (
    f'occurs more than once (at lines {", ".join(lines)}{more}); it must occur '
    'once: take in more of the lines around it'
  )


def write(
  box: base.Box, arguments: Mapping[str, Any], bounds: Bounds
) -> Answer:
  """Writes a whole file."""
  path, text = _inside('write', arguments['path']), arguments['text']
  _put('write', box, path, text, bounds)
  return f'wrote {path}: {len(text.splitlines())} lines', turns_lib.OK


def _put(
  tool: str, box: base.Box, path: str, text: str, bounds: Bounds
) -> None:
  data = text.encode()
  if len(data) > bounds.file_bytes:
    raise _refused(
      tool,
      f'"{path}" would hold {len(data)} bytes; at most {bounds.file_bytes} '
      'are allowed',
    )
  try:
    box.write(path, data)
  except base.FileRefused as error:
    raise _refused(tool, str(error).rstrip('.')) from error


def run(run_in: Run, arguments: Mapping[str, Any], bounds: Bounds) -> Answer:
  """Runs a shell command; returns the exit code and the output's two ends."""
  command = arguments['command']
  # The kernel bounds the length of an argument and takes no null byte.
  if '\0' in command or len(command.encode()) > 100_000:
    raise _refused(
      'run',
      'argument "command" must be at most 100000 bytes and without null '
      'bytes; write a file and run that',
    )
  result = run_in(
    base.Command(
      argv=('/bin/sh', '-c', command),
      wall_s=min(bounds.run_s, arguments.get('seconds', bounds.run_s)),
    )
  )
  end = {
    'ok': f'exit code {result.exit_code}',
    'timeout': 'stopped: it took too long',
  }.get(result.status, 'killed: a crash, or too much memory')
  more = '; it printed more than is kept' if result.truncated else ''
  output = result.output.removesuffix('\n')
  text = f'[{end}{more}]\n{output}' if output else f'[{end}{more}]'
  failed = result.status != 'ok' or result.exit_code != 0
  outcome = turns_lib.FAILED if failed else turns_lib.OK
  return clip(text, bounds.answer_chars), outcome


# Tools that read or change files, and tools that run a command in the box.
FILES = {'read': read, 'list': list_files, 'edit': edit, 'write': write}
COMMANDS = {'run': run, 'search': search}
