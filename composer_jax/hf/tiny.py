"""A tiny random checkpoint as Hugging Face has them, to try things on.

transformers loads it; it knows nothing. Its tokenizer is byte-level BPE, learnt
from this Python's standard library.
"""

import dataclasses
import functools
import json
import os
import pathlib

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

from composer_jax.core import files, trees
from composer_jax.hf.architecture import config as hf_config
from composer_jax.hf.tensors import names
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.text import tokenizer

# Rows of the embedding; the tokenizer leaves some of them free, as those of
# real checkpoints do.
_VOCAB_SIZE, _NUM_FREE = 1024, 24
_SPECIALS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
_TEMPLATE = (
  '{%- for message in messages %}'
  "{{- '<|im_start|>' + message.role + '\\n' }}"
  "{%- if message.role == 'assistant' %}{% generation %}"
  "{{- message.content + '<|im_end|>' }}{% endgeneration %}"
  "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}"
  '{%- endfor %}'
  "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_QWEN3 = model_config.ModelConfig(
  vocab_size=_VOCAB_SIZE,
  embed_dim=64,
  num_layers=2,
  num_dense_layers=0,
  dense_ffw_dim=192,
  norm_eps=1e-6,
  tie_embeddings=False,
  remat=False,
  compute_dtype='float32',
  attention=model_config.GQAConfig(
    kind='gqa',
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    qk_norm='head',
    qkv_bias=False,
    out_bias=False,
  ),
  rope=model_config.RopeConfig(theta=10000.0, interleaved=False, yarn=None),
  moe=model_config.MoEConfig(
    num_experts=8,
    num_active=2,
    ffw_dim=64,
    num_shared=0,
    router='softmax',
    num_groups=1,
    num_active_groups=1,
    renormalize=True,
    routed_scale=1.0,
    aux_loss_weight=0.001,
    z_loss_weight=0.0,
  ),
)
_DEEPSEEK = dataclasses.replace(
  _QWEN3,
  num_dense_layers=1,
  attention=model_config.MLAConfig(
    kind='mla',
    num_heads=4,
    q_lora_dim=48,
    kv_lora_dim=32,
    nope_dim=32,
    rope_dim=16,
    value_dim=32,
    latent_norm_eps=1e-6,
  ),
  rope=dataclasses.replace(_QWEN3.rope, interleaved=True),
  moe=dataclasses.replace(
    _QWEN3.moe,
    num_shared=1,
    router='sigmoid',
    num_groups=4,
    num_active_groups=2,
    routed_scale=2.5,
    aux_loss_weight=0.0,
  ),
)
MODELS = {'qwen3_moe': _QWEN3, 'deepseek_v3': _DEEPSEEK}


def write(folder: str | os.PathLike, family: str, seed: int) -> None:
  """Writes config.json, model.safetensors and the tokenizer's files.

  The folder must not exist and appears whole.
  """
  folder, model = pathlib.Path(folder), MODELS[family]
  if folder.exists():
    raise ValueError(f'{folder} exists; choose another, or delete it.')
  partial = folder.with_name(f'.{folder.name}.partial')
  partial.mkdir(parents=True, exist_ok=True)
  _write_tokenizer(partial)
  weights = _tensors(model, family, seed)
  safetensors.numpy.save_file(weights, partial / 'model.safetensors')
  fields = {**hf_config.to_hf(model, family), 'dtype': 'bfloat16'}
  text = json.dumps(fields, indent=2)
  files.write_atomic(partial / 'config.json', text.encode())
  os.replace(partial, folder)


def _write_tokenizer(folder: pathlib.Path) -> None:
  paths = sorted(pathlib.Path(os.__file__).parent.glob('*.py'))[:40]
  texts = [path.read_text('utf-8', 'replace') for path in paths]
  bpe = tokenizer.train_bpe(texts, _VOCAB_SIZE - _NUM_FREE)
  bpe.add_special_tokens(list(_SPECIALS))
  bpe.save(str(folder / 'tokenizer.json'))
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'eos_token': '<|im_end|>',
    'pad_token': '<|endoftext|>',
    'chat_template': _TEMPLATE,
  }
  files.write_json(folder / 'tokenizer_config.json', config)


def _tensors(
  model: model_config.ModelConfig, family: str, seed: int
) -> dict[str, np.ndarray]:
  init = jax.jit(
    functools.partial(decoder.init, model),
    # Four times as fast to compile, and other last bits.
    compiler_options={'xla_backend_optimization_level': 0},
  )
  arrays = {
    name: np.asarray(array).astype(ml_dtypes.bfloat16)
    for name, array in trees.flatten_names(init(jax.random.key(seed))).items()
  }
  weights = {}
  table = names.tensors(model, family, expert_layout='per_expert')
  for name, tensor in table.items():
    weights[name] = np.empty(tensor.shape, ml_dtypes.bfloat16)
    for part in tensor.parts:
      names.put(part, arrays[part.array][part.index], weights[name])
  return weights
