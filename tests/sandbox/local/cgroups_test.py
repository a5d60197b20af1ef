"""Limits of whole calls, with cgroups and without."""

from composer_jax.sandbox import open as sandbox_open
from composer_jax.sandbox.local import cgroups
from tests.sandbox import conftest


def test_limits_hold_and_are_recorded_without_cgroups(monkeypatch):
  monkeypatch.setattr(cgroups, '_own_groups', dict)
  text = 'def f(size): return len(bytearray(size))'
  with sandbox_open.open_sandbox(
    'auto', conftest.LIMITS, allow_unsafe=True
  ) as sandbox:
    assert sandbox.about['cgroup'] == 'none'
    result = sandbox.call({'m.py': text}, 'm', 'f', [[10], [1 << 30]])
  assert result.value == [['ok', 10], ['raised', 'MemoryError: ']]


def test_version_two_is_one_group_with_all_limits(tmp_path, monkeypatch):
  # With plain files instead of the kernel's: tests names and values only.
  monkeypatch.setattr(cgroups, '_own_groups', lambda: {'': tmp_path})
  group = cgroups.make('0', 1 << 27, 8)
  (directory,) = group.directories
  assert group.version == 'v2' and directory.parent == tmp_path
  assert (directory / 'memory.max').read_text() == f'{1 << 27}'
  assert (directory / 'pids.max').read_text() == '9'
  enabled = (tmp_path / 'cgroup.subtree_control').read_text()
  assert enabled == '+memory +pids'
