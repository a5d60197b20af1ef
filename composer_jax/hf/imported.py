"""What a run takes from the folder that `experiments.hf_import` made.

The folder holds a model's config, its weights as an orbax checkpoint, and the
files of its tokenizer. A run copies the tokenizer and remembers which import it
came from; nothing is ever written there.
"""

import json
import os
import pathlib
from typing import Any

from composer_jax.core import files
from composer_jax.hf import importing
from composer_jax.hf.text import chat_template, conversations
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.models import config as model_config

_TOKENIZER = 'tokenizer.json'  # of a workdir
_NUM_TOLD = 4  # differences, of which a model of another kind has dozens


def model_of(folder: str | os.PathLike) -> dict[str, Any]:
  """The fields of the imported model's config.

  Raises:
    ValueError: the folder is not an import, or one that is not finished.
  """
  path = pathlib.Path(folder) / importing.MODEL
  lacking = [
    name
    for name in (importing.MODEL, importing.RECORD, importing.WEIGHTS)
    if not path.with_name(name).exists()
  ]
  if lacking:
    raise ValueError(
      f'{os.fspath(folder)!r} is not a finished import: it lacks '
      f'{", ".join(lacking)}. Make it with `python -m experiments.hf_import '
      '--source=CHECKPOINT --out=DIR` and name it: '
      '--config=configs/composer/imported.py:DIR.'
    )
  fields = files.read_json(path)
  if not isinstance(fields, dict):
    raise ValueError(f'{path} holds no config of a model.')
  return fields


def check_model(
  folder: str | os.PathLike, model: model_config.ModelConfig
) -> None:
  """Raises a ValueError that names where the run's model is another one."""
  # Through JSON, so that both are what was read back.
  wanted = files.flatten(json.loads(json.dumps(model.to_dict())))
  there = files.flatten(model_of(folder))
  missing = object()
  differing = [
    f'{key} is {there.get(key, "absent")!r} there and '
    f'{wanted.get(key, "absent")!r} in --config.model'
    for key in sorted(there | wanted)
    if key not in model_config.FREE
    and there.get(key, missing) != wanted.get(key, missing)
  ]
  if differing:
    more = len(differing) - _NUM_TOLD
    raise ValueError(
      f'The model in {folder} is not that of this run: '
      f'--config=configs/composer/imported.py:{folder} takes it from there. '
      f'Only {", ".join(model_config.FREE)} may differ; '
      f'{"; ".join(differing[:_NUM_TOLD])}'
      f'{f"; and {more} more" if more > 0 else ""}.'
    )


def take(
  folder: str | os.PathLike,
  workdir: pathlib.Path,
  vocab_size: int,
  *,
  talks: str,
  seq_len: int,
) -> None:
  """Keeps in a workdir what a run needs of the import beside the weights.

  All that a user may have to mend in the import is found out here.

  Args:
    folder: the import.
    workdir: of the run.
    vocab_size: rows of the embedding.
    talks: file of conversations to learn; '' for none.
    seq_len: of SFT's rows.

  Raises:
    ValueError: the tokenizer or the conversations cannot be used; nothing has
      been written.
  """
  made = hf_tokenizer.Tokenizer.from_folder(folder, vocab_size)
  if talks:
    template = chat_template.load(folder)
    found = conversations.documents(talks, template, made, seq_len)
    conversations.save(workdir / conversations.FILE, found)
  made.save(workdir / _TOKENIZER)


def tokenizer(
  folder: str | os.PathLike, workdir: pathlib.Path, vocab_size: int
) -> hf_tokenizer.Tokenizer:
  """The import's tokenizer, also saved where a rollout worker finds it."""
  path = workdir / _TOKENIZER
  if not path.exists():
    hf_tokenizer.Tokenizer.from_folder(folder, vocab_size).save(path)
  return hf_tokenizer.Tokenizer.load(path)


def variables(folder: str | os.PathLike, like: Any) -> Any:
  """The imported weights as float32 masters, placed as `like` says."""
  return importing.load_variables(folder, like)
