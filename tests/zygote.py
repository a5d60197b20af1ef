"""A process that imports libraries once and forks one process per command.

Imports are most of the cost of a short command, so tests that start many pay
for them once; `programs.py` is the other side. A fork does what a process that
`python -m MODULE` or `python -c CODE` starts would do: it has its own session,
environment, arguments and `__main__`, and can be killed alone. This process
imports no main, starts no thread and no backend of JAX. Unlike new processes,
its forks share a seed of hashes.

Its standard input is a socket with requests, lines of JSON that come with the
descriptors of standard output and error. It answers each with the id of the new
process, and with its exit status once it has ended. At the end of its input it
ends, and kills the process that it waits for.
"""

import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import sys
import tempfile
import types

_TRUE = ('1', 'on', 't', 'true', 'y', 'yes')


def _configure_jax(event: str, arguments: tuple) -> None:
  """Passes on to JAX what is set of its variables, which it read when imported.

  An audit hook, so that it also sees what a main sets in `os.environ`.
  """
  if event != 'os.putenv':
    return
  if 'jax' not in sys.modules:
    return  # JAX will read them itself.
  config = sys.modules['jax'].config
  name, text = map(os.fsdecode, arguments)
  option = name.lower()
  # Other variables of these names are read when they are needed.
  if name.startswith('JAX_') and hasattr(config, option):
    default = getattr(config, option)
    if isinstance(default, bool):
      value = text.lower() in _TRUE
    else:
      value = text if default is None else type(default)(text)
    config.update(option, value)


def _hide_own_frames(kind, error, trace) -> None:
  while trace and trace.tb_frame.f_code is not become.__code__:
    trace = trace.tb_next
  shown = trace and trace.tb_next
  sys.__excepthook__(kind, error.with_traceback(shown), shown)


def become(
  request: dict, outputs: list[int], set_by_imports: dict[str, str]
) -> None:
  """Makes this process one that the command started; the caller must end."""
  os.setsid()
  signal.set_wakeup_fd(-1)
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  descriptors = os.open(os.devnull, os.O_RDONLY), *outputs
  for target, descriptor in enumerate(descriptors):
    os.dup2(descriptor, target)
    os.close(descriptor)
  sys.addaudithook(_configure_jax)
  os.environ.clear()
  os.environ.update(set_by_imports | request['env'])
  gc.enable()
  # What modules remember of the first process.
  importlib.invalidate_caches()
  if 'numpy' in sys.modules:
    sys.modules['numpy'].random.seed()
  tempfile.tempdir = None
  sys.excepthook = _hide_own_frames
  main = sys.modules['__main__'] = types.ModuleType('__main__')
  option, program, *arguments = request['command']
  sys.argv = [option, *arguments]
  if option == '-m':
    runpy._run_module_as_main(program)
  else:
    sys.path[0] = ''  # The working directory, as of a module.
    exec(compile(program, '<string>', 'exec'), main.__dict__)


def _receive(client: socket.socket) -> tuple[dict | None, list[int]]:
  """Returns a request and its descriptors; None at the end of the input."""
  line, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 2)
  while line and not line.endswith(b'\n'):
    line += client.recv(1 << 16)
  return json.loads(line) if line else None, descriptors


def _wait(pid: int, children: int, client: socket.socket) -> int:
  """Returns the exit status of a child; ends with it if the input ends."""
  while True:
    ready, _, _ = select.select([client, children], [], [])
    if children in ready:
      os.read(children, 1)
      ended, status = os.waitpid(pid, os.WNOHANG)
      if ended:
        return os.waitstatus_to_exitcode(status)
    elif ready:
      # No request comes before the answer to the last one.
      os.killpg(pid, signal.SIGKILL)
      sys.exit()


def _num_threads() -> int:
  tasks = pathlib.Path('/proc/self/task')
  return len(list(tasks.iterdir())) if tasks.exists() else 1


def main() -> None:
  # Before numpy is imported: threads of its BLAS would not survive a fork.
  os.environ['OPENBLAS_NUM_THREADS'] = '1'
  before = dict(os.environ)
  # Imports make many objects, and next to none of them is garbage.
  gc.disable()
  client = socket.socket(fileno=0)
  children, writer = os.pipe()
  os.set_blocking(writer, False)
  signal.set_wakeup_fd(writer)
  signal.signal(signal.SIGCHLD, lambda *_: None)
  while True:
    request, outputs = _receive(client)
    if request is None:
      return
    for name in request['imports']:
      importlib.import_module(name)
    # JAX sets some, unless they are set.
    set_by_imports = {k: v for k, v in os.environ.items() if k not in before}
    assert _num_threads() == 1, 'a thread would be missing in forks'
    # A fork that searched or freed these objects would copy them.
    gc.freeze()
    pid = os.fork()
    if not pid:
      client.detach()
      os.close(children)
      os.close(writer)
      become(request, outputs, set_by_imports)
      return
    for descriptor in outputs:
      os.close(descriptor)
    client.sendall(b'%d\n' % pid)
    client.sendall(b'%d\n' % _wait(pid, children, client))


if __name__ == '__main__':
  main()
