"""Moonlight-16B-A3B (Liu et al. 2025, arXiv:2502.16982; config.json).

15.96B parameters, 2.91B of them active, both untied tables included. The paper
says 15.29B and 2.24B, which is without the 0.67B of the two tables: 15.29B and
2.24B from this config too. Latents of 31,104 bytes per token in bfloat16.
"""

import ml_collections


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the fields of ModelConfig; it takes no `arg`."""
  if arg:
    raise ValueError(
      f'configs/models/moonlight_16b_a3b.py takes no argument, not {arg!r}.'
    )
  c = ml_collections.ConfigDict()
  c.vocab_size = 163840
  c.embed_dim = 2048
  c.num_layers = 27
  c.num_dense_layers = 1  # the first of num_layers
  c.dense_ffw_dim = 11264
  c.norm_eps = 1e-5
  c.tie_embeddings = False
  c.remat = True
  # Recomputation keeps tokens that other devices sent.
  c.remat_saves = ('keys', 'routes')
  c.compute_dtype = 'bfloat16'
  c.numerics = 'fast'  # 'batch_invariant': the same bits in any batch
  c.attention = dict(
    kind='mla',
    num_heads=16,
    q_lora_dim=None,
    kv_lora_dim=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    latent_norm_eps=1e-6,  # fixed in DeepSeek's code, unlike norm_eps
  )
  c.rope = dict(theta=50000.0, interleaved=True, yarn=None)
  c.moe = dict(
    num_experts=64,
    num_active=6,
    ffw_dim=1408,
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
