"""A rollout worker, which joins a run through its store alone.

  python -m experiments.worker --store=s3://bucket/run --key=delta.key

It may run anywhere that reaches the store, join and leave at any time; there
may be any number. The key is the file `delta.key` in the workdir of the run. A
store that can only be read (an HTTP cache nearby) needs --writes, the store
behind it. The config comes from the run; a worker of another commit is refused.
On SIGTERM it begins nothing new, and ends.
"""

import contextlib
import pathlib
import signal
import tempfile
import traceback

from absl import flags

from composer_jax.fleet import joining, orphans
from experiments import start

_STORE = flags.DEFINE_string('store', '', 'Store of the run: folder or URL.')
_WRITES = flags.DEFINE_string(
  'writes', '', 'Store behind one only read; or "".'
)
_KEY = flags.DEFINE_string('key', '', "File of the run's key.")
_RUN = flags.DEFINE_string('run', 'policy', 'Name of the run in the store.')
_NAME = flags.DEFINE_string('name', '', 'Name that no worker had; "": chosen.')
_FOLDER = flags.DEFINE_string(
  'folder', '', 'Folder for what the worker keeps; "" for a temporary one.'
)
_INITIAL = flags.DEFINE_string(
  'initial', '', "Folder of the run's import; where it lies here."
)
_TASKS = flags.DEFINE_string(
  'tasks', '', "Folder of the run's task set; where it lies here."
)
_DRAIN = flags.DEFINE_float(
  'drain_s',
  60.0,
  'Seconds after SIGTERM in which episodes may end; the others go to others.',
)
_WITHIN = flags.DEFINE_float('within_s', 600.0, 'Seconds to wait for the run.')


def _serve(folder: pathlib.Path) -> None:
  key = pathlib.Path(_KEY.value)
  if not (_STORE.value and _KEY.value and key.is_file()):
    raise ValueError(
      f'--store={_STORE.value} and --key={_KEY.value} must name the store of a '
      'run and a copy of the file delta.key in its workdir.'
    )
  docs = joining.open_documents(_STORE.value, key, _RUN.value, _WRITES.value)
  joined = joining.join(docs, key, folder, within_s=_WITHIN.value)
  config = joined.config
  config['delta']['store'] = _STORE.value
  config['initial'] = _INITIAL.value or config['initial']
  config['tasks']['folder'] = _TASKS.value or config['tasks']['folder']
  start.emulate_devices(config['rollout']['devices'])
  # After the flags: this import loads jax.
  from composer_jax import wiring
  from composer_jax.pipeline import reinforce, rollout_worker

  spec = wiring.spec_of(config)
  systems = wiring.systems_of(spec)
  joined.check(wiring.content_of(spec))
  rules = wiring.rules_of(spec)
  name = _NAME.value or joining.free_name()

  def make_leases(capacity):
    leases = joined.leases(name, _DRAIN.value, capacity, rules)
    signal.signal(signal.SIGTERM, lambda *_: leases.leave())
    return leases

  while True:
    try:
      serve = reinforce.serve_rollouts
      serve(spec, systems, folder, joined.level, make_leases)
      return
    except rollout_worker.Rewound as error:
      # The trainer died and goes on from its checkpoint.
      print(f'[rollout] {error} Joining again.', flush=True)
      name = joining.free_name()


def main() -> None:
  # Before jax is imported, since the run may die meanwhile.
  orphans.die_with_parent()
  if not _FOLDER.value:
    folder: contextlib.AbstractContextManager = tempfile.TemporaryDirectory()
  else:
    folder = contextlib.nullcontext(_FOLDER.value)
  with folder as name:
    try:
      _serve(pathlib.Path(name))
    except (ValueError, OSError, RuntimeError, FloatingPointError):
      if _FOLDER.value:
        traceback.print_exc()  # For the log of the run that started it.
      raise


if __name__ == '__main__':
  start.run(main, (ValueError, OSError, RuntimeError, FloatingPointError))
