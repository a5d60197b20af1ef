"""Programs that leave traces wherever they can, and that look for some.

`WRITE` runs as `python -c WRITE SECONDS BIT PAIR` and holds what it holds so
long; `READ` (`python -c READ PAIR`) writes features by name as JSON to
descriptor 3. A feature is anything that a program can learn without timing: the
text of a file of /proc, a field of stat, an errno, a port that is taken. Left
out, as timing of processor and caches: counts of page faults and of time, and
what `/proc/self` says about them.
"""

PATHS = """
SHARED = ('/usr/lib/os-release', '/bin/sh', '/dev/null', '/dev/zero',
          '/dev/full', '/dev/urandom', '/etc/passwd', '/etc/hosts',
          '/venv/pyvenv.cfg',
          '/python/bin', '/usr/bin/env', '/', '/dev', '/etc', '/usr', '/boot')
TREES = ('/dev', '/etc', '/tmp', '/work', '/boot', '/var', '/boxes')
NAMES = ('\\0trace', '/tmp/trace', '/work/trace', '/var/tmp/trace',
         '/dev/shm/trace', '/etc/trace', '/venv/trace', '/trace')
import contextlib, ctypes, errno, fcntl, json, os, resource, select, signal
import socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
PAIR = int(sys.argv[-1])
PORTS = (20_000 + PAIR, 40_000 + PAIR)
"""

WRITE = (
  PATHS
  + r"""
if sys.argv[-2] == '0':
  time.sleep(float(sys.argv[-3]))
  os._exit(0)
held = []
def attempt(act, *arguments):
  try:
    held.append(act(*arguments))
  except (OSError, ValueError, OverflowError):
    pass
def connect(port):
  with socket.create_server(('127.0.0.1', port), backlog=64) as server:
    for _ in range(5):
      a = socket.create_connection(('127.0.0.1', port))
      b = server.accept()[0]
      b.close(); a.recv(1); a.close()
def listen(name):
  s = socket.socket(socket.AF_UNIX)
  s.bind(name); s.listen(1)
  return s
def write(path):
  with open(path, 'wb') as f:
    f.write(b'x' * 100_000)
def lock(path):
  f = os.open(path, os.O_RDONLY)
  fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
  return f
for port in PORTS:
  attempt(connect, port)
for name in NAMES:
  attempt(write, name)
  attempt(listen, name + '.s' if name[0] == '/' else name)
for path in SHARED:
  attempt(os.utime, path)
  attempt(os.chmod, path, 0o777)
  attempt(os.setxattr, path, 'user.trace', b'x')
  attempt(lock, path)
for path in ('/proc/self', '/proc/1', '/proc/self/net', '/proc/sys/kernel'):
  for name in os.listdir(path) if os.path.isdir(path) else ():
    if name not in ('mem', 'comm'):
      attempt(write, f'{path}/{name}')
attempt(libc.semget, 77, 3, 0o1666)
attempt(libc.shmget, 77, 4096, 0o1666)
attempt(libc.msgget, 77, 0o1666)
attempt(libc.mq_open, b'/trace', 0o102, 0o666, None)
for number in (248, 250):
  attempt(libc.syscall, number, b'user', b'trace', b'x', 1, -3)
attempt(libc.sethostname, b'trace', 5)
attempt(os.setpriority, os.PRIO_PROCESS, 1, 10)
attempt(os.setpriority, os.PRIO_USER, os.getuid(), 10)
attempt(os.sched_setaffinity, 1, {0})
attempt(resource.prlimit, 1, resource.RLIMIT_NOFILE, (50, 50))
attempt(os.nice, 5)
for _ in range(2000):
  for end in os.pipe():
    os.close(end)
for index in range(50):
  attempt(write, f'/tmp/many{index}')
  attempt(socket.socketpair)
attempt(bytearray, 30 << 20)
for _ in range(6):  # what ought to die with the run
  if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
      time.sleep(30)
    os._exit(0)
deadline = time.process_time() + 0.05
while time.process_time() < deadline:
  pass
time.sleep(float(sys.argv[-3]))
os._exit(0)
"""
)

READ = (
  PATHS
  + r"""
seen = {}
def look(name, act, *arguments):
  try:
    value = act(*arguments)
  except OSError as error:
    value = error.errno
  if isinstance(value, (tuple, list)):
    for index, item in enumerate(value):
      seen[f'{name} {index}'] = item
  else:
    seen[name] = value
def stat(path):
  s = os.lstat(path)
  for kind in ('atime', 'mtime', 'ctime'):
    age = time.time_ns() - getattr(s, f'st_{kind}_ns')
    seen[f'{kind} {path} is recent'] = age < 1_000_000_000
  return (s.st_mode, s.st_ino, s.st_dev, s.st_nlink, s.st_uid, s.st_size,
          s.st_blocks, s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)
def words(path):
  with open(path, 'rb') as f:
    return f.read(20_000).decode('latin-1').split()[:800]
def taken(port):
  with socket.socket() as s:
    s.bind(('127.0.0.1', port))
def answers(family, kind, address):
  with socket.socket(family, kind) as s:
    s.settimeout(1)
    s.connect(address)
def lock(path):
  f = os.open(path, os.O_RDONLY)
  try:
    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
  finally:
    os.close(f)
def inode(make):
  ends = make()
  try:
    return [os.fstat(end).st_ino for end in ends]
  finally:
    for end in ends:
      os.close(end)
# Before anything opens a descriptor or a port of its own.
def port():
  return socket.create_server(('127.0.0.1', 0)).getsockname()[1]
def sockets():
  return [os.dup(x.fileno()) for x in socket.socketpair()]
look('free port', port)
look('pipe', inode, os.pipe)
look('socket', inode, sockets)
look('memfd', lambda: inode(lambda: [os.memfd_create('x')]))
TIMES = {'stat', 'sched', 'schedstat', 'io', 'smaps', 'smaps_rollup', 'maps',
         'statm', 'pagemap', 'mem', 'numa_maps', 'kpagecount', 'auxv',
         'clear_refs', 'syscall', 'status', 'stack'}
for top in ('/proc/self', '/proc/1', '/proc/self/net', '/proc/sys/kernel'):
  look(top, lambda: sorted(os.listdir(top)))
  for name in sorted(os.listdir(top)) if os.path.isdir(top) else ():
    path = f'{top}/{name}'
    if os.path.isfile(path) and name not in TIMES:
      look(path, words, path)
look('/proc', lambda: sum(x.isdigit() for x in os.listdir('/proc')))
for name in ('ipc', 'mnt', 'net', 'pid', 'time', 'user', 'uts', 'cgroup'):
  look(f'ns {name}', os.readlink, f'/proc/self/ns/{name}')
for path in SHARED:
  look(f'stat {path}', stat, path)
  look(f'lock {path}', lock, path)
  look(f'xattr {path}', os.listxattr, path)
for tree in TREES:
  for folder, folders, files in os.walk(tree):
    for name in sorted(folders + files)[:50]:
      path = f'{folder}/{name}'
      look(f'stat {path}', stat, path)
for path in ('/', '/usr/lib', '/tmp', '/work', '/etc', '/venv', '/python/lib',
             '/packages', '/dev', '/proc'):
  look(f'statvfs {path}', lambda: tuple(os.statvfs(path)))
for index, port in enumerate(PORTS):
  look(f'port {index}', taken, port)
  address = '127.0.0.1', port
  look(f'answer {index}', answers, socket.AF_INET, socket.SOCK_STREAM, address)
for name in NAMES:
  name = name + '.s' if name[0] == '/' else name
  look(f'unix {name!r}', answers, socket.AF_UNIX, socket.SOCK_STREAM, name)
def errno_of(call, *arguments):
  ctypes.set_errno(0)
  return [call(*arguments), ctypes.get_errno()]
look('sem', errno_of, libc.semget, 77, 0, 0)
look('shm', errno_of, libc.shmget, 77, 0, 0)
look('msg', errno_of, libc.msgget, 77, 0)
look('mq', errno_of, libc.mq_open, b'/trace', 0)
look('key', errno_of, libc.syscall, 249, b'user', b'trace', None, -3)
facts = (ctypes.c_ulong * 64)()
look('sysinfo', errno_of, libc.sysinfo, facts)
# Fields of 8 bytes, without the uptime.
for index in range(1, 14):
  seen[f'fact {index}'] = facts[index] if seen['sysinfo 0'] == 0 else 0
look('uname', lambda: list(os.uname()))
look('ids', lambda: [os.getpid(), os.getppid(), os.getuid(), os.getgid()])
look('groups of processes', lambda: [os.getpgrp(), os.getsid(0)])
look('groups', os.getgroups)
for name in dir(resource):
  if name.startswith('RLIMIT_'):
    look(name, resource.getrlimit, getattr(resource, name))
    look(f'{name} of 1', resource.prlimit, 1, getattr(resource, name))
look('nice', lambda: [os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, 1)])
look('cores', lambda: sorted(os.sched_getaffinity(0)))
look('umask', os.umask, 0o22)
look('policy', lambda: [os.sched_getscheduler(0), libc.prctl(30)])
seen['environment'] = sorted(os.environ.items())
with os.fdopen(3, 'w') as f:
  json.dump(seen, f)
os._exit(0)
"""
)
