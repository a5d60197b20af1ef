"""Pytrees as flat dictionaries of '/'-joined names."""

import re
from typing import Any

import jax


def path_name(path: tuple[Any, ...]) -> str:
  """Joins a key path with '/': `layers/moe/up`."""
  return '/'.join(
    str(getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key))))
    for key in path
  )


def flatten_names(tree: Any) -> dict[str, Any]:
  """Returns {name: leaf}, in the order of `jax.tree.leaves`."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {path_name(path): leaf for path, leaf in leaves}


def map_names(function: Any, tree: Any) -> Any:
  """Maps `function(name, leaf)` over a tree."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: function(path_name(path), leaf), tree
  )


def select(tree: Any, pattern: str) -> dict[str, Any]:
  """Returns the named leaves whose whole name matches a regular expression."""
  regex = re.compile(pattern)
  return {n: v for n, v in flatten_names(tree).items() if regex.fullmatch(n)}
