"""What a decoder is made of; nothing about how it is trained or placed."""

import dataclasses
from typing import Any

_ROUTERS = ('softmax', 'sigmoid')
_DTYPES = ('float32', 'bfloat16')


def _require_at_least(config: Any, lowest: int, names: tuple[str, ...]) -> None:
  for name in names:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
      raise ValueError(
        f'{type(config).__name__}.{name} must be an integer of at least '
        f'{lowest}, not {value!r}.'
      )


def _from_dict(cls: Any, fields: dict[str, Any]) -> Any:
  known = {f.name for f in dataclasses.fields(cls)}
  unknown, missing = set(fields) - known, known - set(fields)
  if unknown or missing:
    raise ValueError(
      f'{cls.__name__} has no field {sorted(unknown)} and needs '
      f'{sorted(missing)}; its fields are {sorted(known)}.'
    )
  return cls(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
  """One mixture-of-experts layer.

  Attributes:
    num_experts: routed experts.
    num_active: routed experts per token.
    ffw_dim: hidden width of each expert, routed or shared.
    num_shared: experts every token passes, computed as one wide expert.
    router: 'softmax' (scores compete) or 'sigmoid' (scores are independent and
      a selection bias outside the optimizer balances the load, DeepSeek-V3).
    renormalize: whether the weights of the chosen experts sum to one.
    routed_scale: factor on those weights (DeepSeek-V3: 2.5, Kimi K2: 2.827).
    aux_loss_weight: of the load-balancing loss in the training loss.
  """

  num_experts: int
  num_active: int
  ffw_dim: int
  num_shared: int
  router: str
  renormalize: bool
  routed_scale: float
  aux_loss_weight: float

  def __post_init__(self):
    _require_at_least(self, 1, ('num_experts', 'num_active', 'ffw_dim'))
    _require_at_least(self, 0, ('num_shared',))
    if self.num_active > self.num_experts:
      raise ValueError(
        f'num_active ({self.num_active}) must not exceed num_experts '
        f'({self.num_experts}).'
      )
    if self.num_experts > 65535:
      raise ValueError(
        f'num_experts ({self.num_experts}) must stay below 65535, the uint16 '
        'id that marks a token without a recorded route.'
      )
    if self.router not in _ROUTERS:
      raise ValueError(f'router {self.router!r} is not one of {_ROUTERS}.')
    if not self.routed_scale > 0:
      raise ValueError(f'routed_scale must be positive: {self.routed_scale}.')
    if not self.aux_loss_weight >= 0:
      raise ValueError(
        f'aux_loss_weight must not be negative: {self.aux_loss_weight}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A decoder: dense layers first, mixture-of-experts layers after them.

  Attributes:
    vocab_size: rows of the embedding.
    embed_dim: width of the residual stream.
    num_layers: decoder layers, dense ones included.
    num_dense_layers: leading layers whose feed-forward is dense.
    dense_ffw_dim: hidden width of those.
    num_heads: query heads.
    num_kv_heads: key/value heads; must divide num_heads.
    head_dim: width of a head; even, for the rotation.
    rope_theta: base of the rotary wavelengths.
    norm_eps: added to the mean square in RMSNorm.
    tie_embeddings: whether the head is the transposed embedding.
    remat: whether the backward pass recomputes each layer.
    compute_dtype: of activations and matmuls; norms, router, softmax and
      logits are float32 always.
    moe: of every layer after the dense ones.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_dense_layers: int
  dense_ffw_dim: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float
  norm_eps: float
  tie_embeddings: bool
  remat: bool
  compute_dtype: str
  moe: MoEConfig

  def __post_init__(self):
    _require_at_least(
      self,
      1,
      (
        'vocab_size',
        'embed_dim',
        'num_layers',
        'dense_ffw_dim',
        'num_heads',
        'num_kv_heads',
        'head_dim',
      ),
    )
    _require_at_least(self, 0, ('num_dense_layers',))
    if self.num_dense_layers >= self.num_layers:
      raise ValueError(
        f'num_dense_layers ({self.num_dense_layers}) must be less than '
        f'num_layers ({self.num_layers}): at least one layer is a mixture.'
      )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_kv_heads ({self.num_kv_heads}) must divide num_heads '
        f'({self.num_heads}).'
      )
    if self.head_dim % 2:
      raise ValueError(
        f'head_dim ({self.head_dim}) must be even: rotary positions turn '
        'pairs of dimensions.'
      )
    if self.compute_dtype not in _DTYPES:
      raise ValueError(
        f'compute_dtype {self.compute_dtype!r} is not one of {_DTYPES}.'
      )
    for name in ('rope_theta', 'norm_eps'):
      if not getattr(self, name) > 0:
        raise ValueError(f'{name} must be positive: {getattr(self, name)}.')

  @property
  def num_moe_layers(self) -> int:
    return self.num_layers - self.num_dense_layers

  @classmethod
  def from_dict(cls, fields: dict[str, Any]) -> 'ModelConfig':
    """Builds a config from nested dictionaries; names every unknown key."""
    fields = dict(fields)
    if 'moe' in fields:
      fields['moe'] = _from_dict(MoEConfig, dict(fields['moe']))
    return _from_dict(cls, fields)
