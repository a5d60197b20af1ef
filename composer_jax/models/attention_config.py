"""What attention is made of: parts of a `models.config.ModelConfig`."""

import dataclasses
from typing import Any

from composer_jax.core import checks

_QK_NORMS = ('none', 'head', 'projection')


def _require_even(config: Any, name: str) -> None:
  if getattr(config, name) % 2:
    raise ValueError(
      f'{type(config).__name__}.{name} ({getattr(config, name)}) must be even: '
      'rotary positions turn pairs of dimensions.'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GQAConfig:
  """Grouped-query attention (Ainslie et al. 2023).

  Attributes:
    kind: 'gqa'.
    num_heads: query heads.
    num_kv_heads: key/value heads; must divide num_heads.
    head_dim: width of a head; even, for the rotation.
    qk_norm: RMSNorm of queries and keys before the rotation: 'none', 'head'
      (over H, one scale for all heads: Qwen3), or 'projection' (over all heads
      at once: OLMoE).
    qkv_bias: whether query, key and value have biases.
    out_bias: whether the output projection has one.
  """

  kind: str
  num_heads: int
  num_kv_heads: int
  head_dim: int
  qk_norm: str
  qkv_bias: bool
  out_bias: bool

  def __post_init__(self):
    checks.at_least(self, 1, 'num_heads', 'num_kv_heads', 'head_dim')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_kv_heads ({self.num_kv_heads}) must divide num_heads '
        f'({self.num_heads}).'
      )
    _require_even(self, 'head_dim')
    checks.one_of(self, 'kind', ('gqa',))
    checks.one_of(self, 'qk_norm', _QK_NORMS)
    checks.boolean(self, 'qkv_bias', 'out_bias')

  @property
  def rotary_dim(self) -> int:
    """Dimensions of a head that rotate."""
    return self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
  """Multi-head latent attention (DeepSeek-V2, section 2.1).

  Attributes:
    kind: 'mla'.
    num_heads: heads.
    q_lora_dim: width of the compressed query (Q); None projects directly.
    kv_lora_dim: width of the compressed key and value (C), which is cached.
    nope_dim: width of a head's part without positions (H).
    rope_dim: width of its rotated part (J); one rotated key serves all heads.
    value_dim: width of a head's value.
    latent_norm_eps: of the RMSNorms on the compressed vectors.
  """

  kind: str
  num_heads: int
  q_lora_dim: int | None
  kv_lora_dim: int
  nope_dim: int
  rope_dim: int
  value_dim: int
  latent_norm_eps: float

  def __post_init__(self):
    sizes = ('num_heads', 'kv_lora_dim', 'nope_dim', 'rope_dim', 'value_dim')
    checks.at_least(self, 1, *sizes)
    if self.q_lora_dim is not None:
      checks.at_least(self, 1, 'q_lora_dim')
    _require_even(self, 'rope_dim')
    checks.one_of(self, 'kind', ('mla',))
    checks.positive(self, 'latent_norm_eps')

  @property
  def rotary_dim(self) -> int:
    """Dimensions of a head that rotate."""
    return self.rope_dim

  @property
  def head_dim(self) -> int:
    """Width of a query and of a key, both parts."""
    return self.nope_dim + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
  """Longer context by stretched wavelengths (YaRN, Peng et al. 2023).

  Attributes:
    factor: of the context length.
    original_max_len: context of the pretraining before.
    beta_fast: wavelengths that turn more often than this within that context
      keep their frequency.
    beta_slow: those that turn less often have it divided by `factor`.
    mscale: with s(m) = 0.1 m log(factor) + 1, cos and sin are multiplied by
      s(mscale) / s(mscale_all_dim); by s(1) where both are None.
    mscale_all_dim: queries and keys are each multiplied whole by
      s(mscale_all_dim) (DeepSeek); by nothing where both are None.
    truncate: whether the bounds of the ramp are rounded outward.
  """

  factor: float
  original_max_len: int
  beta_fast: float
  beta_slow: float
  mscale: float | None
  mscale_all_dim: float | None
  truncate: bool

  def __post_init__(self):
    checks.at_least(self, 1, 'original_max_len')
    checks.number(self, 1, 'factor')
    checks.positive(self, 'beta_fast', 'beta_slow')
    checks.boolean(self, 'truncate')
    for name in ('mscale', 'mscale_all_dim'):
      if getattr(self, name) is not None:
        checks.number(self, 0, name)
    if self.beta_fast <= self.beta_slow:
      raise ValueError(
        f'YarnConfig.beta_fast ({self.beta_fast}) must be above beta_slow '
        f'({self.beta_slow}).'
      )
    alone = not self.mscale_all_dim and self.mscale not in (None, 1.0)
    if alone or (self.mscale_all_dim and not self.mscale):
      raise ValueError(
        f'mscale ({self.mscale}) and mscale_all_dim ({self.mscale_all_dim}) of '
        "YaRN must both be given: from one alone transformers and DeepSeek's "
        'code compute different things.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary positions.

  Attributes:
    theta: base of the wavelengths.
    interleaved: whether neighbours (2h, 2h + 1) form a pair, as in DeepSeek's
      weights, instead of the halves (h, h + H / 2).
    yarn: how the context was stretched; None when it was not.
  """

  theta: float
  interleaved: bool
  yarn: YarnConfig | None

  def __post_init__(self):
    checks.number(self, 1, 'theta')
    checks.boolean(self, 'interleaved')
    if self.theta == 1:
      raise ValueError(
        'RopeConfig.theta must be above 1, not 1: all wavelengths are equal.'
      )
