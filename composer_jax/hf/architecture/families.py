"""What the families of Hugging Face models can have, among what we model."""

from typing import Any

from composer_jax.hf.architecture import rope
from composer_jax.hf.tensors import names
from composer_jax.models import config as model_config

MLA = ('deepseek_v3', 'kimi_k2')
QK_NORMS = {'qwen3_moe': 'head', 'olmoe': 'projection', 'mixtral': 'none'}
# Of DeepSeek's code, whatever `rms_norm_eps` says.
LATENT_NORM_EPS = 1e-6


def check(config: model_config.ModelConfig, family: str) -> None:
  """Raises a ValueError that names what models of a family cannot have."""
  if family not in names.FAMILIES:
    raise ValueError(f'family {family!r} is not one of {names.FAMILIES}.')
  for name, (value, allowed) in _demands(config, family).items():
    if value not in allowed:
      raise ValueError(
        f'{name} is {value!r}, but a model of family {family!r} can only have '
        f'{" or ".join(map(repr, allowed))}; change it or the family.'
      )
  if config.rope.yarn is not None:
    rope.check_yarn(config.rope.yarn, is_mla=family in MLA)


def _demands(
  config: model_config.ModelConfig, family: str
) -> dict[str, tuple[Any, tuple[Any, ...]]]:
  """Returns {field: (its value, the values that the family has)}."""
  c, a, moe = config, config.attention, config.moe
  demands: dict[str, tuple[Any, tuple[Any, ...]]]
  if family in MLA:
    demands = {
      'attention.kind': (a.kind, ('mla',)),
      'moe.router': (moe.router, ('sigmoid',)),
    }
    if isinstance(a, model_config.MLAConfig):
      demands['attention.latent_norm_eps'] = (
        a.latent_norm_eps,
        (LATENT_NORM_EPS,),
      )
    # transformers sums the two best of each group, even where all may choose.
    E = moe.num_experts
    divisors = tuple(n for n in range(1, E // 2 + 1) if E % n == 0)
    demands['moe.num_groups'] = (moe.num_groups, divisors)
    return demands
  demands = {
    'attention.kind': (a.kind, ('gqa',)),
    'moe.router': (moe.router, ('softmax',)),
    'moe.num_shared': (moe.num_shared, (0,)),
    'moe.num_groups': (moe.num_groups, (1,)),
    'moe.routed_scale': (moe.routed_scale, (1.0,)),
    'rope.interleaved': (c.rope.interleaved, (False,)),
  }
  if isinstance(a, model_config.GQAConfig):
    biases = (False,) if family == 'mixtral' else (False, True)
    demands['attention.qk_norm'] = (a.qk_norm, (QK_NORMS[family],))
    demands['attention.qkv_bias'] = (a.qkv_bias, biases)
    demands['attention.out_bias'] = (a.out_bias, (a.qkv_bias,))
    if family == 'olmoe':
      head_dim = c.embed_dim // a.num_heads
      demands['attention.head_dim'] = (a.head_dim, (head_dim,))
  if family != 'qwen3_moe':
    demands['num_dense_layers'] = (c.num_dense_layers, (0,))
    # One key says both, and no layer uses this one.
    demands['dense_ffw_dim'] = (c.dense_ffw_dim, (moe.ffw_dim,))
  if family == 'mixtral':
    demands['moe.renormalize'] = (moe.renormalize, (True,))
  return demands
