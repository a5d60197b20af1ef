"""Commands, flags, fields, links and words of README and docs."""

import ast
import functools
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from composer_jax import wiring
from tests import configs_test

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted(
  [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *ROOT.glob('docs/**/*.md')]
)
README_WORDS = 1500
TERMS = 40

each_page = pytest.mark.parametrize(
  'page', PAGES, ids=lambda path: str(path.relative_to(ROOT))
)


def commands(text: str) -> list[list[str]]:
  """Returns the words of each command of this project in a text."""
  blocks = re.findall(r'^```\w*\n(.*?)^```', text, re.M | re.S)
  blocks += re.findall(r'`(\./run\.sh[^`\n]*)`', text)
  lines = '\n'.join(blocks).replace('\\\n', ' ').splitlines()
  ours = r'(\./run\.sh|(\.venv/bin/)?python -m (experiments|benchmarks))\b'
  return [
    shlex.split(line, comments=True)
    for line in lines
    if re.match(ours, line.strip())
  ]


@functools.cache
def flags_of(module: str) -> frozenset[str]:
  """Returns the names of the flags that a main defines."""
  code = (
    'import importlib, sys; from absl import flags; '
    'importlib.import_module(sys.argv[1]); '
    'print(*flags.FLAGS, "help", "helpfull")'
  )
  process = subprocess.run(
    [sys.executable, '-c', code, module],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  return frozenset(process.stdout.split())


@functools.cache
def fields_of(config: str) -> frozenset[str]:
  loaded = configs_test.load(ROOT / config).get_config()
  return frozenset(e.name for e in wiring.resolved(loaded.to_dict()))


def main_of(words: list[str]) -> tuple[str, list[str]]:
  """Returns the module that a command starts ('' for run.sh) and its flags."""
  if words[0] != './run.sh':
    return words[2], words[3:]
  command, *arguments = words[1:] or ['']
  if command in ('test', 'lint', 'install', 'docs', 'help'):
    return '', arguments
  if command.startswith('-') or not command:
    return 'experiments.composer', words[1:]
  return f'experiments.{command}', arguments


@each_page
def test_commands_exist_with_their_flags(page):
  for words in commands(page.read_text()):
    module, arguments = main_of(words)
    if not module:
      continue
    path = ROOT / (module.replace('.', '/') + '.py')
    assert path.exists(), shlex.join(words)
    flags = [a[2:] for a in arguments if a.startswith('--')]
    if not module.startswith('experiments'):
      continue
    for flag in flags:
      name = flag.partition('=')[0]
      if not name.startswith('config.'):
        assert name in flags_of(module), f'--{name}: {shlex.join(words)}'


RUNS = ('composer', 'config', 'pretrain', 'sft', 'rl')


@each_page
def test_fields_on_command_lines_exist(page):
  for words in commands(page.read_text()):
    module, arguments = main_of(words)
    if module.removeprefix('experiments.') in RUNS:
      for argument in arguments:
        if argument.startswith('--config.'):
          name = argument.removeprefix('--config.').partition('=')[0]
          known = fields_of('configs/composer/tiny.py')
          assert name in known, shlex.join(words)


def anchors(text: str) -> set[str]:
  titles = re.findall(r'^#+ (.*)$', text, re.M)
  return {re.sub(r'[^\w -]', '', t).lower().replace(' ', '-') for t in titles}


# Made from the code when the pages are built.
GENERATED = {'config.md', 'metrics.md'}


@each_page
def test_links_lead_somewhere(page):
  for link in re.findall(r'\]\(([^)\s]+)\)', page.read_text()):
    if link.startswith(('http://', 'https://')):
      continue
    target, _, anchor = link.partition('#')
    path = (page.parent / target).resolve() if target else page
    if path.parent.name == 'reference' and path.name in GENERATED:
      continue
    assert path.exists(), link
    assert not anchor or anchor in anchors(path.read_text()), link


@each_page
def test_files_that_are_named_exist(page):
  text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.M | re.S)
  tops = ('', 'composer_jax', 'docs')
  for name in re.findall(r'`([\w./]+/[\w./]*\.(?:py|md|sh))`', text):
    assert any((ROOT / top / name).exists() for top in tops), name


def test_readme_is_short():
  assert len((ROOT / 'README.md').read_text().split()) <= README_WORDS


def test_the_glossary_is_short_sorted_and_used():
  text = (ROOT / 'docs' / 'glossary.md').read_text()
  terms = re.findall(r'^\| (?!Term )([^|]+?) \|', text, re.M)
  assert len(terms) <= TERMS
  assert terms == sorted(terms)
  code = ' '.join(p.read_text() for p in (ROOT / 'composer_jax').rglob('*.py'))
  code = re.sub(r'\s+', ' ', code)
  unused = [
    t for t in terms if t not in code and t.replace(' ', '_') not in code
  ]
  assert not unused


def test_every_page_is_in_the_navigation():
  text = (ROOT / 'mkdocs.yml').read_text()
  pages = (ROOT / 'docs').rglob('*.md')
  names = [str(path.relative_to(ROOT / 'docs')) for path in pages]
  assert [name for name in names if name not in text] == []


# An entry that begins with such a word leans on the line before it.
LEANING = re.compile(r'(of|as|what|that)\b', re.I)
LEANING_SHARE = 0.02


def entries_of_docstrings():
  """Yields (file, name, text) of each entry of Args, Attributes, Raises."""
  for path in (ROOT / 'composer_jax').rglob('*.py'):
    if 'delta' in path.parts:
      continue  # its own issue rewrites the inside
    for node in ast.walk(ast.parse(path.read_bytes())):
      if not isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
      ):
        continue
      text = ast.get_docstring(node) or ''
      for name, entry in re.findall(r'^  ([\w*, ]+): (.+)$', text, re.M):
        yield path.relative_to(ROOT), name, entry


def test_entries_of_docstrings_stand_alone():
  entries = list(entries_of_docstrings())
  leaning = [
    f'{path}: {name}: {text}'
    for path, name, text in entries
    if LEANING.match(text)
  ]
  share = len(leaning) / len(entries)
  assert share <= LEANING_SHARE, '\n'.join(leaning)


@pytest.mark.slow
def test_the_pages_are_built_without_a_warning():
  process = subprocess.run(
    ['./run.sh', 'docs'], cwd=ROOT, capture_output=True, text=True
  )
  assert process.returncode == 0, process.stdout + process.stderr
  page = (
    ROOT / 'runs' / 'docs' / 'reference' / 'config' / 'index.html'
  ).read_text()
  assert 'rl.max_staleness' in page
