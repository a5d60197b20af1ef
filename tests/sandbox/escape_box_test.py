"""Attempts to leave a box, each through `Box.run` on every backend.

Backends are each level of processes with the host's cgroups and with none, and
the micro VM with version 2. Nothing outside is contacted: probes check that the
call itself is refused, or aim at listeners that the test opens on its own
loopback.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import time

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from composer_jax.sandbox.local import cgroups
from composer_jax.sandbox.remote.microvm import machine

LIMITS = base.Limits(
    wall_s=20.0, cpu_s=15.0, memory_bytes=160 << 20, processes=24,
    file_bytes=4 << 20, output_bytes=1 << 16,
)  # fmt: skip
PROBES = pathlib.Path(__file__).with_name('escape_probes.py').read_bytes()
SHOWN = '\N{REPLACEMENT CHARACTER}'


@dataclasses.dataclass(frozen=True)
class Backend:
  """A level, and the cgroups that its programs may have."""

  level: str
  cgroup: str

  def __str__(self):
    return f'{self.level}-{self.cgroup}'


HARDENED = [Backend('unshare', 'host')]
WITHOUT = [Backend('unshare', 'none')]
LIMITED = [Backend('rlimits', 'host'), Backend('rlimits', 'none')]
MACHINE = [Backend('microvm', 'v2')]


def backends(*groups, slow=()):
  marked = [(x, ()) for group in groups for x in group]
  marked += [(x, pytest.mark.slow) for group in slow for x in group]
  return pytest.mark.parametrize(
    'backend',
    [pytest.param(x, marks=marks, id=str(x)) for x, marks in marked],
    indirect=True,
  )


everywhere = backends(HARDENED, slow=(WITHOUT, LIMITED, MACHINE))
isolated = backends(HARDENED, slow=(WITHOUT, MACHINE))
heavy = backends(slow=(HARDENED, WITHOUT, MACHINE))
with_memory_groups = backends(slow=(HARDENED, MACHINE))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Images for all sandboxes of this file."""
  top = tmp_path_factory.mktemp('images-of-the-host')
  (top / 'one').mkdir()
  (top / 'one' / 'kept.txt').write_text('kept')
  (top / 'two').mkdir()
  (top / 'two' / 'secret.txt').write_text('secret')
  return top


@pytest.fixture(scope='module')
def opened(folder):
  with contextlib.ExitStack() as closing:
    sandboxes = {}

    def get(backend):
      if backend not in sandboxes:
        sandbox = _open(backend, folder)
        sandboxes[backend] = sandbox
        closing.callback(sandbox.close)
      return sandboxes[backend]

    yield get


def _open(backend, images):
  if backend.level == 'microvm':
    try:
      return machine.MicroVM(LIMITS, images=images)
    except ValueError as error:
      pytest.skip(f'no QEMU: {error}')
  try:
    return sandbox_open.open_sandbox(
      backend.level, LIMITS, allow_unsafe=True, images=images
    )
  except ValueError as error:
    pytest.skip(f'no namespaces: {error}')


@pytest.fixture
def backend(request, monkeypatch):
  """The backend; with 'none' it simulates a machine that allows no cgroup."""
  if request.param.cgroup == 'none':
    monkeypatch.setattr(
      cgroups, 'make', lambda *_: cgroups.ControlGroup('none', [])
    )
  return request.param


@pytest.fixture
def sandbox(backend, opened):
  sandbox = opened(backend)
  if backend.cgroup != 'host':
    assert sandbox.about['cgroup'] == backend.cgroup
  return sandbox


@pytest.fixture
def box(sandbox):
  with sandbox.open('one') as box:
    yield box


def python(box, text, *arguments, wall_s=None):
  command = base.Command(
    argv=('python', '-c', text, *map(str, arguments)),
    wall_s=wall_s,
  )
  return box.run(command)


@pytest.fixture(scope='module')
def reports():
  """Results of all probes, which one program tries, by backend."""
  return {}


@pytest.fixture
def reported(sandbox, backend, reports, folder, tmp_path):
  if backend not in reports:
    reports[backend] = _probe(sandbox, backend, folder, tmp_path)
  return reports[backend]


def _probe(sandbox, backend, folder, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('x')
  secret.chmod(0o644)
  names = re.findall(r'^def probe_(\w+)', PROBES.decode(), re.MULTILINE)
  if backend.level == 'rlimits':  # the other attempts would succeed
    names = [name for name in names if name in ROWS_WITHOUT_NAMESPACES]
  with contextlib.ExitStack() as closing:
    listeners = [
      closing.enter_context(socket.create_server(('127.0.0.1', 0)))
      for _ in range(2)
    ]
    datagrams = closing.enter_context(
      socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    )
    datagrams.bind(('127.0.0.1', 0))
    abstract = closing.enter_context(socket.socket(socket.AF_UNIX))
    abstract.bind(f'\0escape-{os.getpid()}')
    abstract.listen()
    arguments = {
        'probes': names,
        'ports': [x.getsockname()[1] for x in listeners],
        'datagram_port': datagrams.getsockname()[1],
        'abstract': f'escape-{os.getpid()}',
        'secret_names': [str(folder), str(tmp_path), 'secret.txt'],
        'host_paths': [
            '/root', '/home', '/etc/shadow', '/var/lib', '/run', '/mnt',
            '/opt', '/usr/sbin/sshd', str(secret), str(folder), __file__,
            os.path.expanduser('~'), os.getcwd(), '/sys', '/etc/hostname',
            '/etc/resolv.conf', '/etc/ssh', '/proc/kcore',
        ],
        'host_pids': [os.getpid(), os.getppid()],
    }  # fmt: skip
    with contextlib.closing(sandbox.open('one')) as box:
      command = base.Command(
        argv=('python', '-', json.dumps(arguments)), stdin=PROBES
      )
      result = box.run(command)
    assert (result.status, result.exit_code) == ('ok', 0), result
    reached = []
    for listener in (*listeners, abstract):
      listener.setblocking(False)
      with contextlib.suppress(BlockingIOError):
        reached.append(listener.accept())
    datagrams.setblocking(False)
    with contextlib.suppress(BlockingIOError):
      reached.append(datagrams.recv(1))
  return {**json.loads(result.report), 'reached': reached}


# Name of the probe: its result where there are namespaces.
ROWS = {
  'clone3': 'ENOSYS',
  'x32_calls': 'ENOSYS',
  'raw_sockets': ['EPERM', 'EPERM'],
  'families': [[1, 2, 10], ['EAFNOSUPPORT']],
  'host_listeners': ['ConnectionRefusedError'] * 2,
  'abstract_socket': 'ECONNREFUSED',
  'loopback_inside': 'connected',
  'interfaces': ['lo'],
  'reached': [],
  'processes': [],
  'kernel_settings': [],
  'writable_kernel_files': [],
  'mountinfo': [],
  'host_files': [],
  'other_boxes': [],
  'writable_folders': ['/tmp', '/work'],
  'programs_can_be_changed': [],
  'set_user_programs': [],
  'terminal': ['ENOENT', [], []],
  'limits_can_be_raised': [],
  'priority': ['EACCES', 'EPERM'],
  'signals': [],
  'shared_memory': -1,
  'set_user_shell': False,
  'core_dumps': False,
  'threads_and_processes_work': [1, 5],
}
ROWS_WITHOUT_NAMESPACES = {
  'system_calls': None,
  'clone3': 'ENOSYS',
  'x32_calls': 'ENOSYS',
  'other_architectures': None,
  'raw_sockets': ['EAFNOSUPPORT', 'EAFNOSUPPORT'],
  'families': [[], ['EAFNOSUPPORT']],
  'host_listeners': ['OSError'] * 2,
  'abstract_socket': 'raised EAFNOSUPPORT',
  'limits_can_be_raised': [],
  'descriptors': None,
  'environment': None,
  'core_dumps': False,
  'threads_and_processes_work': [1, 5],
}


@isolated
@pytest.mark.parametrize('row', ROWS)
def test_a_probe_does_not_get_out(reported, row):
  if row == 'x32_calls' and os.uname().machine != 'x86_64':
    return  # there are no such calls
  assert reported[row] == ROWS[row]


@backends(slow=(LIMITED,))
@pytest.mark.parametrize(
  'row', [x for x, value in ROWS_WITHOUT_NAMESPACES.items() if value]
)
def test_the_filter_alone_refuses_dangerous_calls(reported, row):
  assert reported[row] == ROWS_WITHOUT_NAMESPACES[row]


@everywhere
def test_dangerous_system_calls_are_refused(reported):
  outcomes = reported['system_calls']
  refused = ('EPERM', 'ENOSYS')
  assert {k: v for k, v in outcomes.items() if v not in refused} == {}
  assert len(outcomes) > 30


@everywhere
def test_no_call_by_the_numbers_of_another_architecture(reported):
  assert reported['other_architectures'] in (
      'none', 'refused', 'no executable memory', 'died of -31',  # SIGSYS
  )  # fmt: skip


@isolated
def test_nothing_of_the_first_process_shows(reported):
  assert set(reported['first_process'].values()) <= {'ENOENT', 'EACCES'}


@isolated
def test_devices_hold_nothing(reported):
  names, disk, memory = reported['devices']
  assert set(names) <= {
      '/dev/null', '/dev/zero', '/dev/full', '/dev/random', '/dev/urandom'
  }  # fmt: skip
  assert (disk, memory) == ('EPERM', 'EPERM')


@isolated
def test_no_identity_and_no_privilege_is_left(reported):
  identity = reported['identity']
  assert 0 not in identity['uids'] + identity['gids'] + identity['groups']
  assert len(set(identity['uids'] + identity['gids'])) == 1
  assert identity['capabilities'] == [0] * 6
  assert identity['bounding'] == identity['ambient'] == []
  assert identity['no_new_privileges'] == 1
  assert identity['root again'] == ['EPERM'] * 3


@everywhere
def test_no_environment_and_no_descriptors_are_inherited(reported, monkeypatch):
  assert set(reported['environment']) <= {
      'HOME', 'LANG', 'LC_CTYPE', 'LD_LIBRARY_PATH', 'PATH', 'PWD', 'TMPDIR',
      'PYTHONDONTWRITEBYTECODE', 'PYTHONHASHSEED', 'PYTHONUTF8',
  }  # fmt: skip
  kinds = reported['descriptors']
  assert set(kinds) == {'0', '1', '2', '3'}
  assert [kinds[x] for x in '123'] == [['pipe']] * 3


@everywhere
def test_output_does_nothing_to_a_terminal(box):
  text = r"""
import sys
for piece in (b'\x1b[2J\x1b[1;1H', b'\x1b]0;title\x07', b'\x1b]52;c;eA==\x07',
              b'\x1bP$q"p\x1b\\', b'\x9b31m', '\x9b31m'.encode(), b'\x07\x08',
              b'\x1b[6n', b'fine\rover', b'\xff\xfe', b'\x0e\x0f',
              '\u202eabc\u2066'.encode(), b'\x1b', b'\x1b]8;;x'):
  sys.stdout.buffer.write(piece + b'-')
sys.stdout.flush()
sys.stderr.write('\x1b[31mred')
"""
  result = python(box, text)
  allowed = set(map(chr, range(32, 127))) | {'\n', '\t', SHOWN}
  assert result.status == 'ok' and set(result.output) <= allowed
  assert 'red' in result.output and SHOWN in result.output


@isolated
def test_a_run_finds_nothing_of_the_run_before(box):
  text = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
print(os.path.exists('/tmp/x'), libc.shmget(77, 4096, 0), len(os.listdir(
    '/proc/self/fd')), [x for x in os.listdir('/proc') if x.isdigit()])
open('/tmp/x', 'w').close()
libc.shmget(77, 4096, 0o1777 | 0o600)
if not os.fork():
  os.setsid()
  import time
  time.sleep(60)
"""
  first, second = (python(box, text) for _ in range(2))
  assert first.status == 'ok' and first.wall_s < 15
  assert first.output == second.output
  assert first.output.startswith('False -1 ')


@everywhere
def test_a_daemon_is_dead_when_the_run_is_over(box):
  text = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
  signal.signal(number, signal.SIG_IGN)
if not os.fork():
  os.setsid()
  if not os.fork():
    while True:
      open('beat', 'a').write('x')
      time.sleep(0.01)
  os._exit(0)
while not os.path.exists('beat'):
  time.sleep(0.005)
"""
  assert python(box, text).exit_code == 0
  size = len(box.read('beat', 1 << 16))
  time.sleep(0.1)
  assert len(box.read('beat', 1 << 16)) == size


@everywhere
def test_a_program_that_ignores_signals_ends_at_the_wall(box):
  text = """
import os, signal, time
for number in range(1, 32):
  try:
    signal.signal(number, signal.SIG_IGN)
  except (OSError, ValueError):
    pass
os.fork()
while True:
  time.sleep(1)
"""
  assert python(box, text, wall_s=0.6).status == 'timeout'


HOSTILE = """
import os, socket
open('big', 'wb').write(bytes(100_000))
os.mkfifo('fifo')
os.symlink('/etc/passwd', 'link')
os.symlink('..', 'up')
os.symlink('/', 'root')
os.symlink('link-to-itself', 'link-to-itself')
os.link('big', 'hard')
os.makedirs('folder/inner')
try:
  with socket.socket(socket.AF_UNIX) as s:
    s.bind('socket')
except OSError:
  pass  # no sockets without namespaces
try:
  os.truncate(os.open('sparse', os.O_CREAT | os.O_WRONLY), 1 << 40)
except OSError:
  os.truncate('sparse', 4 << 20)
open('closed', 'w').close()
os.chmod('closed', 0)
"""


@everywhere
def test_the_host_reads_regular_files_of_bounded_size_only(sandbox):
  with contextlib.closing(sandbox.open('one')) as box:
    result = python(box, HOSTILE)
    assert result.exit_code == 0, result
    refused = (
        'fifo', 'link', 'up', 'up/work/kept.txt', 'root/etc/passwd', 'folder',
        'link-to-itself', 'sparse', 'big', 'hard', '../work/kept.txt',
        '/etc/passwd', 'missing', 'kept.txt/x', '', '.', 'a\0b',
        'folder/../kept.txt',
    )  # fmt: skip
    # If opening a pipe waited, this would not end.
    for path in refused:
      with pytest.raises(base.FileRefused):
        box.read(path, 1000)
    for path in ('fifo', 'link', 'up/x', 'root/tmp/x', 'folder', '../x', '/x'):
      with pytest.raises(base.FileRefused):
        box.write(path, b'x')
    for path in ('up/work/kept.txt', 'folder', '../x', 'missing', 'root/x'):
      with pytest.raises(base.FileRefused):
        box.remove(path)
    assert box.read('kept.txt', 4) == b'kept'
    changes = box.changes()
    assert {changes[x] for x in ('fifo', 'link', 'up', 'root')} == {'special'}
    assert 'link' not in box.files() and 'kept.txt' in box.files()


@isolated
def test_names_and_modes_that_trip_tools_do_not_trip_the_host(sandbox):
  text = r"""
import os
os.chdir('/work')
for name in (b'\xff\xfe', b'new\nline', b'\x1b[2J', b'x' * 255, b'-rf',
             '\u202egnp.exe'.encode()):
  open(name, 'wb').write(b'x')
os.mkdir('shut')
open('shut/file', 'w').close()
os.chmod('shut', 0)
here = os.getcwd()
for depth in range(200):
  os.mkdir('d')
  os.chdir('d')
os.chdir('/work')
os.chmod('/work', 0o000)
"""
  with contextlib.closing(sandbox.open('one')) as box:
    result = python(box, text)
    assert result.exit_code == 0, result
    assert box.read('kept.txt', 10) == b'kept'
    try:
      assert box.changes()
      names = box.files()
      assert {'kept.txt', 'shut/file', '-rf'} <= set(names)
    except base.FileRefused:
      pass  # allowed, unlike a crash or a hang
    assert box.read('kept.txt', 10) == b'kept'
  with contextlib.closing(sandbox.open('one')) as box:
    assert python(box, 'print(1)').output == '1\n'


@isolated
def test_a_whiteout_made_by_hand_reveals_nothing(sandbox):
  text = """
import os, stat
try:
  os.mknod('kept2', stat.S_IFCHR, 0)
except OSError:
  pass
os.unlink('kept.txt')
os.mkdir('kept.txt')
for name in ('trusted.overlay.opaque', 'user.overlay.opaque',
             'trusted.overlay.redirect', 'security.capability'):
  try:
    os.setxattr('kept.txt', name, b'y')
  except OSError:
    pass
"""
  with contextlib.closing(sandbox.open('one')) as box:
    assert python(box, text).exit_code == 0
    with pytest.raises(base.FileRefused):
      box.read('kept.txt', 10)
    assert 'kept.txt' not in box.files()
  with contextlib.closing(sandbox.open('one')) as box:
    assert box.read('kept.txt', 10) == b'kept'


@isolated
def test_boxes_do_not_see_each_other(sandbox):
  with contextlib.closing(sandbox.open('one')) as first:
    with contextlib.closing(sandbox.open('two')) as second:
      python(first, 'open("mine", "w").write("x")')
      result = python(
        second,
        'import os\n'
        'print([x for x, _, n in os.walk("/") if "mine" in n or '
        '"kept.txt" in n], os.listdir("."))',
      )
      assert result.output == "[] ['secret.txt']\n"
      assert 'mine' not in second.files()


@heavy
@pytest.mark.parametrize('kind', ['os.fork', 'threads', 'zombies'])
def test_a_bomb_of_processes_stays_small(box, kind):
  text = """
import os, sys, threading, time
count, kind = 0, sys.argv[1]
try:
  while count < 2000:
    if kind == 'threads':
      threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    else:
      if not os.fork():
        os._exit(0) if kind == 'zombies' else time.sleep(30)
    count += 1
except (OSError, RuntimeError):
  pass
print(count, flush=True)
os._exit(0)
"""
  result = python(box, text, kind)
  assert result.status == 'ok' and int(result.output) <= LIMITS.processes
  assert python(box, 'print(1)').output == '1\n'


MEMORY = {
  'private': 'x = []\nwhile True: x.append(bytearray(1 << 20))',
  'shared': (
    'import mmap\nx = []\n'
    'while True:\n  x.append(mmap.mmap(-1, 1 << 20))\n  x[-1].write(b"x" * '
    '(1 << 20))'
  ),
  'many processes': (
    'import os, time\nfor _ in range(12):\n  if not os.fork():\n'
    '    x = bytearray(b"x" * (40 << 20)); time.sleep(30)\ntime.sleep(30)'
  ),
  'anonymous files': (
    'import os\nwhile True:\n  f = os.memfd_create("x")\n'
    '  for _ in range(3): os.write(f, bytes(1 << 20))'
  ),
}


@with_memory_groups
@pytest.mark.parametrize('kind', MEMORY)
def test_memory_is_bounded_for_all_that_a_run_holds(box, kind):
  result = python(box, MEMORY[kind], wall_s=10)
  assert result.status != 'infrastructure'
  assert (result.status, result.exit_code) != ('ok', 0)
  if kind == 'many processes':  # of 480 MB: some die, or the whole run
    assert result.status in ('killed', 'timeout', 'ok')
  assert python(box, 'print(1)').output == '1\n'


@backends(slow=(WITHOUT, LIMITED))
def test_without_cgroups_one_process_is_bounded(box):
  result = python(box, MEMORY['private'])
  assert (result.status, result.exit_code) != ('ok', 0)
  assert result.status != 'infrastructure'


DISK = {
  'one file': ('f = open("x", "wb")\nwhile True: f.write(bytes(1 << 16))'),
  'many files': (
    'for i in range(10**6): open(f"x{i}", "wb").write(bytes(1 << 16))'
  ),
  'no content': 'for i in range(10**6): open(f"x{i}", "wb").close()',
  'folders': 'import os\nfor i in range(10**6): os.mkdir(f"d{i}")',
  'scratch': (
    'for i in range(10**6): open(f"/tmp/x{i}", "wb").write(bytes(1 << 16))'
  ),
  'names': 'import os\nfor i in range(10**6): os.symlink("y" * 4000, f"l{i}")',
}


@heavy
@pytest.mark.parametrize('kind', DISK)
def test_a_full_workspace_fills_nothing_else(sandbox, kind):
  free = os.statvfs('/tmp').f_bavail
  with contextlib.closing(sandbox.open('one')) as box:
    result = python(box, DISK[kind])
    assert (result.status, result.exit_code) != ('ok', 0), result
    assert result.status != 'infrastructure'
    with contextlib.suppress(base.FileRefused):
      box.changes()
    other = sandbox.open('two')
    assert python(other, 'open("y", "w").write("y")').exit_code == 0
    other.close()
  used = (free - os.statvfs('/tmp').f_bavail) * os.statvfs('/tmp').f_frsize
  assert used < 256 << 20  # other processes write here too


@heavy
def test_a_deep_tree_does_not_exhaust_the_host(sandbox):
  text = """
import os
try:
  for depth in range(100_000):
    os.mkdir('d')
    os.chdir('d')
except OSError:
  pass
"""
  with contextlib.closing(sandbox.open('one')) as box:
    assert python(box, text).status == 'ok'
    for question in (box.files, box.changes):
      with contextlib.suppress(base.FileRefused):
        question()
    assert box.read('kept.txt', 10) == b'kept'
  with contextlib.closing(sandbox.open('one')) as box:
    assert python(box, 'print(1)').output == '1\n'


@heavy
def test_processor_time_is_bounded(sandbox):
  with contextlib.closing(sandbox.open('one')) as box:
    text = 'import resource\nprint(resource.getrlimit(resource.RLIMIT_CPU))'
    cpu_s = int(LIMITS.cpu_s)
    assert python(box, text).output == f'({cpu_s}, {cpu_s + 1})\n'
    text = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
while True: pass
"""
    assert python(box, text).status in ('timeout', 'killed')


@heavy
@pytest.mark.parametrize('descriptor', [1, 3])
def test_a_flood_is_not_kept(box, descriptor):
  text = """
import os, sys
piece = b'x' * (1 << 20)
try:
  for _ in range(100):
    os.write(int(sys.argv[1]), piece)
except OSError:
  pass
"""
  result = python(box, text, descriptor)
  kept = len(result.output) + len(result.report)
  assert kept <= 2 * LIMITS.output_bytes and result.status != 'infrastructure'
  assert descriptor == 3 or result.truncated


@heavy
def test_a_stopped_program_ends_at_the_wall(box):
  text = 'import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)'
  assert python(box, text, wall_s=1.0).status == 'timeout'


@heavy
def test_descriptors_and_pipes_are_bounded(box):
  text = """
import os
count = 0
try:
  while True:
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.write(write, bytes(1 << 16))
    count += 2
except OSError:
  print(count)
"""
  result = python(box, text)
  assert result.status in ('ok', 'killed')
  assert result.status == 'killed' or int(result.output) <= 1024
