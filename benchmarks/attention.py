"""Tokens per second of causal attention, forward and backward.

  python -m benchmarks.attention [--quick]
  python -m benchmarks.attention --gpu [--tiny]

The heads of the 17.6M-parameter model of `train_step` (4 query heads, 2 key
heads, 64 wide), rows of 256, 1,024 and 4,096 tokens. Two peers: torch's
`scaled_dot_product_attention`, and the whole softmax of one row and key head at
a time, recomputed in the backward pass. The limit counts the seven products of
causally visible pairs at the measured speed of a dense product.

Two counts follow, which need no clock: the share of a row's query-key pairs
that the kernel visits, beside the share that is visible, for one document and
for many; and the key blocks of the busiest of 8 context shards over their mean,
zigzag beside contiguous.

`--gpu`: the heads of Qwen3-30B-A3B (32 and 4, 128 wide) in bfloat16, 16,384
tokens in rows of 4,096 and in one. The peers are cuDNN's attention, tokamax's
and torch's where they are installed. `--tiny` runs it at any device's size,
without peers that need CUDA.
"""

import argparse
import importlib.util
import os
import statistics
from typing import NamedTuple

import numpy as np

from benchmarks import interleaved


class Case(NamedTuple):
  """Rows of a length, attended to `repeats` times in a round."""

  rows: int
  length: int
  repeats: int
  num_heads: int = 4
  num_kv_heads: int = 2
  head_dim: int = 64

  def __str__(self) -> str:
    return f'{self.rows} x {self.length} tokens'


CASES = (Case(4, 256, 20), Case(2, 1024, 5), Case(1, 4096, 1))
GPU_CASES = (Case(4, 4096, 10, 32, 4, 128), Case(1, 16384, 5, 32, 4, 128))
# Forward: scores and sum. Backward: scores, weights, query, key, value.
_PRODUCTS = 7


def _arrays(case: Case) -> list[np.ndarray]:
  """Returns q, k, v and the gradient of the output, [B, T, heads, H]."""
  random = np.random.default_rng(0)
  heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
  shapes = ((case.rows, case.length, n, case.head_dim) for n in heads)
  return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def _causal(batch: int, length: int):
  import jax.numpy as jnp

  from composer_jax.models import attention

  return attention.visible_of(jnp.ones((batch, length), jnp.int32))


def _blocked(q_BTNH, k_BSKH, v_BSKH):
  from composer_jax.kernels.attention import grouped_query

  visible = _causal(*q_BTNH.shape[:2])
  return grouped_query.attend(q_BTNH, k_BSKH, v_BSKH, visible)[0]


def _row_by_row(q_BTNH, k_BSKH, v_BSKH):
  """The whole softmax of one row and key head at a time, in plain matrices."""
  import jax
  import jax.numpy as jnp

  batch, length, num_heads, head_dim = q_BTNH.shape
  num_kv_heads = k_BSKH.shape[2]
  groups = num_heads // num_kv_heads
  q = (q_BTNH * head_dim**-0.5).reshape(
    batch, length, num_kv_heads, groups, head_dim
  )
  flat = (
    q.transpose(0, 2, 3, 1, 4).reshape(-1, groups * length, head_dim),
    k_BSKH.swapaxes(1, 2).reshape(-1, length, head_dim),
    v_BSKH.swapaxes(1, 2).reshape(-1, length, head_dim),
  )
  mask = jnp.tile(jnp.tril(jnp.ones((length, length), bool)), (groups, 1))

  @jax.checkpoint
  def one(arrays):
    q, k_SH, v_SH = arrays
    scores = jnp.where(mask, q @ k_SH.T, -1e30)
    return jax.nn.softmax(scores, axis=-1) @ v_SH

  out = jax.lax.map(one, flat)
  out = out.reshape(batch, num_kv_heads, groups, length, head_dim)
  return out.transpose(0, 3, 1, 2, 4).reshape(q_BTNH.shape)


def _cudnn(q_BTNH, k_BSKH, v_BSKH):
  import jax

  return jax.nn.dot_product_attention(
    q_BTNH, k_BSKH, v_BSKH, is_causal=True, implementation='cudnn'
  )


def _tokamax(q_BTNH, k_BSKH, v_BSKH):
  import tokamax

  return tokamax.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True)


def _runner(attend, case: Case):
  """Returns a function that attends `repeats` times and counts tokens."""
  import jax
  import jax.numpy as jnp

  on_cpu = jax.default_backend() == 'cpu'
  dtype = jnp.float32 if on_cpu else jnp.bfloat16
  arrays = [jnp.asarray(x, dtype) for x in _arrays(case)]

  @jax.jit
  def run_once(q, k, v, d_out):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(d_out)

  def run() -> float:
    out = None
    for _ in range(case.repeats):
      out = run_once(*arrays)
    jax.block_until_ready(out)
    return float(case.repeats * case.rows * case.length)

  return run


def _torch_runner(case: Case):
  import torch

  torch.set_num_threads(1)
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  dtype = torch.bfloat16 if device == 'cuda' else torch.float32
  q, k, v, d_out = (
    torch.tensor(x, device=device, dtype=dtype).transpose(1, 2).contiguous()
    for x in _arrays(case)
  )
  attend = torch.nn.functional.scaled_dot_product_attention

  def run() -> float:
    for _ in range(case.repeats):
      for x in (q, k, v):
        x.requires_grad_(True).grad = None
      attend(q, k, v, is_causal=True, enable_gqa=True).backward(d_out)
    if device == 'cuda':
      torch.cuda.synchronize()
    return float(case.repeats * case.rows * case.length)

  return run


def _has(library: str) -> bool:
  return importlib.util.find_spec(library) is not None


def _peers(case: Case):
  """Returns, by name, what makes a peer, and the goal for the ratio to it."""
  import jax

  if jax.default_backend() == 'cpu':
    return {
      'the whole softmax of a row': (lambda: _runner(_row_by_row, case), 1.3),
      'torch': (lambda: _torch_runner(case), 1.0),
    }
  peers = {'cuDNN': (lambda: _runner(_cudnn, case), 0.8)}
  if _has('tokamax'):
    peers['tokamax'] = (lambda: _runner(_tokamax, case), 0.9)
  if _has('torch'):
    import torch

    if torch.cuda.is_available():
      peers['torch'] = (lambda: _torch_runner(case), 0.8)
  return peers


def _speed(cases: tuple[Case, ...], rounds: int) -> None:
  peak = interleaved.peak()
  for case in cases:
    ours = _runner(_blocked, case)
    pairs = (case.length + 1) / 2
    flops = _PRODUCTS * 2 * case.num_heads * case.head_dim * pairs
    for name, (make, least) in _peers(case).items():
      interleaved.report(
        'attention',
        f'forward and backward: {case}',
        interleaved.rates(ours, make(), rounds),
        against=name,
        limit=peak / flops,
        goal=f'ratio >= {least}',
        met=lambda _, ratio, least=least: ratio >= least,
      )


def _visits() -> None:
  import jax.numpy as jnp

  from composer_jax.kernels.attention import blocked, blocks
  from composer_jax.models import attention

  for length, documents in ((256, 1), (1024, 1), (4096, 1), (4096, 16)):
    ids = jnp.arange(length)[None] // (length // documents) + 1
    visible = attention.visible_of(ids)
    queries, keys = blocked.sizes(length, length)
    pairs = blocks.executed(visible, queries, keys)
    visited = float(pairs.sum()) * queries * keys / length**2
    visible_keys = float((visible.end_BT - visible.start_BT).mean()) / length
    interleaved.report(
      'attention',
      f'pairs visited: {length} tokens in {documents} documents',
      ([visited], [visible_keys]),
      against='pairs that the mask lets through',
      limit=visible_keys,
      goal='<= a tile and a block per query more',
      met=lambda ours, _, limit=visible_keys + (queries + keys) / length: (
        ours <= limit
      ),
      unit='of all pairs',
    )


def _balance(length: int = 32768, context: int = 8) -> None:
  """Reports the busiest shard of a causal row over the mean."""
  from composer_jax.kernels.attention import blocked, blocks
  from composer_jax.parallel import sequence

  visible = _causal(1, length)

  def busiest(order) -> float:
    work = []
    for shard_positions in np.split(order, context):
      part = blocks.Visible(*(x[:, shard_positions] for x in visible))
      sizes = blocked.sizes(part.start_BT.shape[1], length)
      work.append(int(blocks.executed(part, *sizes).sum()))
    return max(work) / statistics.mean(work)

  interleaved.report(
    'attention',
    f'work of the busiest of {context} context shards, {length} tokens',
    (
      [busiest(sequence.order(length, context))],
      [busiest(np.arange(length))],
    ),
    against='contiguous shards',
    limit=1.0,
    goal='= 1',
    met=lambda ours, _: ours == 1,
    unit='of the mean',
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='under a minute')
  parser.add_argument('--gpu', action='store_true', help='on an accelerator')
  parser.add_argument('--tiny', action='store_true', help='with --gpu')
  arguments = parser.parse_args()
  if arguments.gpu:
    # Peers of torch need a part of the device.
    os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.6')
    interleaved.need_accelerator('attention --gpu', is_tiny=arguments.tiny)
    small = (Case(1, 64, 1, 8, 1, 16),)
    _speed(small if arguments.tiny else GPU_CASES, 2 if arguments.tiny else 9)
    return
  interleaved.pin_to_one_core()
  _speed(CASES, rounds=3 if arguments.quick else 9)
  _visits()
  _balance()


if __name__ == '__main__':
  main()
