"""Task directories are read as Harbor reads them, or refused by name."""

import os

import pytest

from composer_jax import wiring
from composer_jax.tasks.harbor import folders, manifest, prepared
from configs.composer import deletion
from tests.tasks.harbor import conftest

FULL = """
schema_version = "1.2"
artifacts = ["/app/log.txt", { source = "/app/out", destination = "out" }]

[task]
name = "org/add"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 30
env = { MODE = "strict" }

[solution]
env = { KEY = "value" }

[environment]
memory_mb = 512
workdir = "/srv/project"
env = { COLOUR = "blue" }
"""
DOCKERFILE = """# A comment
FROM python:3.11-slim
LABEL who="me"
ENV A=1 B="two words"
ENV C three
RUN pip install --no-cache-dir pytest==8.4.1 \\
    'attrs>=23'
WORKDIR /srv
WORKDIR project
COPY src/ lib/
COPY main.py other.py ./
ADD data/one.txt /data/copy.txt
CMD ["python"]
"""


def _read(folder):
  return manifest.read(folder, conftest.BASES)


def test_a_directory_with_everything(directory):
  files = {
    'environment/Dockerfile': DOCKERFILE,
    'environment/src/a/b.py': 'B',
    'environment/main.py': 'M',
    'environment/other.py': 'O',
    'environment/data/one.txt': 'D',
    'instruction.md': '<!-- canary GUID x -->\n# Canary too\n\nDo it.\n\n',
  }
  task = _read(directory(files, FULL))
  place = task.environment
  assert (task.task_id, task.memory_mb) == ('org/add', 512)
  assert task.metadata == {'difficulty': 'easy'}
  assert task.solution_variables == {'KEY': 'value'}
  assert place.workdir == ('srv', 'project')
  assert place.environment == {
    'A': '1',
    'B': 'two words',
    'C': 'three',
    'COLOUR': 'blue',
  }
  assert place.packages == ('pytest', 'attrs')
  assert place.files == {
    'srv/project/lib/a/b.py': b'B',
    'srv/project/main.py': b'M',
    'srv/project/other.py': b'O',
    'data/copy.txt': b'D',
  }
  assert place.root_folders == {*prepared.ROOT_FOLDERS, 'srv', 'data'}
  (step,) = task.steps
  assert (step.instruction, step.timeout_s) == ('Do it.', 30)
  assert step.variables == {'MODE': 'strict'} and not step.is_separate
  assert [(a.source, a.destination) for a in step.artifacts] == [
    (('app', 'log.txt'), 'app/log.txt'),
    (('app', 'out'), 'out'),
  ]


def test_steps_inherit_and_override(directory):
  toml = """
multi_step_reward_strategy = "final"
[verifier]
timeout_sec = 50
environment_mode = "separate"
env = { A = "1", B = "1" }
[[steps]]
name = "first"
min_reward = 0.5
[steps.verifier]
environment_mode = "shared"
env = { B = "2" }
[[steps]]
name = "second"
min_reward = { speed = 3 }
artifacts = ["/app/x"]
"""
  files = {
    'steps/first/instruction.md': 'One.',
    'steps/second/instruction.md': 'Two.',
    'steps/second/tests/test.sh': 'own',
    'steps/second/solution/solve.sh': 'solve',
  }
  task = _read(directory(files, toml))
  first, second = task.steps
  assert task.strategy == 'final'
  assert (first.name, first.instruction) == ('first', 'One.')
  assert (first.is_separate, second.is_separate) == (False, True)
  assert first.variables == {'A': '1', 'B': '2'}
  assert (first.least, second.least) == ({'reward': 0.5}, {'speed': 3.0})
  assert (first.timeout_s, second.timeout_s) == (50, 50)
  assert second.tests['test.sh'] == b'own' and first.tests['test.sh'] != b'own'
  assert second.solution == {'solve.sh': b'solve'} and not first.solution
  assert [a.source for a in second.artifacts] == [('app', 'x')]


@pytest.mark.parametrize(
  'files, toml, reason, words',
  [
    ({}, 'a = ', 'malformed', 'no TOML'),
    ({'task.toml': b'\xff'}, '', 'malformed', 'not UTF-8'),
    ({}, f'a = {"[" * 3000}', 'malformed', 'no TOML'),
    ({'task.toml': 'x = 1\n' * 11_000}, '', 'too_large', 'larger than'),
    ({}, f'x = {"9" * 5000}', 'malformed', 'no TOML'),
    ({}, f'{"a." * 3000}a = 1', 'malformed', 'key of over 100 parts'),
    ({}, f'[{"a." * 3000}a]', 'malformed', 'key of over 100 parts'),
    ({}, 'schema_version = "2.0"', 'malformed', "is '2.0'"),
    ({}, 'schema_version = 1.4', 'malformed', 'must be a text'),
    ({}, '[task]\nname = "../../etc"', 'malformed', 'ORGANISATION/NAME'),
    ({}, 'task = 3', 'malformed', 'must be a table'),
    ({}, '[environment]\ngpus = 1', 'gpu', 'accelerator'),
    ({}, '[environment.tpu]\ntype = "v6e"', 'gpu', 'accelerator'),
    ({}, '[environment]\ngpus = "one"', 'malformed', 'must be a number'),
    ({}, '[environment]\nmemory_mb = nan', 'malformed', 'finite'),
    ({}, f'[environment]\nmemory_mb = {10**400}', 'malformed', '2\\^53'),
    ({}, '[environment]\nos = "windows"', 'os', 'linux'),
    ({}, '[environment]\nnetwork_mode = "public"', 'network', 'network'),
    ({}, '[environment]\nnetwork_mode = "maybe"', 'malformed', 'allowlist'),
    ({}, '[agent]\nnetwork_mode = "allowlist"', 'network', 'network'),
    ({}, '[environment]\nallow_internet = true', 'network', 'network'),
    ({}, '[environment]\nworkdir = "app"', 'malformed', 'absolute'),
    ({}, '[environment]\nworkdir = "/a/../.."', 'malformed', 'absolute'),
    ({}, '[environment]\nenv = {A = "${HOME}"}', 'secret', 'HOME'),
    ({}, '[environment]\nenv = {A = 3}', 'malformed', 'table of texts'),
    ({}, '[environment]\ndocker_image = "evil:1"', 'image', 'bases'),
    (
      {},
      '[environment.healthcheck]\ncommand = "true"',
      'service',
      'outlives',
    ),
    (
      {},
      '[[environment.mcp_servers]]\nname = "a"',
      'service',
      'outlives',
    ),
    ({}, '[verifier]\ntimeout_sec = -1', 'malformed', 'not negative'),
    ({}, '[verifier]\ntimeout_sec = 1e9', 'malformed', 'must lie in'),
    ({}, '[verifier]\nenvironment_mode = "both"', 'malformed', 'separate'),
    ({}, 'artifacts = ["/app/../etc"]', 'malformed', 'without "\\.\\."'),
    ({}, 'artifacts = ["/"]', 'malformed', 'below the root'),
    ({}, 'artifacts = [3]', 'malformed', 'paths or tables'),
    (
      {},
      'artifacts = [{source = "/a", destination = "/b"}]',
      'malformed',
      'relative',
    ),
    (
      {},
      'artifacts = [{source = "/a", service = "db"}]',
      'compose',
      'service',
    ),
    ({}, '[[steps]]\nname = "../x"', 'malformed', 'one folder'),
    ({}, '[[steps]]\nname = "gone"', 'malformed', 'is no folder'),
    ({}, '[[steps]]\nname = "a"\n' * 101, 'malformed', 'more than 100'),
    ({'instruction.md': None}, '', 'malformed', 'instruction.md'),
    ({'tests/test.sh': None}, '', 'malformed', 'no test.sh'),
    (
      {'environment/docker-compose.yaml': 'services: {}'},
      '',
      'compose',
      'several containers',
    ),
  ],
)
def test_what_is_malformed_or_not_to_be_had_is_named(
  directory, files, toml, reason, words
):
  with pytest.raises(folders.TaskRefused, match=words) as caught:
    _read(directory(files, toml))
  assert caught.value.reason == reason


@pytest.mark.parametrize(
  'text, reason, words',
  [
    ('FROM ubuntu:24.04', 'image', 'ubuntu'),
    ('WORKDIR /app', 'build', '0 FROM'),
    ('FROM scratch\nFROM scratch', 'build', '2 FROM'),
    ('FROM scratch\nRUN apt-get install -y gcc', 'build', 'apt-get'),
    ('FROM scratch\nRUN pip install x && rm -rf /', 'build', 'rm -rf'),
    ('FROM scratch\nRUN pip install git+https://a/b', 'build', 'git'),
    ('FROM scratch\nUSER me', 'build', 'USER me'),
    ('FROM scratch\nCOPY ../x /app/', 'build', 'COPY'),
    ('FROM scratch\nCOPY a* /app/', 'build', 'COPY'),
    ('FROM scratch\nCOPY --chown=1 a /app/', 'build', 'COPY'),
    ('FROM scratch\nADD https://a/b /app/', 'build', 'COPY'),
    ('FROM scratch\nCOPY gone /app/', 'malformed', 'not there'),
    ('FROM scratch\nCOPY . /../etc', 'malformed', 'without'),
    ('FROM scratch\nENV A=$PATH', 'build', 'ENV'),
    ('FROM scratch\nENV A="', 'malformed', 'quot'),
    ('FROM scratch\nCOPY ["a", 3]', 'malformed', 'COPY|no list'),
  ],
)
def test_instructions_that_need_a_build_are_named(
  directory, text, reason, words
):
  folder = directory({'environment/Dockerfile': text})
  with pytest.raises(folders.TaskRefused, match=words) as caught:
    _read(folder)
  assert caught.value.reason == reason


@pytest.mark.parametrize('place', ['tests', 'environment', 'solution'])
@pytest.mark.parametrize('kind', ['link', 'folder link', 'pipe', 'huge'])
def test_nothing_outside_of_a_directory_is_read(
  directory, tmp_path, place, kind
):
  folder = directory()
  secret = tmp_path / 'secret'
  secret.mkdir()
  (secret / 'key').write_text('secret')
  target = folder / place / 'planted'
  if kind == 'link':
    target.symlink_to(secret / 'key')
  elif kind == 'folder link':
    target.symlink_to(secret)
  elif kind == 'pipe':
    os.mkfifo(target)
  else:
    with target.open('wb') as file:
      file.truncate(1 << 40)
  with pytest.raises(folders.TaskRefused, match='planted'):
    _read(folder)


@pytest.mark.parametrize('place', ['tests', 'environment', 'solution'])
def test_a_folder_that_is_a_link_is_not_read(directory, tmp_path, place):
  folder = directory()
  (folder / place).rename(tmp_path / 'elsewhere')
  (folder / place).symlink_to(tmp_path / 'elsewhere')
  with pytest.raises(folders.TaskRefused, match='is a link'):
    _read(folder)


def test_a_linked_manifest_is_not_read(directory, tmp_path):
  folder = directory()
  for name in ('task.toml', 'instruction.md'):
    real = tmp_path / name
    (folder / name).rename(real)
    (folder / name).symlink_to(real)
    with pytest.raises(folders.TaskRefused, match='cannot be read'):
      _read(folder)
    (folder / name).unlink()
    real.rename(folder / name)


def test_many_files_are_too_many(directory, monkeypatch):
  monkeypatch.setattr(folders, 'MAX_FILES', 3)
  files = {f'tests/{i}': '' for i in range(4)}
  with pytest.raises(folders.TaskRefused, match='more than 3 files'):
    _read(directory(files))


def test_an_odd_directory_is_left_out_and_ends_no_others(
  directory, tmp_path, caplog
):
  directory(name='good')
  directory(name='same')  # Both have the name of no task: they are told apart.
  directory(toml=f'[verifier]\ntimeout_sec = 0x{"f" * 4000}', name='large')
  folder = directory({'instruction.md': None}, name='odd')
  (folder / 'instruction.md').mkdir()
  config = deletion.get_config()
  config.tasks.family, config.tasks.folder = 'harbor', str(tmp_path)
  config.tasks.harbor = {'bases': conftest.BASES}
  family = wiring.family_of(wiring.spec_of(config.to_dict()))
  assert len(family._read) == 2
  assert caplog.text.count('A task is left out') == 2
