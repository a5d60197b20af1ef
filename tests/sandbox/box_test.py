"""Laws of boxes: programs, files, changes, and what a box leaves behind."""

import contextlib
import dataclasses
import glob
import hashlib
import os
import pathlib
import resource
import signal
import tempfile
import time

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from composer_jax.sandbox.local import boxes, cgroups, process
from tests.sandbox import conftest
from tests.sandbox.local import zygotes_test


def sh(box, script, **more):
  return box.run(base.Command(argv=('sh', '-c', script), **more))


def python(box, code, warm=True, **more):
  argv = ('-c', code) if warm else ('python', '-I', '-c', code)
  return box.run(base.Command(argv=argv, warm=warm, **more))


def test_a_program_gets_its_input_and_gives_output_code_and_report(box):
  result = sh(
    box,
    'cat; echo out; echo err >&2; echo $NAME; pwd; echo hidden >&3; exit 7',
    stdin=b'in\n',
    environment={'NAME': 'value'},
  )
  assert (result.status, result.exit_code, result.truncated) == ('ok', 7, False)
  *lines, folder = result.output.splitlines()
  assert lines == ['in', 'out', 'err', 'value'] and folder
  assert result.report == b'hidden\n' and result.level == box.level
  assert sh(box, 'cat; cat').output == ''
  assert sh(box, './run.sh').output == 'ran\n'
  result = sh(box, 'echo 1 > /dev/stderr; echo 2 | tee /dev/fd/3 > /dev/stdout')
  assert (result.output, result.report) == ('1\n2\n', b'2\n')


@pytest.mark.parametrize('code, exit_code, output', [
    ('print(1)', 0, '1'), ('raise SystemExit(300)', 44, ''),
    ('import sys; sys.exit("why")', 1, 'why'),
    ('1 / 0', 1, 'ZeroDivisionError: division by zero'),
    ('import atexit; atexit.register(print, "end")', 0, 'end'),
    ('import threading as t; t.Timer(0.05, print, ["late"]).start()', 0,
     'late'),
    ('import sys; print(sys.argv, __name__)', 0, "['-c'] __main__"),
    ('import os; os.kill(os.getpid(), 9)', None, ''),
])  # fmt: skip
def test_a_warm_interpreter_ends_as_a_new_one_does(
  box_sandbox, code, exit_code, output
):
  with box_sandbox.open('') as box:
    for warm in (True, False):
      result = python(box, code, warm)
      assert result.exit_code == exit_code, result
      assert result.output.strip().splitlines()[-1:] == [output][: bool(output)]
      assert 'sandbox' not in result.output
      assert result.status == ('killed' if exit_code is None else 'ok')


def test_pytest_runs_in_the_warm_interpreter_and_in_a_new_one(box):
  arguments = ('-m', 'pytest', '-q', '-p', 'no:cacheprovider')
  assert box.run(base.Command(argv=arguments, warm=True)).exit_code == 0
  box.write('module.py', b'def f(x):\n  return x\n')
  for argv, warm in ((arguments, True), (('python', *arguments), False)):
    result = box.run(base.Command(argv=argv, warm=warm))
    assert result.exit_code == 1 and '1 failed' in result.output
  assert box.changes() == {'module.py': 'changed'}


def test_a_program_that_is_not_there_fails_as_in_a_shell(box):
  assert box.run(base.Command(argv=('nowhere',))).exit_code == 127
  assert box.run(base.Command(argv=('./module.py',))).exit_code == 126


def test_files_stay_in_the_workspace_alone(box):
  sh(box, 'echo 1 > kept; echo 2 > $TMPDIR/gone; echo 3 > $HOME/gone')
  result = sh(box, 'cat kept; ls $TMPDIR $HOME | grep -c gone')
  assert result.output == '1\n0\n' and box.read('kept', 9) == b'1\n'


def test_changes_name_every_difference_to_the_image(box):
  assert box.changes() == {}
  sh(box, 'touch module.py; chmod 644 test_module.py; mv deep x; mv x deep')
  assert box.changes() == {}
  sh(
    box,
    'echo 1 > module.py; echo 2 > "new name"; rm -r deep/er; rm deep/a.txt;'
    'mkdir deep/a.txt empty; mkfifo pipe; ln -sf /etc/passwd link;'
    'rm run.sh; ln -s module.py run.sh',
  )
  assert box.changes() == {
      'deep/a.txt': 'removed', 'deep/er/c.txt': 'removed', 'link': 'special',
      'module.py': 'changed', 'new name': 'added', 'pipe': 'special',
      'run.sh': 'special',
  }  # fmt: skip
  sh(box, 'rm -r deep; mkdir deep; echo z > deep/b.txt; mkdir -p deep/er/q')
  assert {k: v for k, v in box.changes().items() if 'deep' in k} == {
      'deep/a.txt': 'removed', 'deep/b.txt': 'changed',
      'deep/er/c.txt': 'removed',
  }  # fmt: skip
  assert box.files('deep') == ('deep/b.txt',)
  sh(box, 'echo x > "$(printf "\\377")"')
  assert box.changes()['\\xff'] == 'special'
  assert all(name.isascii() for name in box.files())


def test_a_box_begins_as_its_image_with_the_changes_it_was_given(box_sandbox):
  changes = {'deep/a.txt': None, 'module.py': b'x = 1\n', 'a/b/c': b'\0\xff'}
  with box_sandbox.open('repository', changes) as box:
    assert box.files() == (
        'a/b/c', 'deep/b.txt', 'deep/er/c.txt', 'module.py', 'run.sh',
        'test_module.py',
    )  # fmt: skip
    assert box.read('a/b/c', 2) == b'\0\xff'
    assert box.changes() == {
      'a/b/c': 'added', 'deep/a.txt': 'removed', 'module.py': 'changed'
    }  # fmt: skip
    assert sh(box, 'cat module.py; echo 2 > a/b/c && echo ok').output == (
      'x = 1\nok\n'
    )
  for image in ('nothing', '../repository', '/etc', 'module.py'):
    with pytest.raises(base.FileRefused):
      box_sandbox.open(image)
  with pytest.raises(base.FileRefused, match='unknown'):
    box_sandbox.open('repository', {'unknown': None})


def test_changes_are_found_whatever_programs_do_to_times_and_marks(box):
  """Programs can set attributes and times of files that they own."""
  sh(box, 'touch module.py')
  code = (
    'import os\n'
    'for name in ("user.overlay.opaque", "trusted.overlay.opaque"):\n'
    '  try:\n    os.setxattr("deep", name, b"y")\n  except OSError:\n    pass\n'
    'before = os.stat("module.py")\ntext = open("module.py").read()\n'
    'open("module.py", "w").write(text.replace("1", "2"))\n'
    'os.utime("module.py", ns=(before.st_atime_ns, before.st_mtime_ns))'
  )
  assert box.changes() == {}
  assert python(box, code).exit_code == 0
  assert box.changes() == {'module.py': 'changed'}
  assert b'x + 2' in box.read('module.py', 99)


def test_a_refused_image_does_not_hinder_another(box_sandbox, images):
  (images / 'piped').mkdir(exist_ok=True)
  if not (images / 'piped' / 'pipe').exists():
    os.mkfifo(images / 'piped' / 'pipe')
  (images / f'fine-{box_sandbox.level}').mkdir()
  for _ in range(2):
    with pytest.raises(base.FileRefused, match='is a pipe'):
      box_sandbox.open('piped')
  box_sandbox.open(f'fine-{box_sandbox.level}').close()


def test_a_path_that_is_no_unicode_is_refused_and_the_box_lives(box):
  for path in ('\ud800', 'a/\udcff\ud800'):
    with pytest.raises(base.FileRefused, match='cannot name a file'):
      box.read(path, 9)
    with pytest.raises(base.FileRefused, match='cannot name a file'):
      box.write(path, b'')
  assert box.read('deep/a.txt', 9) == b'a'


@pytest.mark.parametrize('script, path, reason', [
    ('true', '../x', 'stay in the workspace'),
    ('true', '/etc/passwd', 'stay in the workspace'),
    ('true', 'deep', 'Is a directory'),
    ('true', 'nothing', 'No such file'),
    ('true', 'module.py/x', 'Not a directory'),
    ('true', 'link', 'symbolic link'),
    ('ln -s /etc etc', 'etc/passwd', 'Not a directory'),
    ('ln -s ../.. up', 'up/secret', 'Not a directory'),
    ('mkfifo pipe', 'pipe', 'no regular file'),
    ('truncate -s 1000000 sparse', 'sparse', 'more than 100'),
    ('true', 'a/' * 70 + 'x', 'at most 64 names'),
    ('true', 'a\0b', 'stay in the workspace'),
])  # fmt: skip
def test_reading_refuses_all_but_files_of_the_workspace(
  box, script, path, reason
):
  sh(box, script)
  with pytest.raises(base.FileRefused, match=reason):
    box.read(path, 100)


@pytest.mark.parametrize('script, path', [
    ('ln -s /tmp/stolen out', 'out'), ('ln -s /tmp way', 'way/stolen'),
    ('mkfifo pipe', 'pipe'), ('true', '../x'), ('true', 'module.py/x'),
    ('true', 'deep'),
])  # fmt: skip
def test_writing_never_leaves_the_workspace(box, script, path):
  sh(box, script)
  with pytest.raises(base.FileRefused):
    box.write(path, b'x')
  with pytest.raises(base.FileRefused):
    box.remove(path)
  assert not os.path.exists('/tmp/stolen')


def test_a_hard_link_leads_to_no_file_of_the_host(box, tmp_path):
  """Their file systems differ; where they do not, hard links are refused."""
  secret = tmp_path / 'secret'
  secret.write_text('x')
  assert sh(box, f'ln {secret} stolen').exit_code or box.level == 'rlimits'
  sh(box, 'ln module.py twice')
  if box.level == 'rlimits':
    for path in ('stolen', 'twice'):
      with pytest.raises(base.FileRefused):
        box.read(path, 100)
  else:
    assert box.read('twice', 100) == box.read('module.py', 100)


def test_sparse_files_do_not_fill_the_host(box):
  huge = 'truncate -s 1T huge; for i in 1 2 3 4; do truncate -s 1M $i; done'
  assert 'huge' in sh(box, huge).output
  assert all(len(box.read(x, 1 << 20)) <= 1 << 20 for x in box.files())
  with pytest.raises(base.FileRefused, match='more than'):
    box.read('1', 1000)


def test_deep_folders_do_not_stop_the_keeper(box):
  code = (
    'import os\nfor _ in range(300):\n'
    '  os.mkdir("d" * 200)\n  os.chdir("d" * 200)\nopen("x", "w")'
  )
  assert python(box, code).exit_code == 0
  assert box.files() and 'special' in box.changes().values()


def test_output_and_report_are_kept_to_the_cap_and_read_to_the_end(box):
  code = (
    'import os\nfor _ in range(40):\n'
    '  print("x" * 50_000)\n  os.write(3, b"y" * 50_000)'
  )
  result = python(box, code)
  cap = conftest.LIMITS.output_bytes
  assert result.exit_code == 0 and result.truncated
  assert result.output == ('x' * 50_000 + '\n' + 'x' * cap)[:cap]
  assert result.report == b'y' * cap


def test_programs_end_at_their_own_limit_and_so_do_their_daemons(box):
  result = sh(box, 'sleep 60', wall_s=0.2)
  assert (result.status, result.exit_code) == ('timeout', None)
  assert 0.2 <= result.wall_s < 5 and '0.2 s' in result.error
  before = zygotes_test.zygote_processes()
  beat = '(trap "" TERM HUP; while true; do sleep 0.05; date > beat; done) &'
  result = sh(box, f"setsid sh -c '{beat}'; sleep 0.2; test -e beat")
  assert result.exit_code == 0
  beat = box.read('beat', 99)
  time.sleep(0.15)
  assert box.read('beat', 99) == beat
  assert zygotes_test.zygote_processes() <= before


def test_files_in_memory_count_with_the_programs(images):
  """A box holds no more than its limit, over all of its runs."""
  limits = dataclasses.replace(
    conftest.LIMITS, memory_bytes=80 << 20, file_bytes=64 << 20
  )
  with contextlib.ExitStack() as stack:
    try:
      sandbox = stack.enter_context(
        conftest.sandbox_open.open_sandbox('auto', limits)
      )
    except ValueError as error:
      pytest.skip(f'no namespaces: {error}')
    box = stack.enter_context(sandbox.open(''))
    assert sh(box, 'head -c 50M /dev/zero > a').exit_code == 0
    if sandbox.about['cgroup'] == 'none':
      return  # recorded as such
    code = 'x = bytearray(b"x") * (40 << 20)'
    assert python(box, code, warm=False).status == 'killed'
    other = stack.enter_context(sandbox.open(''))
    assert python(other, code, warm=False).exit_code == 0


def test_the_workspace_is_bounded_in_bytes_and_files(box):
  if box.level == 'rlimits':
    return  # on the host's own file system only the size of a file is bounded
  result = sh(box, 'for i in 1 2 3; do head -c 1000000 /dev/zero > $i; done')
  assert result.exit_code and 'No space left' in result.output
  code = 'import os\nfor i in range(9999): open(f"f{i}", "w")'
  assert 'No space left' in python(box, code).output
  assert box.changes()


def test_boxes_see_neither_each_other_nor_each_others_memory(box_sandbox):
  """Hidden tests of another box are in no memory that a program inherits."""
  marker = hashlib.sha256(b'hidden').hexdigest().encode()
  # Searched for reversed, so that the search does not find its own argument.
  code = (
    'import ctypes, hashlib, re\n'
    'mark = hashlib.sha256(b"hidden").hexdigest()[::-1].encode()\nfound = 0\n'
    'for line in open("/proc/self/maps"):\n'
    '  first, last, mode = re.match(r"(\\w+)-(\\w+) (\\S+)", line).groups()\n'
    '  if "r" in mode and "[v" not in line:\n'
    '    first, last = int(first, 16), int(last, 16)\n'
    '    data = ctypes.string_at(first, last - first)\n'
    '    found += data[::-1].count(b">" + mark + b"<")\n'
    'print(found, len(data) > 0)'
  )
  with box_sandbox.open('') as other, box_sandbox.open('') as box:
    data = b'<' + marker + b'>'
    other.write('hidden', data * 1000)
    assert other.read('hidden', 1 << 20) == data * 1000
    assert sh(other, 'cat', stdin=data).exit_code == 0
    if not box_sandbox.about['proc']:
      return  # without a /proc of its own there is no memory to open
    assert python(box, code).output.startswith('0 '), python(box, code)
    if box_sandbox.level != 'rlimits':
      look = 'for i in $(seq 0 299); do cat /boxes/$i/merged/hidden; done'
      assert marker.decode() not in sh(box, f'({look}) 2>&-').output
      assert 'hidden' not in sh(box, 'find / -name hidden 2>&-').output


def traces():
  mounts = pathlib.Path('/proc/self/mounts').read_text()
  groups = glob.glob(
    f'/sys/fs/cgroup/**/composer-sandbox-{os.getpid()}-*', recursive=True
  )
  scratch = f'{tempfile.gettempdir()}/composer-{os.getpid()}-'
  folders = [x for top in glob.glob(scratch + '*') for x in os.walk(top)]
  descriptors = len(os.listdir('/proc/self/fd'))
  return mounts, sorted(groups), folders, descriptors


def run_and_leave_nothing(level, images, number, **more):
  before, processes = traces(), zygotes_test.zygote_processes()
  with conftest.open_boxes(level, images, **more) as sandbox:
    sandbox.open('repository').close()
    between = traces()
    for _ in range(number):
      with pytest.raises(base.FileRefused):
        sandbox.open('repository', {'unknown': None})
      with sandbox.open('repository') as box:
        result = sh(box, 'setsid sleep 60 & echo x > new; mkfifo pipe')
        assert result.exit_code == 0
        assert box.changes() == {'new': 'added', 'pipe': 'special'}
    assert traces() == between
    sh(sandbox.open('repository'), 'sleep 60 &')  # a box that is not closed
    running = len(zygotes_test.zygote_processes() - processes)
    assert running <= 12, running
  assert traces() == before
  assert zygotes_test.zygote_processes() <= processes


# At 'rlimits' a program that root starts gets random addresses again.
def test_sets_have_one_order_in_all_interpreters(boxes_of, images):
  # Names of parametrised tests depend on it, and with them verdicts.
  code = 'print(hash(None), hash("text"), hash((None, "text")))'
  outputs = []
  more = {'images': images, 'allow_unsafe': True}
  shared, limits = boxes_of('unshare'), conftest.LIMITS
  with sandbox_open.open_sandbox('unshare', limits, **more) as another:
    for sandbox in (shared, another):
      with sandbox.open('') as box:
        outputs.append(python(box, code).output)
        outputs.append(sh(box, f"python -c '{code}'").output)
  assert len(outputs[0].split()) == 3 and len(set(outputs)) == 1, outputs


@pytest.mark.parametrize('level', base.LEVELS)
def test_runs_leave_no_process_mount_group_or_file(level, images):
  run_and_leave_nothing(level, images, 10)


@pytest.mark.slow
@pytest.mark.parametrize('level', base.LEVELS)
def test_a_thousand_runs_leave_nothing(level, images):
  run_and_leave_nothing(level, images, 1000)


def test_a_box_whose_zygote_died_says_so_and_the_next_one_works(images):
  before = zygotes_test.zygote_processes()
  with conftest.open_boxes('auto', images) as sandbox:
    box = sandbox.open('repository')
    for pid in zygotes_test.zygote_processes() - before:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert sh(box, 'true').status == 'infrastructure'
    with pytest.raises(base.SandboxLost):
      box.read('module.py', 99)
    box.close()
    with sandbox.open('repository') as other:
      assert sh(other, 'echo 1').output == '1\n'
    with pytest.raises(ValueError, match='closed'):
      box.run(base.Command(argv=('true',)))
  with pytest.raises(ValueError, match='closed'):
    sandbox.open('')


def test_a_keeper_that_dies_is_noticed_at_once(images):
  before = zygotes_test.zygote_processes()
  with conftest.open_boxes('auto', images) as sandbox:
    with sandbox.open('repository') as box:
      pids = zygotes_test.zygote_processes() - before
      parents = set()
      for pid in pids:
        text = pathlib.Path(f'/proc/{pid}/stat').read_text()
        parents.add(int(text.rpartition(')')[2].split()[1]))
      (keeper,) = pids - parents
      os.kill(keeper, signal.SIGKILL)
      with pytest.raises(base.SandboxLost, match='ended'):
        box.read('module.py', 99)


def test_a_box_that_cannot_be_had_is_a_loss_of_the_sandbox(images, monkeypatch):
  with conftest.open_boxes('auto', images) as sandbox:

    def refuse(*unused):
      raise process.ZygoteError('too busy')

    sandbox._seats[0].lose(OSError('it died'))
    with monkeypatch.context() as patch:
      patch.setattr(boxes, 'BoxZygote', refuse)
      with pytest.raises(base.SandboxLost, match='too busy'):
        sandbox.open('repository')
    with sandbox.open('repository') as box:
      assert sh(box, 'true').exit_code == 0
      with pytest.raises(ValueError, match='must have a program'):
        box.run(base.Command(argv=()))
    with sandbox.open('repository') as box:
      if sandbox.about['cgroup'] != 'none':
        monkeypatch.setattr(
          cgroups, 'make', lambda *_: cgroups.ControlGroup('none', [])
        )
        result = sh(box, 'true')  # it would run without a limit of memory
        assert result.status == 'infrastructure' and 'no cgroup' in result.error


def test_a_crash_calls_no_program_of_the_host(box):
  """At a limit of 0 a program in core_pattern gets the core; at 1 it does not.

  Where the host's own limit is 0 it stays 0.
  """
  code = 'import resource as r; print(r.getrlimit(r.RLIMIT_CORE))'
  allowed = resource.getrlimit(resource.RLIMIT_CORE)[1]
  limit = 0 if allowed == 0 else 1
  assert python(box, code).output == f'({limit}, {limit})\n'


def test_refusals_say_what_to_do(tmp_path):
  with pytest.raises(ValueError, match='must be a folder'):
    conftest.sandbox_open.open_sandbox(
      'auto', conftest.LIMITS, images=tmp_path / 'nothing'
    )
