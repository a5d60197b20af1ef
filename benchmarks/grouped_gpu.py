"""The grouped matmul on one GPU, at the shapes of Qwen3-30B-A3B.

`python -m benchmarks.grouped_matmul --gpu`: bfloat16, 128 experts, 8 of each of
8,192 tokens, uneven; gate and up as one product, and down; forward, and forward
with both gradients. Each of our backends ('triton', and 'tokamax' if installed)
takes turns with its peers: a dense product of the same operations, torch's
grouped_mm if torch has CUDA, and tokamax's public function with its own choice
of kernels and gradients. `--tiny` runs 'blocked' and 'ragged' on a CPU; those
figures mean nothing.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks import grouped_cases, interleaved
from benchmarks.grouped_cases import Case

_GOAL = 0.6  # share of the dense product's rate


def _cases(is_tiny: bool) -> list[Case]:
  if is_tiny:
    shapes, rows, experts = ((64, 96), (48, 64)), 256, 8
  else:
    shapes, rows, experts = ((2048, 1536), (768, 2048)), 8 * 8192, 128
  return [
    Case(rows, experts, *shape, gradients)
    for shape in shapes
    for gradients in (False, True)
  ]


def _tokamax() -> Callable[..., Any]:
  """Returns tokamax's function, with its choice of kernels and gradients."""

  def multiply(lhs_YD, rhs_EDF, sizes_E):
    import tokamax

    return tokamax.ragged_dot(lhs_YD, rhs_EDF, sizes_E)

  return multiply


def _torch_runner(case: Case) -> Callable[[], float] | None:
  """Returns a function that runs torch's grouped_mm; None without CUDA."""
  if importlib.util.find_spec('torch') is None:
    return None
  import torch

  if not torch.cuda.is_available():
    return None

  def normal(*shape: int) -> Any:
    x = torch.randn(*shape, device='cuda', dtype=torch.bfloat16)
    return x.requires_grad_(case.gradients)

  lhs, rhs = (
    normal(case.rows, case.dim),
    normal(case.num_experts, case.dim, case.width),
  )
  ends = torch.tensor(case.sizes(), device='cuda').cumsum(0).int()
  d_out = torch.randn(case.rows, case.width, device='cuda').bfloat16()

  def run() -> float:
    out = torch._grouped_mm(lhs, rhs, offs=ends)
    if case.gradients:
      lhs.grad = rhs.grad = None
      out.backward(d_out)
    torch.cuda.synchronize()
    return float(case.rows)

  return run


def _backends(is_gpu: bool) -> list[str]:
  if not is_gpu:
    return ['blocked', 'ragged']
  has_tokamax = importlib.util.find_spec('tokamax') is not None
  return ['triton', *['tokamax'] * has_tokamax]


def _peers(case: Case, arrays: Any, is_gpu: bool) -> dict[str, Any]:
  dense = grouped_cases.runner(
    case, grouped_cases.dense(case), grouped_cases.of_one_expert(arrays)
  )
  peers = {'a dense product': dense}
  if is_gpu and importlib.util.find_spec('tokamax') is not None:
    peers['tokamax.ragged_dot'] = grouped_cases.runner(case, _tokamax(), arrays)
  torch_runner = _torch_runner(case)
  if torch_runner is not None:
    peers['torch._grouped_mm'] = torch_runner
  return peers


def run(*, is_tiny: bool) -> None:
  """Prints a line per case, backend of ours and peer."""
  import jax

  is_gpu = jax.default_backend() == 'gpu'
  interleaved.need_accelerator('grouped_matmul --gpu', is_tiny=is_tiny)
  peak = interleaved.peak()
  for case in _cases(is_tiny):
    arrays = grouped_cases.arrays(case, 'bfloat16')
    for backend in _backends(is_gpu):
      ours = grouped_cases.runner(case, grouped_cases.grouped(backend), arrays)
      for name, peer in _peers(case, arrays, is_gpu).items():
        goal = _GOAL if name == 'a dense product' else 0.9
        interleaved.report(
          'grouped_matmul',
          f'{backend} in bfloat16, {case}',
          interleaved.rates(ours, peer, 3 if is_tiny else 11),
          against=name,
          limit=peak / (case.flops() / case.rows),
          goal=f'ratio >= {goal}',
          met=lambda _, ratio, goal=goal: ratio >= goal,
          unit='rows/s',
        )
