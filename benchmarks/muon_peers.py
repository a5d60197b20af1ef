"""Muon of other libraries, over the trees of `muon_cases`.

Each function returns momentum, orthogonalisation and the scale by shape,
without weight decay or learning rate, as our `scale_by_muon` does.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import optax
from optax.contrib import _muon as optax_muon

from benchmarks import muon_cases

RMS = 0.2
_Shardings = Mapping[str, jax.sharding.NamedSharding]


def optax_transform(
  tree: muon_cases.Tree, shardings: _Shardings | None = None
) -> optax.GradientTransformation:
  """`optax.contrib.muon` with the right dimensions for each parameter."""
  del shardings  # It takes no shardings.
  dimensions = {
    name: optax.contrib.MuonDimensionNumbers(leaf.rows, leaf.columns)
    for name, leaf in tree.items()
  }
  return optax.chain(
    optax.contrib.scale_by_muon(weight_dimension_numbers=dimensions),
    optax_muon.scale_by_shape(dimensions, consistent_rms=RMS),
  )


def maxtext_transform(
  tree: muon_cases.Tree, shardings: _Shardings | None = None
) -> optax.GradientTransformation:
  """MaxText's Muon that knows shardings; see `add_maxtext`."""
  maxtext: Any = importlib.import_module('maxtext.optimizers.muon')
  dimensions = {
    name: maxtext.ShardedMuonDimensionNumbers(
      leaf.rows, leaf.columns, shardings[name] if shardings else None
    )
    for name, leaf in tree.items()
  }
  return optax.chain(
    maxtext.scale_by_muon(weight_dimension_numbers=dimensions),
    maxtext.scale_by_shape(dimensions, consistent_rms=RMS),
  )


def add_maxtext(folder: str) -> None:
  """Makes the module importable; nothing else of MaxText is imported.

    pip install --target=FOLDER --no-deps --ignore-requires-python \
      maxtext==0.2.5

  Raises:
    ValueError: if the folder holds no such package.
  """
  sys.path.append(
    folder
  )  # Last in the path, so that it shadows no installed package.
  try:
    importlib.import_module('maxtext.optimizers.muon')
  except ImportError as error:
    raise ValueError(
      f'{folder!r} holds no maxtext.optimizers.muon ({error}); pip install '
      '--target=FOLDER --no-deps --ignore-requires-python maxtext==0.2.5'
    ) from error
