"""Writes a tiny Hugging Face checkpoint with random weights, to try things on.

transformers loads it. Its tokenizer is byte-level BPE, trained on this Python's
standard library.
"""

import dataclasses
import functools
import itertools
import json
import os
import pathlib

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers

from composer_jax.core import files, trees
from composer_jax.hf.architecture import config as hf_config
from composer_jax.hf.tensors import names
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.text import tokenizer

# Rows of the embedding, of which the tokenizer leaves some free, as those of
# real checkpoints do.
_VOCAB_SIZE, _NUM_FREE = 1024, 48
# Rows of the published tables, and the tokens before the special ones.
FULL = {'qwen3_moe': (151936, 151643), 'deepseek_v3': (129280, 128000)}
# Special tokens, further tokens of calls, and the places of bos and eos.
_QWEN = (
  *('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|fim_prefix|>'),
  *('<|fim_middle|>', '<|fim_suffix|>'),
)
_QWEN_MORE = (
  *('<tool_call>', '</tool_call>', '<tool_response>', '</tool_response>'),
  *('<think>', '</think>'),
)
_DEEPSEEK = (
  *('<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜▁pad▁｜>'),
  *('<｜fim▁hole｜>', '<｜fim▁begin｜>', '<｜fim▁end｜>', '<｜User｜>'),
  *('<｜Assistant｜>', '<｜tool▁calls▁begin｜>', '<｜tool▁call▁begin｜>'),
  *('<｜tool▁sep｜>', '<｜tool▁call▁end｜>', '<｜tool▁calls▁end｜>'),
  *('<｜tool▁outputs▁begin｜>', '<｜tool▁output▁begin｜>'),
  *('<｜tool▁output▁end｜>', '<｜tool▁outputs▁end｜>'),
)
# Tokens of each family, special and other ones, and those of its config. The
# chat templates beside have the form of the published ones.
_TOKENS = {
  'qwen3_moe': (
    _QWEN,
    _QWEN_MORE,
    {'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>'},
  ),
  'deepseek_v3': (
    _DEEPSEEK,
    (),
    {
      name: _DEEPSEEK[i]
      for i, name in enumerate(('bos_token', 'eos_token', 'pad_token'))
    },
  ),
}

# The config.json of each family.
_COMMON = {
  'vocab_size': _VOCAB_SIZE,
  'hidden_size': 64,
  'intermediate_size': 192,
  'moe_intermediate_size': 64,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_experts_per_tok': 2,
  'norm_topk_prob': True,
  'rms_norm_eps': 1e-6,
  'rope_theta': 10000.0,
  'dtype': 'bfloat16',
}
MODELS = {
  'qwen3_moe': {
    **_COMMON,
    'model_type': 'qwen3_moe',
    'architectures': ['Qwen3MoeForCausalLM'],
    'num_key_value_heads': 2,
    'head_dim': 32,
    'num_experts': 8,
  },
  'deepseek_v3': {
    **_COMMON,
    'model_type': 'deepseek_v3',
    'architectures': ['DeepseekV3ForCausalLM'],
    'num_key_value_heads': 4,
    'q_lora_rank': 48,
    'kv_lora_rank': 32,
    'qk_nope_head_dim': 32,
    'qk_rope_head_dim': 16,
    'v_head_dim': 32,
    'first_k_dense_replace': 1,
    'n_routed_experts': 8,
    'n_shared_experts': 1,
    'n_group': 4,
    'topk_group': 2,
    'routed_scaling_factor': 2.5,
  },
}


def write(
  folder: str | os.PathLike, family: str, seed: int, *, is_full: bool = False
) -> None:
  """Writes config.json, model.safetensors and the tokenizer's files.

  The folder must not exist and appears whole. With `is_full` the vocabulary has
  the published size, most of it pairs of tokens that no text needs.
  """
  folder, fields = pathlib.Path(folder), MODELS[family]
  num_rows, num_tokens = _VOCAB_SIZE, _VOCAB_SIZE - _NUM_FREE
  if is_full:
    num_rows, num_tokens = FULL[family]
    fields = {**fields, 'vocab_size': num_rows}
  if folder.exists():
    raise ValueError(f'{folder} exists; choose another, or delete it.')
  partial = folder.with_name(f'.{folder.name}.partial')
  partial.mkdir(parents=True, exist_ok=True)
  _write_tokenizer(partial, family, num_tokens)
  model = dataclasses.replace(
    hf_config.from_hf(fields)[0], remat=False, compute_dtype='float32'
  )
  weights = _tensors(model, family, seed)
  safetensors.numpy.save_file(weights, partial / 'model.safetensors')
  text = json.dumps(fields, indent=2)
  files.write_atomic(partial / 'config.json', text.encode())
  os.replace(partial, folder)


def _filled(bpe: tokenizers.Tokenizer, size: int) -> tokenizers.Tokenizer:
  """Returns a tokenizer of `size` tokens, new ones being pairs of old ones."""
  fields = json.loads(bpe.to_str())
  vocab, merges = fields['model']['vocab'], fields['model']['merges']
  for pair in itertools.product(list(vocab), repeat=2):
    if len(vocab) >= size:
      break
    if (token := ''.join(pair)) not in vocab:
      vocab[token] = len(vocab)
      merges.append(list(pair))
  return tokenizers.Tokenizer.from_str(json.dumps(fields))


def _write_tokenizer(
  folder: pathlib.Path, family: str, num_tokens: int
) -> None:
  paths = sorted(pathlib.Path(os.__file__).parent.glob('*.py'))[:40]
  texts = [path.read_text('utf-8', 'replace') for path in paths]
  bpe = tokenizer.train_bpe(texts, _VOCAB_SIZE - _NUM_FREE)
  bpe = _filled(bpe, num_tokens) if num_tokens > _VOCAB_SIZE else bpe
  specials, more, named = _TOKENS[family]
  bpe.add_special_tokens(list(specials))
  bpe.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in more])
  bpe.save(str(folder / 'tokenizer.json'))
  config = {'tokenizer_class': 'PreTrainedTokenizerFast', **named}
  files.write_json(folder / 'tokenizer_config.json', config)
  template = pathlib.Path(__file__).parent / 'tiny_templates'
  text = (template / f'{family}.jinja').read_text().removesuffix('\n')
  files.write_atomic(folder / 'chat_template.jinja', text.encode())
  ends = [bpe.token_to_id(named['eos_token'])]
  ends += [bpe.token_to_id('<|endoftext|>')] * (family == 'qwen3_moe')
  files.write_json(folder / 'generation_config.json', {'eos_token_id': ends})


def _tensors(
  model: model_config.ModelConfig, family: str, seed: int
) -> dict[str, np.ndarray]:
  init = jax.jit(
    functools.partial(decoder.init, model),
    # Compiles four times as fast; the last bits of weights do not matter.
    compiler_options={'xla_backend_optimization_level': 0},
  )
  arrays = {
    name: np.asarray(array).astype(ml_dtypes.bfloat16)
    for name, array in trees.flatten_names(init(jax.random.key(seed))).items()
  }
  weights = {}
  table = names.tensors(model, family)
  for name, tensor in table.items():
    weights[name] = np.empty(tensor.shape, ml_dtypes.bfloat16)
    for part in tensor.parts:
      values = arrays[part.array][part.index]
      view = weights[name].reshape(part.view, copy=False)
      view[part.select] = values.transpose(np.argsort(part.order))
  return weights
