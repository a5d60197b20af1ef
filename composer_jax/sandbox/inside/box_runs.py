"""The file system of a zygote, its keeper, and the start of its programs.

Standard library only: runs inside the sandbox.
"""

import functools
import importlib
import os
import site
import socket
import sys
from collections.abc import Callable

from composer_jax.sandbox.inside import beneath, confine, keeper, programs, wire

_USERS = (
  'root:x:0:0:root:{home}:/bin/sh\nagent:x:{uid}:{uid}:agent:{home}:/bin/sh\n'
)
_GROUPS = 'root:x:0:\nagent:x:{uid}:\n'
_HOSTS = '127.0.0.1 localhost\n::1 localhost\n'
_HOME = '/tmp/home'


def prepare(zygote) -> int:
  """Prepares the file system, starts the keeper and returns its pid."""
  config = zygote.config
  config['counts_memory'] &= zygote.cgroup != 'none'
  _furnish(config)
  overlay = config['proc_options'] = None
  if zygote.namespaces:
    config['proc_options'] = confine.working_proc()
    overlay = confine.working_overlay(config['boxes'])
  channel = socket.socket(fileno=config['keeper'])
  pid = os.fork()
  if pid == 0:
    zygote.control.close()
    keeper.serve(keeper.Keeper(config, overlay), channel)
    os._exit(0)
  channel.close()
  _adopt(config)
  zygote.about |= {
    'overlay': overlay is not None,
    'proc': config['proc_options'] is not None,
  }
  return pid


def _furnish(config: dict) -> None:
  """Writes the few files that programs expect, and a virtual environment."""
  if config['level'] != 'rlimits':
    for folder in ('/etc', config['venv'], config['boxes']):
      confine.mount_workspace(folder, 1 << 40, 1 << 24)
      os.chmod(folder, 0o755)
    _write_etc(config['uid'])
    if config['images']:
      # Below the folder of boxes, which each run unmounts in one step.
      images = f'{config["boxes"]}/images'
      os.mkdir(images, 0o755)
      confine.bind(config['images'], images)
      confine.unmount(config['images'])
      config['images'] = images
  else:
    os.mkdir(config['venv'], 0o755)
    os.mkdir(config['boxes'], 0o711)
  _write_environment(config)
  if config['level'] != 'rlimits':
    for folder in ('/etc', config['venv']):
      confine.make_read_only(folder)


def _write_etc(uid: int | None) -> None:
  uid = 65534 if uid is None else uid
  for name, text in (
    ('passwd', _USERS.format(uid=uid, home=_HOME)),
    ('group', _GROUPS.format(uid=uid)),
    ('hosts', _HOSTS),
    ('nsswitch.conf', 'passwd: files\ngroup: files\nhosts: files\n'),
  ):
    with open(f'/etc/{name}', 'w') as file:
      file.write(text)
  if os.path.isdir('/boot/alternatives'):
    os.symlink('/boot/alternatives', '/etc/alternatives')


def _write_environment(config: dict) -> None:
  """Writes a virtual environment of the interpreter and the given packages."""
  venv = config['venv']
  name = f'python{sys.version_info.major}.{sys.version_info.minor}'
  library = f'{venv}/lib/{name}'
  os.mkdir(f'{venv}/bin')
  os.makedirs(library)
  with open(f'{venv}/pyvenv.cfg', 'w') as file:
    home = os.path.dirname(config['interpreter'])
    file.write(f'home = {home}\ninclude-system-site-packages = false\n')
  for link in ('python', 'python3', name):
    os.symlink(config['interpreter'], f'{venv}/bin/{link}')
  if config['packages']:
    os.symlink(config['packages'], f'{library}/site-packages')
  else:
    os.mkdir(f'{library}/site-packages')


def _adopt(config: dict) -> None:
  """Becomes the environment's interpreter, with pytest imported if it is there.

  Then also with modules that every run of it imports before its first test.
  """
  sys.executable = config['python']
  site.main()
  try:
    pytest_config = importlib.import_module('_pytest.config')
  except ModuleNotFoundError:
    return
  names = [f'_pytest.{name}' for name in pytest_config.default_plugins]
  for name in ('pytest', 'pdb', *names):
    importlib.import_module(name)


def init(zygote, report: int) -> Callable[[], None]:
  """Prepares a program, runs it in a child and outlives it.

  Returns:
    In the child only: the function that becomes the program. It must be called
    after the frames of the zygote have been left, so that the program cannot
    reach their variables.
  """
  code = 1
  try:
    os.setsid()
    request, (stdin,), descriptors = wire.receive(zygote.control)
    confine.join(descriptors[2:])
    arrange = programs.mount_place if zygote.namespaces else programs.make_place
    place = arrange(zygote.config, request['box'])
    program = programs.resolve(zygote.config, request, place)
    pid = os.fork()
    if pid == 0:
      _start(zygote, request, stdin, (*descriptors[:2], report))
      programs.enter(program, place)
      return functools.partial(programs.become, program)
    for descriptor in descriptors:
      os.close(descriptor)
    confine.outlive(pid, report, zygote.namespaces)
    code = 0
  except (OSError, ValueError, beneath.RefusedError) as error:
    confine.report_error(report, error)
  os._exit(code)  # the kernel kills the rest of the namespace


def _start(zygote, request: dict, stdin: bytes, descriptors) -> None:
  """Gives up the descriptors and rights that the program may not have."""
  started = confine.REPORT_FD
  try:
    # Its number may become that of a file of the program.
    zygote.control.detach()
    confine.take_descriptors(*descriptors)
    if stdin:  # else descriptor 0 is /dev/null already
      programs.take_stdin(stdin)
    if zygote.uid is not None:  # else nobody could open /dev/stdout
      for descriptor in (confine.OUTPUT_FD, confine.RESULT_FD):
        os.fchown(descriptor, zygote.uid, zygote.uid)
    programs.set_limits(zygote.config, zygote.processes)
    confine.become_nobody(zygote.uid, zygote.filter)
    os.write(started, f'started {request["wall_s"]}\n'.encode())
  except OSError as error:
    confine.report_error(started, error)
    os._exit(1)
  os.close(started)
