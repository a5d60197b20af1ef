"""Builds a corpus of Python code from sources on this machine.

`build` reads sources in an order that depends on names and the seed alone,
drops files that are not worth learning from, refuses what the tasks hold out,
removes exact and near duplicates, and splits by package (a lone package by
file). It writes `texts.bin`, the documents' UTF-8 end to end, and
`manifest.json`, which lists every document and every dropped file with its
reason, and has the hash that identifies the corpus. A folder that already holds
the requested corpus is opened, not rebuilt: a run keeps its data even when the
machine's packages change.
"""

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_jax.core import files
from composer_jax.corpus import filters, licences
from composer_jax.corpus import sources as sources_lib

FORMAT = 'composer_jax.corpus/2'
TRAIN, HELDOUT = 'train', 'heldout'
SPLITS = (TRAIN, HELDOUT)
HoldOut = filters.HoldOut
Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CorpusOptions:
  """Size, mixture, split and filters of a corpus.

  Attributes:
    max_bytes: most bytes of text, before duplicates are removed.
    weights: share of `max_bytes` per source; () for equal shares.
    heldout_share: share of the bytes held out, in whole packages.
    min_file_bytes: size below which files are dropped.
    max_file_bytes: size above which files are dropped.
    near_duplicate: least share of the smaller file's 5-grams that the other
      file must have for the two to count as copies.
    seed: seed of the choice of files and of the split.
    archives: folder with sdists and wheels for `pypi:` sources; '' for none.
    differences: 'stop' at sources that are not as pinned, or 'note' it.
    exclude_licences: texts that no licence of a file may contain; case does
      not count. 'gpl' excludes LGPL and 'MIT OR GPL-2.0' too, and 'unknown'
      excludes files without a declared licence.
  """

  max_bytes: int = 12_000_000
  weights: tuple[float, ...] = ()
  heldout_share: float = 0.04
  min_file_bytes: int = 128
  max_file_bytes: int = 250_000
  near_duplicate: float = 0.6
  seed: int = 0
  archives: str = ''
  differences: str = 'stop'
  exclude_licences: tuple[str, ...] = ()

  def __post_init__(self):
    if isinstance(self.exclude_licences, str) or '' in self.exclude_licences:
      raise ValueError(
        'data.exclude_licences must be a tuple of texts that are not empty, '
        f'not {self.exclude_licences!r}.'
      )
    if self.differences not in sources_lib.DIFFERENCES:
      raise ValueError(
        f'data.differences must be one of {sources_lib.DIFFERENCES}, not '
        f'{self.differences!r}.'
      )
    if self.max_bytes < 1:
      raise ValueError(
        f'data.max_bytes must be positive, not {self.max_bytes}.'
      )
    if not 0 < self.heldout_share < 1:
      raise ValueError(
        f'data.heldout_share must lie in (0, 1), not {self.heldout_share}.'
      )
    if not 0 < self.near_duplicate <= 1:
      raise ValueError(
        f'data.near_duplicate must lie in (0, 1], not {self.near_duplicate}.'
      )

  def stated(self) -> dict[str, Any]:
    """Fields as manifests have them: no exclude_licences where it is empty."""
    fields = dataclasses.asdict(self)
    if not self.exclude_licences:
      del fields['exclude_licences']
    return fields


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Document:
  """One file of the corpus; `source` is an index into the manifest's.

  The licence is that of the file, else of its package.
  """

  split: str
  source: int
  package: str
  path: str
  licence: str
  sha256: str
  num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
  """A corpus in a folder.

  Attributes:
    folder: folder with `manifest.json` and `texts.bin`.
    documents: documents in the order of `texts.bin`.
    counts: number of files per outcome: 'kept: <split>' or why they are out.
    fingerprint: SHA-256 of all texts with their splits, in order.
  """

  folder: pathlib.Path
  documents: tuple[Document, ...]
  counts: dict[str, int]
  fingerprint: str

  def texts(self, split: str) -> list[str]:
    """Reads a split's documents; a damaged file is named in a ValueError."""
    if split not in SPLITS:
      raise ValueError(f'split must be one of {SPLITS}, not {split!r}.')
    data = (self.folder / 'texts.bin').read_bytes()
    texts, start = [], 0
    for document in self.documents:
      part = data[start : start + document.num_bytes]
      start += document.num_bytes
      if document.split == split:
        if files.sha256(part) != document.sha256:
          raise ValueError(
            f'{self.folder / "texts.bin"} is damaged at {document.package}: '
            f'{document.path}; delete {self.folder} to have it rebuilt.'
          )
        texts.append(part.decode())
    return texts

  def num_bytes(self, split: str) -> int:
    return sum(d.num_bytes for d in self.documents if d.split == split)


def build(
  sources: Sequence[str],
  *,
  workdir: str | os.PathLike,
  holdout: HoldOut | None = None,
  options: CorpusOptions | None = None,
  report: Report = print,
) -> Corpus:
  """Builds the corpus in `workdir`, or opens it where it already stands.

  Sources are names (see `corpus.sources`), or paths of lists of them, which may
  pin hashes. A ValueError names a source that is missing, unreadable or not as
  pinned, or says that too little is left.
  """
  holdout = holdout or HoldOut()
  options = options or CorpusOptions()
  folder = pathlib.Path(workdir)
  key = _key(sources_lib.read_pins(sources), holdout, options)
  manifest = folder / 'manifest.json'
  if manifest.exists():
    if files.read_json(manifest).get('key') == key:
      return open_corpus(folder)
    report('corpus: other sources, hold-outs or options; building again')
  code_sources = sources_lib.find_all(
      sources, options.archives, differences=options.differences,
      report=report,
  )  # fmt: skip
  kept, dropped, counts = _select(code_sources, holdout, options, report)
  documents = _split_and_deduplicate(kept, dropped, options, report)
  kept_bytes = dict.fromkeys(SPLITS, 0)
  for candidate in documents:
    kept_bytes[candidate.split] += len(candidate.text.encode())
    counts[f'kept: {candidate.split}'] += 1
  counts.update(collections.Counter(d['reason'] for d in dropped))
  for name, count in sorted(counts.items()):
    report(f'corpus: {count:6d} files {name}')
  report(
    f'corpus: {kept_bytes[TRAIN] / 1e6:.2f} MB to train, '
    f'{kept_bytes[HELDOUT] / 1e6:.2f} MB held out'
  )
  _write(folder, key, code_sources, documents, dropped, dict(counts), options)
  corpus = open_corpus(folder)
  report(f'corpus: SHA-256 {corpus.fingerprint}')
  return corpus


def open_corpus(workdir: str | os.PathLike) -> Corpus:
  """Opens a corpus that `build` wrote."""
  path = pathlib.Path(workdir) / 'manifest.json'
  manifest = files.read_json(path)
  if manifest.get('format') != FORMAT:
    raise ValueError(
      f'{path} has format {manifest.get("format")!r}, not {FORMAT!r}; delete '
      'it to have the corpus rebuilt.'
    )
  documents = tuple(Document(**d) for d in manifest['documents'])
  return Corpus(
      folder=path.parent, documents=documents, counts=manifest['counts'],
      fingerprint=manifest['sha256'],
  )  # fmt: skip


def _key(
  pinned: dict[str, str | None], holdout: HoldOut, options: CorpusOptions
) -> str:
  """Identifies the request, as opposed to the files that it selected."""
  value: list[Any] = [FORMAT, list(pinned.items()), options.stated()]
  value.append({k: sorted(v) for k, v in dataclasses.asdict(holdout).items()})
  return files.sha256(json.dumps(value, sort_keys=True).encode())


@dataclasses.dataclass(kw_only=True, slots=True)
class _Candidate:
  source: int
  file: sources_lib.File
  licence: str
  text: str
  grams: Any
  split: str = TRAIN


def _select(code_sources, holdout, options, report):
  """Returns candidates, dropped files, and a counter of those not needed."""
  weights = options.weights or (1.0,) * len(code_sources)
  sizes = [sum(f.num_bytes for f in source.files) for source in code_sources]
  shares = allocate(sizes, weights, options.max_bytes)
  lexicon = filters.Lexicon()
  scan = filters.HoldOutScan(holdout, lexicon)
  packages = {sources_lib.normalise(p) for p in holdout.packages}
  packages.add(sources_lib.OWN)
  kept, dropped, seen = [], [], {}
  counts: collections.Counter = collections.Counter()

  def rank(file: sources_lib.File) -> str:
    return files.sha256(f'{options.seed}/{file.package}/{file.path}'.encode())

  for index, source in enumerate(code_sources):
    report(
      f'corpus: {source.name} {source.version}: up to '
      f'{shares[index] / 1e6:.1f} of {sizes[index] / 1e6:.1f} MB'
    )
    remaining = shares[index]
    for file in sorted(source.files, key=rank):
      if remaining < file.num_bytes <= options.max_file_bytes:
        counts['beyond max_bytes'] += 1
        continue
      candidate = _read(index, file, packages, scan, lexicon, options)
      if isinstance(candidate, str):
        dropped.append(_dropped(index, file, candidate))
        continue
      digest = files.sha256(candidate.text.encode())
      if digest in seen:
        dropped.append(_dropped(index, file, 'exact duplicate', seen[digest]))
        continue
      seen[digest] = f'{file.package}: {file.path}'
      kept.append(candidate)
      remaining -= file.num_bytes
  if not kept:
    reasons = dict(collections.Counter(d['reason'] for d in dropped))
    raise ValueError(
      f'The corpus is empty: of {sum(len(s.files) for s in code_sources)} '
      f'files in {[s.name for s in code_sources]} none was kept ({reasons}). '
      f'Add sources or raise data.max_bytes ({options.max_bytes}).'
    )
  return kept, dropped, counts


def allocate(
  sizes: Sequence[int], weights: Sequence[float], budget: int
) -> list[int]:
  """Divides a budget by weight; what one source cannot use goes to the others.

  The others' shares keep the ratio of their weights (water filling). A
  weight of zero leaves a source out.
  """
  if len(weights) != len(sizes):
    raise ValueError(
      f'{len(weights)} mixture weights for {len(sizes)} sources; give one '
      'weight per source in data.weights, or none for equal shares.'
    )
  if any(w < 0 for w in weights) or not any(w > 0 for w in weights):
    raise ValueError(
      f'Mixture weights {list(weights)} must not be negative and one must be '
      'positive.'
    )
  spent = [0] * len(sizes)
  open_ = {i for i, w in enumerate(weights) if w > 0}
  while open_:
    total = sum(weights[i] for i in open_)
    full = [i for i in sorted(open_) if sizes[i] <= budget * weights[i] / total]
    if not full:
      for i in sorted(open_):
        spent[i] = int(budget * weights[i] / total)
      return spent
    for i in full:
      spent[i] = sizes[i]
    budget -= sum(sizes[i] for i in full)
    open_ -= set(full)
  return spent


def _dropped(
  index: int, file: sources_lib.File, reason: str, of: str = ''
) -> dict[str, Any]:
  entry = {'source': index, 'package': file.package, 'path': file.path}
  return {**entry, 'reason': reason, **({'of': of} if of else {})}


def _read(source, file, packages, scan, lexicon, options) -> _Candidate | str:
  """Returns a candidate, or the reason to drop the file."""
  if sources_lib.names(file) & packages:
    return 'held-out package'
  if file.num_bytes > options.max_file_bytes:
    return 'too large'
  try:
    data = file.read()
  except OSError as error:
    return f'unreadable ({error.strerror})'
  reason, text = filters.read(
    file.path, data, options.min_file_bytes, options.max_file_bytes
  )
  if reason:
    return reason
  licence = licences.of_file(text) or file.licence
  if any(x.lower() in licence.lower() for x in options.exclude_licences):
    return 'excluded licence'
  grams = lexicon.grams(text)
  return scan.find(text, grams) or _Candidate(
    source=source, file=file, licence=licence, text=text, grams=grams
  )


def _split_and_deduplicate(kept, dropped, options, report):
  """Holds packages out, then drops copies: training files of held-out ones."""
  _hold_out(kept, options, report)
  kept = sorted(kept, key=lambda c: c.split == TRAIN)
  report(f'corpus: {len(kept)} files read; looking for near-duplicates')
  copies = filters.near_duplicates(
    [c.grams for c in kept], options.near_duplicate
  )
  for index, first in sorted(copies.items()):
    copy, original = kept[index], kept[first]
    across = ' across splits' if copy.split != original.split else ''
    where = f'{original.file.package}: {original.file.path}'
    reason = f'near-duplicate{across}'
    dropped.append(_dropped(copy.source, copy.file, reason, where))
  kept = [c for i, c in enumerate(kept) if i not in copies]
  if not any(c.split == TRAIN for c in kept):
    raise ValueError(
      'Nothing is left to train on: every file repeats a held-out one. Add '
      f'sources or lower data.heldout_share ({options.heldout_share}).'
    )
  return kept


def _hold_out(kept, options, report) -> None:
  """Sets the split of every file: by package, or by file of a lone package."""
  units = [c.file.package for c in kept]
  is_lone = len(set(units)) == 1
  if is_lone:
    report(
      f'corpus: {units[0]} is the only package: held-out files are of the same '
      'package as training files, so the held-out loss is too low'
    )
    units = [c.file.path for c in kept]
  sizes: collections.Counter = collections.Counter()
  for unit, c in zip(units, kept, strict=True):
    sizes[unit] += len(c.text)
  if len(sizes) < 2:
    raise ValueError(
      'A part of the corpus must be held out, but it consists of '
      f'one file, {kept[0].file.package}: {kept[0].file.path}. Add a source.'
    )
  quota = options.heldout_share * sizes.total()
  # A package's only small file may be an `__init__.py` of one line.
  least = quota / 2 if is_lone else 0
  heldout = choose_heldout(sizes, quota, least=least, seed=options.seed)
  for unit, c in zip(units, kept, strict=True):
    c.split = HELDOUT if unit in heldout else TRAIN


def choose_heldout(
  sizes: Mapping[str, int], quota: float, *, least: float, seed: int
) -> set[str]:
  """Picks packages, or files, in the order of their hash up to a quota.

  Only units of at most a quarter of the quota are picked, so that several are
  held out; if these have no more than `least` bytes together, units of at most
  the quota; if these have no more either, the one unit of nearest size.

  Args:
    sizes: bytes of each unit (package or file).
    quota: bytes at which picking ends.
    least: bytes that the picked units must exceed together.
  """
  order = sorted(sizes, key=lambda u: files.sha256(f'{seed}/{u}'.encode()))
  for most in (quota / 4, quota):
    chosen, total = set(), 0
    for unit in order:
      if sizes[unit] <= most and total < quota:
        chosen.add(unit)
        total += sizes[unit]
    if total > least:
      return chosen
  return {min(order, key=lambda unit: (abs(sizes[unit] - quota), unit))}


def _write(folder, key, code_sources, kept, dropped, counts, options) -> None:
  """Writes the texts, then the manifest, without which they do not count."""
  documents, texts = [], []
  for c in kept:
    data = c.text.encode()
    texts.append(data)
    document = Document(
        split=c.split, source=c.source, package=c.file.package,
        path=c.file.path, licence=c.licence, sha256=files.sha256(data),
        num_bytes=len(data),
    )  # fmt: skip
    documents.append(dataclasses.asdict(document))
  # Without the old manifest, new texts never pass for the old corpus.
  (folder / 'manifest.json').unlink(missing_ok=True)
  files.write_atomic(folder / 'texts.bin', b''.join(texts))
  files.write_json(
    folder / 'manifest.json',
    {
      'format': FORMAT,
      'key': key,
      'sha256': files.sha256(
        ''.join(f'{d["split"]} {d["sha256"]}\n' for d in documents).encode()
      ),
      'sources': [
        {'name': s.name, 'version': s.version, 'files': len(s.files)}
        for s in code_sources
      ],
      'options': options.stated(),
      'counts': counts,
      'licences': dict(collections.Counter(d['licence'] for d in documents)),
      'documents': documents,
      'dropped': dropped,
    },
  )
