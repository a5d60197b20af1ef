"""The family of verifiers' environments: its config, tasks and programs.

A script stands for the Python that has verifiers and lists tasks as
`env_server.py` does; the real one runs in tests/tasks/verifiers.
"""

import importlib.util
import sys

import pytest

from composer_jax import wiring
from composer_jax.tasks.verifiers import process
from configs.composer import verifiers as verifiers_config

TOML = '[env.taskset]\nid = "sums"\n'
ALL_STAGES = {'cpt__steps': 1000, 'sft__steps': 1000}
LISTING = """#!{python}
import json, sys
asked = json.loads(sys.stdin.readline())
assert sys.argv[1] == '-P' and sys.argv[3] == 'tasks', sys.argv
for i in range({count}):
  row = {{'task_id': f'task-{{i}}', 'prompt': str(i)}}
  data = {{'prompt': str(i), 'env': asked['env']}}
  print(json.dumps({{**row, 'data': data}}))
"""


@pytest.fixture
def family(tmp_path):
  """family(count, **changes) -> the family of a config with so many tasks."""

  def make(count=40, toml=TOML, listing=LISTING, **changes):
    python, place = tmp_path / 'python', tmp_path / 'sums.toml'
    python.write_text(listing.format(python=sys.executable, count=count))
    python.chmod(0o755)
    place.write_text(toml)
    c = verifiers_config.get_config(f',{place},{python}')
    c.initial, c.sandbox.level = 'import', 'static'
    for name, value in changes.items():
      section, _, field = name.rpartition('__')
      inner = c
      for part in filter(None, section.split('__')):
        inner = inner[part]
      inner[field] = value
    return wiring.family_of(wiring.spec_of(c.to_dict()))

  return make


def test_splits_share_no_task_and_leave_none_out(family):
  made = family()
  made.check_files()
  train, held_out = (made.listed(s, 0) for s in ('train', 'held_out'))
  ids = [task.task_id for task in (*train, *held_out)]
  assert sorted(ids) == sorted(f'task-{i}' for i in range(40))
  assert 0 < len(held_out) < 10
  env = {'taskset': {'id': 'sums'}}
  assert train[0].data == {'prompt': train[0].prompt, 'env': env}
  source = made.tasks(None, split='train', seed=3)
  drawn = [source.of_group(g) for g in range(len(train))]
  assert sorted(t.task_id for t in drawn) == sorted(t.task_id for t in train)
  again = family().tasks(None, split='train', seed=3)
  assert [again.of_group(g) for g in range(len(train))] == drawn
  assert source.of_id(drawn[0].task_id) == drawn[0]


def test_identity_is_of_the_tasks_and_of_modules_beside_them(family, tmp_path):
  first = family().identity()
  assert family().identity() == first
  assert family(39, toml=f'{TOML}n = 39\n').identity() != first
  (tmp_path / 'sums.py').write_text('reward = 2')
  assert family().identity() != first


@pytest.mark.parametrize(
  'changes, said',
  [
    ({'tasks__folder': ''}, 'tasks.folder is needed'),
    ({'tasks__verifiers__python': ''}, r'pip install "verifiers>=0.4" uv'),
    ({'initial': '', **ALL_STAGES}, '--config.initial is needed'),
    ({'summary__trigger': 64}, 'summary.trigger must be 0'),
    (
      {'tasks__auditor__url': 'http://x', 'tasks__auditor__model': 'm'},
      'leave out auditor.url',
    ),
    ({'tasks__verifiers__renderer': 'qwen3'}, 'be JSON with a "name"'),
    ({'tasks__verifiers__renderer': '"name"'}, 'be JSON with a "name"'),
    ({'tasks__verifiers__max_windows': 0}, 'max_windows'),
  ],
)
def test_impossible_configs_are_refused_by_name(family, changes, said):
  with pytest.raises(ValueError, match=said):
    family(**changes)


def test_the_extra_is_named_where_its_packages_are_missing(family, monkeypatch):
  made, known = family(), importlib.util.find_spec
  lacking = lambda name, *more: None if name == 'zmq' else known(name, *more)
  monkeypatch.setattr(importlib.util, 'find_spec', lacking)
  with pytest.raises(ValueError, match=r"pip install -e '.\[verifiers\]'"):
    made.check_files()


@pytest.mark.parametrize(
  'toml, said',
  [
    ('[env', 'must be the TOML file'),
    (f'{TOML}[sampling]\ntop_p = 0.5\n', r"sets \['sampling'\]"),
    *(
      (toml, r'set `id` in \[env.taskset\]')
      for toml in ('[env.agent]', 'env = 3', 'env.taskset = 3', 'select = 3')
    ),
  ],
)
def test_files_that_are_no_environment_are_refused(family, toml, said):
  with pytest.raises(ValueError, match=said):
    family(toml=toml).check_files()


def test_too_few_tasks_and_equal_keys_are_refused(family):
  with pytest.raises(ValueError, match="selects 1 tasks.*'held_out'"):
    family(1, toml=f'{TOML}n = 1\n').check_files()
  same = LISTING.replace('task-{{i}}', 'same')
  with pytest.raises(ValueError, match="two tasks with the key 'same'"):
    family(2, toml=f'{TOML}n = 2\n', listing=same).check_files()


def test_a_program_that_ends_says_why(family, tmp_path, monkeypatch):
  with pytest.raises(ValueError, match='cannot be run'):
    family(tasks__verifiers__python=f'{tmp_path}/none').check_files()
  noise = '#!{python}\nprint("hello {count}")'
  with pytest.raises(ValueError, match='ended'):
    family(listing=noise, toml=f'{TOML}n = 3\n').check_files()
  # Also if it has ended well before it can be killed.
  with monkeypatch.context() as late, pytest.raises(ValueError, match='ended'):
    late.setattr(process.subprocess.Popen, 'kill', lambda program: None)
    family(listing=noise, toml=f'{TOML}n = 4\n').check_files()
  # This one has no verifiers, unless somebody put it there.
  if importlib.util.find_spec('verifiers') is None:
    with pytest.raises(ValueError, match="'verifiers.*Install it there: pip"):
      process.start(sys.executable, str(tmp_path / 'sums.toml'), {})


def test_workers_may_upload_as_many_windows_as_a_harness_opens(family):
  c = verifiers_config.get_config(',a.toml,python')
  c.initial = 'import'
  spec = wiring.spec_of(c.to_dict())
  assert wiring.rules_of(spec).max_windows == 8


def test_what_the_family_has_not_is_said(family):
  made = family()
  with pytest.raises(ValueError, match='knows no solutions'):
    made.gold(made.listed('train', 1)[0], None)
  with pytest.raises(ValueError, match='shows no demonstrations'):
    made.demonstrations(None)
  with pytest.raises(ValueError, match=r'IMPORT,ENVIRONMENT,PYTHON\[,smoke\]'):
    verifiers_config.get_config('a,b')
