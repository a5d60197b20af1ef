"""Grouped-query attention: one function, one implementation per backend.

'reference' materialises the scores in float32; 'rows' does the same row by row
of the batch and recomputes them in the backward pass, so that the scores of one
row stay in cache and training does not touch memory of size B T S (on CPU that
traffic costs more than the products); 'fused' hands bfloat16 to
`jax.nn.dot_product_attention`, which leaves the choice to JAX. In 0.10 to 0.12
that is XLA's own form, with scores of size B N T S: none of the three is for
long contexts.

Each can also return what the softmax subtracts, the largest score that a query
sees (`attend_measured`), which QK-clip needs. It is at hand but for 'fused',
where it costs the product of queries and keys once more.
"""

import jax
import jax.numpy as jnp

from composer_jax.core import rounding

# Keys that batch-invariant attention visits at once (`tiled_attention`).
KEY_BLOCK = 32
# Keys whose scores are at hand at once where a kernel keeps its own to itself.
_MEASURED_BLOCK = 256

BACKENDS = ('reference', 'rows', 'fused')
# Finite, so that a row that sees nothing is uniform rather than NaN.
_MASKED = -1e30


def attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  mask_BTS: jax.Array,
  *,
  scale: float | None = None,
  backend: str = 'auto',
) -> jax.Array:
  """Returns out_BTNH: softmax(scale q k) v over the slots mask_BTS allows.

  Args:
    q_BTNH: queries; query head n reads key/value head n // (N / K).
    k_BSKH: keys.
    v_BSKH: values, whose width may be another; the result has it.
    mask_BTS: bool, true where the query may look.
    scale: on the scores; None means 1 / sqrt(H).
    backend: one of BACKENDS, or 'auto' by platform, dtype and length.
  """
  out_BTNH, _ = _attend(
    (q_BTNH, k_BSKH, v_BSKH, mask_BTS), scale, backend, is_measured=False
  )
  return out_BTNH


def attend_measured(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  mask_BTS: jax.Array,
  *,
  scale: float | None = None,
  backend: str = 'auto',
) -> tuple[jax.Array, jax.Array]:
  """Returns what `attend` does, and tops_BTN.

  Those are each query's largest scaled score over the slots it may look at, in
  float32 and without a gradient; -1e30 where it sees none.
  """
  out_BTNH, tops_BTN = _attend(
    (q_BTNH, k_BSKH, v_BSKH, mask_BTS), scale, backend, is_measured=True
  )
  assert tops_BTN is not None
  return out_BTNH, tops_BTN


def _attend(arrays, scale, backend, is_measured):
  q_BTNH, k_BSKH, v_BSKH, mask_BTS = arrays
  if backend == 'auto':
    backend = _choose(q_BTNH)
  if backend not in BACKENDS:
    raise ValueError(f'attention backend {backend!r} is not in {BACKENDS}.')
  scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
  if backend == 'fused':
    out_BTNH = _fused(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale)
    if not is_measured:
      return out_BTNH, None
    return out_BTNH, _tops(q_BTNH, k_BSKH, mask_BTS, scale)
  q_BTNH = rounding.rounded(q_BTNH * scale)
  whole = _rows if backend == 'rows' else _reference
  return whole(q_BTNH, k_BSKH, v_BSKH, mask_BTS, is_measured)


def weighted_sum(spec: str, weights: jax.Array, values: jax.Array) -> jax.Array:
  """Returns the float32 product of softmax weights and values.

  Weights stay float32 on CPU, where a bfloat16 product of this form is one of
  float32 anyway: a rounding less, and the same for whole and running softmax,
  whose weights differ by a factor. Accelerators take bfloat16.
  """
  dtype = rounding.wide_dtype(values.dtype)
  return jnp.einsum(
    spec,
    weights.astype(dtype),
    values.astype(dtype),
    preferred_element_type=jnp.float32,
  )


def _choose(q_BTNH: jax.Array) -> str:
  platform = jax.default_backend()
  if platform == 'gpu' and q_BTNH.dtype == jnp.bfloat16:
    return 'fused'
  return 'rows' if platform == 'cpu' and q_BTNH.shape[1] > 1 else 'reference'


def _fused(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale):
  # It wants values as wide as keys. Latent attention has narrower ones.
  width = v_BSKH.shape[-1]
  missing = q_BTNH.shape[-1] - width
  v_BSKH = jnp.pad(v_BSKH, ((0, 0), (0, 0), (0, 0), (0, missing)))
  out_BTNH = jax.nn.dot_product_attention(
    q_BTNH, k_BSKH, v_BSKH, mask=mask_BTS[:, None], scale=scale
  )
  return out_BTNH[..., :width]


def _tops(q_BTNH, k_BSKH, mask_BTS, scale):
  """Returns tops_BTN from a few keys at a time, never all scores at once."""
  batch, length, num_heads, head_dim = q_BTNH.shape
  num_kv_heads = k_BSKH.shape[2]
  shape = (batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
  q_BTKGH = jax.lax.stop_gradient(q_BTNH).reshape(shape)
  missing = -k_BSKH.shape[1] % _MEASURED_BLOCK

  def blocks(array, axis):
    pad = [(0, 0)] * array.ndim
    pad[axis] = (0, missing)
    array = jnp.pad(array, pad)
    shape = (*array.shape[:axis], -1, _MEASURED_BLOCK, *array.shape[axis + 1 :])
    return jnp.moveaxis(array.reshape(shape), axis, 0)

  def visit(tops_BKGT, block):
    k_BSKH, mask_BTS = block
    scores_BKGTS = scale * jnp.einsum(
      'BTKGH,BSKH->BKGTS',
      q_BTKGH,
      k_BSKH,
      preferred_element_type=jnp.float32,
    )
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, _MASKED)
    return jnp.maximum(tops_BKGT, scores_BKGTS.max(-1)), None

  tops_BKGT, _ = jax.lax.scan(
    visit,
    jnp.full((batch, *shape[2:4], length), _MASKED, jnp.float32),
    (blocks(jax.lax.stop_gradient(k_BSKH), 1), blocks(mask_BTS, 2)),
  )
  return _by_query(tops_BKGT)


def _by_query(tops_BKGT):
  batch, _, _, length = tops_BKGT.shape
  return tops_BKGT.transpose(0, 3, 1, 2).reshape(batch, length, -1)


def _tops_of(scores, is_measured):
  return jax.lax.stop_gradient(scores).max(-1) if is_measured else None


def _rows(q_BTNH, k_BSKH, v_BSKH, mask_BTS, is_measured):
  # One row and key/value head at a time: its products are plain matrices,
  # which XLA:CPU multiplies in either order without a transposed copy.
  batch, length, num_heads, head_dim = q_BTNH.shape
  num_kv_heads = k_BSKH.shape[2]
  groups = num_heads // num_kv_heads
  q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, groups, head_dim)
  q_BKGTH = q_BTKGH.transpose(0, 2, 3, 1, 4)
  flat = (
    q_BKGTH.reshape(batch * num_kv_heads, groups * length, head_dim),
    k_BSKH.swapaxes(1, 2).reshape(batch * num_kv_heads, -1, head_dim),
    v_BSKH.swapaxes(1, 2).reshape(batch * num_kv_heads, *v_BSKH.shape[1::2]),
    jnp.repeat(jnp.arange(batch), num_kv_heads),
  )

  @jax.checkpoint
  def one(arrays):
    q, k_SH, v_SH, row = arrays
    scores = jnp.dot(q, k_SH.T, preferred_element_type=jnp.float32)
    mask = jnp.tile(mask_BTS[row], (groups, 1))
    scores = jnp.where(mask, scores, _MASKED)
    out = weighted_sum('XS,SH->XH', jax.nn.softmax(scores, axis=-1), v_SH)
    tops = _tops_of(scores, is_measured)
    return rounding.rounded(out, v_SH.dtype), tops

  out, tops = jax.lax.map(one, flat)
  if is_measured:
    tops = _by_query(tops.reshape(batch, num_kv_heads, groups, length))
  out_BKGTH = out.reshape(batch, num_kv_heads, groups, length, -1)
  out_BTKGH = out_BKGTH.transpose(0, 3, 1, 2, 4)
  return out_BTKGH.reshape(batch, length, num_heads, -1), tops


def _reference(q_BTNH, k_BSKH, v_BSKH, mask_BTS, is_measured):
  batch, length, num_heads, head_dim = q_BTNH.shape
  num_kv_heads = k_BSKH.shape[2]
  q_BTKGH = q_BTNH.reshape(batch, length, num_kv_heads, -1, head_dim)
  scores_BKGTS = jnp.einsum(
    'BTKGH,BSKH->BKGTS',
    q_BTKGH,
    k_BSKH,
    preferred_element_type=jnp.float32,
  )
  scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, _MASKED)
  probabilities_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
  out_BTKGH = weighted_sum('BKGTS,BSKH->BTKGH', probabilities_BKGTS, v_BSKH)
  out_BTKGH = rounding.rounded(out_BTKGH, v_BSKH.dtype)
  tops = _tops_of(scores_BKGTS, is_measured)
  if is_measured:
    tops = _by_query(tops)
  return out_BTKGH.reshape(batch, length, num_heads, -1), tops
