"""Names of the leaves of a tree: readable, unique, in the tree's own order."""

from typing import Any

import flax.struct
import jax
import pytest

from composer_jax.core import trees


class Pair(flax.struct.PyTreeNode):
  left: Any
  right: Any


TREE = {
  'moe': Pair(left=[10, (11, 12)], right={'up': 13}),
  'a': {'b/c': 14, 'none': None},
}
NAMES = {
  'a/b/c': 14,
  'moe/left/0': 10,
  'moe/left/1/0': 11,
  'moe/left/1/1': 12,
  'moe/right/up': 13,
}


def test_names_join_keys_fields_and_indices():
  assert trees.flatten_names(TREE) == NAMES
  assert trees.flatten_names(7) == {'': 7}


def test_two_leaves_of_one_name_are_an_error():
  with pytest.raises(ValueError, match=r'leaves .* called a/b\. Rename one'):
    trees.flatten_names({'a/b': 1, 'a': {'b': 2}, 'c': 3})


def test_names_come_in_the_order_of_leaves():
  assert list(trees.flatten_names(TREE).values()) == jax.tree.leaves(TREE)


def test_map_gives_each_leaf_its_name_and_keeps_the_structure():
  mapped = trees.map_names(lambda name, leaf: f'{name}={leaf}', TREE)
  assert jax.tree.structure(mapped) == jax.tree.structure(TREE)
  expected = [f'{name}={leaf}' for name, leaf in NAMES.items()]
  assert jax.tree.leaves(mapped) == expected
