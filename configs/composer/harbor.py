"""Evaluations on Harbor's task directories.

  python -m experiments.evaluate --policy=gold --split=train \
      --config=configs/composer/harbor.py:DIR --out=runs/eval_harbor

DIR holds task directories; tasks that need an image to be built, the network or
several containers are left out and said. The model is that of deletion.py, too
small to solve any: give `initial` to train one that could. Not measured with
such a model.
"""

import pathlib

import ml_collections

from configs.composer import deletion

_UNNAMED = 'DIR'  # value of `tasks.folder` if no folder is named


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the config of deletion.py with tasks of the folder `arg`."""
  if arg and not pathlib.Path(arg).is_dir():
    raise ValueError(f'{arg!r} is no folder of task directories.')
  c = deletion.get_config()
  c.tasks.update(family='harbor', folder=arg or _UNNAMED)
  # A box has Python and a shell; other bases have programs that it lacks.
  c.tasks.harbor = dict(bases=('python:3.*',))
  c.tasks.repository.tools = (
    *('read', 'search', 'list', 'edit', 'write', 'run', 'finish'),
  )
  c.tasks.repository.bounds.run_s = 300.0
  c.sandbox.update(packages=(), wall_s=600.0, cpu_s=600.0)
  return c
