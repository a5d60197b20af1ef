"""What keeps a file out of the corpus: its form, its copies, its secrets.

Everything that compares code compares 5-grams of Python lexical tokens,
comments and white space left out, hashed to 64 bits: reformatting a file does
not hide it.
"""

import ast
import dataclasses
import re
import textwrap
import warnings
from collections.abc import Iterable, Sequence

import numpy as np

from composer_jax.core import files

GRAM = 5
# A run of 5-grams longer than this is thinned by hash, all files alike, so
# that comparing stays linear in memory: 20 million take about 800 MB.
_MAX_GRAMS = 20_000_000
_ANCHOR = 16
# Licence headers and idioms are no sign of a copy.
_BOILERPLATE_FILES = 50

_GENERATED_NAME = re.compile(
  r'(_pb2|_pb2_grpc|parsetab|lextab|_version)\.pyi?$'
)
_GENERATED = re.compile(
  r'auto-?generated|generated (by|from|with|using|and|automatically)|'
  r'\bdo not (edit|modify)|@generated|machine[- ]generated',
  re.I,
)
# Inside a string '#' hides the rest of its line here; both sides of every
# comparison are cut the same way, and a real tokenizer is 20 times slower.
_LEXEME = re.compile(r'#[^\n]*|[^\W\d]\w*|\d[\w.]*|[^\w\s\\]')
_DEFINITION = re.compile(r'^[ \t]*(?:async[ \t]+)?def[ \t]+(\w+)', re.M)
_FIRST_STRING = re.compile(r'\s*[rRuU]?("""|\'\'\'|"|\')(.*?)\1', re.S)


def form(path: str, data: bytes, min_bytes: int, max_bytes: int) -> str:
  """Returns why a file's form keeps it out, or ''.

  Args:
    min_bytes: anything shorter says nothing.
    max_bytes: anything longer is data, or would crowd out the rest.
  """
  if len(data) < min_bytes:
    return 'too small'
  if len(data) > max_bytes:
    return 'too large'
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError:
    return 'not utf-8'
  if '\0' in text:
    return 'binary'
  if _is_generated(path, text):
    return 'generated'
  lines = text.splitlines()
  if max(map(len, lines)) > 1000 or len(text) > 100 * len(lines):
    return 'minified'
  try:
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')
      ast.parse(text)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return 'not Python of this version'
  lexemes = _LEXEME.findall(text)
  names = sum(x[0].isalpha() or x[0] in '_#' for x in lexemes)
  return 'data table' if names < 0.2 * len(lexemes) else ''


def _is_generated(path: str, text: str) -> bool:
  """Looks where generators sign: the name, first comments, first docstring."""
  head = text[:2000]
  comments = re.findall(r'^\s*#.*', head, re.M)
  code = re.sub(r'^\s*#.*\n', '', head, flags=re.M)
  string = _FIRST_STRING.match(code)
  # A long docstring may well discuss generated things; a signature is short.
  signed = [*comments, string[2][:300] if string else '']
  return bool(
    _GENERATED_NAME.search(path) or any(map(_GENERATED.search, signed))
  )


def clean(data: bytes) -> str:
  """Decodes a file that has passed `form`: no BOM, '\\n' line ends."""
  text = data.decode('utf-8-sig')
  return text.replace('\r\n', '\n').replace('\r', '\n')


class Lexicon:
  """Hashes 5-grams of lexical tokens; equal grams get equal hashes."""

  def __init__(self):
    self._ids: dict[str, int] = {}

  def grams(self, text: str) -> np.ndarray:
    """Returns the sorted distinct 5-grams of a text as uint64."""
    ids = self._ids
    tokens = np.array(
      [
        ids.setdefault(x, len(ids))
        for x in _LEXEME.findall(text)
        if x[0] != '#'
      ],
      np.uint64,
    )
    count = len(tokens) - GRAM + 1
    if count < 1:
      return np.zeros(0, np.uint64)
    mixed = _mix(tokens)
    total = np.zeros(count, np.uint64)
    for i in range(GRAM):
      total = _mix(total + mixed[i : i + count])
    return np.unique(total)


def _mix(x: np.ndarray) -> np.ndarray:
  """Finaliser of splitmix64 (Steele et al. 2014); wraps around by design."""
  x = x + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def near_duplicates(
  grams: Sequence[np.ndarray], threshold: float
) -> dict[int, int]:
  """Finds files most of whose 5-grams are in an earlier file, or reversed.

  Two files are near-duplicates when the 5-grams they share are at least
  `threshold` of the smaller file's: of all its grams, or of those in at most
  50 files. Of a gram, only the first 50 files kept count. A copy is dropped as
  it comes, so that the grams of a file with a thousand copies are in one kept
  file: what is in more than 50 is an idiom. The count is exact up to 20 million
  grams.

  Args:
    grams: of each file, sorted and distinct; earlier files win.
    threshold: in (0, 1].

  Returns:
    {dropped file: the kept file it repeats}. No two files that are not dropped
    are near-duplicates of each other.
  """
  if not any(map(len, grams)):
    return {}
  hashes = np.concatenate(grams)
  owners = np.repeat(np.arange(len(grams), dtype=np.int32), [*map(len, grams)])
  thinned = hashes % np.uint64(1 + len(hashes) // _MAX_GRAMS) == 0
  hashes, owners = hashes[thinned], owners[thinned]
  starts = np.searchsorted(owners, np.arange(len(grams) + 1))
  _, ids, counts = np.unique(hashes, return_inverse=True, return_counts=True)
  rare = counts[ids] <= _BOILERPLATE_FILES
  measures = [
    (counted, np.bincount(owners, counted, len(grams)))
    for counted in (np.ones_like(rare), rare)
  ]
  # Per gram a linked list of the kept files that hold it: the newest entry of
  # each, and the entry before each; an entry is a position in `ids`.
  newest = np.full(len(counts), -1, np.int32)
  before = np.full(len(ids), -1, np.int32)
  num_kept = np.zeros(len(counts), np.uint8)
  equal: dict[str, int] = {}
  dropped: dict[int, int] = {}
  for index, own in enumerate(grams):
    start, stop = starts[index], starts[index + 1]
    mine = ids[start:stop]
    # Files of idioms alone are compared whole.
    digest = files.sha256(own.tobytes())
    first = equal.setdefault(digest, index) if len(own) else index
    if first != index:
      dropped[index] = dropped.get(first, first)
      continue
    entries = _chains(newest[mine], before)
    others, which = np.unique(owners[entries], return_inverse=True)
    alike = np.zeros(len(others), bool)
    for counted, sizes in measures:
      shared = np.bincount(which, counted[entries], len(others))
      needed = threshold * np.minimum(sizes[others], sizes[index])
      alike |= (shared > 0) & (shared >= needed)
    if alike.any():
      dropped[index] = int(others[np.argmax(alike)])
      continue
    has_room = num_kept[mine] < _BOILERPLATE_FILES
    mine, places = mine[has_room], np.arange(start, stop)[has_room]
    before[places], newest[mine] = newest[mine], places
    num_kept[mine] += 1
  return dropped


def _chains(entries: np.ndarray, before: np.ndarray) -> np.ndarray:
  """Returns `entries` and all that `before` leads to from them; -1 ends."""
  found = []
  while len(entries := entries[entries >= 0]):
    found.append(entries)
    entries = before[entries]
  return np.concatenate(found) if found else np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HoldOut:
  """What training must never see.

  Attributes:
    bodies: source of function bodies, in any indentation.
  """

  packages: tuple[str, ...] = ()
  functions: tuple[str, ...] = ()
  bodies: tuple[str, ...] = ()

  def __post_init__(self):
    for name in ('packages', 'functions', 'bodies'):
      entries = getattr(self, name)
      if isinstance(entries, str):
        raise ValueError(
          f'HoldOut.{name} must be a tuple of strings, not {entries!r}.'
        )
      if any(not entry.strip() for entry in entries):
        raise ValueError(
          f'HoldOut.{name} has an empty entry, which every file would hold.'
        )


class _Substrings:
  """Looks for thousands of strings in a text in one pass.

  The 16 bytes in the middle of each string are its anchor; a string is looked
  for only where the text holds its anchor.
  """

  def __init__(self, strings: Iterable[str]):
    self._short: list[bytes] = []
    self._by_anchor: dict[int, list[bytes]] = {}
    for data in sorted(string.encode() for string in strings):
      if len(data) < _ANCHOR:
        self._short.append(data)
        continue
      start = (len(data) - _ANCHOR) // 2
      (key,) = _windows(data[start : start + _ANCHOR]).tolist()
      self._by_anchor.setdefault(key, []).append(data)
    # By the top 16 bits: rules nearly every window out with one look-up.
    self._maybe = np.zeros(1 << 16, bool)
    for key in self._by_anchor:
      self._maybe[key >> 48] = True

  def any_in(self, text: str) -> bool:
    data = text.encode()
    if any(string in data for string in self._short):
      return True
    keys = _windows(data)
    keys = np.unique(keys[self._maybe[keys >> np.uint64(48)]])
    return any(
      string in data
      for key in keys.tolist()
      for string in self._by_anchor.get(key, ())
    )


def _windows(data: bytes) -> np.ndarray:
  """Hashes every run of 16 bytes to a uint64."""
  count = len(data) - _ANCHOR + 1
  if count < 1 or not data:
    return np.zeros(0, np.uint64)
  words = np.ndarray((count + 8,), '<u8', data, 0, (1,))
  return _mix(_mix(words[:count]) + words[8:])


class HoldOutScan:
  """Finds held-out functions and bodies in files."""

  def __init__(self, holdout: HoldOut, lexicon: Lexicon):
    self._functions = frozenset(holdout.functions)
    # As written, and as it would stand in a module of any indentation.
    self._verbatim = _Substrings(
      {body.strip() for body in holdout.bodies}
      | {textwrap.dedent(body).strip() for body in holdout.bodies}
    )
    grams = [lexicon.grams(body) for body in sorted(set(holdout.bodies))]
    grams = [g for g in grams if len(g)]
    self._needed = np.array([len(g) for g in grams]) / 2
    owners = np.repeat(np.arange(len(grams)), [len(g) for g in grams])
    hashes = np.concatenate([np.zeros(0, np.uint64), *grams])
    order = np.argsort(hashes, kind='stable')
    self._hashes, self._owners = hashes[order], owners.astype(int)[order]

  def find(self, text: str, grams: np.ndarray) -> str:
    """Returns why a file must be refused, or ''.

    Args:
      grams: of the same text, from the same lexicon.
    """
    if self._functions and not self._functions.isdisjoint(
      _DEFINITION.findall(text)
    ):
      return 'defines a held-out function'
    if self._verbatim.any_in(text):
      return 'holds a held-out body verbatim'
    if len(self._hashes) and len(grams):
      left = np.searchsorted(self._hashes, grams, 'left')
      right = np.searchsorted(self._hashes, grams, 'right')
      # A gram may belong to several bodies: walk the longest run.
      found = np.zeros(len(self._needed), int)
      for step in range(int((right - left).max())):
        hit = left + step < right
        np.add.at(found, self._owners[(left + step)[hit]], 1)
      if (found >= self._needed).any():
        return 'holds half the 5-grams of a held-out body'
    return ''
