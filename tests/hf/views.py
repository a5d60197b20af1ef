"""Blocks of arrays as views of tensors, by the table of names alone."""

import numpy as np

from composer_jax.hf.tensors import names


def block(part: names.TensorPart, tensor: np.ndarray) -> np.ndarray:
  """Returns the block that a part of a tensor fills, as a view."""
  return tensor.reshape(part.view)[part.select].transpose(part.order)


def put(part: names.TensorPart, values: np.ndarray, tensor: np.ndarray) -> None:
  """Writes a block of an array into a contiguous tensor."""
  view = tensor.reshape(part.view, copy=False)
  view[part.select] = values.transpose(np.argsort(part.order))
