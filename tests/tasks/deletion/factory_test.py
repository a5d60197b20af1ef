"""The factory makes valid tasks of a package, and goes on after bad ones."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandboxes
from composer_jax.tasks.deletion import baseline, factory, sdists, workspace
from composer_jax.tasks.grading import suites
from composer_jax.tasks.repository import task_set
from tests.tasks import small_package

LIMITS = base.Limits(
    wall_s=60.0, cpu_s=60.0, memory_bytes=1 << 30, processes=32,
    file_bytes=16 << 20, output_bytes=4 << 20,
)  # fmt: skip
OPTIONS = workspace.Options(
  body=1, symbol=1, class_=1, file=1, closure=1, min_tests=5, max_guards=30
)
_PASS = ''.join(f'def test_{i}():\n  pass\n\n\n' for i in range(8))
BAD = {
  'untested': {'untested/__init__.py': 'x = 1\n'},
  'broken': {
    'broken/__init__.py': 'import no_such_thing\n',
    'test_broken.py': 'import broken\n\n\ndef test_a():\n  pass\n',
  },
  'outside': {
    'outside.py': 'x = 1\n',
    'test_outside.py': (
      'import os, pathlib\n\n\n'
      + _PASS
      + "def test_up():\n  pathlib.Path('../escaped').write_text('x')\n\n\n"
      "def test_host():\n  pathlib.Path('@HOST@').write_text('x')\n\n\n"
      "def test_tmp():\n  pathlib.Path('/tmp/escaped_8').write_text('x')\n\n\n"
      "def test_here():\n  pathlib.Path('outside.py').write_text('x = 2')\n"
    ),
  },
}
# One of its functions for each tier of one; larder's go with what holds them.
JAR = {
  'jar.py': (
    'def up_to(values, most):\n  """The values before one above most."""\n'
    '  for place, value in enumerate(values):\n    if value > most:\n'
    '      return values[:place]\n  return values\n\n\n'
    'def spread(values):\n  """The largest minus the smallest."""\n'
    '  low = min(values)\n  high = max(values)\n  return high - low\n'
  ),
  'test_jar.py': (
    'import jar\n\n\n'
    + _PASS
    + 'def test_some():\n  assert jar.up_to([1, 5, 2], 3) == [1]\n\n\n'
    'def test_each():\n  assert jar.up_to([2, 1], 3) == [2, 1]\n\n\n'
    'def test_far():\n  assert jar.spread([1, 5, 2]) == 4\n\n\n'
    'def test_near():\n  assert jar.spread([2, 2]) == 0\n'
  ),
}
# Its two functions are deleted together.
PANTRY = {
  'pantry.py': (
    'def _at_least(value, least):\n  """The larger one."""\n'
    '  if value < least:\n    return least\n  return value\n\n\n'
    'def raised(values, least):\n  """The values, none below the least."""\n'
    '  result = []\n  for value in values:\n'
    '    result.append(_at_least(value, least))\n  return result\n'
  ),
  'test_pantry.py': (
    'import pantry\n\n\n'
    + _PASS
    + 'def test_low():\n  assert pantry.raised([1, 5], 3) == [3, 5]\n\n\n'
    'def test_high():\n  assert pantry.raised([7, 8], 3) == [7, 8]\n\n\n'
    'def test_all():\n  assert pantry.raised([1, 2, 3], 9) == [9, 9, 9]\n'
  ),
}
SLOW = {
  # The names of the tests depend on the order of a set.
  'hashed': {
    'hashed.py': (
      'def up(x):\n  """One more, or one for none."""\n'
      '  if x:\n    return x + 1\n  return 1\n'
    ),
    'test_hashed.py': (
      'import datetime\nimport hashed\nimport pytest\n\n'
      'ROWS = {("a", (1,)), ("b", (2,)), '
      '("c", (3,)), ("d", (4,)), ("e", (5,))}\n\n'
      "@pytest.mark.parametrize('name, row', ROWS)\n"
      'def test_set(name, row):\n  assert hashed.up(row[0]) > 1\n\n'
      "@pytest.mark.parametrize('day', [f'{datetime.date.today()}'])\n"
      'def test_day(day):\n  assert hashed.up(day == 1) == 1\n\n'
      'def test_one():\n  assert hashed.up(1) == 2\n\n'
      'def test_two():\n  assert hashed.up(2) == 3\n\n' + _PASS
    ),
  },
  'flaky': {
    'flaky.py': 'seen = []\n',
    'test_flaky.py': 'import flaky\n\n\n'
    + ''.join(
      f'def test_{i}():\n  flaky.seen.append({i})\n'
      f'  assert flaky.seen == list(range({i + 1}))\n\n\n'
      for i in range(8)
    ),
  },
  'hanging': {
    'hanging.py': 'x = 1\n',
    'test_hanging.py': _PASS
    + 'def test_long():\n  import time\n  time.sleep(1e6)\n',
  },
  'exiting': {
    'exiting.py': 'x = 1\n',
    'test_exiting.py': _PASS + 'def test_end():\n  import os\n  os._exit(0)\n',
  },
}


def pins(folder, packages):
  listed = []
  for name, files in packages.items():
    for path, text in files.items():
      (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
      text = text.replace('@HOST@', str(folder / 'escaped'))
      (folder / name / path).write_text(text)
    listed.append(sdists.Pin(name=name, folder=str(folder / name)))
  return listed


def make(root, packages, options=OPTIONS, workers=1):
  lines = []
  made = factory.make(
    root,
    packages,
    options,
    archives=root,
    open_sandbox=lambda images, needs: sandboxes.open_sandbox(
      'auto', LIMITS, images=images, packages=needs, size=workers
    ),
    licence_of=lambda files: 'MIT',
    workers=workers,
    progress=lines.append,
  )
  return made, lines


@pytest.fixture(scope='module')
def made(tmp_path_factory):
  folder = tmp_path_factory.mktemp('packages')
  packages = {
    **BAD,
    'larder': small_package.FILES,
    'pantry': PANTRY,
    'jar': JAR,
  }
  return (*make(folder / 'set', pins(folder, packages)), folder)


def test_every_tier_gives_a_task(made):
  tasks, lines, _ = made
  assert {t.tier for t in tasks.tasks} == set(task_set.TIERS)
  assert {t.package for t in tasks.tasks} == {'larder', 'pantry', 'jar'}
  assert 'larder: 28 tests, 0 unstable' in '\n'.join(lines)
  facts = [tasks.packages[name].facts for name in ('larder', 'pantry', 'jar')]
  counts = [c for each in facts for c in each['candidates'].values()]
  assert sum(c.get('valid', 0) for c in counts) == len(tasks.tasks)
  for task in tasks.tasks:
    assert task.hidden and task.shown
    package = tasks.packages[task.package]
    assert task.provenance['sha256'] == package.sha256
    assert (task.licence, task.tier in task.task_id) == ('MIT', True)


def test_a_set_without_a_held_out_package_holds_out_files(made):
  tasks, lines, folder = made
  held_out, train = tasks.split(True), tasks.split(False)
  assert 0 < len(held_out) <= len(train)
  assert 5 * len(held_out) >= len(tasks.tasks)
  files = [
    {(t.package, p) for t in s for p in t.solution} for s in (held_out, train)
  ]
  assert not files[0] & files[1]
  (line,) = [line for line in lines if 'no package is held out' in line]
  assert f'{len(held_out)} of {len(tasks.tasks)} tasks' in line
  for task in held_out:
    assert any(f'{task.package}: {path}' in line for path in task.solution)
  # The same command says the same.
  again, _ = make(folder / 'set', pins(folder, {'jar': JAR}))
  assert again.tasks == tasks.tasks


def test_a_single_file_holds_out_some_of_its_tasks(made, tmp_path):
  tasks, _, folder = made
  task = next(t for t in tasks.tasks if t.tier == 'body')
  record = dataclasses.replace(tasks.packages[task.package], held_out=False)
  for count, wanted in ((1, 0), (2, 1), (7, 2)):
    root = tmp_path / str(count)
    for place in range(count):
      name = f'deletion/{place}'
      task = dataclasses.replace(task, task_id=name, held_out=False)
      task_set.save_task(root, task)
    task_set.save_package(root, record)
    lines = []
    made = factory._hold_out(root, lines.append)
    assert len(made.split(True)) == wanted
    assert ('too few' in lines[0]) == (not wanted)


def test_bad_packages_are_refused_by_name_and_the_run_goes_on(made):
  tasks, lines, folder = made
  assert {n: p.refused for n, p in tasks.packages.items()} == {
    'untested': 'no_tests',
    'broken': 'no_import',
    'outside': '',  # it has no feature that tests touch
    'larder': '',
    'pantry': '',
    'jar': '',
  }
  assert 'no_such_thing' in tasks.packages['broken'].detail
  assert any('untested: refused, no_tests' in line for line in lines)
  # Every test that passes is stable; nothing was written outside the box.
  assert tasks.packages['outside'].facts['tests'] >= 8
  assert not (folder / 'escaped').exists()
  assert not pathlib.Path('/tmp/escaped_8').exists()
  image = folder / 'set' / tasks.packages['outside'].image
  assert (image / 'outside.py').read_text() == 'x = 1\n'
  assert not (image.parent / 'escaped').exists()


def test_null_scores_nothing_and_the_original_everything(made):
  tasks, _, _ = made
  task = next(t for t in tasks.tasks if t.tier == 'closure')
  with sandboxes.open_sandbox(
    'auto', LIMITS, images=tasks.root, packages=('pytest',)
  ) as sandbox:
    for changes, wanted in ((task.view(), 0), (task.restored(), 1)):
      for path in task.test_paths:
        changes[path] = (tasks.root / task.image / path).read_bytes()
      with sandbox.open(task.image, changes) as box:
        result = suites.run(box, source_roots=task.source_roots)
      assert result.status == 'ok'
      num_failing = len(task.fail_to_pass)
      assert result.passed(task.fail_to_pass) == wanted * num_failing
      assert result.passed(task.pass_to_pass) == len(task.pass_to_pass)


def test_a_finished_set_is_left_alone_and_keeps_its_settings(made):
  tasks, _, folder = made
  again, lines = make(folder / 'set', pins(folder, {'larder': {}}))
  assert again == tasks
  assert lines == ['larder: finished before']
  with pytest.raises(ValueError, match=r"other values of \['options'\]"):
    make(folder / 'set', [], workspace.Options(seed=7))
  other = sdists.Pin(name='larder', folder='/elsewhere')
  with pytest.raises(ValueError, match=r"other values of \['larder'\]"):
    make(folder / 'set', [other])


def test_a_set_asks_for_nothing_twice_under_any_names(tmp_path):
  task = small_package.tasks()[1]
  (path,) = {d.path for d in task.deleted}
  text = task.solution[path]
  for old, new in (('chunks', 'pieces'), ('values', 'row'), ('"""S', '"""A s')):
    assert old in text
    text = text.replace(old, new)
  twin = dataclasses.replace(
    task,
    task_id='deletion/pantry/pieces',
    package='pantry',
    held_out=True,
    solution={**task.solution, path: text},
    deleted=(task_set.Deleted(path=path, symbol='pieces'),),
  )
  other = small_package.tasks()[0]
  for each in (task, twin, other):
    task_set.save_task(tmp_path, each)
    package = task_set.Package(
      name=each.package,
      version=each.version,
      image=each.image,
      held_out=each.held_out,
      licence='MIT',
      sha256='',
    )
    task_set.save_package(tmp_path, package)
  made, _ = make(tmp_path, [])
  # Of two that are alike, the held-out one stays.
  assert {t.task_id for t in made.tasks} == {twin.task_id, other.task_id}


def test_no_package_is_an_error(tmp_path):
  with pytest.raises(ValueError, match='holds no finished package'):
    make(tmp_path / 'set', pins(tmp_path, {}))


def manifests(root):
  return {
    p.relative_to(root).as_posix(): p.read_bytes()
    for folder in ('tasks', 'packages', 'images')
    for p in sorted((root / folder).rglob('*'))
    if p.is_file()
  }


_PROGRAM = """
import pathlib, sys
sys.path.insert(0, {root!r})
from tests.tasks.deletion import factory_test as t
folder = pathlib.Path(sys.argv[1])
pins = t.pins(folder, {{'larder': t.small_package.FILES}})
t.make(folder / 'set', pins)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_set(tmp_path):
  root = pathlib.Path(__file__).parents[3]
  packages = pins(tmp_path / 'a', {'larder': small_package.FILES})
  make(tmp_path / 'a' / 'set', packages, workers=2)
  whole = manifests(tmp_path / 'a' / 'set')
  program = _PROGRAM.format(root=str(root))
  tasks = tmp_path / 'b' / 'set' / 'tasks' / 'larder'
  kills = 0
  for num_tasks in (1, 2, 3):
    process = subprocess.Popen(
      [sys.executable, '-c', program, str(tmp_path / 'b')],
      cwd=root,
      env={**os.environ, 'PYTHONPATH': str(root)},
    )
    while process.poll() is None:
      if len(list(tasks.glob('*.json'))) >= num_tasks:
        process.send_signal(signal.SIGKILL)
        kills += 1
        break
      time.sleep(0.02)
    process.wait()
  assert kills
  folder = tmp_path / 'b'
  made, _ = make(folder / 'set', pins(folder, {'larder': {}}))
  assert made.tasks
  # Both folders differ in their names alone.
  there = {
    name: data.replace(str(folder).encode(), str(tmp_path / 'a').encode())
    for name, data in manifests(folder / 'set').items()
  }
  assert there == whole


def test_a_test_that_is_named_after_the_day_is_known():
  noon = 20_000.5 * 86400  # of 4 October 2024
  for day, is_dated in (('2024-10-04', True), ('20241003', True),
                        ('2024-10-09', False), ('10-04', False)):  # fmt: skip
    assert baseline._is_dated(f'test_a.py::test[x-{day}]', noon) is is_dated


@pytest.mark.slow
def test_flaky_and_hanging_packages_are_quarantined(tmp_path):
  packages = {**SLOW, 'larder': small_package.FILES}
  options = workspace.Options(
    body=1, symbol=0, class_=0, file=0, closure=0, min_tests=5, suite_s=15.0
  )
  made, _ = make(tmp_path / 'set', pins(tmp_path, packages), options)
  assert {n: p.refused for n, p in made.packages.items()} == {
    'flaky': 'flaky',
    'hashed': '',
    'hanging': 'hangs',
    'exiting': 'broken',
    'larder': '',
  }
  facts = made.packages['hashed'].facts
  assert (facts['tests'], facts['hashed']) == (10, 6)
  assert [task.package for task in made.tasks] == ['hashed', 'larder']
  assert 'test_set' not in str(made.tasks[0].fail_to_pass)
