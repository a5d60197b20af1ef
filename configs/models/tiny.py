"""A policy that trains on a CPU core.

1.77M parameters, 0.89M of them active, the tied table included. Keys and values
of 1,024 bytes per token in bfloat16.
"""

import ml_collections


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the fields of ModelConfig; it takes no `arg`."""
  if arg:
    raise ValueError(f'configs/models/tiny.py takes no argument, not {arg!r}.')
  c = ml_collections.ConfigDict()
  c.vocab_size = 768  # the tokenizer is trained to this size
  c.embed_dim = 128
  c.num_layers = 4
  c.num_dense_layers = 1  # the first of num_layers
  c.dense_ffw_dim = 384
  c.norm_eps = 1e-6
  c.tie_embeddings = True
  c.remat = False  # activations fit; recomputing would cost a third more time
  # Recomputation keeps tokens that other devices sent.
  c.remat_saves = ('keys', 'routes')
  c.compute_dtype = 'float32'
  c.numerics = 'fast'  # 'batch_invariant': the same bits in any batch
  c.attention = dict(
    kind='gqa',
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    qk_norm='none',
    qkv_bias=False,
    out_bias=False,
  )
  c.adapters = {}  # ranks by role, beside the frozen weights of an import
  c.mtp = {}  # heads for further tokens: depth, and layer ('moe' or 'dense')
  c.precision = {}  # formats of few bits of the experts, 'bf16' of all if empty
  c.rope = dict(theta=10000.0, interleaved=False, yarn=None)
  c.moe = dict(
    num_experts=8,
    num_active=2,
    ffw_dim=128,
    num_shared=1,
    router='sigmoid',
    num_groups=1,
    num_active_groups=1,
    renormalize=True,
    routed_scale=1.0,
    aux_loss_weight=0.0,  # the selection bias balances the load
    z_loss_weight=0.0,
    replay_alpha=0.0,  # in RL; 0 replays every recorded expert
  )
  return c
