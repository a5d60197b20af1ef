"""Writes a tiny random checkpoint in the format of Hugging Face, for trials.

  python -m experiments.hf_tiny --out=runs/hf_tiny --family=deepseek_v3

Import it like a downloaded one: see experiments/hf_import.py.
"""

from absl import flags

from experiments import files_main

_OUT = flags.DEFINE_string(
  'out', 'runs/hf_tiny', 'Folder to make; must not exist.'
)
_FAMILY = flags.DEFINE_enum(
  'family',
  'qwen3_moe',
  ['qwen3_moe', 'deepseek_v3'],
  'Family of models to imitate.',
)
_FULL = flags.DEFINE_bool(
  'full_vocabulary', False, 'Makes a vocabulary of the published size.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the weights.')


def run() -> None:
  from experiments import tiny_checkpoint

  tiny_checkpoint.write(
    _OUT.value, _FAMILY.value, _SEED.value, is_full=_FULL.value
  )
  print(f'A tiny {_FAMILY.value} checkpoint: {_OUT.value}')


if __name__ == '__main__':
  files_main.main(run)
