"""Tells whether a call does what an expert's call does, without executing it.

Tools and the names of arguments must be the same, and values equal, or one of:
texts that differ in white space at ends of lines; Python with the same syntax
tree; shell commands of the same words; paths of the same normal form. What else
would do the same is not seen: the judge errs by refusing.
"""

import ast
import posixpath
import shlex
from typing import Any

from composer_jax.tasks import source
from composer_jax.text import tool_calls

_COMMANDS = frozenset(('command', 'cmd', 'script'))
_PATHS = frozenset(('path', 'file', 'filename', 'file_path', 'folder', 'dir'))
_MAX_TEXT = 100_000


def same(expert: tool_calls.JsonCall, made: tool_calls.JsonCall) -> bool:
  """True if both calls are sure to do the same."""
  if (
    expert.name != made.name or expert.arguments.keys() != made.arguments.keys()
  ):
    return False
  return all(
    _same_value(name, value, made.arguments[name])
    for name, value in expert.arguments.items()
  )


def _same_value(name: str, one: Any, other: Any) -> bool:
  if type(one) is not type(other):
    return False
  if not isinstance(one, str):
    return one == other
  if _trimmed(one) == _trimmed(other):
    return True
  if max(len(one), len(other)) > _MAX_TEXT:
    return False
  if name in _PATHS:
    return posixpath.normpath(one) == posixpath.normpath(other)
  if name in _COMMANDS:
    return _same_words(one, other)
  return _same_code(one, other)


def _trimmed(text: str) -> list[str]:
  return [line.rstrip() for line in text.strip('\n').split('\n')]


def _same_words(one: str, other: str) -> bool:
  # Line feeds separate commands, so they are no white space.
  if one.strip().count('\n') != other.strip().count('\n'):
    return False
  try:
    pairs = zip(one.strip().split('\n'), other.strip().split('\n'), strict=True)
    return all(_words(a) == _words(b) for a, b in pairs)
  except ValueError:
    return False  # A quote that spans lines, or does not end.


def _words(line: str) -> list[str]:
  """Returns words as they are written: quotes may keep a shell from acting."""
  lexer = shlex.shlex(line, posix=False, punctuation_chars=True)
  lexer.whitespace_split = True
  lexer.commenters = ''
  return list(lexer)


def _same_code(one: str, other: str) -> bool:
  try:
    trees = [source.parse(text) for text in (one, other)]
    # Texts without a statement say nothing by their tree.
    dumps = [ast.dump(tree) for tree in trees if tree.body]
  except (ValueError, RecursionError):
    return False
  return len(dumps) == 2 and dumps[0] == dumps[1]
