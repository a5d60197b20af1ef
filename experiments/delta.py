"""Publishes checkpoints as delta bundles, and turns bundles into checkpoints.

  P="--store=s3://bucket/weights --run=demo --key=delta.key"
  python -m experiments.delta publish $P --source=runs/tiny:rl
  python -m experiments.delta apply $P --out=checkpoints/demo
  python -m experiments.delta verify $P       (or log, or gc)
  python -m experiments.delta relay --upstream=s3://bucket/weights --cache=DIR
  python -m experiments.delta keys --key=pair.key

A store is a folder, s3://, gs:// or, to read, the http:// of a relay, which
nobody has to trust. publish makes a secret key when there is none; who applies
needs the same file, or the public half of a pair that `keys` made. verify names
all that is damaged, and with --source compares a checkpoint. gc deletes what
the newest --keep versions do not need; only a trainer may while it publishes.
"""

import sys

from absl import flags

from experiments import files_main

_STORE = flags.DEFINE_string('store', None, 'Where the bundles are.')
_RUN = flags.DEFINE_string('run', None, 'Name of the run in the store.')
_KEY = flags.DEFINE_string('key', None, 'The file of the key.')
_SOURCE = flags.DEFINE_string(
  'source', None, 'Orbax checkpoint, folder of numbered ones, or WORKDIR:STAGE.'
)
_VERSION = flags.DEFINE_integer('version', None, 'The next, or the latest.')
_TIER = flags.DEFINE_string('tier', 'small', 'small or fast.')
_DTYPE = flags.DEFINE_string(
  'dtype',
  None,
  'Of --source: policy (the bfloat16 of float32 masters; default for runs of '
  'ours), stored (for other checkpoints), bfloat16, float16 or float32.',
)
_DAYS = flags.DEFINE_float(
  'expires_days', 365.0, 'Until receivers want news of the run; 0 for ever.'
)
_OUT = flags.DEFINE_string('out', None, 'Folder to make; must not exist.')
_KEEP = flags.DEFINE_integer('keep', 64, 'Newest versions that gc leaves.')
_GRACE = flags.DEFINE_float('grace_s', 3600.0, 'Age of what gc may delete.')
_UPSTREAM = flags.DEFINE_string('upstream', None, 'Store or relay to serve.')
_CACHE = flags.DEFINE_string('cache', None, "The relay's folder.")
_CACHE_GB = flags.DEFINE_float('cache_gb', None, 'That it may fill, or all.')
_HOST = flags.DEFINE_string('host', '0.0.0.0', 'Where the relay listens.')
_PORT = flags.DEFINE_integer('port', 8765, 'Where the relay listens.')

_PLACE = (_STORE, _RUN, _KEY)
# The flags that a command needs, and those that it may have.
_COMMANDS = {
  'publish': ((_SOURCE, *_PLACE), (_VERSION, _DTYPE, _TIER, _DAYS)),
  'apply': ((*_PLACE, _OUT), (_VERSION,)),
  'verify': (_PLACE, (_SOURCE, _VERSION, _DTYPE)),
  'log': (_PLACE, ()),
  'gc': (_PLACE, (_KEEP, _GRACE)),
  'relay': ((_UPSTREAM, _CACHE), (_CACHE_GB, _HOST, _PORT)),
  'keys': ((_KEY,), ()),
}


def _run(command: str) -> None:
  if command not in _COMMANDS:
    raise ValueError(f'{command!r} is no command of {list(_COMMANDS)}.')
  needed, others = _COMMANDS[command]
  missing = [f'--{flag.name}' for flag in needed if flag.value is None]
  if missing:
    raise ValueError(f'{command} needs {", ".join(missing)}; see --help.')
  from composer_jax.delta.device import commands

  values = {flag.name: flag.value for flag in (*needed, *others)}
  print(getattr(commands, command)(**values))


if __name__ == '__main__':
  # absl knows flags only.
  has_command = len(sys.argv) > 1 and not sys.argv[1].startswith('-')
  given = sys.argv.pop(1) if has_command else ''
  files_main.main(lambda: _run(given))
