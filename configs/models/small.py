"""A model for one accelerator, with every part of the big ones.

0.70B parameters, 0.14B of them active, the tied table included. The parts are
Moonlight's (MLA without a compressed query, sigmoid router, two shared experts,
a dense layer first) in sizes that divide over 8 devices. Float32 masters and
AdamW's moments take 8.4 GB; latents 6,912 bytes per token in bfloat16.
"""

import ml_collections


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the fields of ModelConfig; it takes no `arg`."""
  if arg:
    raise ValueError(f'configs/models/small.py takes no argument, not {arg!r}.')
  c = ml_collections.ConfigDict()
  c.vocab_size = 32768
  c.embed_dim = 768
  c.num_layers = 12
  c.num_dense_layers = 1  # the first of num_layers
  c.dense_ffw_dim = 3072  # as wide as the 8 experts of a token
  c.norm_eps = 1e-6
  c.tie_embeddings = True
  c.remat = True
  # Recomputation keeps tokens that other devices sent.
  c.remat_saves = ('keys', 'routes')
  c.compute_dtype = 'bfloat16'
  c.numerics = 'fast'  # 'batch_invariant': the same bits in any batch
  c.attention = dict(
    kind='mla',
    num_heads=12,
    q_lora_dim=None,
    kv_lora_dim=256,
    nope_dim=64,
    rope_dim=32,
    value_dim=64,
    latent_norm_eps=1e-6,
  )
  c.rope = dict(theta=50000.0, interleaved=True, yarn=None)
  c.moe = dict(
    num_experts=64,
    num_active=6,
    ffw_dim=384,
    num_shared=2,
    router='sigmoid',
    num_groups=1,
    num_active_groups=1,
    renormalize=True,
    routed_scale=2.446,
    aux_loss_weight=0.0,  # the selection bias balances the load
    z_loss_weight=0.0,
    replay_alpha=0.0,  # in RL; 0 replays every recorded expert
  )
  return c
