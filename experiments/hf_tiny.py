"""Writes a tiny random checkpoint as Hugging Face has them, to try things on.

  python -m experiments.hf_tiny --out=runs/hf_tiny --family=deepseek_v3

Then import it as one that was downloaded: see experiments/hf_import.py.
"""

from absl import flags

from experiments import files_main

_OUT = flags.DEFINE_string('out', 'runs/hf_tiny', 'A folder; must not exist.')
_FAMILY = flags.DEFINE_enum(
  'family', 'qwen3_moe', ['qwen3_moe', 'deepseek_v3'], 'What to imitate.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'Of the weights.')


def run() -> None:
  from experiments import tiny_checkpoint

  tiny_checkpoint.write(_OUT.value, _FAMILY.value, _SEED.value)
  print(f'A tiny {_FAMILY.value} checkpoint: {_OUT.value}')


if __name__ == '__main__':
  files_main.main(run)
