"""Attempts to leave a box, each in a process of its own, and their report.

Run inside a box: `python escape_probes.py ARGUMENTS`. Nothing outside is
contacted: a probe checks that the call itself is refused, or aims at sockets
and files that the test opened on its own machine. Standard library only.
"""

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_NET, NEW_MOUNTS = 0x10000000, 0x40000000, 0x00020000
NEW_CGROUP, NEW_TIME = 0x02000000, 0x00000080
CLONE, CLONE3 = {'x86_64': (56, 435)}.get(platform.machine(), (220, 435))
# name: (x86-64, aarch64), arguments
CALLS = {
  'unshare a user': ((272, 97), (NEW_USER,)),
  'unshare mounts': ((272, 97), (NEW_MOUNTS,)),
  'unshare cgroups': ((272, 97), (NEW_CGROUP,)),
  'unshare time': ((272, 97), (NEW_TIME,)),
  'clone a user': ((56, 220), (NEW_USER | NEW_NET | 17, 0, 0, 0, 0)),
  'setns': ((308, 268), (0, 0)),
  'mount': ((165, 40), (0, 0, 0, 0, 0)),
  'umount': ((166, 39), (0, 2)),
  'open_tree': ((428, 428), (-100, 0, 0)),
  'move_mount': ((429, 429), (-1, 0, -1, 0, 0)),
  'fsopen': ((430, 430), (0, 0)),
  'mount_setattr': ((442, 442), (-100, 0, 0, 0, 0)),
  'pivot_root': ((155, 41), (0, 0)),
  'chroot': ((161, 51), (0,)),
  'keyctl': ((250, 219), (0, 0)),
  'add_key': ((248, 217), (0, 0, 0, 0)),
  'request_key': ((249, 218), (0, 0, 0, 0)),
  'userfaultfd': ((323, 282), (0,)),
  'ptrace': ((101, 117), (16, 1, 0, 0)),
  'process_vm_readv': ((310, 270), (1, 0, 0, 0, 0, 0)),
  'pidfd_getfd': ((438, 438), (0, 0, 0)),
  'kcmp': ((312, 272), (1, 1, 0, 0, 0)),
  'bpf': ((321, 280), (0, 0, 0)),
  'perf_event_open': ((298, 241), (0, 0, 0, 0, 0)),
  'io_uring_setup': ((425, 425), (1, 0)),
  'open_by_handle_at': ((304, 265), (0, 0, 0)),
  'fanotify_init': ((300, 262), (0, 0)),
  'init_module': ((175, 105), (0, 0, 0)),
  'kexec_load': ((246, 104), (0, 0, 0, 0)),
  'reboot': ((169, 142), (0, 0, 0, 0)),
  'swapon': ((167, 224), (0, 0)),
  'syslog': ((103, 116), (10, 0, 0)),
  'sethostname': ((170, 161), (0, 0)),
  'clock_settime': ((227, 112), (0, 0)),
  'quotactl': ((179, 60), (0, 0, 0, 0)),
  'acct': ((163, 89), (0,)),
  'memfd_secret': ((447, 447), (0,)),
}


def content(path, count=-1):
  with open(path, errors='replace') as file:
    return file.read(count)


def name_of(error):
  return errno.errorcode.get(error.errno, str(error.errno))


def attempt(action, *arguments):
  """'done', or the name of the error."""
  try:
    action(*arguments)
  except OSError as error:
    return name_of(error)
  return 'done'


def system_call(number, *arguments):
  ctypes.set_errno(0)
  result = LIBC.syscall(
    ctypes.c_long(number), *(ctypes.c_long(x) for x in arguments)
  )
  if result == 0 and number == CLONE:
    os._exit(0)
  return errno.errorcode.get(ctypes.get_errno(), 'done')


def probe_system_calls(_):
  column = 0 if platform.machine() == 'x86_64' else 1
  return {
    name: system_call(numbers[column], *arguments)
    for name, (numbers, arguments) in CALLS.items()
  }


def probe_clone3(_):
  return system_call(CLONE3, 0, 0)


def probe_other_architectures(_):
  """32-bit calls have other numbers, which a careless filter lets pass."""
  if platform.machine() != 'x86_64':
    return 'none'
  page = ctypes.create_string_buffer(4096)  # only its machine code matters
  memory = LIBC.mmap
  memory.restype = ctypes.c_void_p
  place = memory(0, 4096, 7, 0x22, -1, 0)
  if place in (None, ctypes.c_void_p(-1).value):
    return 'no executable memory'
  # mov eax, 20 (getpid of i386); int 0x80; ret
  code = b'\xb8\x14\x00\x00\x00\xcd\x80\xc3'
  ctypes.memmove(place, code + page.raw[: 64 - len(code)], 64)
  got = ctypes.CFUNCTYPE(ctypes.c_int)(place)()
  return 'done' if got > 0 else 'refused'


def probe_x32_calls(_):
  return system_call(0x40000000 | 41, 40, 1, 0)


def probe_families(_):
  opened, errors = [], set()
  for family in range(1, 46):
    try:
      socket.socket(family, socket.SOCK_DGRAM, 0).close()
      opened.append(family)
    except OSError as error:
      errors.add(name_of(error))
  return [opened, sorted(errors)]


def probe_raw_sockets(_):
  return [
    attempt(socket.socket, family, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    for family in (socket.AF_INET, socket.AF_INET6)
  ]


def probe_host_listeners(arguments):
  outcomes = []
  for port in arguments['ports']:
    try:
      with socket.socket(socket.AF_INET) as client:
        client.settimeout(0.5)
        client.connect(('127.0.0.1', port))
        client.send(b'x')
      outcomes.append('done')
    except OSError as error:
      outcomes.append(type(error).__name__)
  return outcomes


def probe_host_datagram(arguments):
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.sendto(b'x', ('127.0.0.1', arguments['datagram_port']))
  return 'sent'


def probe_abstract_socket(arguments):
  with socket.socket(socket.AF_UNIX) as client:
    return attempt(client.connect, '\0' + arguments['abstract'])


def probe_loopback_inside(_):
  with socket.create_server(('127.0.0.1', 0)) as server:
    with socket.create_connection(server.getsockname()):
      return 'connected'


def probe_interfaces(_):
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    room = ctypes.create_string_buffer(40 * 64)
    request = bytearray(
      struct.pack('iiQ', len(room), 0, ctypes.addressof(room))
    )
    fcntl.ioctl(probe, 0x8912, request)  # SIOCGIFCONF
    used = struct.unpack_from('i', request)[0]
  names = [room.raw[at : at + 16].rstrip(b'\0') for at in range(0, used, 40)]
  return sorted({name.decode().split('\0')[0] for name in names})


def probe_processes(_):
  """Numbers that are neither ours nor our parents'."""
  own, family = os.getpid(), set()
  while own:
    family.add(own)
    text = content(f'/proc/{own}/stat') if own in visible() else ''
    own = int(text.rpartition(')')[2].split()[1]) if text else 0
  return sorted(visible() - family - {1})


def visible():
  return {int(name) for name in os.listdir('/proc') if name.isdigit()}


def probe_first_process(_):
  seen = {}
  for name in ('environ', 'mem', 'maps', 'root', 'cwd', 'exe', 'fd', 'ns/net'):
    path = f'/proc/1/{name}'
    try:
      if name in ('root', 'cwd', 'exe', 'ns/net'):
        os.readlink(path)
      elif name == 'fd':
        os.listdir(path)
      else:
        content(path, 1)
      seen[name] = 'done'
    except OSError as error:
      seen[name] = name_of(error)
  return seen


def probe_kernel_settings(_):
  """What of /proc and /sys belongs to the machine rather than to processes."""
  paths = (
      '/proc/sys/kernel/core_pattern', '/proc/sys/kernel/modprobe',
      '/proc/sysrq-trigger', '/proc/kcore', '/proc/kallsyms', '/proc/kmsg',
      '/proc/config.gz', '/proc/keys', '/proc/interrupts', '/proc/mounts',
      '/proc/net/tcp', '/proc/bus', '/proc/acpi', '/proc/scsi',
      '/sys/kernel', '/sys/fs/cgroup', '/sys/class/net', '/sys/firmware',
      '/sys/devices', '/sys/block', '/sys/kernel/debug', '/sys/module',
  )  # fmt: skip
  readable = []
  for path in paths:
    try:
      os.listdir(path) if os.path.isdir(path) else content(path, 1)
      readable.append(path)
    except OSError:
      continue
  return readable


def probe_writable_kernel_files(_):
  wrote = []
  for top in ('/proc', '/sys'):
    for folder, names, files in os.walk(top):
      if folder == '/proc':
        names[:] = [x for x in names if not x.isdigit() and x != 'self']
      for name in files:
        path = f'{folder}/{name}'
        if folder.count('/') < 4 and os.access(path, os.W_OK):
          wrote.append(path)
      if folder.count('/') > 3:
        del names[:]
  return wrote


def probe_mountinfo(arguments):
  texts = []
  for name in ('mountinfo', 'mounts', 'mountstats', 'maps', 'cgroup'):
    try:
      texts.append(content(f'/proc/self/{name}'))
    except OSError:
      continue
  return sorted(x for x in arguments['secret_names'] if x in '\n'.join(texts))


def probe_host_files(arguments):
  return [path for path in arguments['host_paths'] if os.path.lexists(path)]


def probe_other_boxes(_):
  paths = []
  for top in ('/boxes', '/images'):
    for folder, names, files in os.walk(top):
      paths += [os.path.join(folder, name) for name in (*names, *files)]
  return [path for path in paths if not path.endswith('escape_probes.py')]


def probe_writable_folders(_):
  wrote = set()
  for folder, names, _ in os.walk('/'):
    try:
      os.close(os.open(f'{folder}/.x', os.O_CREAT | os.O_WRONLY, 0o600))
      os.unlink(f'{folder}/.x')
      wrote.add('/'.join(folder.split('/')[:2]))
    except OSError:
      pass
    if folder.count('/') > 2 or folder.startswith('/proc'):
      del names[:]
  return sorted(wrote)


def probe_programs_can_be_changed(_):
  """Through the descriptor of a program that runs, or by its name."""
  names = [sys.executable, '/bin/sh', '/usr/bin/env', os.__file__, __file__]
  outcomes = [attempt(os.open, name, os.O_WRONLY) for name in names]
  outcomes.append(attempt(os.open, '/proc/self/exe', os.O_WRONLY))
  return [error for error in outcomes if error == 'done']


def probe_set_user_programs(_):
  """Programs that would give rights, on file systems that let them."""
  folders = []
  for top in ('/usr/bin', '/bin', '/work', '/tmp', '/packages', '/venv'):
    if os.path.isdir(top) and not os.statvfs(top).f_flag & os.ST_NOSUID:
      folders.append(top)
  path = os.path.join(os.environ.get('TMPDIR', '.'), 'mine')
  os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
  attempt(os.chmod, path, 0o6755)
  attempt(os.chown, path, 0, 0)
  return [*folders, *(['chown'] if os.stat(path).st_uid == 0 else [])]


def probe_devices(_):
  names = [
    f'{folder}/{name}'
    for folder, _, files in os.walk('/dev')
    for name in files
    if not os.path.islink(f'{folder}/{name}')
  ]
  made = attempt(os.mknod, 'disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))
  memory = attempt(os.mknod, 'mem', stat.S_IFCHR | 0o600, os.makedev(1, 1))
  return [sorted(names), made, memory]


def probe_terminal(_):
  opened = attempt(os.open, '/dev/tty', os.O_RDWR)
  typed = []
  for descriptor in (0, 1, 2):
    try:
      fcntl.ioctl(descriptor, 0x5412, b'x')  # TIOCSTI: types for the user
      typed.append(descriptor)
    except OSError:
      continue
  return [opened, typed, [x for x in (0, 1, 2) if os.isatty(x)]]


def probe_identity(_):
  data = (ctypes.c_uint32 * 6)(*[9] * 6)
  header = (ctypes.c_uint32 * 2)(0x20080522, 0)
  LIBC.capget(header, data)
  return {
    'uids': list(os.getresuid()),
    'gids': list(os.getresgid()),
    'groups': [x for x in os.getgroups() if x != os.getgid()],
    'capabilities': list(data),
    'no_new_privileges': LIBC.prctl(39, 0, 0, 0, 0),
    'bounding': [x for x in range(41) if LIBC.prctl(23, x, 0, 0, 0) == 1],
    'ambient': [x for x in range(41) if LIBC.prctl(47, 1, x, 0, 0) == 1],
    'root again': [
      attempt(os.setuid, 0),
      attempt(os.setgid, 0),
      attempt(os.setgroups, [0]),
    ],
  }


def probe_limits_can_be_raised(_):
  raised = []
  for name in dir(resource):
    if not name.startswith('RLIMIT_'):
      continue
    kind = getattr(resource, name)
    soft, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY:
      continue
    try:
      resource.setrlimit(kind, (soft, hard + 1))
      raised.append(name)
    except (OSError, ValueError):
      continue
  return raised


def probe_priority(_):
  return [
    attempt(os.setpriority, os.PRIO_PROCESS, 0, -5),
    attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(10)),
  ]


def probe_signals(arguments):
  outcomes = [attempt(os.kill, pid, 0) for pid in arguments['host_pids']]
  return [x for x in outcomes if x == 'done']


def probe_environment(_):
  return sorted(os.environ)


def probe_descriptors(arguments):
  """A folder or socket left open would bypass every mount."""
  return arguments['descriptors']


def inherited():
  kinds_of = {}
  for descriptor in range(1024):
    try:
      mode = os.fstat(descriptor).st_mode
    except OSError:
      continue
    kinds = {'file': stat.S_ISREG, 'pipe': stat.S_ISFIFO, 'null': stat.S_ISCHR}
    kinds_of[descriptor] = [k for k, test in kinds.items() if test(mode)]
  return kinds_of


def probe_shared_memory(_):
  seen = LIBC.shmget(4242, 4096, 0)
  LIBC.shmget(4242, 4096, 0o1777 | 0o1000)
  return seen


def probe_set_user_shell(_):
  text = subprocess.run(
    ['sh', '-c', 'su -c id </dev/null; sudo -n id'],
    check=False,
    capture_output=True,
    timeout=10,
  ).stdout
  return 'uid=0' in text.decode('ascii', 'replace')


def probe_core_dumps(_):
  pid = os.fork()
  if not pid:
    os.abort()
  return os.WCOREDUMP(os.waitpid(pid, 0)[1])


def probe_threads_and_processes_work(_):
  import threading

  seen = []
  thread = threading.Thread(target=seen.append, args=(1,))
  thread.start()
  thread.join()
  done = subprocess.run(['sh', '-c', 'exit 5'], check=False, timeout=10)
  return [*seen, done.returncode]


def isolated(probe, arguments):
  """Runs one probe in a child, because some end their process."""
  read, write = os.pipe()
  pid = os.fork()
  if pid == 0:
    os.close(read)
    try:
      value = probe(arguments)
    except OSError as error:
      value = f'raised {name_of(error)}'
    # Otherwise the test would see an empty pipe.
    except Exception as error:  # noqa: BLE001
      value = f'failed: {type(error).__name__}: {error}'
    os.write(write, json.dumps(value).encode())
    os._exit(0)
  os.close(write)
  data, end = b'', time.monotonic() + 15
  while select.select([read], [], [], max(0, end - time.monotonic()))[0]:
    piece = os.read(read, 65536)
    if not piece:
      break
    data += piece
  os.close(read)
  os.kill(pid, signal.SIGKILL)
  _, status = os.waitpid(pid, 0)
  if data:
    return json.loads(data)
  return f'died of {os.waitstatus_to_exitcode(status)}'


def main():
  arguments = json.loads(sys.argv[1])
  arguments['descriptors'] = inherited()
  report = {
    name: isolated(globals()[f'probe_{name}'], arguments)
    for name in arguments['probes']
  }
  os.write(3, json.dumps(report).encode())


if __name__ == '__main__':
  main()
