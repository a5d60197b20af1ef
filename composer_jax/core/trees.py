"""Pytrees as flat dictionaries of '/'-joined names."""

import collections
from typing import Any

import jax


def path_name(path: tuple[Any, ...]) -> str:
  """Joins a key path with '/': `layers/moe/up`."""
  return '/'.join(
    str(getattr(key, 'key', getattr(key, 'name', getattr(key, 'idx', key))))
    for key in path
  )


def flatten_names(tree: Any) -> dict[str, Any]:
  """Returns {name: leaf} in the order of leaves; refuses equal names."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  named = {path_name(path): leaf for path, leaf in leaves}
  if len(named) < len(leaves):
    names = collections.Counter(path_name(path) for path, _ in leaves)
    raise ValueError(
      f'Two leaves of the tree are called {names.most_common(1)[0][0]}. '
      "Rename one: '/' joins the keys of a name."
    )
  return named


def is_on_host(x: Any) -> bool:
  return jax.typeof(x).memory_space == jax.memory.Space.Host


def on_device(tree: Any) -> Any:
  """Moves what is in the memory of the host to that of the device."""
  space = jax.memory.Space.Device
  return jax.tree.map(
    lambda x: jax.device_put(x, space) if is_on_host(x) else x, tree
  )


def map_names(function: Any, tree: Any) -> Any:
  """Maps `function(name, leaf)` over a tree."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: function(path_name(path), leaf), tree
  )
