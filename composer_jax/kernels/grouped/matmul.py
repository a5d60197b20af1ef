"""Rows times the matrix of their group: one function with a backend a platform.

- 'blocked' (CPU), 'megablox' (TPU) and 'triton' (GPU): modules of these names.
- 'tokamax' (GPU, with the extra 'kernels'): its Hopper kernel if that takes the
  arrays, else its Triton kernel, never XLA. It asks the default device for its
  kind, so plans for GPUs that are not there take 'triton'.
- 'ragged': `jax.lax.ragged_dot`, for comparisons. On CPU and on NVIDIA it is a
  dense product over all groups, E times the work, and with libtpu 0.0.52 on a
  TPU v7, too. It is refused on a GPU and a TPU v7.

docs/decisions/tokamax.md says why tokamax does not replace the others.
"""

import functools
import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.core import platforms, rounding
from composer_jax.kernels import linear

# Backends for every platform, and backends for one.
BACKENDS = ('blocked', 'ragged')
KERNELS = ('megablox', 'triton', 'tokamax')
# using(backend) is a context in which 'auto' means that backend.
using = jax.make_user_context(None)


def chosen() -> str:
  """Returns the backend that 'auto' means here, at trace time."""
  can_tokamax = _has_tokamax() and not platforms.is_elsewhere()
  on_gpu = 'tokamax' if can_tokamax else 'triton'
  by_platform = {'cpu': 'blocked', 'tpu': 'megablox', 'gpu': on_gpu}
  return using.value or by_platform[platforms.current()]


def grouped_matmul(
  lhs_YD: jax.Array,
  rhs_EDF: jax.Array | linear.Adapted,
  group_sizes_E: jax.Array,
  *,
  backend: str = 'auto',
) -> jax.Array:
  """Multiplies the rows of group e, which are contiguous, by rhs[e].

  Args:
    lhs_YD: rows sorted by group; rows past sum(group_sizes) have no group.
    backend: one of BACKENDS or KERNELS; 'auto' takes the platform's.

  Returns:
    out_YF in the dtype of lhs; rows without a group are exactly zero in the
    output and in the gradient.
  """
  if isinstance(rhs_EDF, linear.Adapted):
    multiply = functools.partial(
      grouped_matmul, group_sizes_E=group_sizes_E, backend=backend
    )
    low_YR = multiply(lhs_YD, rhs_EDF.a)
    return rounding.rounded(
      multiply(lhs_YD, rhs_EDF.weight) + multiply(low_YR, rhs_EDF.b)
    )
  if backend == 'auto':
    backend = chosen()
  if backend not in (names := (*BACKENDS, *KERNELS)):
    raise ValueError(f'grouped_matmul backend {backend!r} is not in {names}.')
  is_dense = platforms.current() == 'gpu' or platforms.kind().startswith('tpu7')
  if backend == 'ragged' and is_dense:
    raise ValueError(
      "grouped_matmul backend 'ragged' is refused on a GPU and a TPU v7, where "
      f'it does {len(rhs_EDF)} times the work and keeps all products (a train '
      "step on an H100 went from 15 to 54 GiB). Take 'auto', or 'tokamax' on a "
      "GPU after pip install -e '.[kernels]' in the checkout."
    )
  if backend == 'tokamax' and not _has_tokamax():
    raise ValueError(
      "grouped_matmul backend 'tokamax' needs the package tokamax: "
      "pip install -e '.[kernels]' in the checkout. 'triton' needs no package."
    )
  return _multiply(backend, lhs_YD, rhs_EDF, group_sizes_E.astype(jnp.int32))


def gradient(
  lhs_YD: jax.Array,
  rhs_EDF: Any,
  d_out_YF: jax.Array,
  group_sizes_E: jax.Array,
  sums_EDF: Any,
) -> tuple[jax.Array, Any]:
  """Returns d_lhs_YD, and `sums_EDF` (None: zero) with that of rhs added.

  The sums are float32; of an adapted matrix those of its adapter.
  """
  if isinstance(rhs_EDF, linear.Adapted):
    before = sums_EDF or linear.Adapted(None, None, None)
    low_YR = grouped_matmul(lhs_YD, rhs_EDF.a, group_sizes_E)
    d_low_YR, b = gradient(low_YR, rhs_EDF.b, d_out_YF, group_sizes_E, before.b)
    d_lhs_YD, a = gradient(lhs_YD, rhs_EDF.a, d_low_YR, group_sizes_E, before.a)
    through_YD = _by_group(
      chosen(), d_out_YF, rhs_EDF.weight, group_sizes_E, True
    )
    return rounding.rounded(through_YD + d_lhs_YD), linear.Adapted(None, a, b)
  d_lhs_YD = _by_group(chosen(), d_out_YF, rhs_EDF, group_sizes_E, True)
  _, multiply_groups = _functions(chosen())
  return d_lhs_YD, multiply_groups(
    lhs_YD, d_out_YF, group_sizes_E, dtype=jnp.float32, sums=sums_EDF
  )


@functools.cache
def _has_tokamax() -> bool:
  return importlib.util.find_spec('tokamax') is not None


def _functions(backend: str) -> tuple[Any, Any]:
  """Returns a backend's functions `multiply` and `multiply_groups`."""
  # Modules are imported on demand, since their own imports take seconds.
  if backend in ('ragged', 'tokamax'):
    ragged_dot = jax.lax.ragged_dot_general
    if backend == 'tokamax':
      tokamax = importlib.import_module('tokamax')
      ragged_dot = functools.partial(
        tokamax.ragged_dot_general, implementation=('mosaic', 'triton')
      )
    return (
      functools.partial(_ragged, ragged_dot),
      functools.partial(_ragged_groups, ragged_dot),
    )
  module = importlib.import_module(f'composer_jax.kernels.grouped.{backend}')
  return module.multiply, module.multiply_groups


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(backend, lhs_YD, rhs_EDF, group_sizes_E):
  return _by_group(backend, lhs_YD, rhs_EDF, group_sizes_E)


def _by_group(backend, lhs_YD, rhs_EDF, group_sizes_E, transposed=False):
  multiply, _ = _functions(backend)
  out_YF = multiply(lhs_YD, rhs_EDF, group_sizes_E, transposed=transposed)
  if backend == 'blocked':
    return out_YF
  # Kernels do not write the rows past the groups.
  num_rows = len(lhs_YD)
  inside_Y = jnp.arange(num_rows) < group_sizes_E.sum()
  return jnp.where(inside_Y[:, None], out_YF[:num_rows], 0)


def _backward(backend, residuals, d_out_YF):
  lhs_YD, rhs_EDF, group_sizes_E = residuals
  d_lhs_YD = _by_group(backend, d_out_YF, rhs_EDF, group_sizes_E, True)
  _, multiply_groups = _functions(backend)
  d_rhs_EDF = multiply_groups(
    lhs_YD, d_out_YF, group_sizes_E, dtype=rhs_EDF.dtype
  )
  return d_lhs_YD, d_rhs_EDF, None


_multiply.defvjp(
  lambda backend, *arrays: (_multiply(backend, *arrays), arrays), _backward
)


def _ragged(ragged_dot, lhs_YD, rhs_EDF, group_sizes_E, *, transposed):
  dims = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2 if transposed else 1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
  )
  return ragged_dot(
    lhs_YD, rhs_EDF, group_sizes_E, dims, preferred_element_type=lhs_YD.dtype
  )


def _ragged_groups(
  ragged_dot, lhs_YD, d_out_YF, group_sizes_E, *, dtype, sums=None
):
  # The contracted dimension, rows, is the ragged one.
  dims = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  d_rhs_EDF = ragged_dot(
    lhs_YD, d_out_YF, group_sizes_E, dims, preferred_element_type=dtype
  )
  # For a group without rows, tokamax's last, masked step reads any rows.
  d_rhs_EDF = jnp.where(group_sizes_E[:, None, None] > 0, d_rhs_EDF, 0)
  return d_rhs_EDF if sums is None else sums + d_rhs_EDF
