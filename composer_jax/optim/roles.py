"""Roles of parameters in the optimizer, from their logical axes.

A role is 'adam', or names the two sides of a matrix: 'embed->ffw' maps embed
to ffw, 'embed->heads,head_dim' merges two axes into the output side. Every axis
that a role does not name is a batch axis of independent matrices. A parameter
of two or more dimensions with missing or unknown axis names is an error.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import optax

from composer_jax.core import trees

ADAM = 'adam'

# With heads: attention is orthogonalised head by head.
BATCH_AXES = ('layer', 'expert', 'gate_up', 'heads', 'kv_heads')
# Axes of tables, classifiers, scales and adapters, which are no whole maps of
# activations.
ADAM_AXES = ('vocab', 'route', 'norm', 'rank')
MATRIX_AXES = ('embed', 'joined', 'ffw', 'head_dim', 'q_lora', 'kv_lora')

Axes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
  """Dimensions of a parameter that form a matrix; others are batch dimensions.

  Attributes:
    rows: dimensions merged, in order, into the input side.
    columns: dimensions merged, in order, into the output side.
    swapped: true if the output side is the first one of a square matrix, so
      that embed->head_dim and head_dim->embed form one group on every mesh.
  """

  rows: tuple[int, ...]
  columns: tuple[int, ...]
  swapped: bool = False


def of_axes(name: str, axes: Axes, ndim: int) -> str:
  """Returns the role of a parameter; a ValueError if its axes give none."""
  unlabelled = len(axes) != ndim or None in axes
  if unlabelled and ndim < 2:
    return ADAM
  known = BATCH_AXES + ADAM_AXES + MATRIX_AXES
  sides = tuple(a for a in axes if a not in BATCH_AXES)
  is_table = any(a in ADAM_AXES for a in axes)
  is_matrix = is_table or len(sides) <= 2
  if unlabelled or not set(axes) <= set(known) or not is_matrix:
    raise ValueError(
      f'Parameter {name} has {ndim} dimensions with logical axes {axes}; '
      f'each must be one of {known}, and at most two outside {BATCH_AXES}. '
      'Label it with nn.with_logical_partitioning, add its axes to '
      "optim/roles.py, or give it a role ('adam' or one such as 'embed->ffw') "
      "or, for `muon`, optax's MuonDimensionNumbers."
    )
  return ADAM if is_table or len(sides) < 2 else '->'.join(map(str, sides))


def parse(
  name: str, role: str, axes: Axes, shape: tuple[int, ...]
) -> Matrix | None:
  """Returns the matrix of a role, None for Adam; it must fit the axes."""
  if role == ADAM:
    return None
  about = f'Parameter {name} of shape {shape} with logical axes {axes}: role '
  about += repr(role)
  word = r'\s*\w+\s*(?:,\s*\w+\s*)*'
  match = re.fullmatch(f'({word})->({word})', role)
  if match is None:
    raise ValueError(
      f"{about} must be {ADAM!r} or two sides of axes, such as 'embed->ffw' "
      "or 'embed->heads,head_dim'."
    )
  if len(axes) != len(shape):
    raise ValueError(f'{about} needs one logical axis per dimension.')
  rows, columns = (
    tuple(axis.strip() for axis in side.split(',')) for side in match.groups()
  )
  unused: list[str | None] = list(axes)
  dims = []
  for axis in rows + columns:
    if axis not in unused:
      raise ValueError(f'{about} names {axis!r} once too often.')
    # In order: in 'embed->embed' the first dimension is the input.
    dims.append(unused.index(axis))
    unused[dims[-1]] = None
  unclear = sorted({axis for axis in unused if axis in rows + columns})
  if unclear:
    raise ValueError(
      f'{about} leaves open which of the axes called {unclear[0]!r} is meant; '
      'give them different names.'
    )
  return Matrix(
    rows=tuple(dims[: len(rows)]),
    columns=tuple(dims[len(rows) :]),
    swapped=columns < rows,
  )


def tree(
  params: Any, axes: Any, overrides: Sequence[tuple[str, str]] = ()
) -> Any:
  """Returns the tree of roles.

  Args:
    axes: tree of PartitionSpecs of logical axis names (`nn.get_partition_spec`
      of the boxed tree).
    overrides: pairs of a regular expression and the role of all parameters
      whose '/'-joined names contain a match; the first match decides.

  Raises:
    ValueError: an override is no regular expression, or matches no parameter;
      see `of_axes` and `parse`.
  """
  logical = {n: tuple(a) for n, a in trees.flatten_names(axes).items()}
  names = sorted(trees.flatten_names(params))
  for pattern, _ in overrides:
    try:
      is_used = any(re.search(pattern, name) for name in names)
    except re.error as error:
      raise ValueError(
        f'The role override {pattern!r} is no regular expression: {error}.'
      ) from error
    if not is_used:
      raise ValueError(
        f'The role override {pattern!r} matches no parameter; there are '
        f'{names}.'
      )

  def role(name, leaf):
    for pattern, chosen in overrides:
      if re.search(pattern, name):
        parse(name, chosen, logical.get(name, ()), leaf.shape)
        return chosen
    return of_axes(name, logical.get(name, ()), leaf.ndim)

  return trees.map_names(role, params)


def matrices(params: Any, axes: Any, roles: Any) -> Any:
  """Returns a tree of `Matrix`, for Adam's parameters `optax.MaskedNode()`."""
  logical = trees.flatten_names(axes)
  named = trees.flatten_names(roles)

  def matrix(name, leaf):
    parsed = parse(name, named[name], tuple(logical.get(name, ())), leaf.shape)
    return parsed or optax.MaskedNode()

  return trees.map_names(matrix, params)
