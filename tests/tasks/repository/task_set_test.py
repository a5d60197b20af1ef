"""Sets of tasks survive the disk, and refuse what contradicts itself."""

import dataclasses
import json

import pytest

from composer_jax.tasks.repository import task_set
from tests.tasks import small_package


@pytest.fixture
def saved(tmp_path):
  return small_package.task_set(tmp_path)


def test_a_set_is_what_was_saved(saved):
  assert saved.tasks == tuple(
    sorted(small_package.tasks(), key=lambda task: task.task_id)
  )
  assert [t.tier for t in small_package.tasks()] == list(task_set.TIERS)
  assert saved.packages['larder'].facts == {'tests': 28}


def test_view_and_solution_make_the_image(saved):
  for task in saved.tasks:
    image = saved.root / task.image
    files = {p: (image / p).read_bytes() for p in small_package.FILES}
    view = {**files, **task.view()}
    assert view != files
    restored = {**files, **task.restored()}
    # Files of the grader differ, since some tests are cut out of them.
    assert {p: d for p, d in restored.items() if p not in task.test_paths} == {
      p: d for p, d in files.items() if p not in task.test_paths
    }


def test_hidden_tests_fail_and_are_not_shown(saved):
  for task in saved.tasks:
    assert task.hidden
    assert set(task.hidden) | set(task.shown) == set(task.fail_to_pass)
    assert not set(task.hidden) & set(task.shown)
    assert not set(task.guards) & set(task.fail_to_pass)


def test_a_task_says_what_is_wrong_with_it():
  task = small_package.tasks()[0]
  for field, value, words in (
    ('tier', 'house', "tier 'house' must be one of"),
    ('fail_to_pass', (), r'it needs tests that fail \(0\)'),
    ('shown', ('tests/other.py::test_x',), 'shown tests must be among'),
    ('pass_to_pass', task.fail_to_pass, 'none of those a guard'),
    ('solution', {'larder/shelf.py': ''}, 'changed files that are no tests'),
    ('changes', {**task.changes, '../x': ''}, r"'../x' must be relative"),
    ('image', '/etc', "'/etc' must be relative"),
  ):
    with pytest.raises(ValueError, match=words):
      dataclasses.replace(task, **{field: value})


def test_a_held_out_package_has_no_other_tasks(tmp_path, saved):
  assert saved.split(held_out=False) == saved.tasks
  assert saved.split(held_out=True) == ()
  package = dataclasses.replace(saved.packages['larder'], held_out=True)
  task_set.save_package(tmp_path, package)
  with pytest.raises(ValueError, match='says held_out=False; its package'):
    task_set.load(tmp_path)


def test_tasks_of_an_unfinished_package_are_not_there(tmp_path, saved):
  (tmp_path / 'packages' / 'larder.json').unlink()
  with pytest.raises(ValueError, match='holds no finished package'):
    task_set.load(tmp_path)


def test_a_damaged_manifest_is_named(tmp_path, saved):
  path = task_set.task_path(tmp_path, saved.tasks[0])
  fields = json.loads(path.read_text())
  path.write_text(path.read_text()[:100])
  with pytest.raises(ValueError, match=f'{path.name} is not valid JSON'):
    task_set.load(tmp_path)
  path.write_text(json.dumps({**fields, 'colour': 'red'}))
  with pytest.raises(ValueError, match='no manifest of a RepositoryTask'):
    task_set.load(tmp_path)


def test_long_ids_make_files_of_different_names(tmp_path, saved):
  first, second = (
    dataclasses.replace(saved.tasks[0], task_id='deletion/' + 'x' * 400 + end)
    for end in 'ab'
  )
  paths = {task_set.task_path(tmp_path, task) for task in (first, second)}
  assert len(paths) == 2
  assert all(len(path.name) < 200 for path in paths)
  for task in (first, second):
    task_set.save_task(tmp_path, task)
  assert len(task_set.load(tmp_path).tasks) == 7
