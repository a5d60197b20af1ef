"""Finds which parameters of a tree are matrices for Muon, and their axes.

Flax's logical axis names decide where parameters carry them. Elsewhere names
and shapes decide: embeddings, heads, routers, norms, biases and vectors go to
Adam; attention kernels of Flax are matrices of each head; a kernel of a
convolution maps all axes but the last to the last; any other parameter maps its
last but one axis to its last, and stacks independent matrices along the others.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta
from optax.contrib import MuonDimensionNumbers

from composer_jax.core import trees
from composer_jax.optim import roles

# Logical axes of Flax, T5X and MaxText, and what `optim.roles` calls them.
FLAX_AXES = {
  **dict.fromkeys(('layers', 'stack'), 'layer'),
  **dict.fromkeys(('exp', 'experts'), 'expert'),
  'q_heads': 'heads',
  **dict.fromkeys(('kv', 'kv_head_dim'), 'head_dim'),
  **dict.fromkeys(('mlp', 'moe_mlp', 'hidden', 'joined_kv'), 'ffw'),
  **dict.fromkeys(('relpos_buckets', 'abspos_buckets', 'classes'), 'vocab'),
}
_KNOWN = {*roles.BATCH_AXES, *roles.ADAM_AXES, *roles.MATRIX_AXES, *FLAX_AXES}

# Ends of names of modules and arrays.
_ADAM_NAMES = re.compile(
  r'(emb(ed(ding|der)?)?s?|vocab|logits(_dense)?|classifier|router|norm|bias'
  r'|(?<!down)(?<!up)scale|(?<!lora)(^|_)b|(^|_)(wte|wpe|ln|cls|tokens?|pos)'
  r'|(?<!multi)(?<!multi_)(?<!attention)(?<!attention_)head|^a_log)_?\d*$',
  re.IGNORECASE,
)
# Modules of attention that make heads, and the one that joins them.
_TO_HEADS = re.compile(r'(q|k|v|query|key|value)(_proj)?|w[qkv]')
_QUERY = re.compile(r'(q|query)(_proj)?|wq')
_OUT = re.compile(r'(o|out)(_proj)?|wo')


def dimension_numbers(params: Any) -> Any:
  """Returns optax's dimension numbers of each parameter; None for Adam's.

  `params` may be arrays or shapes, in Flax's boxes or without. The result has
  no boxes, and can be printed, changed, and given to `muon` or to optax's Muon.

  Raises:
    ValueError: a parameter has an unknown logical axis or too many sides.
  """
  leaves, structure = jax.tree_util.tree_flatten_with_path(
    params,
    # Nodes in which Flax keeps a parameter with its metadata.
    is_leaf=lambda x: (
      isinstance(x, meta.AxisMetadata) or hasattr(x, 'get_metadata')
    ),
  )
  boxes = {trees.path_name(path): box for path, box in leaves}
  arrays = {name: jax.tree.leaves(box)[0] for name, box in boxes.items()}
  shapes = {name: x.shape for name, x in arrays.items()}

  def numbers(name, box):
    if not jnp.issubdtype(arrays[name].dtype, jnp.inexact):
      return None
    axes = tuple(FLAX_AXES.get(axis or '', axis) for axis in _axis_names(box))
    if not axes or None in axes:
      return _from_shape(name, shapes)
    if unknown := sorted({a for a in axes if a} - _KNOWN):
      raise ValueError(
        f'Parameter {name} has logical axes {axes}. Muon does not know '
        f'{", ".join(unknown)}; it knows {", ".join(sorted(_KNOWN))}. Give '
        "muon(muon_weight_dimension_numbers=...) optax's MuonDimensionNumbers "
        'of this parameter, or None to leave it to Adam.'
      )
    role = roles.of_axes(name, axes, len(shapes[name]))
    matrix = roles.parse(name, role, axes, shapes[name])
    return matrix and MuonDimensionNumbers(matrix.rows, matrix.columns)

  return structure.unflatten([numbers(*item) for item in boxes.items()])


def _axis_names(box: Any) -> tuple[str | None, ...]:
  if hasattr(box, 'get_metadata'):  # Of flax.nnx.
    names = tuple(box.get_metadata().get('out_sharding') or ())
  else:
    names = tuple(getattr(box, 'names', ()))
  # Only some boxes (with rules) have logical names for certain; others may
  # have names of mesh axes, which do not tell what a parameter is.
  return names if hasattr(box, 'rules') or set(names) <= _KNOWN else ()


def _from_shape(
  name: str, shapes: dict[str, tuple[int, ...]]
) -> MuonDimensionNumbers | None:
  shape, parts = shapes[name], name.split('/')
  if len(shape) < 2 or any(map(_ADAM_NAMES.search, parts)):
    return None
  first, last = len(shape) - 2, len(shape) - 1
  if len(shape) > 2 and len(parts) > 1 and parts[-1] in ('kernel', 'w'):
    if 'conv' in parts[-2].lower():
      return MuonDimensionNumbers(tuple(range(last)), last)
    # [embed, heads, head_dim] and [heads, head_dim, embed], which scanned
    # kernels of two axes do not fit.
    beside = _siblings(parts, shapes)
    query, out = (
      next((shape for m, shape in beside.items() if module.fullmatch(m)), ())
      for module in (_QUERY, _OUT)
    )
    is_by_head = len(query) == len(out) > 2 and query[-2:] == out[-3:-1]
    if is_by_head and _TO_HEADS.fullmatch(parts[-2]):
      return MuonDimensionNumbers(first - 1, last)
  return MuonDimensionNumbers(first, last)


def _siblings(
  parts: list[str], shapes: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
  """Returns shapes of the same array of the modules beside this one."""
  split = ((name.split('/'), shape) for name, shape in shapes.items())
  return {
    other[-2]: shape
    for other, shape in split
    if len(other) == len(parts)
    and other[:-2] == parts[:-2]
    and other[-1] == parts[-1]
  }
