"""Starts a run from an import directory that `experiments.hf_import` made.

The directory holds a model's config, its weights as an orbax checkpoint, and
the files of its tokenizer. A run copies the tokenizer and remembers the
identity of the import; nothing is ever written to the directory.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from composer_jax.core import files
from composer_jax.hf import importing
from composer_jax.hf.text import chat_template, conversations, language
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.models import config as model_config
from composer_jax.telemetry import progress

_TOKENIZER = 'tokenizer.json'  # in a workdir
_NUM_SHOWN = 4  # differences in an error; a model of another kind has dozens


def model_of(folder: str | os.PathLike) -> dict[str, Any]:
  """Returns the fields of the model's config; refuses an unfinished import."""
  importing.check_finished(folder)
  path = pathlib.Path(folder) / importing.MODEL
  fields = files.read_json(path)
  if not isinstance(fields, dict):
    raise ValueError(f'{path} holds no config of a model.')
  return fields


def identity(folder: str | os.PathLike) -> str:
  """Returns a SHA-256 of everything that a run takes from an import.

  Weights enter by the hashes recorded beside them. Two imports of the same
  checkpoint have the same identity, wherever they lie.
  """
  folder = pathlib.Path(folder)
  names = (importing.MODEL, hf_tokenizer.SOURCE, hf_tokenizer.CONFIG)
  paths = [folder / name for name in names]
  paths += [p for p in importing.copied(folder) if p.suffix == '.jinja']
  with contextlib.closing(importing.open_weights(folder)) as weights:
    arrays = weights.record(0)['arrays']
  texts = {
    str(path.relative_to(folder)): files.sha256(path.read_bytes())
    for path in paths
    if path.exists()
  }
  return files.sha256(json.dumps([arrays, texts], sort_keys=True).encode())


def check_identity(
  folder: str | os.PathLike, expected: str, workdir: str | os.PathLike
) -> None:
  """Raises a ValueError unless a folder holds the import a run began from."""
  is_there = (pathlib.Path(folder) / importing.RECORD).is_file()
  if is_there and identity(folder) == expected:
    return
  problem = 'another one or has changed' if is_there else 'not there'
  raise ValueError(
    f'The run in {workdir} began from the import {folder}, which is {problem}. '
    'Put it back, or, where it has been moved to DIR, start the run once more '
    'with --config=configs/composer/imported.py:DIR: that notes the place and '
    'repeats no finished stage.'
  )


def check_model(
  folder: str | os.PathLike, model: model_config.ModelConfig
) -> None:
  """Raises a ValueError with the fields in which the run's model differs."""
  # Through JSON, where a tuple is a list on both sides.
  ours = json.loads(json.dumps(model.to_dict()))
  imported = model_of(folder)
  if not imported.get('mtp'):
    # A run may train heads of its own.
    _check_room(folder, model)
    ours.pop('mtp')
    imported.pop('mtp', None)
  ours, imported = files.flatten(ours), files.flatten(imported)
  differing = [
    f'{key} is {imported.get(key, "absent")!r} there and '
    f'{ours.get(key, "absent")!r} in --config.model'
    for key in sorted(imported | ours)
    if key not in model_config.FREE
    and (key in imported, imported.get(key)) != (key in ours, ours.get(key))
  ]
  if differing:
    more = len(differing) - _NUM_SHOWN
    raise ValueError(
      f'The model in {folder} is not that of this run. Take it from there by '
      f'--config=configs/composer/imported.py:{folder}; other configs, such as '
      'deletion.py, have a model of their own. '
      f'Only {", ".join(model_config.FREE)} may differ; '
      f'{"; ".join(differing[:_NUM_SHOWN])}'
      f'{f"; and {more} more" if more > 0 else ""}.'
    )


def _check_room(
  folder: str | os.PathLike, model: model_config.ModelConfig
) -> None:
  """Raises a ValueError if new heads have the place of carried ones."""
  start = f'model.layers.{model.num_layers}.'
  carried = importing.read_record(folder)['carried'] if model.mtp else []
  if any(start in name for name in carried):
    raise ValueError(
      f'The model in {folder} has heads for multi-token prediction, which were '
      'carried along. Import it with `--mtp` to train these, or leave '
      '--config.model.mtp empty.'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportedModel:
  """An import directory as a `core.seams.StartingPoint` of a run.

  Attributes:
    conversations_file: the user's own conversations for SFT; '' for none.
    windows: tokens of the longest windows, by the field that asks for them.
    speech: choices of how the model is spoken to.
    functions: tools of the run's tasks.
  """

  folder: str
  model: model_config.ModelConfig
  conversations_file: str
  seq_len: int
  windows: Mapping[str, int]
  speech: language.LanguageOptions = language.LanguageOptions()
  functions: Sequence[Any] = ()

  def claim(self) -> dict[str, Any]:
    """Returns the identities.

    A ValueError if the model is not the import's, or a window is too long.
    """
    check_model(self.folder, self.model)
    for field, num_tokens in self.windows.items():
      importing.check_window(self.folder, field, num_tokens)
    file = self.conversations_file
    return {
      'imported': identity(self.folder),
      'conversations': conversations.identity(file) if file else '',
    }

  def take(self, workdir: pathlib.Path) -> None:
    """Copies what a run needs of the texts, or raises before it writes."""
    tokenizer, speech = self._read()
    file, say = self.conversations_file, progress.teller('language')
    say(speech.describe() if speech else 'ten roles, as models trained here')
    if file and speech is None:
      chat_template.load(self.folder)  # Raises if there is none.
      raise ValueError(
        f'--config.demonstrations.conversations ({file!r}) need the chat '
        "template of the import: set --config.language.calls='auto'."
      )
    if file and speech:
      documents = conversations.documents(file, speech, self.seq_len)
      conversations.save(workdir / conversations.FILE, documents)
    self._save(workdir, tokenizer, speech)

  def _read(self) -> tuple[Any, language.TemplateLanguage | None]:
    """Returns tokenizer and language of the import."""
    tokenizer = hf_tokenizer.ImportedTokenizer.from_folder(
      self.folder, self.model.vocab_size
    )
    try:
      return tokenizer, language.from_folder(
        self.folder, tokenizer, self.speech, self.functions
      )
    except ValueError as error:
      raise ValueError(
        f"{error} Mend the template, or set --config.language.calls='roles', "
        'the protocol of models trained here.'
      ) from error

  def _save(self, workdir: pathlib.Path, tokenizer: Any, speech: Any) -> None:
    if speech is not None:
      language.save(workdir / language.FILE, speech)
    tokenizer.save(workdir / _TOKENIZER)

  def tokenizer(self, workdir: pathlib.Path) -> Any:
    """Returns the import's tokenizer, saved where a rollout worker reads it."""
    path = workdir / _TOKENIZER
    if not path.exists():
      self._save(workdir, *self._read())
    return language.load_any(path, self.functions)

  def conversations(self, workdir: pathlib.Path) -> list[tuple[Any, Any]]:
    if not self.conversations_file:
      return []
    return conversations.load(workdir / conversations.FILE)

  def variables(self, like: Any) -> Any:
    """Returns the imported weights in the dtypes and shardings of `like`.

    Without 'mtp' if the import has no heads for multi-token prediction.
    """
    if not model_of(self.folder).get('mtp'):
      like = {name: tree for name, tree in like.items() if name != 'mtp'}
    return importing.load_variables(self.folder, like)
