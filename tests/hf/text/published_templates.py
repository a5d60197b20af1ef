"""Tokenizers with chat templates in the form of published checkpoints.

Written from knowledge of those templates, quirks included: DeepSeek-V3 leaves
the last call of a turn open, Qwen3 and DeepSeek-R1 drop earlier reasoning.
"""

import pathlib

import experiments
from composer_jax.hf.text import language
from composer_jax.hf.text import tokenizer as hf_tokenizer
from tests.hf.text import tokenizer_files

_HERE = pathlib.Path(__file__).parent / 'published'
_TINY = pathlib.Path(experiments.__file__).parent / 'tiny_templates'
_DEEPSEEK = (
  *('<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜▁pad▁｜>'),
  *('<｜fim▁hole｜>', '<｜fim▁begin｜>', '<｜fim▁end｜>', '<｜User｜>'),
  *('<｜Assistant｜>', '<｜tool▁calls▁begin｜>', '<｜tool▁call▁begin｜>'),
  *('<｜tool▁sep｜>', '<｜tool▁call▁end｜>', '<｜tool▁calls▁end｜>'),
  *('<｜tool▁outputs▁begin｜>', '<｜tool▁output▁begin｜>'),
  *('<｜tool▁output▁end｜>', '<｜tool▁outputs▁end｜>'),
)
_KIMI = (
  *('[BOS]', '[EOS]', '<|im_end|>', '<|im_user|>', '<|im_assistant|>'),
  *('<|im_system|>', '<|im_middle|>', '[PAD]'),
)
_KIMI_CALLS = (
  *('<|tool_calls_section_begin|>', '<|tool_calls_section_end|>'),
  *('<|tool_call_begin|>', '<|tool_call_argument_begin|>', '<|tool_call_end|>'),
)
_LLAMA = (
  *('<|begin_of_text|>', '<|eot_id|>', '<|end_of_text|>', '<|eom_id|>'),
  *('<|start_header_id|>', '<|end_header_id|>'),
)
_QWEN = (tokenizer_files.QWEN, (*tokenizer_files.QWEN_MORE, '</think>'))

# Name -> specials, further tokens, spellings of bos and eos.
PUBLISHED = {
  'qwen3_moe': (*_QWEN, '', '<|im_end|>'),
  'qwen2_5': (*_QWEN, '', '<|im_end|>'),
  'chatml': (*_QWEN, '', '<|im_end|>'),
  'deepseek_v3': (_DEEPSEEK, (), *_DEEPSEEK[:2]),
  'deepseek_r1': (
    _DEEPSEEK[:3],  # Its tokenizer has no other special ones.
    (*_DEEPSEEK[3:], '<think>', '</think>'),
    *_DEEPSEEK[:2],
  ),
  'kimi_k2': (_KIMI, _KIMI_CALLS, '[BOS]', '[EOS]'),
  'llama3': (_LLAMA, (), *_LLAMA[:2]),
  'mistral': (('<unk>', '<s>', '</s>'), (), '<s>', '</s>'),
}


def write(folder: pathlib.Path, name: str) -> pathlib.Path:
  """Writes the tokenizer's files of a checkpoint, with its chat template."""
  specials, more, bos, eos = PUBLISHED[name]
  config = {'eos_token': eos, **({'bos_token': bos} if bos else {})}
  bpe = tokenizer_files.byte_level()
  tokenizer_files.write(folder, bpe, specials, more, **config)
  path = _TINY / f'{name}.jinja'
  path = path if path.exists() else _HERE / f'{name}.jinja'
  # Files often end in a line feed that the published text lacks.
  text = path.read_text().removesuffix('\n')
  (folder / 'chat_template.jinja').write_text(text)
  return folder


def speech(folder: pathlib.Path, functions=(), **options):
  """Returns the language of such a folder."""
  tokenizer = hf_tokenizer.ImportedTokenizer.from_folder(folder, 400)
  tokenizer.language = language.from_folder(
    folder, tokenizer, language.LanguageOptions(**options), functions
  )
  return tokenizer, tokenizer.language
