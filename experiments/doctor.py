"""What of a config would work on this machine, before anything is begun.

  ./run.sh doctor --config=configs/composer/deletion.py --workdir=runs/mine

Looks at devices, memory, packages, sandboxes, files of tasks and corpus, the
model and conversations that a run begins with, the store and the server's port.
Exits with 1 if the config would not run here.
"""

import contextlib
import importlib.util
import pathlib
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator

from absl import flags, logging

from configs import hardware
from experiments import start

_CONFIG = start.define_config(
  'configs/composer/tiny.py', 'The config file, as of the main job.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/tiny', 'Where the run would keep everything.'
)
_PORT = flags.DEFINE_integer('port', 8000, 'Port of ./run.sh serve.')

# extra of setup.py -> a module that it brings
_EXTRAS = {
  'gpu': 'jax_plugins.xla_cuda13',
  'tpu': 'libtpu',
  'kernels': 'tokamax',
  'serve': 'uvicorn',
  'grammar': 'llguidance',
  'stores': 'obstore',
  'tasks': 'pytest',
  'verifiers': 'zmq',
  'hf': 'transformers',
  'judge': 'openai',
  'ray': 'ray',
  'wandb': 'wandb',
}


def _has(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ImportError:
    return False


def _machine() -> Iterator[str]:
  from composer_jax.telemetry import machine

  facts = machine.describe()
  yield f'{facts["system"]}, Python {facts["Python"]}'
  yield f'{facts["processor"]}, cores: {facts["cores"]}'
  yield f'{facts.get("memory", "unknown")} of memory'
  there = pathlib.Path(_WORKDIR.value).absolute()
  there = next(p for p in (there, *there.parents) if p.is_dir())
  free = shutil.disk_usage(there).free
  yield f'{free / 2**30:.1f} GiB free for --workdir={_WORKDIR.value}'


def _devices(spec) -> Iterator[str]:
  import jax

  found = hardware.look()
  yield from (f'here: {line}' for line in found.lines)
  for device in jax.devices():
    limit = (device.memory_stats() or {}).get('bytes_limit')
    size = f', {limit / 2**30:.1f} GiB' if limit else ''
    yield f'jax {jax.__version__} sees {device.device_kind}{size}'
  if jax.default_backend() == 'cpu' and (found.lines or spec.accelerator):
    cure = found.reason or (
      'install jax for it: ./run.sh install' if found.extras else 'none is here'
    )
    raise ValueError(f'jax sees no accelerator: {cure}.')


def _memory(spec) -> Iterator[str]:
  import jax

  from composer_jax.models import decoder
  from composer_jax.plan import memory

  yield f'a device has {memory.size(memory.device_limit())}'
  yield from memory.check(spec)
  variables, _ = decoder.abstract(spec.model)
  leaves = jax.tree.leaves(decoder.without_base(variables))
  count = sum(leaf.size for leaf in leaves)
  # Masters and two moments; two checkpoints of each stage are kept.
  yield (
    f'on disk: {memory.size(12 * count)} a checkpoint, two of each stage; '
    f'{memory.size(4 * count)} an export; {memory.size(2 * count)} a full '
    'bundle'
  )


def _packages() -> Iterator[str]:
  here = [extra for extra, module in _EXTRAS.items() if _has(module)]
  absent = sorted(_EXTRAS.keys() - set(here))
  yield f'extras here: {", ".join(here) or "none"}'
  yield f'not here: {", ".join(absent)} (pip install -e ".[NAME]")'


def _sandboxes(spec, systems) -> Iterator[str]:
  from composer_jax.sandbox import base
  from composer_jax.sandbox import open as sandboxes

  # Not an actor: that would start a cluster here.
  for level in (*base.LEVELS, 'microvm'):
    try:
      sandboxes.open_sandbox(
        level, spec.systems['sandbox'].limits(), allow_unsafe=True
      ).close()
    except ValueError as error:
      yield f'{level} does not work: {error}'
    else:
      yield f'{level} works'
  with tempfile.TemporaryDirectory() as folder:
    systems.settle_judge(pathlib.Path(folder))  # Tells what it settles on.


def _files(spec, systems) -> Iterator[str]:
  systems.family.check_files()
  yield f'{spec.systems["tasks"].family}: as many as the run plays'
  if spec.cpt.steps or not spec.initial:
    spec.systems['data'].check_files()
    yield 'corpus: every source is there'


def _beginning(systems) -> Iterator[str]:
  if systems.initial is None:
    yield 'of random weights'
    return
  systems.initial.claim()
  with tempfile.TemporaryDirectory() as folder:
    systems.initial.take(pathlib.Path(folder))  # Tells how it speaks.
  yield f'of {systems.initial.folder}'


def _store(spec) -> Iterator[str]:
  from composer_jax.delta import transport
  from composer_jax.train import workdir as workdirs

  workdir = pathlib.Path(_WORKDIR.value).absolute()
  if (workdir / workdirs.CONFIG).exists():
    yield f'not asked: a run is in {workdir}; --workdir names another place'
  else:
    yield transport.check_store(workdir, spec.systems['delta'])


def _port() -> Iterator[str]:
  with contextlib.closing(socket.socket()) as tried:
    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      tried.bind(('127.0.0.1', _PORT.value))
    except OSError as error:
      raise ValueError(
        f'{_PORT.value} is taken ({error}): ./run.sh serve --port=0 takes a '
        'free one.'
      ) from error
  yield f'{_PORT.value} is free for ./run.sh serve'


def _tell(name: str, check: Callable[[], Iterator[str]]) -> bool:
  """Prints what a check yields; false if it raises."""
  try:
    for line in check():
      print(f'{name:<10} {line}', flush=True)
  except (ValueError, OSError, RuntimeError) as error:
    print(f'{name:<10} PROBLEM: {error}', flush=True)
    return False
  return True


def main() -> None:
  logging.set_verbosity(logging.ERROR)
  fields = start.config_fields(_CONFIG)
  # As many as the run would have, before jax counts them.
  start.emulate_run(fields)
  found, rl = hardware.look(), fields.get('rl')
  if found.extras and len(found.lines) == 1 and isinstance(rl, dict):
    rl['placement'] = 'colocated'  # As the run does.
  from composer_jax import wiring

  spec = wiring.spec_of(fields)
  systems = wiring.systems_of(spec)
  checks = {
    'machine': _machine,
    'devices': lambda: _devices(spec),
    'memory': lambda: _memory(spec),
    'packages': _packages,
    'sandbox': lambda: _sandboxes(spec, systems),
    'files': lambda: _files(spec, systems),
    'beginning': lambda: _beginning(systems),
    'store': lambda: _store(spec),
  }
  failed = [name for name, check in checks.items() if not _tell(name, check)]
  _tell('port', _port)  # No run needs it.
  if failed:
    sys.exit(f'error: this config does not run here: {", ".join(failed)}.')
  print('This config runs here.')


if __name__ == '__main__':
  start.run(main, (ValueError, OSError, RuntimeError))
