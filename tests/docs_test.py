"""Commands, flags, fields, links and words of README and docs."""

import ast
import functools
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from composer_jax import wiring
from composer_jax.core import files
from composer_jax.models import config as model_config
from tests import configs_test

ROOT = pathlib.Path(__file__).parent.parent
PAGES = sorted(
  [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *ROOT.glob('docs/**/*.md')]
)
REPORTS = sorted(
  [ROOT / 'benchmarks/README.md', *ROOT.glob('experiments/studies/*/README.md')]
)
README_WORDS = 1500
TERMS = 42


def each(pages):
  return pytest.mark.parametrize(
    'page', pages, ids=lambda path: str(path.relative_to(ROOT))
  )


each_page = each(PAGES)
each_text = each([*PAGES, *REPORTS])


def commands(text: str) -> list[list[str]]:
  """Returns the words of each command of this project in a text."""
  ours = (
    r'(?:\./run\.sh|(?:\.venv/bin/)?python -m (?:experiments|benchmarks))\b'
  )
  blocks = re.findall(r'^```\w*\n(.*?)^```', text, re.M | re.S)
  blocks += re.findall(rf'`({ours}[^`\n]*)`', text)
  lines = '\n'.join(blocks).replace('\\\n', ' ').splitlines()
  return [
    shlex.split(line, comments=True)
    for line in lines
    if re.match(ours, line.strip())
  ]


# Commands that run.sh runs itself, and those that it hands to a benchmark.
WORDS = ('test', 'lint', 'install', 'docs', 'help')
BENCHMARKS = {'bench': 'benchmarks.__main__', 'gpu_day': 'benchmarks.gpu_day'}


def main_of(words: list[str]) -> tuple[str, list[str]]:
  """Returns the module, or word of run.sh, that a command starts, and flags."""
  if words[0] != './run.sh':
    is_all = words[2] == 'benchmarks'
    return BENCHMARKS['bench'] if is_all else words[2], words[3:]
  command, *arguments = words[1:] or ['']
  if command in WORDS:
    return command, arguments
  if command in BENCHMARKS:
    return BENCHMARKS[command], arguments
  if command.startswith('-') or not command:
    return 'experiments.composer', words[1:]
  return f'experiments.{command}', arguments


# One process for all mains, which import the same libraries. Two mains may
# define one flag, so that those of the last one are removed.
LIST_FLAGS = """
import importlib, json, sys
from absl import app, flags, logging
always = {*flags.FLAGS, 'help', 'helpfull'}
for name in sys.argv[1:]:
  importlib.import_module(name)
  default = 'config' in flags.FLAGS and flags.FLAGS['config'].default_unparsed
  print(json.dumps([name, default, [*always, *flags.FLAGS]]))
  for flag in {*flags.FLAGS} - always:
    delattr(flags.FLAGS, flag)
  for module in [m for m in sys.modules if m.startswith('experiments')]:
    del sys.modules[module]
"""


def run(*arguments: str) -> str:
  return subprocess.run(
    [sys.executable, *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  ).stdout


@functools.cache
def mains() -> dict[str, tuple[str, frozenset[str]]]:
  """Returns default config and flags of each main that a text names."""
  names = {
    name
    for page in [*PAGES, *REPORTS]
    for words in commands(page.read_text())
    if (ROOT / ((name := main_of(words)[0]).replace('.', '/') + '.py')).exists()
  }
  absl = [n for n in sorted(names) if n.startswith('experiments.')]
  flags = {
    name: (default, frozenset(flags))
    for name, default, flags in map(
      json.loads, run('-c', LIST_FLAGS, *absl).splitlines()
    )
  }
  for name in names:
    if name.startswith('benchmarks.'):
      text = run('-m', name, '--help')
      flags[name] = '', frozenset(re.findall(r'--([\w-]+)', text))
  return flags


RUN, MODEL = 'configs/composer/tiny.py', 'configs/models/tiny.py'
SERVER, TASK_SET = 'configs/serve/tiny.py', 'configs/tasks/packages.py'


@functools.cache
def fields_of(config: str) -> frozenset[str]:
  """Returns the fields that a command line may set of a config file."""
  fields = configs_test.load(ROOT / config).get_config().to_dict()
  if config == RUN:
    return frozenset(e.name for e in wiring.resolved(fields))
  if config == MODEL:
    fields = model_config.ModelConfig.from_dict(fields).to_dict()
  return frozenset(files.flatten(fields))


def kind_of(config: str) -> str:
  """Returns a config file with the fields that this one may have."""
  of_folder = {'composer': RUN, 'models': MODEL, 'serve': SERVER}
  return of_folder.get(pathlib.Path(config).parts[1], TASK_SET)


@each_text
def test_commands_exist_with_their_flags(page, pytestconfig):
  for words in commands(page.read_text()):
    main, arguments = main_of(words)
    if main == 'benchmarks.<name>':
      continue
    assert main in WORDS or main in mains(), shlex.join(words)
    for argument in arguments:
      flag = argument.partition('=')[0]
      if main == 'test' and flag.startswith('-'):
        pytestconfig.getoption(flag)  # raises for a name that does not exist
      elif main == 'test' and '/' in argument:
        assert (ROOT / argument).exists(), shlex.join(words)
      elif flag.startswith('--') and not flag.startswith('--config.'):
        known = () if main in WORDS else mains()[main][1]
        assert flag[2:] in known, f'{flag}: {shlex.join(words)}'


@each_text
def test_fields_on_command_lines_exist(page):
  for words in commands(page.read_text()):
    main, arguments = main_of(words)
    parts = [a.partition('=')[::2] for a in arguments]
    fields = [name for name, _ in parts if name.startswith('--config.')]
    if fields:
      config = dict(parts).get('--config') or mains()[main][0]
      known = fields_of(kind_of(config))
      for name in fields:
        assert name.removeprefix('--config.') in known, shlex.join(words)


# A field that change_one_thing.md shows how to add.
TO_ADD = 'cpt.final_ratio'


@each_text
def test_fields_and_flags_in_sentences_exist(page):
  text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.M | re.S)
  fields = {n for c in (RUN, SERVER, TASK_SET) for n in fields_of(c)}
  for name in re.findall(r'--config\.([\w.]+\w)', text):
    assert (name in fields) != (name == TO_ADD), name
  if page in PAGES:
    flags = {name for _, names in mains().values() for name in names}
    for name in re.findall(r'`--(\w+)[=`]', text):
      assert name in flags, name


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
