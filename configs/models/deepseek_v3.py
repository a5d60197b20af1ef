"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437; config.json).

671.03B parameters, 37.55B of them active, both untied tables included: the 671B
and 37B of the paper, whose active count leaves out the embedding (36.63B). Its
multi-token prediction layer (14B in the checkpoint, whose tables are copies) is
not part of it; --config.mtp.depth=1 adds it. Latents of
70,272 bytes per token in bfloat16.
"""

import ml_collections


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the fields of ModelConfig; it takes no `arg`."""
  if arg:
    raise ValueError(
      'configs/models/deepseek_v3.py and kimi_k2.py take no argument, '
      f'not {arg!r}.'
    )
  c = ml_collections.ConfigDict()
  c.vocab_size = 129280
  c.embed_dim = 7168
  c.num_layers = 61
  c.num_dense_layers = 3  # the first of num_layers
  c.dense_ffw_dim = 18432  # as wide as the 9 experts of a token
  c.norm_eps = 1e-6
  c.tie_embeddings = False
  c.remat = True
  # Recomputation keeps tokens that other devices sent.
  c.remat_saves = ('keys', 'routes')
  c.compute_dtype = 'bfloat16'
  c.numerics = 'fast'  # 'batch_invariant': the same bits in any batch
  c.attention = dict(
    kind='mla',
    num_heads=128,
    q_lora_dim=1536,
    kv_lora_dim=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    latent_norm_eps=1e-6,  # fixed in DeepSeek's code, unlike norm_eps
  )
  c.rope = dict(
    theta=10000.0,
    interleaved=True,
    yarn=dict(
      factor=40.0,  # 4,096 to 163,840 tokens
      original_max_len=4096,
      beta_fast=32.0,
      beta_slow=1.0,
      mscale=1.0,
      mscale_all_dim=1.0,
      truncate=True,
    ),
  )
  c.mtp = {}  # heads for further tokens
  c.moe = dict(
    num_experts=256,
    num_active=8,
    ffw_dim=2048,
    num_shared=1,
    router='sigmoid',
    num_groups=8,  # nodes in DeepSeek's training
    num_active_groups=4,
    renormalize=True,
    routed_scale=2.5,
    aux_loss_weight=0.0,  # the selection bias balances the load
    z_loss_weight=0.0,
    replay_alpha=0.0,  # in RL; 0 replays every recorded expert
  )
  return c
