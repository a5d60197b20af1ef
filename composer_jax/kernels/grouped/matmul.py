"""Rows times the matrix of their group: one function, one VJP, per backend.

- 'blocked' (CPU and reference): `kernels.grouped.blocked`, loops in plain JAX.
- 'megablox' (TPU): `kernels.grouped.megablox`, the kernels that come with JAX.
- 'triton' (GPU): `kernels.grouped.triton`, our own kernels.
- 'tokamax' (GPU, with the extra 'kernels'): `kernels.grouped.tokamax`, tuned
  for Hopper. It asks its device what to do, so plans for GPUs that are not here
  take 'triton'.
- 'ragged': `jax.lax.ragged_dot`. On CPU and on NVIDIA that is a dense product
  over all groups, E times the work. It is refused on a GPU; 'ragged_dense' is
  the same without the refusal, for comparisons.

Each has its own forward and both gradients. `kernels.grouped.mlp` is the
experts' whole MLP on CPU.
"""

import functools
import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from composer_jax.core import platforms
from composer_jax.kernels.grouped import blocked, schedule

# Those that run on every platform, and those made for one.
BACKENDS = ('blocked', 'ragged')
KERNELS = ('megablox', 'triton', 'tokamax', 'ragged_dense')
_chosen = jax.make_user_context(None)

executed_rows = schedule.executed_rows
worst_case_rows = schedule.worst_case_rows


def using(backend: str):
  """Returns a context in which 'auto' means `backend`."""
  return _chosen(backend)


def backend_for(platform: str) -> str:
  """Returns the backend that 'auto' means on 'cpu', 'gpu' or 'tpu'."""
  if _chosen.value:
    return _chosen.value
  if platform != 'gpu':
    return {'cpu': 'blocked', 'tpu': 'megablox'}[platform]
  if platforms.is_elsewhere() or not _has_tokamax():
    return 'triton'
  return 'tokamax'


def chosen() -> str:
  """Returns the backend that 'auto' means where this is traced."""
  return backend_for(platforms.current())


def grouped_matmul(
  lhs_YD: jax.Array,
  rhs_EDF: jax.Array,
  group_sizes_E: jax.Array,
  *,
  backend: str = 'auto',
  block: int | None = None,
) -> jax.Array:
  """Multiplies the rows of group e, which are contiguous, by rhs[e].

  Args:
    lhs_YD: rows sorted by group; rows past sum(group_sizes) belong to none.
    rhs_EDF: one matrix per group.
    group_sizes_E: int32 rows of each group, in order.
    backend: one of BACKENDS or KERNELS, or 'auto' for the platform's.
    block: rows of every product of 'blocked'; None lets it choose.

  Returns:
    out_YF of lhs's dtype; rows past the groups are exactly zero, in the output
    and in the gradient.
  """
  if backend == 'auto':
    backend = chosen()
  _check(backend, len(rhs_EDF))
  return _grouped_matmul(
    lhs_YD, rhs_EDF, group_sizes_E.astype(jnp.int32), backend, block
  )


def _check(backend: str, num_groups: int) -> None:
  names = (*BACKENDS, *KERNELS)
  if backend not in names:
    raise ValueError(f'grouped_matmul backend {backend!r} is not in {names}.')
  if backend == 'ragged' and platforms.current() == 'gpu':
    raise ValueError(
      "grouped_matmul backend 'ragged' is refused on a GPU: there "
      'jax.lax.ragged_dot multiplies every row by the matrices of all '
      f'{num_groups} groups, {num_groups} times the work, and keeps what that '
      'makes (a train step on an H100 went from 15 to 54 GiB). Take '
      "'triton', or 'tokamax' from pip install \"composer_jax[kernels]\"; "
      "'ragged_dense' gets it nonetheless."
    )
  if backend == 'tokamax' and not _has_tokamax():
    raise ValueError(
      "grouped_matmul backend 'tokamax' needs the package of that name: "
      'pip install "composer_jax[kernels]". \'triton\' needs nothing.'
    )


@functools.cache
def _has_tokamax() -> bool:
  return importlib.util.find_spec('tokamax') is not None


def _functions(backend: str, block: int | None) -> tuple[Any, Any]:
  """Returns what multiplies rows, and what makes the gradient of the groups."""
  if backend == 'blocked':
    return (
      functools.partial(blocked.multiply, block=block),
      functools.partial(blocked.multiply_groups, block=block),
    )
  if backend in ('ragged', 'ragged_dense'):
    return _ragged, _ragged_groups
  # Only where they are asked for: what they import takes seconds.
  name = f'composer_jax.kernels.grouped.{backend}'
  module = importlib.import_module(name)
  return module.multiply, module.multiply_groups


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_matmul(lhs_YD, rhs_EDF, group_sizes_E, backend, block):
  multiply, _ = _functions(backend, block)
  return multiply(lhs_YD, rhs_EDF, group_sizes_E)


def _forward(lhs_YD, rhs_EDF, group_sizes_E, backend, block):
  out_YF = _grouped_matmul(lhs_YD, rhs_EDF, group_sizes_E, backend, block)
  return out_YF, (lhs_YD, rhs_EDF, group_sizes_E)


def _backward(backend, block, residuals, d_out_YF):
  lhs_YD, rhs_EDF, group_sizes_E = residuals
  multiply, multiply_groups = _functions(backend, block)
  d_lhs_YD = multiply(d_out_YF, rhs_EDF, group_sizes_E, transposed=True)
  d_rhs_EDF = multiply_groups(
    lhs_YD, d_out_YF, group_sizes_E, dtype=rhs_EDF.dtype
  )
  return d_lhs_YD, d_rhs_EDF, None


_grouped_matmul.defvjp(_forward, _backward)


def _ragged(lhs_YD, rhs_EDF, group_sizes_E, *, transposed=False):
  if transposed:
    rhs_EDF = rhs_EDF.swapaxes(1, 2)
  out_YF = jax.lax.ragged_dot(lhs_YD, rhs_EDF, group_sizes_E)
  # Kernels leave the rows past the groups unwritten.
  inside_Y = jnp.arange(lhs_YD.shape[0]) < group_sizes_E.sum()
  return jnp.where(inside_Y[:, None], out_YF, 0)


def _ragged_groups(lhs_YD, d_out_YF, group_sizes_E, *, dtype):
  dims = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  return jax.lax.ragged_dot_general(
    lhs_YD, d_out_YF, group_sizes_E, dims, preferred_element_type=jnp.float32
  ).astype(dtype)
