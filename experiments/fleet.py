"""Keeps rollout workers of a run going, here or on a Ray cluster.

  python -m experiments.fleet --store=s3://bucket/run --key=delta.key \
      --workers=4                       # or --ray=auto --workers=40 --boxes=400

The run shows in its store who may join, as for one worker. With --ray each
worker is an actor, which Ray places and, if its node is lost, places again;
those without room are the cluster's demand. --boxes is the number of sandboxes
of all workers together: actors on the cluster's processors, which come as they
are needed, or without --ray processes beside the workers. On SIGTERM all drain.
"""

import contextlib
import pathlib
import signal
import sys

from absl import flags

from composer_jax.delta.format import keys
from composer_jax.fleet import crew, orphans, ray_workers, supervisor
from composer_jax.telemetry import progress
from experiments import joined, start

_STORE = flags.DEFINE_string('store', '', 'Store of the run: folder or URL.')
_RAY = flags.DEFINE_string(
  'ray', '', 'Ray cluster: \'auto\' or its address; "" for this machine.'
)
_WORKERS = flags.DEFINE_integer('workers', 1, 'Number of workers.', 1)
_RESTARTS = flags.DEFINE_integer(
  'restarts', 5, 'Restarts of a worker that ended with an error, in a row.', 0
)
_REFILL = flags.DEFINE_float(
  'refill_s', 3600.0, 'Seconds after which a worker has one more restart.', 1.0
)
_DRY_RUN = flags.DEFINE_bool(
  'dry_run', False, 'Checks that workers may join, and says what would start.'
)
_PASSED = ('run', 'writes', 'initial', 'tasks', 'drain_s', 'within_s')


def _command() -> list[str]:
  command = [sys.executable, '-m', 'experiments.worker']
  command += [f'--store={_STORE.value}']
  command += [f'--{name}={flags.FLAGS[name].value}' for name in _PASSED]
  if boxes := flags.FLAGS.boxes:
    command += [f'--boxes={-(-boxes // _WORKERS.value)}']
    command += ['--boxes_on_ray'] if _RAY.value else []
  return command


def main() -> None:
  orphans.die_with_parent()
  say = progress.teller('fleet')
  with contextlib.ExitStack() as stack:
    # Who may not join is told once, before anything starts.
    run = joined.join(_STORE.value, stack.enter_context(joined.folder()))
    key, command = flags.FLAGS.key, _command()
    if _RAY.value:
      text = keys.open_key(pathlib.Path(key)).text
      devices = run.spec.rollout.devices
      starting = ray_workers.starting(_RAY.value, command, text, devices)
      begin, place = stack.enter_context(starting)
    else:
      command += [f'--key={key}']
      begin, place = crew.local(command), 'this machine'
    say(f'{_WORKERS.value} workers on {place}: {" ".join(command)}')
    if _DRY_RUN.value:
      return
    limits = _RESTARTS.value, _REFILL.value
    restarts = lambda: supervisor.Restarts(*limits)
    workers = crew.Crew(begin, _WORKERS.value, restarts, say=say)
    signal.signal(signal.SIGTERM, lambda *_: workers.stop())
    signal.signal(signal.SIGINT, lambda *_: workers.stop())
    stack.callback(workers.close)
    if reason := workers.run():
      raise ValueError(reason)
    say('no worker is needed any more')


if __name__ == '__main__':
  start.run(main, (ValueError, OSError, RuntimeError))
