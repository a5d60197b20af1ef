"""Converts a Hugging Face checkpoint to one that runs here begin from.

  python -m experiments.hf_import --source=DIR --out=runs/import/qwen3

DIR holds config.json and safetensors files: Qwen3-MoE, DeepSeek-V3, Kimi K2,
Mixtral or OLMoE, in bfloat16, float16 or float32, DeepSeek's fp8 or Kimi's
int4. Nothing larger than a piece of a tensor is held in memory, and the same
command goes on after an interruption. `experiments.export` is the way back.
"""

from absl import flags

from experiments import files_main

_SOURCE = flags.DEFINE_string(
  'source', None, 'Folder of the Hugging Face checkpoint.', required=True
)
_OUT = flags.DEFINE_string(
  'out', None, 'Import directory to make; must not exist.', required=True
)
_UNMODELLED = flags.DEFINE_enum(
  'unmodelled',
  'carry',
  ['carry', 'refuse'],
  'What to do with tensors that the model does not have (layers for '
  'multi-token prediction, vision towers): carry them to exports unchanged, or '
  'refuse the checkpoint.',
)
_VERIFY = flags.DEFINE_bool(
  'verify',
  False,
  'Afterwards reads both again and compares every value. Hashes are checked '
  'at every load without it.',
)


def run() -> None:
  from composer_jax.checkpoint import hf_import

  hf_import.convert(_SOURCE.value, _OUT.value, unmodelled=_UNMODELLED.value)
  if _VERIFY.value:
    hf_import.verify(_SOURCE.value, _OUT.value)
  print(
    f'Import: {_OUT.value}. Train it with '
    f'--config=configs/composer/imported.py:{_OUT.value}'
  )


if __name__ == '__main__':
  files_main.main(run)
