"""Which ids of a model's vocabulary play our ten roles.

A role is a token of the vocabulary where it has one of that meaning, and an id
that it leaves free where it has none: embeddings are padded (151,669 tokens in
the 151,936 rows of Qwen3).
"""

import os
import re
from collections.abc import Mapping
from typing import Any

# Tokens of the meaning of a role, the first that the vocabulary has. Of Qwen,
# DeepSeek (whose 'hole' stands before the suffix and 'end' before the middle),
# Kimi, Llama, Mixtral, OLMo and StarCoder.
_NAMES = {
  'EOD': (
    *('<|endoftext|>', '<｜end▁of▁sentence｜>', '<|end_of_text|>', '[EOS]'),
    *('</s>', '<eos>'),
  ),
  'USER': ('<|user|>', '<|im_user|>', '<｜User｜>'),
  'CALL': (
    '<|assistant|>',
    '<|im_assistant|>',
    '<｜Assistant｜>',
    '<tool_call>',
  ),
  'TOOL': ('<|tool|>', '<｜tool▁output▁begin｜>', '<tool_response>'),
  'END': ('<|im_end|>', '<|eot_id|>', '[EOT]', '<|end|>', '<|eot|>'),
  'FIM_PREFIX': ('<|fim_prefix|>', '<｜fim▁begin｜>', '<fim_prefix>'),
  'FIM_MIDDLE': ('<|fim_middle|>', '<｜fim▁end｜>', '<fim_middle>'),
  'FIM_SUFFIX': ('<|fim_suffix|>', '<｜fim▁hole｜>', '<fim_suffix>'),
}
NAMES = ('PAD', 'BOS', *_NAMES)
# Special tokens that a vocabulary keeps for uses like ours.
_RESERVED = re.compile('reserved|place.?holder|unused', re.IGNORECASE)


def assign(
  source: dict[str, Any],
  config: dict[str, Any],
  vocab_size: int,
  path: str | os.PathLike,
) -> dict[str, int]:
  """Chooses the ids of the ten roles, the same for the same files.

  Args:
    source: content of `tokenizer.json`.
    config: content of `tokenizer_config.json`.
    vocab_size: rows of the model's embedding.
    path: for errors.
  """
  added = {t['content']: t['id'] for t in source['added_tokens']}
  taken = {*source['model'].get('vocab', {}).values(), *added.values()}
  if max(taken) >= vocab_size:
    raise ValueError(
      f'{path} has ids up to {max(taken)}, the embedding of the model '
      f'{vocab_size} rows: they are not of one checkpoint.'
    )
  roles: dict[str, int | None] = {
    role: next((added[n] for n in names if n in added), None)
    for role, names in _NAMES.items()
  }
  named = {
    key: added[text]
    for key, text in special_tokens(config).items()
    if text in added
  }
  # A token of another role ends turns, and is not also the end of documents.
  if roles['EOD'] is None and named.get('eos_token') not in roles.values():
    roles['EOD'] = named.get('eos_token')
  reserved = [
    i
    for text, i in added.items()
    if _RESERVED.search(text) and i not in named.values()
  ]
  free = [i for i in range(vocab_size) if i not in taken] + sorted(reserved)
  lacking = [role for role, i in roles.items() if i is None]
  if len(lacking) > len(free):
    missing = len(lacking) - len(free)
    raise ValueError(
      f'{path}: the vocabulary has no token for {", ".join(lacking)} and '
      f'leaves {len(free)} of the {vocab_size} rows of the embedding free: '
      f'{missing} too few. Add rows before the import (with transformers: '
      f'model.resize_token_embeddings({vocab_size + missing}), then '
      'save_pretrained), or take a checkpoint whose embedding is padded, as '
      'those of Qwen3 and DeepSeek-V3 are.'
    )
  roles |= dict(zip(lacking, free, strict=False))
  others = {i for role, i in roles.items() if role != 'EOD'}
  for role, key in (('BOS', 'bos_token'), ('PAD', 'pad_token')):
    i = named.get(key, roles['EOD'])
    # Such vocabularies begin documents after the end of the one before.
    roles[role] = roles['EOD'] if i in others else i
  return {role: int(i) for role, i in roles.items() if i is not None}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
  """The spellings that a `tokenizer_config.json` names: bos_token and such."""
  found = {}
  for key, value in config.items():
    if isinstance(value, dict):
      value = value.get('content')
    if key.endswith('_token') and isinstance(value, str):
      found[key] = value
  return found
