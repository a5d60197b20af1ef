"""Writes the tokenizer files of small checkpoints, as Hugging Face has them."""

import json
import pathlib

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXT = (
  'def total(values):\n  """Adds."""\n  return sum(v for v in values)\n\n'
  "for index in range(10):\n    if index > 3:\n        print('héllo', 42)\n"
) * 8

QWEN = (
  *('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|fim_prefix|>'),
  *('<|fim_middle|>', '<|fim_suffix|>', '<|fim_pad|>'),
)
# Tokens that Qwen3's files add without calling them special.
QWEN_MORE = ('<tool_call>', '</tool_call>', '<tool_response>', '<think>')
QWEN_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
DEEPSEEK = (
  *('<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜▁pad▁｜>'),
  *('<｜fim▁hole｜>', '<｜fim▁begin｜>', '<｜fim▁end｜>', '<｜User｜>'),
  *('<｜Assistant｜>', '<｜tool▁output▁begin｜>', '<｜place▁holder▁no▁0｜>'),
)
# A vocabulary with no token for most roles.
PLAIN = ('<unk>', '<s>', '</s>')


def byte_level(vocab_size: int = 300) -> tokenizers.Tokenizer:
  """Returns BPE as Qwen has it: NFC, words by a pattern, bytes."""
  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.normalizer = normalizers.NFC()
  bpe.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(QWEN_WORDS), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  bpe.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  bpe.train_from_iterator([TEXT], trainer)
  return bpe


def write(
  folder: pathlib.Path,
  bpe: tokenizers.Tokenizer,
  specials: tuple[str, ...],
  more: tuple[str, ...] = (),
  **config,
) -> pathlib.Path:
  """Writes `tokenizer.json` and `tokenizer_config.json`."""
  folder.mkdir(parents=True, exist_ok=True)
  bpe.add_special_tokens(list(specials))
  for content in more:
    bpe.add_tokens([tokenizers.AddedToken(content, normalized=False)])
  bpe.save(str(folder / 'tokenizer.json'))
  config = {'tokenizer_class': 'PreTrainedTokenizerFast', **config}
  (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  return folder


def qwen(folder: pathlib.Path, **config) -> pathlib.Path:
  config = {'eos_token': '<|im_end|>', 'pad_token': '<|endoftext|>', **config}
  return write(folder, byte_level(), QWEN, QWEN_MORE, **config)


def deepseek(folder: pathlib.Path, **config) -> pathlib.Path:
  names = ('bos_token', 'eos_token', 'pad_token')
  config = {**dict(zip(names, DEEPSEEK, strict=False)), **config}
  return write(folder, byte_level(), DEEPSEEK, **config)


def plain(folder: pathlib.Path, **config) -> pathlib.Path:
  names = ('unk_token', 'bos_token', 'eos_token')
  config = {**dict(zip(names, PLAIN, strict=False)), **config}
  return write(folder, byte_level(), PLAIN, **config)
