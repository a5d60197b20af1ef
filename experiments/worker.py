"""A rollout worker, which joins a run through its store alone.

  python -m experiments.worker --store=s3://bucket/run --key=delta.key

It may run anywhere that reaches the store, join and leave at any time; there
may be any number. The key is the file `delta.key` in the workdir of the run. A
store that can only be read (an HTTP cache nearby) needs --writes, the store
behind it. The config comes from the run; a worker of another commit is refused.
On SIGTERM it begins nothing new, and ends. --dry_run checks all that, says what
would be sampled here, and starts nothing.
"""

import signal
import time
import traceback

from absl import flags

from composer_jax.fleet import orphans
from experiments import joined, start

_STORE = flags.DEFINE_string('store', '', 'Store of the run: folder or URL.')
_NAME = flags.DEFINE_string('name', '', 'Name that no worker had; "": any.')
_BOXES_ON_RAY = flags.DEFINE_bool(
  'boxes_on_ray', False, 'Judges code on the Ray cluster of RAY_ADDRESS.'
)
_DRY_RUN = flags.DEFINE_bool(
  'dry_run',
  False,
  'Checks that this worker may join, and says what it would do.',
)


def _level(run: joined.JoinedRun) -> str:
  """Returns the isolation in which this worker judges."""
  level = run.joined.level
  if _BOXES_ON_RAY.value and level not in ('unshare', 'ray'):
    raise ValueError(
      '--boxes_on_ray judges in the namespaces of other nodes, and this run '
      f'in {level!r} (--config.sandbox.level): leave out --boxes_on_ray.'
    )
  return 'ray' if _BOXES_ON_RAY.value else level


def _describe(run: joined.JoinedRun) -> None:
  from composer_jax.models import flops

  spec, docs = run.spec, run.joined.docs
  options = spec.engine_options()
  print(
    f'run {docs.run_id!r} in {docs.store.url}: this worker may join. It would '
    f'serve {flops.params_total(spec.model):,} parameters on '
    f'{options.devices} device(s), {options.num_slots} episodes of '
    f'{options.max_len} tokens at a time, and judge in {_level(run)}.'
  )


def _serve() -> None:
  with joined.folder() as folder:
    run = joined.join(_STORE.value, folder)
    # After the flags: this import loads jax.
    from composer_jax.pipeline import reinforce

    if _DRY_RUN.value:
      _describe(run)
      return

    doors, notices = [], []

    def leave(*_):
      notices.append(time.monotonic())
      doors[-1].leave()

    def make_leases(capacity):
      # After a rewind there is another, under the same notice.
      doors.append(run.leases(capacity, '' if doors else _NAME.value))
      signal.signal(signal.SIGTERM, leave)
      if notices:
        leave()
      return doors[-1]

    level = _level(run)
    reinforce.serve_rollouts(run.spec, run.systems, folder, level, make_leases)


def main() -> None:
  # Before jax is imported, since the run may die meanwhile.
  orphans.die_with_parent()
  try:
    _serve()
  except (ValueError, OSError, RuntimeError, FloatingPointError):
    if flags.FLAGS.folder:
      traceback.print_exc()  # For the log of the run that started it.
    raise


if __name__ == '__main__':
  start.run(main, (ValueError, OSError, RuntimeError, FloatingPointError))
