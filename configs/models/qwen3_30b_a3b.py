"""Qwen3-30B-A3B (Qwen3 Technical Report, arXiv:2505.09388; config.json).

30.53B parameters, 3.35B of them active, both untied tables included: the 30.5B
and 3.3B of its model card (29.9B without the tables, also on the card). Keys
and values of 98,304 bytes per token in bfloat16.

Rotation as in the base model and the first release; Instruct-2507 and
Qwen3-Coder-30B-A3B differ from it by theta = 1e7 only.
"""

import ml_collections


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the fields of ModelConfig; it takes no `arg`."""
  if arg:
    raise ValueError(
      f'configs/models/qwen3_*.py take no argument, not {arg!r}.'
    )
  c = ml_collections.ConfigDict()
  c.vocab_size = 151936
  c.embed_dim = 2048
  c.num_layers = 48
  c.num_dense_layers = 0
  c.dense_ffw_dim = 6144  # unused: no layer is dense
  c.norm_eps = 1e-6
  c.tie_embeddings = False
  c.remat = True
  # Recomputation keeps tokens that other devices sent.
  c.remat_saves = ('keys', 'routes')
  c.compute_dtype = 'bfloat16'
  c.numerics = 'fast'  # 'batch_invariant': the same bits in any batch
  c.attention = dict(
    kind='gqa',
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    qk_norm='head',
    qkv_bias=False,
    out_bias=False,
  )
  c.rope = dict(theta=1e6, interleaved=False, yarn=None)
  c.moe = dict(
    num_experts=128,
    num_active=8,
    ffw_dim=768,
    num_shared=0,
    router='softmax',
    num_groups=1,
    num_active_groups=1,
    renormalize=True,
    routed_scale=1.0,
    # As published, for another loss: transformers means over layers and sums
    # over a token's choices, we sum over layers and mean over choices. Where
    # layers are loaded alike, ours is num_layers / num_active = 6 times theirs.
    aux_loss_weight=0.001,
    z_loss_weight=0.0,
    replay_alpha=0.0,  # in RL; 0 replays every recorded expert
  )
  return c
