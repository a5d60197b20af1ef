"""Differences of workspaces that programs filled."""

import os

from composer_jax.sandbox.inside import beneath, trees

NUM_FOLDERS = 40_000


def _folder(path, *names):
  for name in names:
    os.makedirs(path / name)
  return str(path)


def test_what_a_new_folder_hides_is_hidden_at_any_depth(tmp_path):
  lower = _folder(tmp_path / 'lower', 'a/b/c', 'kept')
  (tmp_path / 'lower' / 'file').write_text('')
  upper = _folder(tmp_path / 'upper', 'file/a/b/c', 'new/x', 'newer', 'a/b/c')
  tree = trees.Tree(upper, lower, upper, None, 'user.none')
  diff = trees.difference(tree)
  assert diff.removed == ['file']
  assert [*diff.present] == [path for path, _ in beneath.walk(upper)]


def test_very_many_new_folders_cost_a_step_each(tmp_path, monkeypatch):
  # One comparison for each pair of them would take minutes.
  status = os.stat(tmp_path)
  walked = [(f'{i}', status) for i in range(NUM_FOLDERS)]
  walked += [(f'{i}/below', status) for i in range(NUM_FOLDERS)]
  monkeypatch.setattr(beneath, 'walk', lambda top: walked)
  looked_up = []
  monkeypatch.setattr(trees, '_status', lambda top, p: looked_up.append(p))
  tree = trees.Tree('top', str(tmp_path), 'upper', None, 'user.none')
  assert len(trees.difference(tree).present) == 2 * NUM_FOLDERS
  assert looked_up == [f'{i}' for i in range(NUM_FOLDERS)]
