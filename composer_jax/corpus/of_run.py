"""The corpus of a run, by its config sections `data` and `tokenizer`."""

import dataclasses
import pathlib
from collections.abc import Callable

from composer_jax.corpus import build, sources, tokens
from composer_jax.text import tokenizer as tokenizers


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
  """The code of continued pretraining.

  Attributes:
    sources: 'pinned', 'stdlib', folders, sdists, or lists of them.
    differences: 'stop' where a source is not as its list pins it, or 'note' to
      print that and train on what is here.
    weights: shares of max_bytes, one per source; () for equal shares.
    archives: folder of sdists and wheels, for sources pypi:NAME==VERSION.
    max_bytes: most bytes of text, before duplicates are removed.
    heldout_share: share of the bytes held out, in whole packages.
    fim_rate: share of pieces rearranged for fill-in-the-middle.
    exclude_licences: texts that no licence of a file may contain, in any case,
      such as 'gpl'; () excludes nothing.
  """

  sources: tuple[str, ...] = (sources.PINNED,)
  differences: str = 'stop'
  weights: tuple[float, ...] = ()
  archives: str = ''
  max_bytes: int = 12_000_000
  heldout_share: float = 0.05
  fim_rate: float = 0.3
  exclude_licences: tuple[str, ...] = ()

  def __post_init__(self):
    if not self.sources:
      raise ValueError('--config.data.sources must name at least one source.')
    if not 0 <= self.fim_rate <= 1:
      raise ValueError(
        f'--config.data.fim_rate must lie in [0, 1], not {self.fim_rate}.'
      )
    if self.max_bytes < 10_000:
      raise ValueError(
        f'--config.data.max_bytes must be at least 10000, not {self.max_bytes}.'
      )
    self.options(seed=0)

  def options(self, seed: int) -> build.CorpusOptions:
    """Options of a corpus; ValueError for a field that it refuses."""
    return build.CorpusOptions(
        max_bytes=self.max_bytes, weights=self.weights, seed=seed,
        heldout_share=self.heldout_share, archives=self.archives,
        exclude_licences=self.exclude_licences, differences=self.differences,
    )  # fmt: skip

  def names(self) -> list[str]:
    """Names of sources; `--config.data.sources=a,b` arrives as one string."""
    return [name for names in self.sources for name in names.split(',')]

  def check_files(self) -> None:
    """Raises a ValueError for a source not as pinned, or without its weight."""
    pinned_sources = sources.find_all(
        self.names(), self.archives, differences=self.differences,
        report=lambda _: None,
    )  # fmt: skip
    if self.weights:
      build.allocate([1] * len(pinned_sources), self.weights, self.max_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
  """The tokenizer that a run trains for itself.

  Attributes:
    train_bytes: bytes of the corpus that the merges are learnt from.
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
  """A `core.seams.CodeCorpus` in the workdir of a run."""

  built: build.Corpus
  fim_rate: float
  tokenizer_bytes: int
  vocab_size: int
  report: Callable[[str], None]

  def train_tokenizer(self, extra_texts: list[str]) -> tokenizers.Tokenizer:
    return tokens.train_tokenizer(
        self.built, self.vocab_size, max_bytes=self.tokenizer_bytes,
        extra_texts=extra_texts, report=self.report,
    )  # fmt: skip

  def documents(
    self, tokenizer: tokens.TokenizerLike
  ) -> tuple[tokens.Documents, tokens.Documents]:
    documents = tokens.tokenise(self.built, tokenizer, report=self.report)
    return documents[build.TRAIN], documents[build.HELDOUT]


def build_corpus(
  data: DataOptions,
  workdir: pathlib.Path,
  holdout: build.HoldOut,
  *,
  seed: int,
  report: Callable[[str], None],
) -> build.Corpus:
  """Builds or opens the corpus in the folder `corpus` of a run's workdir."""
  return build.build(
    data.names(),
    workdir=workdir / 'corpus',
    holdout=holdout,
    options=data.options(seed),
    report=report,
  )
