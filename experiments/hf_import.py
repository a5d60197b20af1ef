"""Converts a Hugging Face checkpoint to an import, from which runs can begin.

  python -m experiments.hf_import --source=DIR --out=runs/import/qwen3

DIR holds config.json and safetensors files: Qwen3-MoE, DeepSeek-V3, Kimi K2 or
OLMoE, in bfloat16, float16 or float32, DeepSeek's fp8 or Kimi's int4. Nothing
larger than a piece of a tensor is held in memory, and the same command resumes
after an interruption. Tensors that the model does not have
(layers for multi-token prediction unless `--mtp` is given, vision towers) are
named and carried along.
`experiments.export` converts back.
"""

import pathlib

from absl import flags

from experiments import files_main

_SOURCE = flags.DEFINE_string(
  'source', None, 'Folder of the Hugging Face checkpoint.', required=True
)
_OUT = flags.DEFINE_string(
  'out', None, 'Import directory to make; must not exist.', required=True
)

_MTP = flags.DEFINE_bool(
  'mtp',
  False,
  'Make layers for multi-token prediction heads of the model, to be trained.',
)


def run() -> None:
  from composer_jax.hf import importing

  _warn(pathlib.Path(_SOURCE.value))
  importing.convert(_SOURCE.value, _OUT.value, mtp=_MTP.value)
  print(
    f'Import: {_OUT.value}. Train it with '
    f'--config=configs/composer/imported.py:{_OUT.value}'
  )


def _warn(source: pathlib.Path) -> None:
  """Warns before the conversion of what a run would refuse after it."""
  from composer_jax.core import files
  from composer_jax.hf.architecture import config as hf_config
  from composer_jax.hf.text import tokenizer

  try:
    config, _, _ = hf_config.from_hf(files.read_json(source / 'config.json'))
  except (ValueError, OSError):
    return  # The import reports this error itself.
  try:
    tokenizer.ImportedTokenizer.from_folder(source, config.vocab_size)
  except ValueError as error:
    print(f'Warning: a run will refuse this tokenizer: {error}', flush=True)


if __name__ == '__main__':
  files_main.main(run)
