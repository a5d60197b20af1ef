"""Publishes checkpoints as delta bundles, and turns bundles into checkpoints.

  python -m experiments.delta diff --base=ckpt/1 --new=ckpt/2 --out=STORE
  python -m experiments.delta apply --store=STORE --out=ckpt/again

  P="--store=s3://bucket/weights --run=demo --key=delta.key"
  python -m experiments.delta publish $P --source=runs/tiny:rl
  python -m experiments.delta apply $P --out=checkpoints/demo

diff makes a store of two orbax checkpoints, the first whole and the second as a
delta to it; apply turns a version into a checkpoint that plain orbax opens. A
store is a folder, s3://, gs://, az:// or, to read, the http:// of a web
server or a cache (configs/delta/nginx.conf), which need not be trusted. publish
makes a secret key when there is none; apply needs the same file.
"""

import pathlib
import sys

from absl import flags

from experiments import files_main

_STORE = flags.DEFINE_string('store', None, 'Store of the bundles.')
_RUN = flags.DEFINE_string('run', 'policy', 'Name of the run in the store.')
_KEY = flags.DEFINE_string(
  'key', None, 'File of the key (default: STORE.key beside a folder).'
)
_BASE = flags.DEFINE_string('base', None, 'Orbax checkpoint to start from.')
_NEW = flags.DEFINE_string('new', None, 'Orbax checkpoint to arrive at.')
_SOURCE = flags.DEFINE_string(
  'source', None, 'Orbax checkpoint, folder of numbered ones, or WORKDIR:STAGE.'
)
_VERSION = flags.DEFINE_integer(
  'version',
  None,
  'Policy version to publish (default: the next) or to apply (default: the '
  'latest).',
)
_TIER = flags.DEFINE_string(
  'tier', 'small', 'Tier of compression: small or fast.'
)
_DAYS = flags.DEFINE_float(
  'expires_days', 365.0, 'Days until receivers distrust the pointer; 0: never.'
)
_OUT = flags.DEFINE_string(
  'out',
  None,
  'Folder of the checkpoint to make, which must not exist; of diff, the store.',
)
_PLACE = (_STORE, _RUN, _KEY)
_NAMED = (_RUN, _KEY)  # have defaults
_FLAGS = (*_PLACE, _SOURCE, _VERSION, _TIER, _DAYS, _OUT, _BASE, _NEW)
# The flags that a command needs, and those that it may have.
_COMMANDS = {
  'publish': ((_SOURCE, _STORE), (*_NAMED, _VERSION, _TIER, _DAYS)),
  'diff': ((_BASE, _NEW, _OUT), (*_NAMED, _TIER)),
  'apply': ((_STORE, _OUT), (*_NAMED, _VERSION)),
}


def _run(command: str) -> None:
  if command not in _COMMANDS:
    raise ValueError(
      f'{command!r} is no command; the commands are {list(_COMMANDS)}.'
    )
  needed, optional = _COMMANDS[command]
  missing = [f'--{flag.name}' for flag in needed if flag.value is None]
  if missing:
    raise ValueError(f'{command} needs {", ".join(missing)}; see --help.')
  taken = {flag.name for flag in (*needed, *optional)}
  flags_set = {flag.name for flag in _FLAGS if flag.present}
  if unused := sorted(flags_set - taken):
    raise ValueError(
      f'{command} does not take {", ".join(f"--{name}" for name in unused)}; '
      f'it takes {", ".join(f"--{name}" for name in sorted(taken))}.'
    )
  from composer_jax.delta import commands

  values = {flag.name: flag.value for flag in (*needed, *optional)}
  if 'source' in values:
    _check_format(str(values['source']))
  if values['key'] is None:
    store = _STORE.value or _OUT.value or ''
    if '://' in store:
      raise ValueError(f'{command} needs --key for {store}; see --help.')
    values['key'] = f'{store.rstrip("/")}.key'
  print(getattr(commands, command)(**values))


def _check_format(source: str) -> None:
  """Refuses masters of a run whose policy has rounded weights."""
  from composer_jax.core import files
  from composer_jax.train import workdir

  place = pathlib.Path(source.rpartition(':')[0] or source)
  for folder in (place, *place.parents)[:4]:
    if (folder / workdir.CONFIG).is_file():
      model = files.read_json(folder / workdir.CONFIG).get('model', {})
      name = model.get('precision', {}).get('experts', 'bf16')
      if name != 'bf16':
        raise ValueError(
          f'{source} holds float32 masters, and the run serves their experts '
          f'in {name!r}, to which this command does not round. Follow the '
          'bundles that the run has published.'
        )
      return


if __name__ == '__main__':
  # absl takes only flags, so the command is removed.
  has_command = len(sys.argv) > 1 and not sys.argv[1].startswith('-')
  command_name = sys.argv.pop(1) if has_command else ''
  files_main.main(lambda: _run(command_name))
