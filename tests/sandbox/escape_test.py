"""Attempts to leave the sandbox of a call; nothing outside is contacted.

Network tests check that the call itself is refused, or aim at a listener that
the test opens on its own loopback.
"""

import os
import socket
import textwrap

import pytest

from tests.sandbox.inside import seccomp_test

CALLS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
  ctypes.set_errno(0)
  result = libc.syscall(ctypes.c_long(number),
                        *(ctypes.c_long(x) for x in arguments))
  if result == 0 and number == CLONE:
    os._exit(0)
  return errno.errorcode.get(ctypes.get_errno(), 'ALLOWED')
"""


def _syscalls(**arguments):
  """Text of a module whose f() makes each call and returns the errors."""
  machine = os.uname().machine
  lines = [
    f'    {name!r}: call({seccomp_test.number_of(name, machine)}, *{values}),'
    for name, values in arguments.items()
  ]
  clone = seccomp_test.number_of('clone', machine)
  return '\n'.join(
    [f'CLONE = {clone}', CALLS, 'def f():', '  return {', *lines, '  }']
  )


@pytest.fixture
def filtered(sandbox):
  if sandbox.about['seccomp'] != 'on':
    pytest.skip(f'no namespaces: seccomp {sandbox.about["seccomp"]}')
  return sandbox


def test_only_network_families_that_namespaces_cover_exist(filtered, run):
  text = """
    import errno, socket
    def f():
      opened, errors = [], []
      for family in range(1, 46):
        try:
          socket.socket(family, socket.SOCK_DGRAM, 0).close()
          opened.append(family)
        except OSError as error:
          errors.append(errno.errorcode[error.errno])
      return [opened, sorted(set(errors))]
  """
  opened, errors = run(textwrap.dedent(text))
  assert opened == ([] if filtered.level == 'rlimits' else [1, 2, 10])
  assert errors == ['EAFNOSUPPORT']


@pytest.mark.parametrize('kind', ['SOCK_STREAM', 'SOCK_DGRAM'])
def test_a_listener_of_the_host_is_out_of_reach(run, kind):
  text = f"""
    import socket
    def f(port):
      try:
        with socket.socket(socket.AF_INET, socket.{kind}) as client:
          client.settimeout(0.2)
          client.connect(('127.0.0.1', port))
          client.send(b'x')
      except OSError as error:
        return type(error).__name__
      return 'sent'
  """
  with socket.socket(socket.AF_INET, getattr(socket, kind)) as listener:
    listener.bind(('127.0.0.1', 0))
    if kind == 'SOCK_STREAM':
      listener.listen()
    listener.settimeout(0.05)
    outcome = run(textwrap.dedent(text), listener.getsockname()[1])
    with pytest.raises(TimeoutError):
      listener.accept() if kind == 'SOCK_STREAM' else listener.recv(1)
  # A datagram may leave for the loopback of the sandbox, where nobody listens.
  assert kind == 'SOCK_DGRAM' or outcome != 'sent'


def test_an_abstract_unix_socket_of_the_host_is_out_of_reach(run):
  text = """
    import socket
    def f(name):
      with socket.socket(socket.AF_UNIX) as client:
        client.connect(chr(0) + name)
  """
  name = f'sandbox-test-{os.getpid()}'
  with socket.socket(socket.AF_UNIX) as listener:
    listener.bind('\0' + name)
    listener.listen()
    with pytest.raises(AssertionError, match='raised'):
      run(textwrap.dedent(text), name)


def test_loopback_inside_works(run_isolated):
  text = """
    import socket
    def f():
      with socket.create_server(('127.0.0.1', 0)) as server:
        with socket.create_connection(server.getsockname()):
          return 'connected'
  """
  assert run_isolated(textwrap.dedent(text)) == 'connected'


def test_namespaces_mounts_and_dangerous_calls_are_refused(filtered, run):
  new_user, new_net, new_mounts = 0x10000000, 0x40000000, 0x00020000
  outcomes = run(
      _syscalls(
          unshare=(new_user,), clone=(new_user | new_net | 17, 0, 0, 0, 0),
          setns=(0, 0), mount=(0, 0, 0, 0, 0), umount2=(0, 2),
          pivot_root=(0, 0), chroot=(0,), open_tree=(-100, 0, 0),
          move_mount=(-1, 0, -1, 0, 0), fsopen=(0, 0), fsmount=(0, 0, 0),
          mount_setattr=(0, 0, 0, 0, 0), keyctl=(0, 0), add_key=(0, 0, 0, 0),
          request_key=(0, 0, 0, 0), userfaultfd=(0,), ptrace=(0, 0, 0, 0),
          process_vm_readv=(1, 0, 0, 0, 0, 0), bpf=(0, 0, 0),
          perf_event_open=(0, 0, 0, 0, 0), io_uring_setup=(1, 0),
          pidfd_getfd=(0, 0, 0), open_by_handle_at=(0, 0, 0),
      )
  )  # fmt: skip
  assert {name for name, error in outcomes.items() if error != 'EPERM'} == set()
  assert run(_syscalls(clone3=(0, 0))) == {'clone3': 'ENOSYS'}
  assert run(_syscalls(unshare=(new_mounts,))) == {'unshare': 'EPERM'}


def test_threads_and_subprocesses_still_work(run):
  text = """
    import os, threading
    def f():
      seen = []
      thread = threading.Thread(target=seen.append, args=(1,))
      thread.start()
      thread.join()
      pid = os.fork()
      if not pid:
        os._exit(5)
      return seen + [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
  """
  assert run(textwrap.dedent(text)) == [1, 5]


def test_no_identity_and_no_privilege_is_left(run, sandbox):
  text = """
    import ctypes, os
    def f():
      libc = ctypes.CDLL(None)
      data = (ctypes.c_uint32 * 6)(*[9] * 6)
      header = (ctypes.c_uint32 * 2)(0x20080522, 0)
      got = libc.capget(header, data)
      try:
        os.setuid(0)
        root = os.getuid() == 0
      except OSError:
        root = False
      bounding = [x for x in range(41) if libc.prctl(23, x, 0, 0, 0) == 1]
      return [os.getresuid(), os.getgroups(), got, list(data),
              libc.prctl(39, 0, 0, 0, 0), len(bounding), root]
  """.replace('os.getresuid()', 'list(os.getresuid())')
  uids, groups, got, capabilities, no_new_privileges, bounding, root = run(
    textwrap.dedent(text)
  )
  assert got == 0 and capabilities == [0] * 6 and no_new_privileges == 1
  if sandbox.about['uid'] is not None:
    assert set(uids) == {sandbox.about['uid']} and groups == []
    assert not root
  if sandbox.level != 'rlimits':
    assert bounding == 0


def test_nothing_of_the_host_can_be_read(run_isolated, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('x')
  secret.chmod(0o644)
  paths = [
      '/sys', '/root', '/home', '/run', '/etc/shadow', '/etc/hostname',
      '/proc/1/environ', '/proc/sys', '/proc/net', '/var/lib', str(secret),
      os.getcwd(), os.path.expanduser('~'), __file__,
  ]  # fmt: skip
  text = (
    'import os\ndef f(paths): return [p for p in paths if os.path.exists(p)]'
  )
  assert run_isolated(text, paths) == []
  top = run_isolated('import os\ndef f(): return sorted(os.listdir("/"))')
  assert set(top) <= {
      'bin', 'boot', 'boxes', 'dev', 'etc', 'lib', 'lib32', 'lib64', 'nix',
      'proc', 'python', 'tmp', 'usr', 'var', 'venv', 'work',
  }  # fmt: skip
  users = run_isolated('def f(): return open("/etc/passwd").read()')
  assert [line.split(':')[0] for line in users.splitlines()] == [
    'root', 'agent'
  ]  # fmt: skip


def test_installed_packages_are_masked(run_isolated):
  text = """
    import os
    def f():
      seen = []
      for folder, names, files in os.walk('/python', followlinks=False):
        if os.path.basename(folder) in ('site-packages', 'dist-packages'):
          seen += names + files
          del names[:]
      return seen
  """
  names = run_isolated(textwrap.dedent(text))
  assert not {name for name in names if not name.endswith('.txt')}


def test_only_the_workspace_and_its_own_tmp_can_be_written(run_isolated):
  text = """
    import os
    def f():
      wrote = []
      for folder, names, _ in os.walk('/'):
        try:
          open(folder + '/x', 'w').close()
          wrote.append(folder)
        except OSError:
          pass
        if folder.count('/') > 2:
          del names[:]
      return wrote
  """
  wrote = run_isolated(textwrap.dedent(text))
  assert wrote == ['/tmp', '/tmp/home', '/work']


def test_links_and_pipes_in_the_workspace_lead_nowhere(run_isolated):
  text = """
    import os
    def f():
      os.mkfifo('result')
      os.symlink('/etc/shadow', 'link')
      os.symlink('../../..', 'up')
      os.truncate(os.open('sparse', os.O_CREAT | os.O_WRONLY), 1 << 20)
      return [os.path.exists('link'), 'home' in os.listdir('up')]
  """
  assert run_isolated(textwrap.dedent(text)) == [False, False]


def test_the_zygote_cannot_be_signalled(run_isolated, isolated):
  text = """
    import os, signal
    def f():
      seen = []
      for pid in (1, os.getppid(), -1, *range(3, 60)):
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT):
          try:
            if pid != os.getpid():
              os.kill(pid, number)
          except OSError as error:
            seen.append(type(error).__name__)
      return sorted(set(seen)), os.getppid()
  """.replace('sorted(set(seen)), os.getppid()', '[os.getppid()]')
  about = isolated.about
  # It can name only the init of its namespace, which ignores the signals.
  assert run_isolated(textwrap.dedent(text)) == [1]
  assert run_isolated('import os\ndef f(): return os.getppid()') == 1
  assert isolated.about is about


def test_no_environment_and_no_descriptors_are_inherited(run, monkeypatch):
  monkeypatch.setenv('SANDBOX_SECRET', 'x')
  text = """
    import os
    def f():
      opened = []
      for descriptor in range(1024):
        try:
          os.fstat(descriptor)
          opened.append(descriptor)
        except OSError:
          pass
      return [opened, sorted(os.environ)]
  """
  read, write = os.pipe()
  os.set_inheritable(write, True)
  try:
    opened, names = run(textwrap.dedent(text))
  finally:
    os.close(read)
    os.close(write)
  assert opened == [0, 1, 2, 3]  # the last is the pipe for the result
  assert set(names) <= {
      'HOME', 'LANG', 'LC_CTYPE', 'LD_LIBRARY_PATH', 'PATH', 'PWD', 'TMPDIR',
      'PYTHONDONTWRITEBYTECODE', 'PYTHONHASHSEED', 'PYTHONUTF8',
  }  # fmt: skip


def test_shared_memory_does_not_pass_from_call_to_call(run_isolated):
  text = """
    import ctypes
    def f(flags):
      return ctypes.CDLL(None).shmget(77, 4096, flags)
  """
  text = textwrap.dedent(text)
  assert run_isolated(text, 0o1777 | 0o600) >= 0
  assert run_isolated(text, 0) == -1


def test_the_terminal_of_the_host_is_out_of_reach(run_isolated):
  text = """
    import os
    def f():
      try:
        os.open('/dev/tty', os.O_RDWR)
      except OSError:
        return [os.isatty(0), os.isatty(1), os.getsid(0) != 0]
  """
  assert run_isolated(textwrap.dedent(text))[:2] == [False, False]
