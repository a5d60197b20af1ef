"""What a run takes from the folder that `experiments.hf_import` made.

The folder holds a model's config, its weights as an orbax checkpoint, and the
files of its tokenizer. A run copies the tokenizer and remembers which import it
came from; nothing is ever written there.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

from composer_jax.core import files
from composer_jax.hf import identity, importing
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportedModel:
  """A `core.seams.StartingPoint`: the folder of an import.

  Attributes:
    folder: made by `experiments.hf_import`.
    model: of the run.
    conversations_file: of the user's own, to learn; '' for none.
    seq_len: of SFT's rows, which a conversation has to fit.
  """

  folder: str
  model: model_config.ModelConfig
  conversations_file: str
  seq_len: int

  def check(self) -> None:
    """Raises a ValueError that names where the run's model is another one."""
    check_model(self.folder, self.model)

  def claim(self) -> dict[str, Any]:
    """Identities of the weights, and of the conversations."""
    file = self.conversations_file
    return {
      'imported': identity.of(self.folder),
      'conversations': conversations.identity(file) if file else '',
    }

  def take(self, workdir: pathlib.Path) -> None:
    """Keeps in a workdir what a run needs of the import beside the weights.

    All that a user may have to mend in the import is found out here.

    Raises:
      ValueError: the tokenizer or the conversations cannot be used; nothing has
        been written.
    """
    made = hf_tokenizer.ImportedTokenizer.from_folder(
      self.folder, self.model.vocab_size
    )
    if self.conversations_file:
      documents = conversations.documents(
        self.conversations_file,
        chat_template.load(self.folder),
        made,
        self.seq_len,
      )
      conversations.save(workdir / conversations.FILE, documents)
    made.save(workdir / _TOKENIZER)

  def tokenizer(self, workdir: pathlib.Path) -> hf_tokenizer.ImportedTokenizer:
    """The import's tokenizer, saved where a rollout worker finds it."""
    path = workdir / _TOKENIZER
    if not path.exists():
      hf_tokenizer.ImportedTokenizer.from_folder(
        self.folder, self.model.vocab_size
      ).save(path)
    return hf_tokenizer.ImportedTokenizer.load(path)

  def conversations(self, workdir: pathlib.Path) -> list[tuple[Any, Any]]:
    if not self.conversations_file:
      return []
    return conversations.load(workdir / conversations.FILE)

  def variables(self, like: Any) -> Any:
    """The imported weights as float32 masters, placed as `like` says."""
    return importing.load_variables(self.folder, like)
