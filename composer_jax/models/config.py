"""What a decoder is made of; nothing about how it is trained or placed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from composer_jax.core import checks
from composer_jax.models import attention_config

GQAConfig = attention_config.GQAConfig
MLAConfig = attention_config.MLAConfig
RopeConfig = attention_config.RopeConfig
YarnConfig = attention_config.YarnConfig

_ROUTERS = ('softmax', 'sigmoid')
_DTYPES = ('float32', 'bfloat16')
NUMERICS = ('fast', 'batch_invariant')

# Tensors of a layer that recomputation may keep: weights made whole, keys and
# values of a whole row, what experts received and gave back, the outputs of
# attention and the hidden units of experts.
REMAT_NAMES = (
  *('weights', 'keys', 'dispatched', 'routes', 'combined'),
  *('attention_out', 'expert_hidden'),
)

# Fields of a ModelConfig that a run may choose: no weight depends on them.
FREE = (
  *('compute_dtype', 'remat', 'remat_saves', 'numerics'),
  *('moe.aux_loss_weight', 'moe.z_loss_weight', 'moe.replay_alpha'),
)


def _from_dict(cls: Any, fields: dict[str, Any]) -> Any:
  known = {f.name for f in dataclasses.fields(cls)}
  # What no weight depends on may be left out: imports that are older than the
  # field have it not.
  optional = {
    f.name
    for f in dataclasses.fields(cls)
    if f.default is not dataclasses.MISSING
  }
  unknown, missing = set(fields) - known, known - set(fields) - optional
  if unknown or missing:
    raise ValueError(
      f'{cls.__name__} has no field {sorted(unknown)} and needs '
      f'{sorted(missing)}; its fields are {sorted(known)}.'
    )
  return cls(**fields)


_ATTENTIONS = {'gqa': GQAConfig, 'mla': MLAConfig}


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
    num_groups: equal groups of neighbouring experts.
    num_active_groups: groups a token may choose from, those with the largest
      sum of their two best biased scores (DeepSeek-V3, section 2.1.2); equal
      to num_groups it limits nothing. Needs the sigmoid router.
    renormalize: whether the weights of the chosen experts sum to one.
    routed_scale: factor on those weights (DeepSeek-V3: 2.5, Kimi K2: 2.827).
    aux_loss_weight: of the load-balancing loss in the loss of pretraining and
      fine-tuning; RL has neither this nor the next.
    z_loss_weight: of the mean squared log-sum-exp of the router's logits
      (ST-MoE, eq. 5), likewise.
    replay_alpha: plausibility of replayed experts (`router.route`): 0 replays
      every recorded one, 1 none that the router would not have chosen.
  """

  num_experts: int
  num_active: int
  ffw_dim: int
  num_shared: int
  router: str
  num_groups: int
  num_active_groups: int
  renormalize: bool
  routed_scale: float
  aux_loss_weight: float
  z_loss_weight: float
  replay_alpha: float = 0.0

  def __post_init__(self):
    checks.at_least(self, 1, 'num_experts', 'num_active', 'ffw_dim')
    checks.at_least(self, 1, 'num_groups', 'num_active_groups')
    checks.at_least(self, 0, 'num_shared')
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
    checks.one_of(self, 'router', _ROUTERS)
    self._check_groups()
    checks.boolean(self, 'renormalize')
    checks.positive(self, 'routed_scale')
    checks.number(self, 0, 'aux_loss_weight', 'z_loss_weight', 'replay_alpha')
    if self.replay_alpha > 1:
      raise ValueError(
        f'MoEConfig.replay_alpha ({self.replay_alpha}) must lie in 0..1: at 1 '
        'every token is routed as by its own router.'
      )

  def _check_groups(self):
    if self.num_active_groups > self.num_groups:
      raise ValueError(
        f'num_active_groups ({self.num_active_groups}) must not exceed '
        f'num_groups ({self.num_groups}).'
      )
    if self.num_active_groups == self.num_groups:
      return
    if self.router != 'sigmoid':
      raise ValueError(
        f'num_active_groups ({self.num_active_groups}) below num_groups '
        f"({self.num_groups}) needs router 'sigmoid', not {self.router!r}."
      )
    size, left = divmod(self.num_experts, self.num_groups)
    if left or size < 2:
      raise ValueError(
        f'num_groups ({self.num_groups}) must divide num_experts '
        f'({self.num_experts}) into groups of at least two, whose two best '
        'scores are summed.'
      )
    if self.num_active > size * self.num_active_groups:
      raise ValueError(
        f'num_active ({self.num_active}) must not exceed the experts of '
        f'num_active_groups ({self.num_active_groups}) groups of {size}.'
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
    norm_eps: added to the mean square in RMSNorm.
    tie_embeddings: whether the head is the transposed embedding.
    remat: whether the backward pass recomputes each layer.
    remat_saves: what it keeps of it, of REMAT_NAMES. By default what other
      devices sent of tokens; with 'weights' too it repeats no collective.
    compute_dtype: of activations and matmuls; norms, router, softmax and
      logits are float32 always.
    numerics: 'fast', or 'batch_invariant': prefill, decode and training give
      bitwise equal results whatever else is in the batch, at a price.
    attention: of every layer; its `kind` says which.
    rope: rotary positions.
    moe: of every layer after the dense ones.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_dense_layers: int
  dense_ffw_dim: int
  norm_eps: float
  tie_embeddings: bool
  remat: bool
  compute_dtype: str
  attention: GQAConfig | MLAConfig
  rope: RopeConfig
  moe: MoEConfig
  numerics: str = 'fast'
  remat_saves: tuple[str, ...] = ('keys', 'dispatched', 'routes', 'combined')

  def __post_init__(self):
    # A list, as files have it, would compare as another config.
    object.__setattr__(self, 'remat_saves', tuple(self.remat_saves))
    if unknown := set(self.remat_saves) - set(REMAT_NAMES):
      raise ValueError(
        f'remat_saves names {sorted(unknown)}; known are {REMAT_NAMES}.'
      )
    sizes = ('vocab_size', 'embed_dim', 'num_layers', 'dense_ffw_dim')
    checks.at_least(self, 1, *sizes)
    checks.at_least(self, 0, 'num_dense_layers')
    if self.num_dense_layers >= self.num_layers:
      raise ValueError(
        f'num_dense_layers ({self.num_dense_layers}) must be less than '
        f'num_layers ({self.num_layers}): at least one layer is a mixture.'
      )
    checks.one_of(self, 'compute_dtype', _DTYPES)
    checks.one_of(self, 'numerics', NUMERICS)
    checks.positive(self, 'norm_eps')
    checks.boolean(self, 'tie_embeddings', 'remat')
    is_gqa = isinstance(self.attention, GQAConfig)
    if is_gqa and self.rope.yarn and self.rope.yarn.mscale_all_dim:
      raise ValueError(
        f'rope.yarn.mscale_all_dim ({self.rope.yarn.mscale_all_dim}) needs '
        'latent attention: transformers scales the softmax by it there alone. '
        'Set mscale and mscale_all_dim to None.'
      )

  @property
  def num_moe_layers(self) -> int:
    return self.num_layers - self.num_dense_layers

  @property
  def mla(self) -> MLAConfig:
    """The attention of a model that has this kind."""
    assert isinstance(self.attention, MLAConfig)
    return self.attention

  @classmethod
  def from_dict(cls, fields: dict[str, Any]) -> 'ModelConfig':
    """Builds a config from nested dictionaries; names every unknown key."""
    fields = dict(fields)
    if 'attention' in fields:
      fields['attention'] = _attention(_section(fields, 'attention'))
    if 'rope' in fields:
      rope = _section(fields, 'rope')
      if rope.get('yarn') is not None:
        rope['yarn'] = _from_dict(YarnConfig, _section(rope, 'yarn'))
      fields['rope'] = _from_dict(RopeConfig, rope)
    if 'moe' in fields:
      fields['moe'] = _from_dict(MoEConfig, _section(fields, 'moe'))
    return _from_dict(cls, fields)

  def to_dict(self) -> dict[str, Any]:
    """Returns what `from_dict` takes."""
    return dataclasses.asdict(self)


def _section(fields: dict[str, Any], name: str) -> dict[str, Any]:
  if not isinstance(fields[name], Mapping):
    raise ValueError(f'{name} must be a section, not {fields[name]!r}.')
  return dict(fields[name])


def _attention(fields: dict[str, Any]) -> GQAConfig | MLAConfig:
  kind = fields.get('kind')
  if kind not in _ATTENTIONS:
    raise ValueError(
      f'attention.kind must be one of {sorted(_ATTENTIONS)}, not {kind!r}.'
    )
  return _from_dict(_ATTENTIONS[kind], fields)
