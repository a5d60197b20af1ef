"""The program that runs where verifiers is: it lists tasks, or serves them.

  PYTHON -P env_server.py tasks|serve < asked.json

The input is one line of JSON, {"env": ..., "select": ..., "folder": ...,
"address": ...}; of `tasks` each line of the output is a task, of `serve` the
first says that it answers. It serves until its input ends. verifiers and this
project want other versions of some packages, so this file imports nothing of
the project, and another Python may run it.
"""

import json
import os
import sys
from typing import Any

from verifiers import v1
from verifiers.v1 import serve
from verifiers.v1.configs import select
from verifiers.v1.utils import loaders


class Input:
  """Standard input as the pipe whose end ends a server."""

  def recv(self) -> None:
    sys.stdin.read()


class Output:
  """Standard output as the queue that gets a server's address."""

  def __init__(self, file: Any):
    self._file = file

  def put(self, address: str) -> None:
    self.tell({'address': address})

  def tell(self, row: dict[str, Any]) -> None:
    self._file.write(f'{json.dumps(row)}\n')
    self._file.flush()


def main() -> None:
  # What a taskset prints must not come between the lines of the output.
  output = Output(os.fdopen(os.dup(1), 'w'))
  os.dup2(2, 1)
  asked = json.loads(sys.stdin.readline())
  # A taskset may be a module beside the config, also for its tool servers.
  sys.path.insert(0, asked['folder'])
  paths = (asked['folder'], os.environ.get('PYTHONPATH', ''))
  os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, paths))
  config = loaders.resolve_env_config(asked['env'])
  if sys.argv[1] == 'tasks':
    chosen: v1.Taskset = loaders.load_taskset(config.taskset)
    chosen = chosen.select(select.SelectConfig(**asked['select']))
    if not chosen.bounded:
      raise ValueError(
        'This taskset never ends: set `limit` in the table [select].'
      )
    for task in chosen:
      text, data = task.data.prompt_text, task.data.model_dump(mode='json')
      output.tell({'task_id': task.key, 'prompt': text, 'data': data})
    return
  serve.serve_env(
    max_workers=1,
    address=asked['address'],
    address_queue=output,
    death_pipe=Input(),
    config=config,
  )


if __name__ == '__main__':
  main()
