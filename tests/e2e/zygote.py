"""A process that has imported everything and forks one process per run.

Imports are most of the cost of starting the main job, so tests that start it a
dozen times pay for them once. A fork has its own process id and can be killed
alone; everything after the imports (devices, compilation, reading the workdir)
happens in it. The zygote itself starts no backend of JAX.

Reads lines of JSON, a list of arguments and a log file; answers each with the
id of the new process, and with its exit status once it has ended.
"""

import json
import os
import runpy
import sys

# Set before numpy is imported: threads of its BLAS would not survive a fork.

os.environ['OPENBLAS_NUM_THREADS'] = '1'

import tensorboardX  # noqa: F401

from composer_jax.pipeline import reinforce, stages  # noqa: F401
from composer_jax.report import document  # noqa: F401


def _become(arguments: list[str], log: str) -> None:
  """Turns this process into a run of the main job; never returns."""
  os.setsid()
  descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
  os.dup2(descriptor, 1)
  os.dup2(descriptor, 2)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  sys.argv = ['experiments/composer.py', *arguments]
  runpy.run_module('experiments.composer', run_name='__main__', alter_sys=True)


def main() -> None:
  for line in sys.stdin:
    arguments, log = json.loads(line)
    pid = os.fork()
    if not pid:
      _become(arguments, log)
      sys.exit(0)
    print(json.dumps(pid), flush=True)
    _, status = os.waitpid(pid, 0)
    print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == '__main__':
  main()
