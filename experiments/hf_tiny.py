"""Writes a tiny random checkpoint as Hugging Face has them, to try things on.

  python -m experiments.hf_tiny --out=runs/hf_tiny --family=deepseek_v3

Then import it as one that was downloaded: see experiments/hf_import.py.
"""

import sys

from absl import app, flags, logging

_OUT = flags.DEFINE_string('out', 'runs/hf_tiny', 'A folder; must not exist.')
_FAMILY = flags.DEFINE_enum(
  'family', 'qwen3_moe', ['qwen3_moe', 'deepseek_v3'], 'What to imitate.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the weights.')


def _main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments {argv[1:]}.')
  # Libraries report every file they touch at INFO.
  logging.set_verbosity(logging.WARNING)
  # After the flags: this import loads jax.
  from composer_jax.checkpoint import hf_tiny

  try:
    hf_tiny.write(_OUT.value, _FAMILY.value, _SEED.value)
  except (ValueError, OSError) as error:
    sys.exit(f'error: {error}')
  print(f'A tiny {_FAMILY.value} checkpoint: {_OUT.value}')


if __name__ == '__main__':
  app.run(_main)
