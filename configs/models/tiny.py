"""A policy of about 2 million parameters that trains on a CPU core."""

import ml_collections


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the fields of ModelConfig; it takes no `arg`."""
  if arg:
    raise ValueError(f'configs/models/tiny.py takes no argument, not {arg!r}.')
  c = ml_collections.ConfigDict()
  c.vocab_size = 1024  # the tokenizer is trained to this size
  c.embed_dim = 128
  c.num_layers = 4
  c.num_dense_layers = 1  # of num_layers, the first ones
  c.dense_ffw_dim = 384
  c.num_heads = 4
  c.num_kv_heads = 2
  c.head_dim = 32
  c.rope_theta = 10000.0
  c.norm_eps = 1e-6
  c.tie_embeddings = True
  c.remat = False  # activations fit; recomputing would cost a third more time
  c.compute_dtype = 'float32'
  c.moe = ml_collections.ConfigDict()
  c.moe.num_experts = 8
  c.moe.num_active = 2
  c.moe.ffw_dim = 128
  c.moe.num_shared = 1
  c.moe.router = 'sigmoid'
  c.moe.renormalize = True
  c.moe.routed_scale = 1.0
  c.moe.aux_loss_weight = 0.0  # the selection bias balances the load
  return c
