"""The corpus of a run: its sections of the config, its text and tokenizer."""

import dataclasses
import pathlib
from collections.abc import Callable

from composer_jax.corpus import build, tokens
from composer_jax.text import tokenizer as tokenizers


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
  """The code of continued pretraining.

  Attributes:
    sources: 'stdlib', 'site-packages', folders, sdists, or lists of them.
    weights: shares of max_bytes, one a source; () for equal ones.
    archives: folder of sdists and wheels, for sources pypi:NAME==VERSION.
    max_bytes: of text.
    heldout_share: of packages, for the held-out loss.
    fim_rate: share of documents rearranged for fill-in-the-middle.
  """

  sources: tuple[str, ...] = ('stdlib', 'site-packages')
  weights: tuple[float, ...] = ()
  archives: str = ''
  max_bytes: int = 12_000_000
  heldout_share: float = 0.05
  fim_rate: float = 0.3

  def __post_init__(self):
    if not self.sources:
      raise ValueError('--config.data.sources must name at least one source.')
    if not 0 < self.heldout_share < 1 or not 0 <= self.fim_rate <= 1:
      raise ValueError(
        '--config.data.heldout_share must lie in (0, 1) and fim_rate in '
        f'[0, 1]; got {self.heldout_share} and {self.fim_rate}.'
      )
    if self.max_bytes < 10_000:
      raise ValueError(
        f'--config.data.max_bytes must be at least 10000, not {self.max_bytes}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
  """The tokenizer that a run trains for itself.

  Attributes:
    train_bytes: of the corpus that the merges are learnt from.
  """

  train_bytes: int = 2_000_000

  def __post_init__(self):
    if self.train_bytes < 1000:
      raise ValueError(
        '--config.tokenizer.train_bytes must be at least 1000, not '
        f'{self.train_bytes}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCorpus:
  """A `core.seams.CodeCorpus` in the workdir of a run.

  Attributes:
    built: the text, which `build_corpus` found or made.
    fim_rate: share of documents rearranged for fill-in-the-middle.
    tokenizer_bytes: of the text that merges are learnt from.
    vocab_size: rows of the embedding.
    report: takes lines.
  """

  built: build.Corpus
  fim_rate: float
  tokenizer_bytes: int
  vocab_size: int
  report: Callable[[str], None]

  def train_tokenizer(self, extra_texts: list[str]) -> tokenizers.Tokenizer:
    return tokens.train_tokenizer(
      self.built,
      self.vocab_size,
      max_bytes=self.tokenizer_bytes,
      extra_texts=extra_texts,
      report=self.report,
    )

  def documents(
    self, tokenizer: tokenizers.TokenizerLike
  ) -> tuple[tokens.Documents, tokens.Documents]:
    made = tokens.tokenise(self.built, tokenizer, report=self.report)
    return made[build.TRAIN], made[build.HELDOUT]


def build_corpus(
  data: DataOptions,
  workdir: pathlib.Path,
  holdout: build.HoldOut,
  *,
  seed: int,
  report: Callable[[str], None],
) -> build.Corpus:
  """The corpus of a run, without anything that tasks hold out.

  Args:
    data: the section.
    workdir: of the run, whose folder `corpus` keeps it.
    holdout: what tasks hold out.
    seed: of the run.
    report: takes lines.
  """
  return build.build(
    # The flag `--config.data.sources=a,b` arrives as one string.
    [name for names in data.sources for name in names.split(',')],
    workdir=workdir / 'corpus',
    holdout=holdout,
    options=build.CorpusOptions(
      max_bytes=data.max_bytes,
      weights=data.weights,
      heldout_share=data.heldout_share,
      seed=seed,
      archives=data.archives,
    ),
    report=report,
  )
