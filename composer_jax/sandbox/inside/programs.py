"""Turns a fork of the zygote into the program of a box.

Standard library only: runs inside the sandbox, in the processes that the zygote
forks for one program.
"""

import atexit
import contextlib
import dataclasses
import os
import resource
import runpy
import shutil
import signal
import sys
import threading
import types

from composer_jax.sandbox.inside import confine, runner


@dataclasses.dataclass(frozen=True)
class RunFolders:
  """Folders of one run.

  Attributes:
    work: folder of the workspace.
    scratch: writable folder that ends with the run.
  """

  work: str
  scratch: str


def mount_place(config: dict, box: int) -> RunFolders:
  """Mounts the run's folders in its own namespace.

  The folders of all boxes and images are unmounted, so that the program sees
  its own workspace only.
  """
  limits = config['limits']
  uid = 0 if config['uid'] is None else config['uid']
  confine.bind(f'{config["boxes"]}/{box}/merged', config['workspace'])
  num_files = 4096 + limits['file_bytes'] // 4096
  confine.mount_workspace('/tmp', limits['file_bytes'], num_files)
  os.chmod('/tmp', 0o1777)
  os.mkdir('/tmp/home', 0o755)
  os.chown('/tmp/home', uid, uid)
  confine.unmount(config['boxes'])
  confine.leave_shared()
  confine.mount_proc(config['proc_options'])
  return RunFolders(config['workspace'], '/tmp')


def make_place(config: dict, box: int) -> RunFolders:
  """Makes the run's folders without namespaces; `sweep` removes them."""
  scratch = os.path.join(config['scratch'], f'run-{os.getpid()}')
  os.makedirs(f'{scratch}/home')
  owner = config['uid']
  if owner is not None:
    for path in (scratch, f'{scratch}/home'):
      os.chown(path, owner, owner)
  return RunFolders(f'{config["boxes"]}/{box}/merged', scratch)


def sweep(scratch: str) -> None:
  """Removes the folders of runs without namespaces."""
  for name in os.listdir(scratch):
    if name.startswith('run-'):
      shutil.rmtree(os.path.join(scratch, name), ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class BoxProgram:
  """The program that a forked process becomes.

  Attributes:
    argv: program and arguments; with `warm` the arguments after `python -I`.
    warm: true if the running interpreter itself becomes the program.
    environment: all variables of the program.
    python: path of the sandbox's interpreter.
  """

  argv: list[str]
  warm: bool
  environment: dict[str, str]
  python: str


def resolve(config: dict, request: dict, place: RunFolders) -> BoxProgram:
  """Makes a program of a request, with the paths of its folders."""
  environment = {
      **config['environment'], 'HOME': f'{place.scratch}/home',
      'TMPDIR': place.scratch, 'PWD': place.work,
      **request['environment'],
  }  # fmt: skip
  argv = request['argv']
  warm = request['warm'] and argv[0] in ('-m', '-c', runner.CALL)
  if request['warm'] and not warm:
    # Like -I, but with the hash seed of the environment.
    argv = [config['python'], '-s', '-P', *argv]
  return BoxProgram(argv, warm, environment, config['python'])


def take_stdin(data: bytes) -> None:
  """Makes descriptor 0 an anonymous file with these bytes."""
  descriptor = os.memfd_create('stdin')
  with open(descriptor, 'wb', closefd=False) as file:
    file.write(data)
  os.lseek(descriptor, 0, os.SEEK_SET)
  os.dup2(descriptor, 0)
  os.close(descriptor)


def enter(program: BoxProgram, place: RunFolders) -> None:
  """Sets environment, signals and folder, as the user of the program."""
  os.environ.clear()
  os.environ.update(program.environment)
  signal.signal(signal.SIGINT, signal.default_int_handler)
  os.umask(0o022)
  try:
    os.chdir(place.work)
  except OSError as error:  # programs can close the folder
    os.write(2, f'cannot enter the workspace: {error}\n'.encode())
    os._exit(127)


def become(program: BoxProgram) -> None:
  """Becomes the program; never returns. Errors are now the program's."""
  if program.warm:
    _go_on(program)
  # The interpreter ignores SIGPIPE, which programs would inherit.
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)
  signal.signal(signal.SIGINT, signal.SIG_DFL)
  try:
    os.execvpe(program.argv[0], program.argv, program.environment)
  except (OSError, ValueError) as error:
    os.write(2, f'{program.argv[0]}: {error}\n'.encode())
    os._exit(126 if isinstance(error, PermissionError) else 127)


def _go_on(program: BoxProgram) -> None:
  """Runs as `python -I ARGV` would, in this interpreter."""
  main = types.ModuleType('__main__')
  vars(main)['__builtins__'] = __builtins__
  sys.modules['__main__'] = main
  kind, *arguments = program.argv
  sys.orig_argv[:] = [program.python, '-I', *program.argv]
  code = 1
  try:
    if kind == runner.CALL:
      runner.main()
    elif kind == '-m':
      sys.argv[:] = ['-m', *arguments[1:]]
      runpy.run_module(arguments[0], run_name='__main__', alter_sys=True)
    else:
      sys.argv[:] = ['-c', *arguments[1:]]
      exec(compile(arguments[0], '<string>', 'exec'), main.__dict__)
    code = 0
  except SystemExit as error:
    code = _exit_code(error)
  # As the interpreter does with an uncaught exception.
  except BaseException as error:  # noqa: BLE001
    # Without this frame, which is not the program's.
    trace = error.__traceback__ and error.__traceback__.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
  finally:
    _finish(code)


def _exit_code(error: SystemExit) -> int:
  if error.code is None:
    return 0
  if isinstance(error.code, int):
    return error.code & 0xFF
  print(error.code, file=sys.stderr)
  return 1


def _finish(code: int) -> None:
  """Ends as an interpreter does, but without freeing every object."""
  try:
    # Ends thread pools and joins threads; it has no public name.
    vars(threading)['_shutdown']()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(Exception):
        stream.flush()
  finally:
    os._exit(code)


def set_limits(config: dict, processes: int) -> None:
  """Sets limits; that of address space only where no cgroup counts memory."""
  limits = dict(config['limits'])
  if config['counts_memory']:
    limits['memory_bytes'] = resource.RLIM_INFINITY
  confine.set_limits(limits, processes)
