"""Shared by the mains of a run: flags, the config as a Spec, errors."""

import os
import pathlib
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from absl import flags, logging

from composer_jax.core import files, processes
from composer_jax.fleet import hosts, identity, orphans, ray_hosts, supervisor
from composer_jax.telemetry import progress
from experiments import start

_TRACEBACK = 'error.txt'
_BOUND = 'config.json'  # as in train.workdir, which is imported later
# Beginning of the messages of XLA and of its services: the name of a status.
_FROM_XLA = re.compile('[A-Z]+(_[A-Z]+)*: ')

_WITH_RL = ('composer', 'rl')  # Programs that train by RL.

_CONFIG = start.define_config(
  'configs/composer/tiny.py',
  'A config file, with `:argument` where it takes one. Override any field: '
  '--config.rl.steps=200.',
)
_WORKDIR = flags.DEFINE_string(
  'workdir',
  'runs/tiny',
  'Folder in which the run keeps everything. The same command on the same '
  'workdir resumes; another config needs another workdir.',
)
_FLEET = start.define_fields(supervisor.SupervisorOptions, '')


def _keep_traceback(workdir: pathlib.Path) -> str:
  """Writes the current traceback; returns a sentence that names its file.

  Nothing into the folder of a run that has not begun, or that another process
  goes on with: --debug shows it.
  """
  if not (workdir / _BOUND).exists():
    return ''
  path = workdir / _TRACEBACK
  try:
    with files.alone(workdir):
      files.write_atomic(path, traceback.format_exc().encode())
  except (OSError, ValueError):
    return ''  # The disk is full or read-only: most likely the error.
  return f' (traceback: {path})'


def _fit(config: dict[str, Any], module: str) -> None:
  """Adapts a run to the devices found, or asks if it is for others."""
  import jax

  devices, rl = jax.devices(), config.get('rl')
  rl = rl if isinstance(rl, dict) else {'placement': ''}  # Refused later.
  divides = rl.get('placement', 'processes') == 'processes'
  divides = divides and module.rpartition('.')[2] in _WITH_RL
  if devices[0].platform == 'cpu':
    if config.get('accelerator'):
      _ask()
  elif divides and processes.count() > 1:
    raise ValueError(
      "--config.rl.placement must be 'colocated' where several processes "
      f"(--launch) share accelerators; got 'processes', on {len(devices)} "
      f'devices of {processes.count()} processes, which leave none to a '
      'rollout worker. Set --config.rl.placement=colocated.'
    )
  elif divides and _num_workers(config) > 1:
    raise ValueError(
      '--config.fleet.workers must be at most 1 on a machine with an '
      f'accelerator, not {_num_workers(config)}: every worker would take the '
      'same devices. Set it to 1 or 0, and start the others where devices are '
      'free: ./run.sh worker --store=... --key=...'
    )
  elif divides and len(devices) == 1:
    # Each of two processes would preallocate the device.
    rl['placement'] = 'colocated'
    print(
      '[rl] one device: trainer and engine take turns in one process '
      "(--config.rl.placement='colocated')",
      flush=True,
    )


def _num_workers(config: dict[str, Any]) -> int:
  """Returns how many workers the run starts; the spec refuses no number."""
  fleet = config.get('fleet')
  workers = fleet.get('workers', 1) if isinstance(fleet, dict) else 1
  return workers if type(workers) is int else 1


def _ask() -> None:
  text = 'This config is for a GPU or TPU, and jax sees only a CPU'
  if sys.stdin.isatty():
    answer = input(f'{text}, which would take days. Go on? [y/N] ')
    if answer.strip().lower() in ('y', 'yes'):
      return
  sys.exit(
    f'error: {text}. `./run.sh doctor` says what this machine has; to go on '
    'without asking set --config.accelerator=False.'
  )


def _check_meshes(
  config: dict[str, Any], module: str, place: hosts.Hosts
) -> None:
  """Refuses a mesh that has not as many devices of each process."""
  total, emulated = place.total or 1, None if place.is_ray else place.devices
  meshes: dict[str, Any] = {'mesh': config}
  if module.rpartition('.')[2] in _WITH_RL:
    meshes['rl.mesh'] = config.get('rl')
  for name, section in meshes.items():
    size = start.num_devices(section)
    if size % total:
      raise ValueError(
        f'--config.{name} has {size} devices, which do not divide over '
        f'{total} processes (--launch): each must hold as many. Make its '
        f'product a multiple of {total}'
        + (
          ', or run pretrain and sft with --launch and rl without.'
          if name == 'rl.mesh'
          else ', or change --launch.'
        )
      )
    if emulated and size > total * emulated:
      raise ValueError(
        f'--config.{name} has {size} devices, and {total} processes emulate '
        f'{emulated} each: ask for --launch=local:{total}x{size // total}.'
      )


def _supervise(
  config: dict[str, Any], module: str, workdir: pathlib.Path
) -> str | None:
  """Runs this program as the processes that --launch says."""
  fields = {name: flag.value for name, flag in _FLEET.items()}
  options = supervisor.SupervisorOptions(**fields)
  place = hosts.parse(options.launch)
  command = [sys.executable, '-m', module, *sys.argv[1:]]
  _check_meshes(config, module, place)
  found = identity.of(config, module)
  say = progress.teller('fleet')
  if options.dry_run:
    from composer_jax import wiring

    wiring.spec_of(config)
    say(f'{place}, code {found["code"]}, jax {found["jax"]}')
    say(' '.join(command))
    return None
  if place.is_ray:
    # The last flag of a name counts.
    return ray_hosts.run(place, [*command, '--launch=env'])

  def end(number: int, _: Any) -> None:
    raise SystemExit(128 + number)

  signal.signal(signal.SIGTERM, end)
  orphans.die_with_parent()  # An actor of Ray.
  kept = supervisor.Supervisor(
    command, place, options, workdir=workdir, own_identity=found, say=say
  )
  reason = kept.run()
  if place.count == 1 and not (workdir / _BOUND).exists():
    # A start that fails leaves nothing.
    shutil.rmtree(workdir / supervisor.FOLDER, ignore_errors=True)
    if workdir.exists() and not os.listdir(workdir):
      workdir.rmdir()
  return reason


def _end_member(error: BaseException) -> None:
  """Ends one of several processes, whose exit would wait for the others."""
  code, cause = processes.REFUSED, error
  while cause is not None and code != processes.LOST:
    # Of another class at each place where a collective or a barrier fails. In
    # a message or a group another process was waited for in vain.
    if isinstance(cause, TimeoutError) or _FROM_XLA.match(str(cause)):
      code = processes.LOST
    cause = cause.__cause__ or cause.__context__
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def _end_by_bug(kind: Any, error: BaseException, trace: Any) -> None:
  sys.__excepthook__(kind, error, trace)
  _end_member(error)


def main(run: Callable[..., None]) -> None:
  """Runs `run(spec, systems, workdir, command)` under absl.

  `command` is the command line of this program, for the record.

  Errors that a user can cause (ValueError, OSError, ...) end the program with
  one line. Our own faults raise the same classes, so the traceback is kept in
  the workdir, if there is one, and that line names its file. --debug prints it
  at once.
  """

  def call():
    if not start.DEBUG.value:
      # Libraries report every file they touch at INFO.
      logging.set_verbosity(logging.WARNING)
    config = start.config_fields(_CONFIG)
    workdir = pathlib.Path(_WORKDIR.value).absolute()
    ticket = processes.take_ticket()
    if _FLEET['launch'].value and ticket is None:
      try:
        reason = _supervise(config, module, workdir)
      except (ValueError, OSError) as error:
        start.fail(error)
      sys.exit(reason and f'error: {reason}')
    if ticket is None:
      start.emulate_run(config)
    else:
      start.emulate_run(config, ticket.count, ticket.devices)
      # Before the imports, since the job may die during them.
      orphans.die_with_parent()
    # After the flags: this import loads jax.
    from composer_jax import wiring

    command = [sys.executable, '-m', module, *sys.argv[1:]]
    try:
      if ticket is not None:
        sys.excepthook = _end_by_bug
        processes.join(ticket)
      wiring.spec_of(config)  # What is wrong anywhere comes first.
      _fit(config, module)
      spec = wiring.spec_of(config)
      systems = wiring.systems_of(spec)
      run(spec, systems, workdir, command=command)
      if processes.is_first():
        (workdir / _TRACEBACK).unlink(missing_ok=True)
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
      where = ''
      if start.DEBUG.value or not processes.is_first():
        traceback.print_exc()
      else:
        where = _keep_traceback(workdir)
      if ticket is not None:
        print(f'error: {error}{where}', file=sys.stderr)
        _end_member(error)
      sys.exit(f'error: {error}{where}')

  # Absent when a main is run as a plain file.
  main_spec = sys.modules['__main__'].__spec__
  if main_spec is None:
    sys.exit('error: start this as `python -m experiments.<name>`.')
  module = main_spec.name
  start.run(call)
