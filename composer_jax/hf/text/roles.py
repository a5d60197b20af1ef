"""Chooses the ids of an imported vocabulary that play the ten roles.

A role is the token with that meaning where the vocabulary has one, and else an
id that the vocabulary leaves free: embeddings are padded (Qwen3 has 151,669
tokens in 151,936 rows).
"""

import os
import re
from collections.abc import Mapping
from typing import Any

# Spellings of each role in Qwen, DeepSeek (whose 'hole' is before the suffix
# and 'end' before the middle), Kimi, Llama, Mixtral, OLMo and StarCoder; the
# first that a vocabulary has is taken.
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
# Special tokens that a vocabulary reserves for later use.
_RESERVED = re.compile('reserved|place.?holder|unused', re.IGNORECASE)


def assign(
  source: dict[str, Any],
  config: dict[str, Any],
  vocab_size: int,
  path: str | os.PathLike,
) -> dict[str, int]:
  """Returns the id of each role; equal files give equal ids."""
  added = {t['content']: t['id'] for t in source['added_tokens']}
  taken = {*source['model'].get('vocab', {}).values(), *added.values()}
  if max(taken) >= vocab_size:
    raise ValueError(
      f'{path} has ids up to {max(taken)}, and the embedding of the model '
      f'{vocab_size} rows: the two do not belong to one checkpoint.'
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
  # A token that already plays another role, such as the end of a turn, cannot
  # be the end of documents as well.
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
    # Vocabularies without such a token separate documents by EOD alone.
    roles[role] = roles['EOD'] if i in others else i
  return {role: int(i) for role, i in roles.items() if i is not None}


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
  """Returns {'bos_token': spelling, ...} of a `tokenizer_config.json`."""
  spellings = {}
  for key, value in config.items():
    if isinstance(value, dict):
      value = value.get('content')
    if key.endswith('_token') and isinstance(value, str):
      spellings[key] = value
  return spellings
