"""The whole loop on a model imported from Hugging Face.

  python -m experiments.hf_import --source=CHECKPOINT --out=runs/import/qwen3
  python -m experiments.composer \
      --config=configs/composer/imported.py:runs/import/qwen3 \
      --workdir=runs/qwen3

Model, weights and tokenizer are those of the import. Everything else is as in
tiny.py but the learning rates, which are those at the end of pretraining, far
below those for random weights. For a large model set `--config.mesh`,
`--config.layout=hsdp` and the lengths. Not measured on published weights.

Arguments: the import's folder, or `imported.py:DIR,smoke` for tiny.py's
shortest job. Without a folder the file can be loaded, and a run of it says what
is missing.
"""

import json
import pathlib

import ml_collections

from configs.composer import tiny

_UNNAMED = 'DIR'  # value of `initial` if no import is named


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  folder, comma, variant = arg.partition(',')
  if comma and variant != 'smoke':
    raise ValueError(f'imported.py:DIR[,smoke] has no variant {variant!r}.')
  c = tiny.get_config(variant)
  c.initial = folder or _UNNAMED
  if folder:
    c.model = _model(folder)
    if c.model.compute_dtype == 'bfloat16':
      # These depend on the dtype, see gpu.py.
      c.rl.gate.max_kl_exact, c.rl.gate.max_kl_afresh = 1e-4, 1e-3
      c.rl.gate.min_exact_agreement = 0.97
      c.accelerator = variant != 'smoke'
  if variant == 'smoke':
    # For a CPU; an import sets bfloat16 and recomputation, for accelerators.
    c.model.compute_dtype, c.model.remat = 'float32', False
    c.rl.gate = tiny.get_config().rl.gate
    # Calls take more tokens in a vocabulary that was not trained on them.
    c.episode.max_call_tokens = 64
  # Weights that know code and names need no more SFT than this.
  if variant != 'smoke':
    c.cpt.steps, c.sft.steps, c.sft.decay_steps = 300, 280, 100
  c.sft.batch_size = c.cpt.batch_size
  for stage in (c.cpt, c.sft):
    # Most published weights were trained with AdamW; those trained with Muon,
    # such as Kimi K2 and Moonlight, go on with it: optimizer='muon'.
    stage.optimizer = 'adam'
    stage.learning_rate = 2e-5
    stage.adam_learning_rate = 2e-5
    # DeepSeek-V3 froze it at the end of pretraining (section 4.2).
    stage.bias_update_rate = 0.0
  c.rl.learning_rate = 1e-6
  return c


def _model(folder: str) -> ml_collections.ConfigDict:
  path = pathlib.Path(folder) / 'model.json'
  try:
    fields = json.loads(path.read_text())
  except (OSError, ValueError) as error:
    source, out = 'CHECKPOINT', folder
    if (pathlib.Path(folder) / 'config.json').exists():
      source, out = folder, f'runs/import/{pathlib.Path(folder).name}'
    raise ValueError(
      f'{folder!r} is not an import ({error}); make it with `python -m '
      f'experiments.hf_import --source={source} --out={out}`, and name {out}.'
    ) from error
  # Absent from imports that are older than these, and to be set by a run.
  fields.setdefault('numerics', 'fast')
  saves = fields.get('remat_saves', tiny.get_config().model.remat_saves)
  fields['remat_saves'] = tuple(saves)  # A list in JSON.
  fields['moe'].setdefault('replay_alpha', 0.0)
  # Ranks above 0 train adapters beside the frozen weights.
  roles = ('attention', 'dense', 'shared', 'routed', 'router')
  fields.setdefault('adapters', {**dict.fromkeys(roles, 0), 'alpha': 32.0})
  # Heads of the import (--mtp), or those that the run makes.
  fields['mtp'] = fields.get('mtp') or {}
  return ml_collections.ConfigDict(fields)
