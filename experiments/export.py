"""Writes a model as a Hugging Face checkpoint: safetensors and config.json.

  python -m experiments.export --source=runs/tiny --stage=rl --out=exports/tiny
  python -m experiments.export --source=runs/import/qwen3 --out=exports/qwen3

The source is the workdir of a run, or an import directory, which is returned
byte for byte: tensors, index, config.json and the tokenizer's files. Quantised
weights are written as bfloat16 instead. Tensors that an import carried along
are written, as stored, with every export of a model that began from it.
"""

import pathlib

from absl import flags

from experiments import files_main

_SOURCE = flags.DEFINE_string(
  'source', None, 'Workdir of a run, or an import directory.', required=True
)
_STAGE = flags.DEFINE_string(
  'stage', None, 'Finished stage of the run: cpt, sft or rl.'
)
_OUT = flags.DEFINE_string(
  'out', None, 'Folder to make; must not exist.', required=True
)
_DTYPE = flags.DEFINE_enum(
  'dtype',
  None,
  ['source', 'int4', 'bfloat16', 'float16', 'float32'],
  'Dtype of the tensors. Default: bfloat16 for a run; for an import directory '
  'source, the dtype that each tensor was imported with. int4 is that of the '
  'source, where it was quantised so.',
)
_FAMILY = flags.DEFINE_string(
  'family',
  None,
  'Family whose names and config.json are written, if the model was not '
  'imported: qwen3_moe, deepseek_v3 or olmoe.',
)


def run() -> None:
  from composer_jax.hf import exporting, importing

  source = pathlib.Path(_SOURCE.value)
  if (source / importing.RECORD).exists():
    if _STAGE.value or _FAMILY.value:
      raise ValueError(
        f'{source} is an import directory, which has no stages and knows its '
        'family; leave out --stage and --family.'
      )
    origin = exporting.of_import(source)
  else:
    origin = exporting.of_run(source, _STAGE.value, family=_FAMILY.value)
  exporting.write(origin, _OUT.value, dtype=_DTYPE.value)
  print(f'Hugging Face checkpoint: {_OUT.value}')


if __name__ == '__main__':
  files_main.main(run)
