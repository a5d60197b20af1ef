"""Serves a model over HTTP, to OpenAI's clients and to trainers.

  python -m experiments.serve --source=runs/tiny
  python -m experiments.serve --source=runs/tiny --follow   # while RL runs
  python -m experiments.serve --lend --store=s3://bucket/run --key=delta.key
  python -m experiments.serve --source=runs/tiny --record=runs/live/record

It listens on 127.0.0.1 unless --host is set; see docs/how_to/serve.md.
"""

import contextlib
import functools
import os
import pathlib
from typing import Any

from absl import flags, logging

from experiments import joined, start

_CONFIG = start.define_config(
  'configs/serve/tiny.py', 'Config file of shapes and limits.', shows_all=True
)
_SOURCE = flags.DEFINE_string(
  'source', 'runs/tiny', 'The workdir of a run, or a folder of hf_import.'
)
_STAGE = flags.DEFINE_enum(
  'stage',
  '',
  ['', 'rl', 'sft', 'cpt'],
  'Stage whose export is served; default: the last that is finished.',
)
_FOLLOW = flags.DEFINE_bool(
  'follow', False, 'Swaps in each policy version that RL publishes in --source.'
)
_STORE = flags.DEFINE_string(
  'store',
  '',
  "With --follow: URL of a cache of the run's bundles; default: the run's own "
  "store. With --lend: the run's store.",
)
_LEND = flags.DEFINE_bool(
  'lend',
  False,
  'Serves the policy of the RL in --store, and rolls out for it while no '
  'client asks for anything. Needs --key; the engine is that of the run.',
)
_ON_SWAP = flags.DEFINE_enum(
  'on_swap',
  None,
  ['keep', 'refresh'],
  'With --follow: go on with KV caches of older weights, or compute them anew.',
)
_RECORD = flags.DEFINE_string(
  'record',
  '',
  'Folder that keeps episodes of users who consent, with events on them; see '
  'docs/how_to/live.md. Default: nothing is kept.',
)
_ARM = flags.DEFINE_enum(
  'arm',
  'control',
  ['control', 'candidate'],
  'With --record: the arm of a trial whose weights this server has.',
)
_HOST = flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on.')
_PORT = flags.DEFINE_integer('port', 8000, 'Port; 0 takes a free one.')
_NAME = flags.DEFINE_string(
  'name', '', 'Name of the model; default: folder and stage.'
)
_TOKEN_FILE = flags.DEFINE_string(
  'token_file',
  '',
  'File of a token that clients must send (Authorization: Bearer). Default: '
  'the variable COMPOSER_JAX_TOKEN; without either, none is asked for.',
)

# Longest default window of an import: all its positions may not fit memory.
_IMPORT_WINDOW = 8192


def _token() -> str:
  if not _TOKEN_FILE.value:
    return os.environ.get('COMPOSER_JAX_TOKEN', '').strip()
  token = pathlib.Path(_TOKEN_FILE.value).read_text().strip()
  if token:
    return token
  raise ValueError(f'{_TOKEN_FILE.value} is empty.')


def _check_flags() -> None:
  """Refuses flags that would have no effect."""
  if _LEND.value:
    if _FOLLOW.value or _STAGE.value:
      raise ValueError(
        '--lend follows the RL in --store; leave out --follow and --stage.'
      )
    if _RECORD.value:
      raise ValueError(
        '--record keeps what a server of published weights answered, and '
        '--lend serves those of an engine that plays rollouts; leave out one.'
      )
  elif flags.FLAGS.key:
    raise ValueError('--key needs --lend; add it.')
  elif _FOLLOW.value:
    if _STAGE.value not in ('', 'rl'):
      raise ValueError(
        f'--follow serves the policies of stage rl, not of {_STAGE.value!r}; '
        'leave out --stage or --follow.'
      )
  elif _STORE.value or _ON_SWAP.value:
    raise ValueError('--store and --on_swap need --follow; add it.')
  if _ARM.value != 'control' and not _RECORD.value:
    raise ValueError('--arm needs --record, the folder of the trial; add it.')


def _recorder(fields):
  if not _RECORD.value:
    return None
  from composer_jax.live import recorder

  folder = pathlib.Path(_RECORD.value).absolute()
  return recorder.recorder_of(folder, fields['record'], _ARM.value)


def _fit_window(engine: dict[str, Any]) -> None:
  """Chooses the window if it is 0, and refuses one that the model lacks."""
  from composer_jax.core import files
  from composer_jax.hf import importing
  from composer_jax.train import workdir as workdirs

  folder = pathlib.Path(_SOURCE.value).absolute()
  config = folder / workdirs.CONFIG
  if (folder / importing.RECORD).exists():
    model, window = str(folder), importing.positions(folder) or _IMPORT_WINDOW
    window = min(window, _IMPORT_WINDOW)
    why = f'at most {_IMPORT_WINDOW}, and the positions of the model'
  elif config.exists():
    run = files.read_json(config)
    model, window = run['initial'], run['episode']['max_tokens']
    why = 'that of the run'
  else:
    return  # The loading says what is lacking.
  if not engine['max_len']:
    engine['max_len'] = window
    print(
      f'A window of {window} tokens: {why} (--config.engine.max_len).',
      flush=True,
    )
  # A run of a new model, or one whose import has gone, has no such limit.
  if model and pathlib.Path(model).is_dir():
    importing.check_window(model, 'engine.max_len', engine['max_len'])


def _main():
  if not start.DEBUG.value:
    logging.set_verbosity(logging.WARNING)  # orbax logs every file
  fields = start.config_fields(_CONFIG)
  if _ON_SWAP.value:
    fields['engine']['on_swap'] = _ON_SWAP.value
  _check_flags()
  with contextlib.ExitStack() as stack:
    if _LEND.value:
      folder = stack.enter_context(joined.folder())
      run = joined.join(_STORE.value, folder)
      fields['devices'] = run.spec.rollout.devices
      load = functools.partial(_lent, run, folder, fields['engine'], stack)
    else:
      _fit_window(fields['engine'])
      start.emulate_devices(int(fields['devices']))
      load = _load
    # After the flags: this import loads jax.
    from composer_jax.serve import lifetime

    lifetime.run(
      load,
      fields,
      host=_HOST.value,
      port=_PORT.value,
      name=_NAME.value,
      token=_token(),
      recorder=_recorder(fields),
    )


def _load(**options: Any) -> Any:
  from composer_jax.serve import lifetime

  return lifetime.load(
    pathlib.Path(_SOURCE.value).absolute(),
    stage=_STAGE.value,
    follow=_FOLLOW.value,
    store=_STORE.value,
    **options,
  )


def _lent(
  run: joined.JoinedRun,
  folder: pathlib.Path,
  engine: dict[str, Any],
  stack: contextlib.ExitStack,
  **_: Any,
) -> Any:
  """Returns the policy of a run, whose engine is lent to it."""
  from composer_jax.pipeline import reinforce
  from composer_jax.serve import lifetime

  names = ('num_top', 'max_stop_tokens')
  worker = stack.enter_context(
    reinforce.joined_worker(
      *(run.spec, run.systems, folder, run.joined.level, run.leases),
      **{name: engine[name] for name in names},
    )
  )
  return lifetime.lend(worker, folder, f'{run.joined.docs.run_id}-rl')


if __name__ == '__main__':
  start.run(_main, errors=(ValueError, OSError))
