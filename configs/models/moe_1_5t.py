"""Our own proposal for 1.5T parameters: nothing of it has been trained.

1508.73B parameters, 37.44B of them active, both untied tables included. Routed
experts hold 1494.65B, 99.1 %. Figures below are arithmetic from this config and
from data sheets (H200: 989 TFLOP/s dense bfloat16, 141 GB at 4.8 TB/s, NVLink
450 GB/s and InfiniBand 50 GB/s each way; TPU v5p: 459 TFLOP/s, 95 GB).

Frame: DeepSeek-V3's and Kimi K2's. MLA, a sigmoid router balanced by a
selection bias, one shared expert, few dense layers: what is proven at 1T is not
changed for the last half of a factor. K2's vocabulary and rotation (YaRN x64 to
262,144 tokens; pretraining at 4,096 would set yarn to None), so tokenizer, data
and kernels are shared with the model that this project starts from.

512 experts, because meshes are powers of two: one a device on 512 devices, two
on 256, 64 on the 8 of a node. K2's 384 do not divide over 512 devices, where
they lie 128 wide and every layer gathers the rest. What of a mesh the experts
leave falls on D = 8192 = 2^13, over which dense weights lie too: every mesh of
powers of two up to 8,192 devices fits, and larger ones whose axes split into
products of at most 512 and 8192, with fsdp x context at most 8192.

8 active, as in both parents: sparsity 64. At equal loss K2 reports 1.69x,
1.39x and 1.15x fewer FLOPs for sparsity 48 than for 8, 16 and 32: still
falling, so 64 should not cost, and gains little; divisibility is the reason.
routed_scale is sqrt(8): eight equal weights of 1/8 then leave the sum of
independent experts as large as one, the shared one (K2's 2.827 likewise).

60 layers of width 8192: 58 mixtures of 25.77B come closest to 1.5T, and
137 channels a layer lie near K2's 118. Two dense layers as wide as the 9
experts of a token cost a token what a mixture does.

64 heads, half of DeepSeek-V3's: K2 found that the other half buys 0.5 to 1.2 %
of loss for 83 % more FLOPs at 128k tokens, and agents live at long context.
Absorbed decoding does 121 FLOP per byte of latents, below the H200's 206, where
128 heads would be at 242: reading the cache stays the limit. A query latent of
2048 keeps K2's ratio to D, rounded to a power of two.

Latents of 69,120 bytes per token in bfloat16: 18.1 GB at the full context. The
bfloat16 policy is 3.02 TB: 32 H200s hold it and 82 such sessions.

Memory: masters, gradient and two AdamW moments in float32 are 16 bytes a
parameter. On 512 H200s as (replica, fsdp, context) = (64, 4, 2) experts take
46.7 GB and the rest, replicated 64 times, 28.2 GB a device. On 512 TPU v5p as
(16, 16, 2) the rest takes 7.1 GB and 41 of 95 GB are left.

Intensity: a training token costs 247 GFLOP at 4,096 tokens (unmasked), 40 % of
512 H200s 0.82M tokens/s. With 8,192 tokens a device every expert meets 65,536
rows a step, far above the 206 that make a bfloat16 product compute bound;
decoding needs 13,200 concurrent tokens for that, as sparsity 64 must.

What it asks of the network: a routed copy does 6 D F operations for 4 D bytes
sent and returned, 1.5 F = 3,072 per byte whatever E and D are, or 322 GB/s an
H200 to stay hidden. NVLink gives that and InfiniBand does not: between nodes an
exchange has to send a token once a node and in 8 bits, or limit groups
(`num_groups`), which costs quality. A v5p needs 149 GB/s of its torus. This is
why F is not below 2048, and the first thing to measure.
"""

import ml_collections


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Returns the fields of ModelConfig; it takes no `arg`."""
  if arg:
    raise ValueError(
      f'configs/models/moe_1_5t.py takes no argument, not {arg!r}.'
    )
  c = ml_collections.ConfigDict()
  c.vocab_size = 163840
  c.embed_dim = 8192
  c.num_layers = 60
  c.num_dense_layers = 2  # the first of num_layers
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
    num_heads=64,
    q_lora_dim=2048,
    kv_lora_dim=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    latent_norm_eps=1e-6,
  )
  c.rope = dict(
    theta=50000.0,
    interleaved=True,
    yarn=dict(
      factor=64.0,  # 4,096 to 262,144 tokens
      original_max_len=4096,
      beta_fast=32.0,
      beta_slow=1.0,
      mscale=1.0,
      mscale_all_dim=1.0,
      truncate=True,
    ),
  )
  c.moe = dict(
    num_experts=512,
    num_active=8,
    ffw_dim=2048,
    num_shared=1,
    router='sigmoid',
    num_groups=1,
    num_active_groups=1,
    renormalize=True,
    routed_scale=2.828,  # the square root of num_active
    aux_loss_weight=0.0,  # the selection bias balances the load
    z_loss_weight=0.0,
    replay_alpha=0.0,  # in RL; 0 replays every recorded expert
  )
  return c
