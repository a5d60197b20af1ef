"""Closed forms for parameters and floating-point operations."""

from composer_jax.models import config as model_config


def _attention_params(c: model_config.ModelConfig) -> int:
  heads = 2 * c.num_heads + 2 * c.num_kv_heads
  return c.embed_dim * c.head_dim * heads


def _params(c: model_config.ModelConfig, experts: int) -> int:
  """Counts parameters with `experts` routed experts per MoE layer."""
  per_expert = 3 * c.embed_dim * c.moe.ffw_dim
  norms = 2 * c.embed_dim
  dense = 3 * c.embed_dim * c.dense_ffw_dim
  moe = c.embed_dim * c.moe.num_experts
  moe += (experts + c.moe.num_shared) * per_expert
  tables = 1 if c.tie_embeddings else 2
  return (
    tables * c.vocab_size * c.embed_dim
    + c.num_layers * (_attention_params(c) + norms)
    + c.num_dense_layers * dense
    + c.num_moe_layers * moe
    + c.embed_dim
  )


def params_total(config: model_config.ModelConfig) -> int:
  """Counts trained parameters; the selection bias is not among them."""
  return _params(config, config.moe.num_experts)


def params_active(config: model_config.ModelConfig) -> int:
  """Counts the parameters that one token reads."""
  return _params(config, config.moe.num_active)


def flops_per_token(config: model_config.ModelConfig, seq_len: int) -> float:
  """Counts the useful operations of a forward pass per token; training is 3x.

  Two per weight of a matrix the token passes (the embedding lookup passes
  none), plus attention over the causal half of `seq_len` positions. Norms,
  rotations and softmax are left out, and so is work that an implementation
  does beyond this, such as masked scores.
  """
  c = config
  per_expert = 3 * c.embed_dim * c.moe.ffw_dim
  matrices = (
    c.vocab_size * c.embed_dim
    + c.num_layers * _attention_params(c)
    + c.num_dense_layers * 3 * c.embed_dim * c.dense_ffw_dim
    + c.num_moe_layers
    * (
      c.embed_dim * c.moe.num_experts
      + (c.moe.num_active + c.moe.num_shared) * per_expert
    )
  )
  visible = (seq_len + 1) / 2
  scores = 2 * c.num_layers * c.num_heads * c.head_dim * visible
  return 2 * (matrices + scores)
