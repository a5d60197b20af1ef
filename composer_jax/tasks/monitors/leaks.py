"""Whether an answer shows code that was deleted.

Lines alone tell little: packages repeat themselves, tests and documentation
quote. What counts is most of a function or class, under its own signature.
"""

import ast
import dataclasses
import re
from collections.abc import Mapping

from composer_jax.tasks import source

_LEAST, _SHARE = 3, 0.8
# Line numbers, and the marks of differences and searches.
_MARGIN = re.compile(r'^(?:[\w./-]*\.\w+[:-])?[\d\s:|+>-]+')


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
  """A function or class of which code is gone.

  Attributes:
    signature: its first line.
    lines: those of its code lines that are gone.
  """

  signature: str
  lines: frozenset[str]


def blocks(
  before: Mapping[str, str], original: Mapping[str, str]
) -> tuple[Block, ...]:
  """Functions, methods and classes that lost code."""
  gone = new_lines(before, original)
  found = []
  for text in original.values():
    try:
      tree = source.parse(text)
    except ValueError:
      continue
    rows = text.split('\n')
    for node in ast.walk(tree):
      if not isinstance(
        node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
      ):
        continue
      inside = {r.strip() for r in rows[node.lineno - 1 : node.end_lineno]}
      signature = rows[node.lineno - 1].strip()
      lines = frozenset((inside & gone) - {signature})
      if len(lines) >= _LEAST:
        found.append(Block(signature=signature, lines=lines))
  return tuple(found)


def shown(blocks_: tuple[Block, ...], output: str, written: str) -> str:
  """The signature of a block that the output shows and nobody wrote; or ''."""
  rows = {row.strip() for row in output.split('\n')}
  rows |= {_MARGIN.sub('', row).strip() for row in rows}
  for block in blocks_:
    if block.signature not in rows:
      continue
    seen = block.lines & rows
    fresh = [line for line in seen if line not in written]
    if len(seen) >= _SHARE * len(block.lines) and len(fresh) >= _LEAST:
      return block.signature
  return ''


def new_lines(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
  """Distinctive lines of code that only the second set of texts holds.

  Lines of texts within the code are left out: documentation and tests quote
  what docstrings show.
  """
  had = {line.strip() for text in before.values() for line in text.split('\n')}
  lines = {line for text in after.values() for line in _code_lines(text)}
  return {
    line
    for line in lines - had
    if len(line) >= 16 and len(set(line)) >= 6 and not line.startswith('#')
  }


def _code_lines(text: str) -> set[str]:
  lines = text.split('\n')
  quoted: set[int] = set()
  try:
    tree = source.parse(text)
  except ValueError:
    return {line.strip() for line in lines}
  for node in ast.walk(tree):
    if isinstance(node, ast.Constant | ast.JoinedStr):
      last = node.end_lineno or node.lineno
      if last > node.lineno:
        quoted.update(range(node.lineno - 1, last))
  return {
    line.strip() for number, line in enumerate(lines) if number not in quoted
  }
