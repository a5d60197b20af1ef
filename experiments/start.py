"""The start of every main: flags, and errors in one line.

absl and ml_collections end a wrong flag or config with a traceback, or with one
inside the message, partly before a main begins: a default config is loaded and
overridden where its flag is defined. All of these errors become one line here.
"""

import dataclasses
import math
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import config_flags

from composer_jax import sections

DEBUG = flags.DEFINE_bool(
  'debug', False, 'Prints the traceback of an error that has a message.'
)

# Errors that a wrong flag raises, or a file that is no config.
_ERRORS = (
  *(flags.Error, ValueError, TypeError, AttributeError, LookupError, OSError),
  *(SyntaxError, ImportError, NameError),
)


def define_config(
  default: str, text: str, *, shows_all: bool = False
) -> flags.FlagHolder:
  """Defines --config, a config file that --config.FIELD=VALUE overrides.

  Args:
    default: path of the config file that is loaded without the flag.
    text: help of the flag.
    shows_all: true if the file shows every field there is. Otherwise a field
      that it does not show has its default elsewhere, and the main has to
      refuse unknown names.
  """
  try:
    return config_flags.DEFINE_config_file(
      'config',
      default,
      text,
      lock_config=shows_all,
      accept_new_attributes=not shows_all,
    )
  except _ERRORS as error:
    _refuse(error)


def define_fields(cls: Any, prefix: str) -> dict[str, flags.FlagHolder]:
  """Defines a flag for each field of a dataclass; returns them by name."""
  define: dict[Any, Any] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
  }
  texts = sections.meanings(cls)
  return {
    f.name: define[type(f.default)](f.name, f.default, prefix + texts[f.name])
    for f in dataclasses.fields(cls)
  }


def config_fields(config: flags.FlagHolder) -> dict[str, Any]:
  """Returns the fields of --config; ends the program if the file is missing."""
  try:
    return config.value.to_dict()
  except _ERRORS as error:
    _refuse(error)


def run(
  main: Callable[[], None], errors: tuple[type[Exception], ...] = ()
) -> None:
  """Runs `main` under absl.

  Args:
    main: function that does what the program is for, once flags are parsed.
    errors: classes of the errors that a user can cause; such an error of `main`
      ends the program with its message.
  """

  def call(_):
    try:
      main()
    except errors as error:
      fail(error)

  # --help lists the flags of the file that was started; add those it imports.
  for module, module_flags in flags.FLAGS.flags_by_module_dict().items():
    if module.startswith('experiments.'):
      for flag in module_flags:
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
  app.run(call, flags_parser=_parse)


def fail(error: BaseException) -> NoReturn:
  """Ends the program with the error's message, and its traceback on demand."""
  if '--debug' in sys.argv:  # Not DEBUG, which may not be parsed yet.
    traceback.print_exception(error)
  sys.exit(f'error: {error}')


def _parse(argv: list[str]) -> list[str]:
  try:
    arguments = flags.FLAGS(argv)
  except SystemExit:
    sys.exit(0)  # --help, --helpfull, ..., for which absl exits with 1.
  except _ERRORS as error:
    _refuse(error)
  if len(arguments) > 1:
    _refuse(
      flags.Error(f'Unknown arguments {arguments[1:]}; flags are --NAME=VALUE')
    )
  return arguments


def _refuse(error: Exception) -> NoReturn:
  refused = ValueError(
    f'{_describe(error)} (--help lists the flags, --debug shows the traceback)'
  )
  refused.__cause__ = error
  fail(refused)


def _describe(error: Exception) -> str:
  """Returns the message in one line, without the tracebacks within."""
  cause = error.args[0] if error.args else None
  if isinstance(error, KeyError) or isinstance(cause, KeyError):
    # The text of a KeyError is its message in quotes.
    reason = cause.args[0] if isinstance(cause, KeyError) else cause
    text = f'--config has no such field: {reason}'
  elif isinstance(error, OSError):
    # The last line says what failed; earlier ones what was tried.
    reason_line = str(error).splitlines()[-1].rpartition('failure to load: ')[2]
    text = f'--config cannot be loaded: {reason_line}'
  elif isinstance(error, flags.Error | ValueError):
    # Drop everything up to the last error of a traceback.
    text = re.sub(
      r'(?s)Error whilst parsing config file:.*\n[\w.]*(Error|Exception): ',
      '',
      str(error),
    )
  else:
    text = f'--config must be a Python file with a function get_config: {error}'
  return ' '.join(text.split())


def num_devices(
  section: Any, axes: tuple[str, ...] = ('replica', 'fsdp', 'context')
) -> int:
  """Returns a section's number of devices; the spec refuses a wrong mesh."""
  mesh = section.get('mesh') if isinstance(section, dict) else None
  sizes = [mesh.get(axis) for axis in axes] if isinstance(mesh, dict) else []
  return math.prod(size for size in sizes if type(size) is int)


def emulate_run(
  config: dict[str, Any], count: int = 1, each: int | None = None
) -> None:
  """Emulates the devices of a run, or those of one of its processes.

  Args:
    count: number of processes of the run.
    each: devices of a process, if the user has named their number.
  """
  devices = max(map(num_devices, (config, config.get('rl'))))
  serving = num_devices({'mesh': config.get('rollout')}, ('devices',))
  emulate_devices(max(each or -(-devices // count), serving))


def emulate_devices(num_devices: int) -> None:
  """Makes a CPU show this many devices; call it before JAX is used."""

  xla_flags = os.environ.get('XLA_FLAGS', '')
  for flag in (
    f'--xla_force_host_platform_device_count={num_devices}',
    '--xla_cpu_collective_call_terminate_timeout_seconds=600',
    # One thread per emulated device: eigen's own threads would fight them.
    '--xla_cpu_multi_thread_eigen=false',
  ):
    if flag.split('=')[0] not in xla_flags:
      xla_flags = f'{xla_flags} {flag}'
  os.environ['XLA_FLAGS'] = xla_flags.strip()
