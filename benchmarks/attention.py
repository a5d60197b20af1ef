"""Tokens per second of causal attention, forward and backward.

  python -m benchmarks.attention [--quick]

The heads of the 17.6M-parameter model of `train_step` (4 query heads, 2 key
heads, 64 wide), rows of 256, 1,024 and 4,096 tokens. Two peers: torch's
`scaled_dot_product_attention`, and the whole softmax of one row and key head at
a time, recomputed in the backward pass. The limit counts the seven products of
causally visible pairs at the measured speed of a dense product.

Two counts follow, which need no clock: the share of a row's query-key pairs
that the kernel visits, beside the share that is visible, for one document and
for many; and the key blocks of the busiest of 8 context shards over their mean,
zigzag beside contiguous.

On a GPU the arrays are bfloat16 and the peer is cuDNN's attention of
`jax.nn.dot_product_attention`.
"""

import argparse
import statistics

import numpy as np

from benchmarks import interleaved

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 64
# Rows, their length, repetitions in a round.
CASES = ((4, 256, 20), (2, 1024, 5), (1, 4096, 1))
# Forward: scores and sum. Backward: scores, weights, query, key, value.
_PRODUCTS = 7


def _arrays(batch: int, length: int) -> list[np.ndarray]:
  """Returns q, k, v and the gradient of the output, [B, T, heads, H]."""
  random = np.random.default_rng(0)
  heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)
  shapes = ((batch, length, number, HEAD_DIM) for number in heads)
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

  batch, length = q_BTNH.shape[:2]
  groups = NUM_HEADS // NUM_KV_HEADS
  q = (q_BTNH * HEAD_DIM**-0.5).reshape(
    batch, length, NUM_KV_HEADS, groups, HEAD_DIM
  )
  flat = (
    q.transpose(0, 2, 3, 1, 4).reshape(-1, groups * length, HEAD_DIM),
    k_BSKH.swapaxes(1, 2).reshape(-1, length, HEAD_DIM),
    v_BSKH.swapaxes(1, 2).reshape(-1, length, HEAD_DIM),
  )
  mask = jnp.tile(jnp.tril(jnp.ones((length, length), bool)), (groups, 1))

  @jax.checkpoint
  def one(arrays):
    q, k_SH, v_SH = arrays
    scores = jnp.where(mask, q @ k_SH.T, -1e30)
    return jax.nn.softmax(scores, axis=-1) @ v_SH

  out = jax.lax.map(one, flat)
  out = out.reshape(batch, NUM_KV_HEADS, groups, length, HEAD_DIM)
  return out.transpose(0, 3, 1, 2, 4).reshape(q_BTNH.shape)


def _cudnn(q_BTNH, k_BSKH, v_BSKH):
  import jax

  return jax.nn.dot_product_attention(
    q_BTNH, k_BSKH, v_BSKH, is_causal=True, implementation='cudnn'
  )


def _runner(attend, arrays, repeats: int):
  """Returns a function that attends `repeats` times and counts tokens."""
  import jax
  import jax.numpy as jnp

  on_cpu = jax.default_backend() == 'cpu'
  dtype = jnp.float32 if on_cpu else jnp.bfloat16
  arrays = [jnp.asarray(x, dtype) for x in arrays]

  @jax.jit
  def run_once(q, k, v, d_out):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(d_out)

  def run() -> float:
    out = None
    for _ in range(repeats):
      out = run_once(*arrays)
    jax.block_until_ready(out)
    return float(repeats * arrays[0].shape[0] * arrays[0].shape[1])

  return run


def _torch_runner(arrays, repeats: int):
  import torch

  torch.set_num_threads(1)
  q, k, v, d_out = (
    torch.tensor(x).transpose(1, 2).contiguous() for x in arrays
  )
  attend = torch.nn.functional.scaled_dot_product_attention

  def run() -> float:
    for _ in range(repeats):
      for x in (q, k, v):
        x.requires_grad_(True).grad = None
      attend(q, k, v, is_causal=True, enable_gqa=True).backward(d_out)
    return float(repeats * q.shape[0] * q.shape[2])

  return run


def _speed(rounds: int) -> None:
  import jax

  peak = interleaved.peak()
  for batch, length, repeats in CASES:
    arrays = _arrays(batch, length)
    ours = _runner(_blocked, arrays, repeats)
    peers = {'whole softmax': (_runner(_row_by_row, arrays, repeats), 1.3)}
    if jax.default_backend() == 'cpu':
      peers['torch'] = (_torch_runner(arrays, repeats), 1.0)
    else:
      peers = {'cudnn': (_runner(_cudnn, arrays, repeats), 0.8)}
    pairs = (length + 1) / 2
    flops = _PRODUCTS * 2 * NUM_HEADS * HEAD_DIM * pairs
    for name, (peer, least) in peers.items():
      interleaved.report(
        'attention',
        f'{batch} x {length}, against {name}',
        interleaved.rates(ours, peer, rounds),
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
      f'visited share of {length} tokens in {documents} documents',
      ([visited], [visible_keys]),
      limit=visible_keys,
      goal='at most a tile and a block per query more',
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
    f'key blocks of the busiest of {context} context shards, {length} tokens',
    (
      [busiest(sequence.order(length, context))],
      [busiest(np.arange(length))],
    ),
    limit=1.0,
    goal='1, equal work',
    met=lambda ours, _: ours == 1,
    unit='of the mean',
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--quick', action='store_true', help='under a minute')
  quick = parser.parse_args().quick
  interleaved.pin_to_one_core()
  _speed(rounds=3 if quick else 9)
  _visits()
  _balance()


if __name__ == '__main__':
  main()
