"""Laws of opening: the level that is picked, as root and as other users."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from tests.sandbox import conftest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_unsafe_levels_and_unknown_names_are_refused():
  with pytest.raises(ValueError, match='refused for untrusted code'):
    sandbox_open.open_sandbox('rlimits', conftest.LIMITS)
  with pytest.raises(ValueError, match="'docker' is not"):
    sandbox_open.open_sandbox('docker', conftest.LIMITS)
  with pytest.raises(ValueError, match='wall_s'):
    base.Limits(**{**dict.fromkeys(base.Limits.__slots__, 1), 'wall_s': 0})


def test_a_refusal_says_in_one_line_why_no_level_works(monkeypatch):
  monkeypatch.setattr(sys, 'platform', 'darwin')
  with pytest.raises(ValueError, match='unshare: .*do not exist') as caught:
    sandbox_open.open_sandbox('auto', conftest.LIMITS)
  assert 'rlimits: ' in str(caught.value) and '\n' not in str(caught.value)


def test_folders_of_the_workspace_are_found_at_the_root():
  with sandbox_open.open_sandbox(
    'auto', conftest.LIMITS, folders=('app', 'logs')
  ) as sandbox:
    with contextlib.closing(sandbox.open('', {'app/a': b'text'})) as box:
      script = 'cat /app/a; echo more > /app/b; rm /app 2>&1; echo x > /new'
      result = box.run(base.Command(argv=('/bin/sh', '-c', script)))
      assert result.output.startswith('text')
      # The root itself stays as it is.
      assert result.output.count('Read-only file system') == 2
      assert box.read('app/b', 10) == b'more\n'
      assert box.files() == ('app/a', 'app/b')
    # A box has the folders of its own workspace, not of another.
    with contextlib.closing(sandbox.open('')) as box:
      result = box.run(base.Command(argv=('/bin/ls', '/app/', '/logs/')))
      assert result.exit_code and 'app/a' not in result.output


@pytest.mark.parametrize(
  'folders, level, words',
  [
    (('etc',), 'auto', 'no folder /etc'),
    (('../x',), 'auto', 'no folder'),
    (('a/b',), 'auto', 'no folder'),
    (('',), 'auto', 'no folder'),
    (('.',), 'auto', 'no folder'),
    (('app',), 'rlimits', "need the sandbox 'unshare'"),
    (('app',), 'microvm', "need the sandbox 'unshare'"),
  ],
)
def test_folders_that_cannot_be_are_named(folders, level, words):
  with pytest.raises(ValueError, match=words):
    sandbox_open.open_sandbox(
      level, conftest.LIMITS, allow_unsafe=True, folders=folders
    )


# Becomes the user 65001, who may enter neither the home of root nor, perhaps,
# this checkout. In a mount namespace of its own the checkout is bound to a
# folder that everyone may enter, and the closed folder above the interpreter is
# covered. The interpreter keeps its path, by which it finds its library.
_BECOME = """
mount --bind "$1" "$3/python" && mount --bind "$2" "$3/code" || exit 77
if [ -n "$6" ]; then
  mount -t tmpfs -o mode=755 tmpfs "$6" && mkdir -p "$1" &&
    mount --bind "$3/python" "$1" || exit 77
fi
cd "$3/code"
exec setpriv --reuid=65001 --regid=65001 --clear-groups "$1/$4" -B -c "$5"
"""
_CODE = """
import ctypes, os
def f():
  made = 0
  try:
    while made < 200:
      if not os.fork():
        __import__('time').sleep(60)
      made += 1
  except BlockingIOError:
    pass
  try:
    open('/x', 'w')
    wrote = True
  except OSError:
    wrote = False
  return [made, wrote, os.path.exists('/home'), os.getppid(),
          ctypes.CDLL(None).unshare(0x10000000)]
"""
_REPORT = """
import json, pathlib, sys, tempfile
sys.path.insert(0, '.')
from composer_jax.sandbox import base, open as sandbox_open
limits = base.Limits(wall_s=5, cpu_s=2, memory_bytes=256 << 20, processes=8,
                     file_bytes=1 << 20, output_bytes=1 << 16)
try:
  with tempfile.TemporaryDirectory() as images:
    pathlib.Path(images, 'i', 'd').mkdir(parents=True)
    for name in ('d/a', 'd/b', 'kept'):
      pathlib.Path(images, 'i', name).write_text(name)
    with sandbox_open.open_sandbox(
      'unshare', limits, images=pathlib.Path(images)
    ) as sandbox:
      result = sandbox.call({'m.py': CODE}, 'm', 'f', [[]])
      with sandbox.open('i', {'new': b'x'}) as box:
        run = box.run(base.Command(argv=('sh', '-c', SCRIPT)))
        print(json.dumps([sandbox.about, result.value, run.output, run.error,
                          box.changes()]))
except ValueError as error:
  print(json.dumps(str(error)))
"""


_SHELL = """
rm -r d; mkdir d; echo x > d/a; python -c 'print(5)'
ls /boxes /boot/alternatives/nothing 2> /dev/null; echo y > /tmp/z; touch /z
head -c 5 /proc/2/cmdline | tr '\\0' ' '
"""


def _script() -> str:
  text = _REPORT.replace('CODE', repr(_CODE))
  return text.replace('SCRIPT', repr(_SHELL))


def _check_report(command, **more):
  """Runs it and reads its report; skips where isolation is refused."""
  done = subprocess.run(
    command, capture_output=True, text=True, check=False, **more
  )
  if done.returncode == 77:
    pytest.skip(f'no namespaces: {done.stderr}')
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout)
  if isinstance(report, str):
    assert 'refused here' in report, report
    pytest.skip(f'no namespaces: {report}')
  about, ((outcome, (made, *rest)),), output, error, changes = report
  assert not error and output.splitlines() == [
    '5',
    '/boxes:',
    "touch: cannot touch '/z': Read-only file system",
    'sh -c',
  ]
  expected = {'d/a': 'changed', 'd/b': 'removed', 'new': 'added'}
  assert changes == expected
  assert about['overlay'] and about['proc']
  assert outcome == 'ok' and about['uid'] is None
  # The kernel sets root no limit of processes; only a cgroup does.
  assert made <= 12 or (os.getuid() == 0 and about['cgroup'] == 'none')
  assert rest == [False, False, 1, -1]


def test_an_unprivileged_user_has_the_same_sandbox():
  python = pathlib.Path(getattr(sys, '_base_executable', sys.executable))
  if os.getuid():
    _check_report([python, '-B', '-c', _script()], cwd=ROOT)
    return
  prefix = pathlib.Path(sys.base_prefix).resolve()
  inside = str(python.resolve().relative_to(prefix))
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o755)
    for name in ('python', 'code'):
      os.mkdir(f'{folder}/{name}')
    private = [
      p for p in reversed(prefix.parents) if not p.stat().st_mode & 0o001
    ]
    arguments = [prefix, ROOT, folder, inside, _script()]
    arguments.append(private[0] if private else '')
    _check_report(['unshare', '-m', 'sh', '-c', _BECOME, 'sh', *arguments])


def test_root_of_a_namespace_with_one_user_has_the_same_sandbox():
  """As in rootless containers: every capability, but no other user."""
  become = ['unshare', '-rm']
  if subprocess.run([*become, 'true'], check=False).returncode:
    pytest.skip('no namespaces: unshare -rm is refused')
  python = [sys.executable, '-B', '-c', _script()]
  _check_report([*become, *python], cwd=ROOT)
