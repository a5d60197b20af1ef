"""Serves a model over HTTP, to OpenAI's clients and to trainers.

  python -m experiments.serve --source=runs/tiny
  python -m experiments.serve --source=runs/tiny --follow   # while RL runs

It listens on 127.0.0.1 unless --host is set; see docs/how_to/serve.md.
"""

import functools
import os
import pathlib

from absl import flags, logging

from experiments import start

_CONFIG = start.define_config(
  'configs/serve/tiny.py', 'Shapes and limits.', shows_all=True
)
_SOURCE = flags.DEFINE_string(
  'source', 'runs/tiny', 'The workdir of a run, or a folder of hf_import.'
)
_STAGE = flags.DEFINE_enum(
  'stage', '', ['', 'rl', 'sft', 'cpt'], 'Whose export; default: the last.'
)
_FOLLOW = flags.DEFINE_bool(
  'follow', False, 'Serves what RL publishes in --source, as it does.'
)
_STORE = flags.DEFINE_string(
  'store', '', "With --follow: a cache's URL; default: the run's own store."
)
_ON_SWAP = flags.DEFINE_enum(
  'on_swap',
  None,
  ['keep', 'refresh'],
  'With --follow: go on with KV caches of older weights, or compute them anew.',
)
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on.')
_PORT = flags.DEFINE_integer('port', 8000, 'Port; 0 takes a free one.')
_NAME = flags.DEFINE_string(
  'name', '', 'Name of the model; default: made of the folder.'
)
_TOKEN_FILE = flags.DEFINE_string(
  'token_file',
  '',
  'Holds a token that clients must send (Authorization: Bearer). Default: the '
  'variable COMPOSER_JAX_TOKEN; without either, none is wanted.',
)


def _token() -> str:
  if not _TOKEN_FILE.value:
    return os.environ.get('COMPOSER_JAX_TOKEN', '').strip()
  token = pathlib.Path(_TOKEN_FILE.value).read_text().strip()
  if token:
    return token
  raise ValueError(f'{_TOKEN_FILE.value} is empty.')


def _main():
  if not start.DEBUG.value:
    logging.set_verbosity(logging.WARNING)  # orbax logs every file
  fields = start.config_fields(_CONFIG)
  if _ON_SWAP.value:
    fields['engine']['on_swap'] = _ON_SWAP.value
  try:
    start.emulate_devices(int(fields['devices']))
    # After the flags: this import loads jax.
    from composer_jax.serve import lifetime

    lifetime.run(
      functools.partial(
        lifetime.load,
        pathlib.Path(_SOURCE.value).absolute(),
        stage=_STAGE.value,
        follow=_FOLLOW.value,
        store=_STORE.value,
      ),
      fields,
      host=_HOST.value,
      port=_PORT.value,
      name=_NAME.value,
      token=_token(),
    )
  except (ValueError, OSError) as error:
    start.fail(error)


if __name__ == '__main__':
  start.run(_main)
