"""Closed forms for parameters and floating-point operations.

Operations are those of the model's matrix products, two per multiply-add,
without recomputation and padding.

With `causal=False` a query counts all `seq_len` keys (PaLM, appendix B), as in
every MFU of this project; MaxText and others halve it. With `causal=True` it
counts the keys up to its own, (seq_len + 1) / 2 on average.
"""

from composer_jax.models import config as model_config


def params_by_part(config: model_config.ModelConfig) -> dict[str, int]:
  """Counts trained parameters, without the selection bias.

  'embedding' includes an untied head, 'attention' its biases, and 'norms' the
  scales of norms in attention.
  """
  c = config
  tables = 1 if c.tie_embeddings else 2
  matrices, biases, norms = _attention(c)
  expert = 3 * c.embed_dim * c.moe.ffw_dim
  heads = {}
  if c.mtp is not None:
    width = c.dense_ffw_dim
    mixture = c.embed_dim * c.moe.num_experts
    mixture += (c.moe.num_experts + c.moe.num_shared) * expert
    ffw = mixture if c.mtp.layer == 'moe' else 3 * c.embed_dim * width
    # Two norms before the projection, and one before the unembedding.
    others = 2 * c.embed_dim**2 + norms + 5 * c.embed_dim
    heads['mtp'] = c.mtp.depth * (matrices + biases + ffw + others)
  return {
    'embedding': tables * c.vocab_size * c.embed_dim,
    'attention': c.num_layers * (matrices + biases),
    'dense_ffw': c.num_dense_layers * 3 * c.embed_dim * c.dense_ffw_dim,
    'router': c.num_moe_layers * c.embed_dim * c.moe.num_experts,
    'routed_experts': c.num_moe_layers * c.moe.num_experts * expert,
    'shared_experts': c.num_moe_layers * c.moe.num_shared * expert,
    'norms': c.num_layers * (norms + 2 * c.embed_dim) + c.embed_dim,
    **heads,
  }


def params_total(config: model_config.ModelConfig) -> int:
  return sum(params_by_part(config).values())


def forward_per_token(
  config: model_config.ModelConfig, seq_len: int, *, causal: bool = False
) -> float:
  """Counts the operations of a forward pass per token, head included."""
  c = config
  matrices, _, _ = _attention(c)
  passed = (
    c.vocab_size * c.embed_dim
    + c.num_layers * matrices
    + c.num_dense_layers * 3 * c.embed_dim * c.dense_ffw_dim
    + c.num_moe_layers * _mixture(c)
  )
  return 2 * (passed + c.num_layers * _scores(c, seq_len, causal))


def heads_per_token(
  config: model_config.ModelConfig, seq_len: int, *, causal: bool = False
) -> float:
  """Counts what training heads for multi-token prediction adds to a step.

  Each loss takes the main head's logits, the head's own, and the gradient of
  its hidden states, but none of the unembedding, which is constant.
  """
  c, (matrices, _, _) = config, _attention(config)
  if c.mtp is None:
    return 0.0
  ffw = 3 * c.embed_dim * c.dense_ffw_dim
  layer = matrices + (_mixture(c) if c.mtp.layer == 'moe' else ffw)
  layer += 2 * c.embed_dim**2 + _scores(c, seq_len, causal)
  return 2 * 3 * c.mtp.depth * (layer + c.vocab_size * c.embed_dim)


def _mixture(c: model_config.ModelConfig) -> int:
  """Counts the weights of a layer of experts that a token meets."""
  passed = (c.moe.num_active + c.moe.num_shared) * 3 * c.moe.ffw_dim
  return c.embed_dim * (c.moe.num_experts + passed)


def _scores(c: model_config.ModelConfig, seq_len: int, causal: bool) -> float:
  """Counts the products q k and p v of a layer, each head its own."""
  keys = (seq_len + 1) / 2 if causal else seq_len
  a = c.attention
  width = a.head_dim + getattr(a, 'value_dim', a.head_dim)
  return a.num_heads * width * keys


def train_per_token(
  config: model_config.ModelConfig, seq_len: int, *, causal: bool = False
) -> float:
  """Counts a training step's operations: each product has two gradients."""
  return 3 * forward_per_token(config, seq_len, causal=causal)


def _attention(c: model_config.ModelConfig) -> tuple[int, int, int]:
  """Counts the matrices, the biases and the norms of one layer's attention."""
  if isinstance(c.attention, model_config.MLAConfig):
    return _mla(c.embed_dim, c.attention)
  return _gqa(c.embed_dim, c.attention)


def _gqa(embed_dim: int, a: model_config.GQAConfig) -> tuple[int, int, int]:
  queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
  biases = a.qkv_bias * (queries + 2 * keys) + a.out_bias * embed_dim
  norms = {'none': 0, 'head': 2 * a.head_dim, 'projection': queries + keys}
  return embed_dim * 2 * (queries + keys), biases, norms[a.qk_norm]


def _mla(embed_dim: int, a: model_config.MLAConfig) -> tuple[int, int, int]:
  queries = a.num_heads * a.head_dim
  if a.q_lora_dim is None:
    query = embed_dim * queries
  else:
    query = a.q_lora_dim * (embed_dim + queries)
  key_value = embed_dim * (a.kv_lora_dim + a.rope_dim)
  key_value += a.kv_lora_dim * a.num_heads * (a.nope_dim + a.value_dim)
  out = a.num_heads * a.value_dim * embed_dim
  return query + key_value + out, 0, (a.q_lora_dim or 0) + a.kv_lora_dim
