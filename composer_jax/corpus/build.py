"""Builds a corpus of Python code out of what a machine has.

`build` reads sources in an order that depends on names and the seed alone,
drops what is not worth learning from (each file with its reason), refuses what
the tasks hold out, removes exact and near duplicates, and splits by package (a
lone package by file).
The result lies in a folder: `texts.bin`, the documents' UTF-8 end to end, and
`manifest.json`, which lists every document and every dropped file and whose
hash identifies the corpus. A folder that holds the corpus asked for is opened,
not rebuilt: a run keeps its data even when the machine's packages change.
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

FORMAT = 'composer_jax.corpus/1'
TRAIN, HELDOUT = 'train', 'heldout'
SPLITS = (TRAIN, HELDOUT)
HoldOut = filters.HoldOut
Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CorpusOptions:
  """How much to take and what to drop.

  Attributes:
    max_bytes: of text to accept, before duplicates are removed.
    weights: share of `max_bytes` per source; () for equal shares.
    heldout_share: of the bytes, in whole packages.
    min_file_bytes: shorter files are dropped.
    max_file_bytes: longer files are dropped.
    near_duplicate: share of the smaller file's 5-grams that makes a copy.
    seed: of the choice of files and of the split.
    archives: folder with sdists and wheels for `pypi:` sources; '' for none.
  """

  max_bytes: int = 12_000_000
  weights: tuple[float, ...] = ()
  heldout_share: float = 0.04
  min_file_bytes: int = 128
  max_file_bytes: int = 250_000
  near_duplicate: float = 0.6
  seed: int = 0
  archives: str = ''

  def __post_init__(self):
    if self.max_bytes < 1:
      raise ValueError(f'max_bytes must be positive, not {self.max_bytes}.')
    if not 0 < self.heldout_share < 1:
      raise ValueError(
        f'heldout_share must lie in (0, 1), not {self.heldout_share}.'
      )
    if not 0 < self.near_duplicate <= 1:
      raise ValueError(
        f'near_duplicate must lie in (0, 1], not {self.near_duplicate}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Document:
  """One file of the corpus.

  Attributes:
    split: TRAIN or HELDOUT.
    source: index into the manifest's sources.
    package: normalised name.
    licence: of the file, else of its package.
    num_bytes: of the text in UTF-8.
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
    folder: with `manifest.json` and `texts.bin`.
    documents: in the order of `texts.bin`.
    counts: files per fate: kept per split, dropped per reason, not needed.
    fingerprint: SHA-256 of the manifest.
  """

  folder: pathlib.Path
  documents: tuple[Document, ...]
  counts: dict[str, int]
  fingerprint: str

  def texts(self, split: str) -> list[str]:
    """Reads a split's documents; a damaged file is named in a ValueError."""
    if split not in SPLITS:
      raise ValueError(f'split {split!r} is not one of {SPLITS}.')
    data = (self.folder / 'texts.bin').read_bytes()
    found, start = [], 0
    for document in self.documents:
      part = data[start : start + document.num_bytes]
      start += document.num_bytes
      if document.split == split:
        if files.sha256(part) != document.sha256:
          raise ValueError(
            f'{self.folder / "texts.bin"} is damaged at {document.package}: '
            f'{document.path}; delete {self.folder} to have it rebuilt.'
          )
        found.append(part.decode())
    return found

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

  Args:
    sources: as `corpus.sources` names them; or paths of lists, whose hashes
      are then checked.
    workdir: of this corpus alone.
    holdout: what must not get in.
    report: told what goes on, a line at a time.

  Raises:
    ValueError: a source is missing, unreadable, empty or differs from its pin;
      nothing is left after filtering; the split cannot be made.
  """
  holdout = holdout or HoldOut()
  options = options or CorpusOptions()
  folder = pathlib.Path(workdir)
  pinned = sources_lib.read_pins(sources)
  key = _key(pinned, holdout, options)
  manifest = folder / 'manifest.json'
  if manifest.exists():
    if files.read_json(manifest).get('key') == key:
      return open_corpus(folder)
    report('corpus: other sources, hold-outs or options; building again')
  found = [sources_lib.find(name, options.archives) for name in pinned]
  for source in found:
    sources_lib.check_pin(source, pinned[source.name])
  kept, dropped, counts = _select(found, holdout, options, report)
  documents = _split_and_deduplicate(kept, dropped, options, report)
  kept_bytes = dict.fromkeys(SPLITS, 0)
  for c in documents:
    kept_bytes[c.split] += len(c.text.encode())
  counts.update(collections.Counter(f'kept: {c.split}' for c in documents))
  counts.update(collections.Counter(d['reason'] for d in dropped))
  for name, count in sorted(counts.items()):
    report(f'corpus: {count:6d} files {name}')
  report(
    f'corpus: {kept_bytes[TRAIN] / 1e6:.2f} MB to train, '
    f'{kept_bytes[HELDOUT] / 1e6:.2f} MB held out'
  )
  _write(folder, key, found, documents, dropped, dict(counts), options)
  return open_corpus(folder)


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
      fingerprint=files.sha256(path.read_bytes()),
  )  # fmt: skip


def _key(
  pinned: dict[str, str | None], holdout: HoldOut, options: CorpusOptions
) -> str:
  """Identifies what was asked for, as opposed to what was found."""
  value: list[Any] = [FORMAT, list(pinned.items()), dataclasses.asdict(options)]
  value.append({k: sorted(v) for k, v in dataclasses.asdict(holdout).items()})
  return files.sha256(json.dumps(value, sort_keys=True).encode())


@dataclasses.dataclass(kw_only=True, slots=True)
class _Candidate:
  source: int
  file: sources_lib.File
  text: str
  grams: Any
  split: str = TRAIN


def _select(found, holdout, options, report):
  """Reads files until each source has given its share.

  Returns:
    the candidates, the dropped files as dictionaries, and a counter with the
    files that were not needed.
  """
  weights = options.weights or (1.0,) * len(found)
  sizes = [sum(f.num_bytes for f in source.files) for source in found]
  shares = allocate(sizes, weights, options.max_bytes)
  lexicon = filters.Lexicon()
  scan = filters.HoldOutScan(holdout, lexicon)
  packages = {sources_lib.normalise(p) for p in holdout.packages}
  packages.add(sources_lib.OWN)
  kept, dropped, seen = [], [], {}
  counts: collections.Counter = collections.Counter()

  def rank(file: sources_lib.File) -> str:
    return files.sha256(f'{options.seed}/{file.package}/{file.path}'.encode())

  for index, source in enumerate(found):
    report(
      f'corpus: {source.name} {source.version}: up to '
      f'{shares[index] / 1e6:.1f} of {sizes[index] / 1e6:.1f} MB'
    )
    left = shares[index]
    for file in sorted(source.files, key=rank):
      if left < file.num_bytes <= options.max_file_bytes:
        counts['beyond max_bytes'] += 1
        continue
      reason, candidate = _read(file, packages, scan, lexicon, options)
      if candidate is None:
        dropped.append(_dropped(index, file, reason))
        continue
      candidate.source = index
      digest = files.sha256(candidate.text.encode())
      if digest in seen:
        dropped.append(_dropped(index, file, 'exact duplicate', seen[digest]))
        continue
      seen[digest] = f'{file.package}: {file.path}'
      kept.append(candidate)
      left -= file.num_bytes
  if not kept:
    reasons = dict(collections.Counter(d['reason'] for d in dropped))
    raise ValueError(
      f'The corpus is empty: of {sum(len(s.files) for s in found)} files in '
      f'{[s.name for s in found]} none was kept ({reasons}). Add sources or '
      f'raise data.max_bytes ({options.max_bytes}).'
    )
  return kept, dropped, counts


def allocate(
  sizes: Sequence[int], weights: Sequence[float], budget: int
) -> list[int]:
  """Divides a budget by weight; what one source cannot use goes to the rest.

  Args:
    weights: relative shares, not negative; zero leaves a source out.

  Returns:
    One integer per source, at most its size, in all at most the budget. Where
    a source runs out, the shares of the others keep the ratio of their weights
    (water filling).

  Raises:
    ValueError: as many weights as sources are needed, one of them positive.
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
  left = budget
  while open_:
    total = sum(weights[i] for i in open_)
    full = [i for i in sorted(open_) if sizes[i] <= left * weights[i] / total]
    if not full:
      for i in sorted(open_):
        spent[i] = int(left * weights[i] / total)
      return spent
    for i in full:
      spent[i] = sizes[i]
    left -= sum(sizes[i] for i in full)
    open_ -= set(full)
  return spent


def _dropped(
  index: int, file: sources_lib.File, reason: str, of: str = ''
) -> dict[str, Any]:
  entry = {'source': index, 'package': file.package, 'path': file.path}
  return {**entry, 'reason': reason, **({'of': of} if of else {})}


def _read(file, packages, scan, lexicon, options):
  """Returns (reason to drop, None) or ('', candidate)."""
  if sources_lib.names(file) & packages:
    return 'held-out package', None
  if file.num_bytes > options.max_file_bytes:
    return 'too large', None
  try:
    data = file.read()
  except OSError as error:
    return f'unreadable ({error.strerror})', None
  reason = filters.form(
    file.path, data, options.min_file_bytes, options.max_file_bytes
  )
  if reason:
    return reason, None
  text = filters.clean(data)
  grams = lexicon.grams(text)
  reason = scan.find(text, grams)
  if reason:
    return reason, None
  return '', _Candidate(source=0, file=file, text=text, grams=grams)


def _split_and_deduplicate(kept, dropped, options, report):
  """Holds packages out, then drops copies, held-out files winning."""
  _hold_out(kept, options, report)
  kept = sorted(kept, key=lambda c: c.split == TRAIN)
  report(f'corpus: {len(kept)} files read; looking for near-duplicates')
  copies = filters.near_duplicates(
    [c.grams for c in kept], options.near_duplicate
  )
  for index, first in sorted(copies.items()):
    c, other = kept[index], kept[first]
    across = ' across splits' if c.split != other.split else ''
    where = f'{other.file.package}: {other.file.path}'
    reason = f'near-duplicate{across}'
    dropped.append(_dropped(c.source, c.file, reason, where))
  kept = [c for i, c in enumerate(kept) if i not in copies]
  if not any(c.split == TRAIN for c in kept):
    raise ValueError(
      'Nothing is left to train on: every file repeats a held-out one. Add '
      f'sources or lower data.heldout_share ({options.heldout_share}).'
    )
  return kept


def _hold_out(kept, options, report) -> None:
  """Sets the split of every file: by package, or by file where there is one."""
  units = [c.file.package for c in kept]
  is_lone = len(set(units)) == 1
  if is_lone:
    report(
      f'corpus: {units[0]} is the only package: the held-out loss is that of '
      'other files of the same package, which flatters it'
    )
    units = [c.file.path for c in kept]
  sizes: collections.Counter = collections.Counter()
  for unit, c in zip(units, kept, strict=True):
    sizes[unit] += len(c.text)
  if len(sizes) < 2:
    raise ValueError(
      'A part of the corpus must be held out, and all that is left of it is '
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
  """Picks packages, or files, by hash until their bytes reach the quota.

  None is larger than a quarter of it, so that the held-out loss is that of
  several; where these have no more than `least` bytes, none is larger than all
  of it; where neither do, it is the one of nearest size.
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


def _write(folder, key, found, kept, dropped, counts, options) -> None:
  """Writes texts, then the manifest that makes them count."""
  documents, texts = [], []
  for c in kept:
    data = c.text.encode()
    texts.append(data)
    document = Document(
        split=c.split, source=c.source, package=c.file.package,
        path=c.file.path, licence=licences.of_file(c.text) or c.file.licence,
        sha256=files.sha256(data), num_bytes=len(data),
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
      'sources': [
        {'name': s.name, 'version': s.version, 'files': len(s.files)}
        for s in found
      ],
      'options': dataclasses.asdict(options),
      'counts': counts,
      'licences': dict(collections.Counter(d['licence'] for d in documents)),
      'documents': documents,
      'dropped': dropped,
    },
  )
