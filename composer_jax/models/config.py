"""Architecture of a decoder, without its training and placement."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from composer_jax.core import checks
from composer_jax.numerics import formats

NUMERICS = ('fast', 'batch_invariant')

# Roles of weights that adapters may have.
ADAPTED = ('attention', 'dense', 'shared', 'routed', 'router')

# Tensors of a layer that recomputation may keep: gathered weights (with 'ahead'
# they are gathered, and gradients scattered, beside another layer), keys and
# values of a row, chosen experts, the outputs of attention, and where no token
# travels the hidden units of experts.
REMAT_NAMES = (
  *('weights', 'ahead', 'keys', 'routes'),
  *('attention_out', 'expert_hidden'),
)
# Names in older files, of tensors that no gradient needs.
_RETIRED = ('dispatched', 'combined')

# Fields that a run may choose for given weights.
FREE = (
  *(f'adapters.{name}' for name in (*ADAPTED, 'alpha')),
  *('compute_dtype', 'remat', 'remat_saves', 'numerics'),
  'precision.codes',
  *(f'precision.{name}' for name in ('experts', 'backward', 'first', 'last')),
  *(f'precision.{name}' for name in ('stochastic', 'hadamard', 'products')),
  *('moe.aux_loss_weight', 'moe.z_loss_weight', 'moe.replay_alpha'),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GQAConfig:
  """Grouped-query attention (Ainslie et al. 2023).

  Attributes:
    kind: 'gqa', the name of this attention in configs.
    num_heads: query heads.
    num_kv_heads: key/value heads; must divide num_heads.
    head_dim: width of a head; even, for the rotation.
    qk_norm: RMSNorm of queries and keys before the rotation: 'none', 'head'
      (over H, one scale for all heads: Qwen3), or 'projection' (over all heads
      at once: OLMoE).
    qkv_bias: true if query, key and value have biases.
    out_bias: true if the output projection has a bias.
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
    divides = self.num_heads % self.num_kv_heads == 0
    rule = f'divide num_heads ({self.num_heads})'
    checks.require(self, 'num_kv_heads', divides, rule)
    is_even = self.head_dim % 2 == 0
    checks.require(self, 'head_dim', is_even, 'be even: pairs rotate')
    checks.one_of(self, 'kind', ('gqa',))
    checks.one_of(self, 'qk_norm', ('none', 'head', 'projection'))
    checks.boolean(self, 'qkv_bias', 'out_bias')

  @property
  def rotary_dim(self) -> int:
    """Number of dimensions of a head that rotate."""
    return self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
  """Multi-head latent attention (DeepSeek-V2, section 2.1).

  Attributes:
    kind: 'mla', the name of this attention in configs.
    num_heads: query heads.
    q_lora_dim: width of the compressed query (Q); None projects directly.
    kv_lora_dim: width of the compressed key and value (C), which is cached.
    nope_dim: width of a head's part without positions (H).
    rope_dim: width of its rotated part (J); one rotated key serves all heads.
    value_dim: width of a head's value.
    latent_norm_eps: epsilon of the RMSNorms on the compressed vectors.
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
    is_even = self.rope_dim % 2 == 0
    checks.require(self, 'rope_dim', is_even, 'be even: pairs rotate')
    checks.one_of(self, 'kind', ('mla',))
    checks.positive(self, 'latent_norm_eps')

  @property
  def rotary_dim(self) -> int:
    return self.rope_dim

  @property
  def head_dim(self) -> int:
    """Width of a query and of a key, both parts."""
    return self.nope_dim + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig:
  """Longer context by stretched wavelengths (YaRN, Peng et al. 2023).

  With s(m) = 0.1 m log(factor) + 1, cos and sin are multiplied by
  s(mscale) / s(mscale_all_dim), and queries and keys each by s(mscale_all_dim)
  (DeepSeek); if both are None, cos and sin by s(1).

  Attributes:
    factor: longer context length over the original.
    original_max_len: original context length.
    beta_fast: turns within the original context above which dimensions keep
      their frequency.
    beta_slow: turns below which frequencies are divided by `factor`.
    mscale: factor m of the scale of cos and sin.
    mscale_all_dim: factor m of the scale of queries and keys.
    truncate: true if the bounds of the ramp are rounded outward.
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
    is_faster = self.beta_fast > self.beta_slow
    rule = f'be above beta_slow ({self.beta_slow})'
    checks.require(self, 'beta_fast', is_faster, rule)
    alone = not self.mscale_all_dim and self.mscale not in (None, 1.0)
    if alone or (self.mscale_all_dim and not self.mscale):
      raise ValueError(
        f'mscale ({self.mscale}) and mscale_all_dim ({self.mscale_all_dim}) of '
        "YaRN must both be given: transformers and DeepSeek's code differ in "
        'what they make of one alone.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
  """Rotary positions.

  Attributes:
    theta: base of the wavelengths.
    interleaved: true if pairs are neighbours (2h, 2h + 1), as in DeepSeek's
      weights, false if they are (h, h + H / 2).
    yarn: stretching of the context; None for the original context.
  """

  theta: float
  interleaved: bool
  yarn: YarnConfig | None

  def __post_init__(self):
    checks.number(self, 1, 'theta')
    checks.boolean(self, 'interleaved')
    rule = 'be above 1, for else all wavelengths are equal'
    checks.require(self, 'theta', self.theta > 1, rule)


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
    num_groups: number of equal groups of neighbouring experts.
    num_active_groups: number of groups that a token may choose from, those with
      the largest sum of their two best biased scores (DeepSeek-V3, section
      2.1.2). Less than num_groups needs the sigmoid router.
    renormalize: true if the weights of the chosen experts sum to one.
    routed_scale: factor on those weights (DeepSeek-V3: 2.5, Kimi K2: 2.827).
    aux_loss_weight: weight of the load-balancing loss in pretraining and
      fine-tuning; RL does not use it.
    z_loss_weight: weight of the mean squared log-sum-exp of the router's logits
      (ST-MoE, eq. 5) in pretraining and fine-tuning; RL does not use it.
    replay_alpha: plausibility required of replayed experts (`router.choose`): 0
      replays every recorded expert, 1 only those that the router chooses too.
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
    rule = f'not exceed num_experts ({self.num_experts})'
    checks.require(
      self, 'num_active', self.num_active <= self.num_experts, rule
    )
    rule = 'be at most 65535: the next uint16 id marks a token without a route'
    checks.require(self, 'num_experts', self.num_experts <= 65535, rule)
    checks.one_of(self, 'router', ('softmax', 'sigmoid'))
    self._check_groups()
    checks.boolean(self, 'renormalize')
    checks.positive(self, 'routed_scale')
    checks.number(self, 0, 'aux_loss_weight', 'z_loss_weight')
    checks.number(self, 0, 'replay_alpha', highest=1)

  def _check_groups(self):
    among, groups = self.num_active_groups, self.num_groups
    rule = f'not exceed num_groups ({groups})'
    checks.require(self, 'num_active_groups', among <= groups, rule)
    if among == groups:
      return
    rule = f"be 'sigmoid' where {among} of {groups} groups are active"
    checks.require(self, 'router', self.router == 'sigmoid', rule)
    size, left = divmod(self.num_experts, groups)
    rule = (
      f'divide num_experts ({self.num_experts}) into groups of at least two, '
      'whose two best scores are summed'
    )
    checks.require(self, 'num_groups', not left and size >= 2, rule)
    rule = f'not exceed the experts of num_active_groups ({among}) of {size}'
    checks.require(self, 'num_active', self.num_active <= size * among, rule)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
  """Low-rank adapters beside frozen weights (LoRA, Hu et al. 2021).

  A weight W becomes W + (alpha / rank) A B, with B zero at first. All weights
  are frozen if any rank is above 0, and all are trained otherwise.

  Attributes:
    attention: rank in the projections of attention; 0 adds none. The second
      projections of latent keys and values stay as they are.
    dense: rank in the feed-forward of dense layers.
    shared: rank in shared experts.
    routed: rank in each routed expert.
    router: rank in routers; 0 freezes them.
    alpha: scale of the adapters, over the rank.
  """

  attention: int = 0
  dense: int = 0
  shared: int = 0
  routed: int = 0
  router: int = 0
  alpha: float = 32.0

  def __post_init__(self):
    checks.at_least(self, 0, *ADAPTED)
    checks.positive(self, 'alpha')

  @property
  def enabled(self) -> bool:
    return any(getattr(self, role) for role in ADAPTED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
  """Formats of the routed experts' products; all else is `compute_dtype`.

  Masters stay float32. The policy, which rollout serves and the forward pass
  uses, has weights rounded to the format, and each product rounds its
  activations, so that sampler and trainer multiply the same numbers.

  Attributes:
    experts: format of weights and activations in the forward pass, one of
      `numerics.formats`; 'bf16' rounds nothing, and 'int4' weights alone.
    backward: 'dequantised' multiplies gradients by the rounded weights and
      activations of the forward pass; 'bf16' by those from before the rounding,
      which costs a second copy of the weights; 'mxfp8' rounds all operands to
      MXFP8 along the contracted axis.
    first: number of first mixture layers that stay in bf16.
    last: number of last mixture layers that stay in bf16.
    stochastic: true if the backward pass in MXFP8 rounds gradients up or down
      by chance, so that their mean is exact.
    hadamard: true if it mixes 32 rows of an expert by a Hadamard matrix before
      it rounds the operands of a weight's gradient, which spreads outliers.
    products: 'values' multiplies the rounded numbers in `compute_dtype`;
      'codes', with 'fp8' on a TPU v7, an H100 or an H200, the eight bits.
    codes: true if bundles carry codes and scales of experts, not their values;
      what an engine holds is `rollout.experts`.
  """

  experts: str = 'bf16'
  backward: str = 'dequantised'
  first: int = 0
  last: int = 0
  stochastic: bool = False
  hadamard: bool = False
  products: str = 'values'
  codes: bool = False

  def __post_init__(self):
    checks.boolean(self, 'codes')
    checks.one_of(self, 'experts', ('bf16', *formats.NAMES))
    checks.one_of(self, 'backward', ('dequantised', 'bf16', 'mxfp8'))
    checks.at_least(self, 0, 'first', 'last')
    checks.boolean(self, 'stochastic', 'hadamard')
    checks.one_of(self, 'products', ('values', 'codes'))
    for field in dataclasses.fields(self)[1:]:
      value = getattr(self, field.name)
      if not self.enabled and value != field.default:
        raise ValueError(
          f'precision.{field.name}={value!r} is for experts of few bits, and '
          "precision.experts is 'bf16'. Set precision.experts to one of "
          f'{formats.NAMES}, or leave {field.name} at {field.default!r}.'
        )
    is_right = self.backward == 'mxfp8' or not (
      self.stochastic or self.hadamard
    )
    rule = "be 'mxfp8' with stochastic or hadamard, which are parts of it"
    checks.require(self, 'backward', is_right, rule)
    if self.products == 'codes' and self.experts != 'fp8':
      raise ValueError(
        "precision.products='codes' needs precision.experts='fp8', not "
        f'{self.experts!r}: only its scales can be applied to a product of '
        "codes. Set precision.products='values'."
      )

  @property
  def enabled(self) -> bool:
    return self.experts != 'bf16'

  @property
  def draws(self) -> bool:
    """True if gradients need random numbers."""
    return self.enabled and (self.stochastic or self.hadamard)

  @property
  def travels(self) -> bool:
    """True if experts need no more of a token than its bytes in a format.

    Layers that stay in bf16, and a backward pass in it, need all bits.
    """
    is_whole = not (self.first or self.last or self.backward == 'bf16')
    return is_whole and self.experts in formats.BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig:
  """Heads that predict further tokens (DeepSeek-V3, section 2.2).

  Attributes:
    depth: number of heads; the k-th predicts the token k + 1 places on.
    layer: kind of each head's decoder layer, 'moe' or 'dense'.
  """

  depth: int = 1
  layer: str = 'moe'

  def __post_init__(self):
    checks.at_least(self, 1, 'depth')
    checks.one_of(self, 'layer', ('moe', 'dense'))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A decoder: dense layers first, mixture-of-experts layers after them.

  Attributes:
    vocab_size: number of tokens.
    embed_dim: width of the residual stream.
    num_layers: number of decoder layers, dense ones included.
    num_dense_layers: number of leading layers with a dense feed-forward.
    dense_ffw_dim: hidden width of a dense feed-forward.
    norm_eps: epsilon added to the mean square in RMSNorm.
    tie_embeddings: true if the head is the transposed embedding.
    remat: true if the backward pass recomputes each layer.
    compute_dtype: dtype of activations and matrix products; norms, router,
      softmax and logits are float32 always.
    adapters: low-rank adapters, which a run may choose.
    numerics: 'fast', or 'batch_invariant', in which prefill, decode and
      training give bitwise equal results for any batch, at a price.
    precision: formats of few bits, which a run may choose.
    mtp: heads for multi-token prediction; None for none.
    remat_saves: tensors of REMAT_NAMES that are not recomputed. By default only
      weights are gathered again; with 'weights' no collective is repeated.
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
  adapters: AdapterConfig = AdapterConfig()
  precision: PrecisionConfig = PrecisionConfig()
  mtp: MTPConfig | None = None
  numerics: str = 'fast'
  remat_saves: tuple[str, ...] = ('keys', 'routes')

  def __post_init__(self):
    # Files have lists, which would not equal tuples.
    saves = tuple(name for name in self.remat_saves if name not in _RETIRED)
    object.__setattr__(self, 'remat_saves', saves)
    is_known = set(self.remat_saves) <= set(REMAT_NAMES)
    checks.require(self, 'remat_saves', is_known, f'be of {REMAT_NAMES}')
    sizes = ('vocab_size', 'embed_dim', 'num_layers', 'dense_ffw_dim')
    checks.at_least(self, 1, *sizes)
    checks.at_least(self, 0, 'num_dense_layers')
    has_mixture = self.num_dense_layers < self.num_layers
    limit = f'num_layers ({self.num_layers})'
    rule = f'be less than {limit}: at least one layer is a mixture'
    checks.require(self, 'num_dense_layers', has_mixture, rule)
    checks.one_of(self, 'compute_dtype', ('float32', 'bfloat16'))
    checks.one_of(self, 'numerics', NUMERICS)
    checks.positive(self, 'norm_eps')
    checks.boolean(self, 'tie_embeddings', 'remat')
    self._check_precision()
    is_gqa = isinstance(self.attention, GQAConfig)
    if is_gqa and self.rope.yarn and self.rope.yarn.mscale_all_dim:
      raise ValueError(
        f'rope.yarn.mscale_all_dim ({self.rope.yarn.mscale_all_dim}) needs '
        'latent attention: transformers scales the softmax by it there alone. '
        'Set mscale and mscale_all_dim to None.'
      )

  def _check_precision(self):
    c = self.precision
    if c.enabled and self.adapters.enabled:
      raise ValueError(
        f'precision.experts is {c.experts!r} and the model has adapters, whose '
        "frozen experts stay as they are. Set precision.experts='bf16', or all "
        'ranks of adapters to 0.'
      )
    sizes = self.embed_dim, self.moe.ffw_dim
    if c.products == 'codes' and any(n % formats.BLOCKS['fp8'] for n in sizes):
      raise ValueError(
        f"precision.products 'codes' needs embed_dim and moe.ffw_dim {sizes} "
        "that 128, the block of a scale, divides. Set it to 'values'."
      )
    if c.codes:
      self.check_codes('precision.codes', c.experts)
    if c.enabled and c.first + c.last >= self.num_moe_layers:
      raise ValueError(
        f'precision.first ({c.first}) and precision.last ({c.last}) leave none '
        f'of {self.num_moe_layers} mixture layers in {c.experts!r}. Lower '
        "them, or set precision.experts='bf16'."
      )

  def check_codes(self, field: str, name: str) -> None:
    """Raises a ValueError if experts have no packed codes in a format.

    `field` is that of the config which asks for them.
    """
    sizes = self.embed_dim, self.moe.ffw_dim
    if name in ('nvfp4', 'int4') and any(n % 2 for n in sizes):
      raise ValueError(
        f'{field} needs even embed_dim and moe.ffw_dim, since {name!r} packs '
        f'two codes in a byte; they are {sizes}. Change these, or take a '
        'format of 8 bits.'
      )

  def is_precise(self, moe_layer: int) -> bool:
    """Returns whether a mixture layer, counted from 0, stays in bf16."""
    c, end = self.precision, self.num_moe_layers
    return not (c.enabled and c.first <= moe_layer < end - c.last)

  def precise(self) -> 'ModelConfig':
    """Returns the config of a layer that stays in bf16."""
    return dataclasses.replace(self, precision=PrecisionConfig())

  @property
  def num_moe_layers(self) -> int:
    return self.num_layers - self.num_dense_layers

  @property
  def stacks(self) -> dict[str, int]:
    """Number of layers of each stack that exists, dense ones first."""
    lengths = (self.num_dense_layers, self.num_moe_layers)
    stacks = zip(('dense_layers', 'moe_layers'), lengths, strict=True)
    return {name: length for name, length in stacks if length}

  @property
  def mla(self) -> MLAConfig:
    """Config of the attention, which must be latent attention."""
    assert isinstance(self.attention, MLAConfig)
    return self.attention

  @classmethod
  def from_dict(cls, fields: Mapping[str, Any]) -> 'ModelConfig':
    """Builds a config from nested dictionaries."""
    return _from_dict(cls, fields)

  def to_dict(self) -> dict[str, Any]:
    """Returns the nested dictionaries that `from_dict` takes."""
    return dataclasses.asdict(self)


_ATTENTIONS = {'gqa': GQAConfig, 'mla': MLAConfig}
_SECTIONS = {
  'rope': RopeConfig,
  'yarn': YarnConfig,
  'moe': MoEConfig,
  'adapters': AdapterConfig,
  'precision': PrecisionConfig,
  'mtp': MTPConfig,
}


def _from_dict(cls: Any, fields: Mapping[str, Any]) -> Any:
  known = {f.name: f.default for f in dataclasses.fields(cls)}
  for name in fields:
    checks.known_name(name, known, cls.__name__)
  required = {n for n, v in known.items() if v is dataclasses.MISSING}
  if missing := sorted(required - set(fields)):
    raise ValueError(
      f'{cls.__name__} needs {missing}; its fields are {sorted(known)}.'
    )
  if cls is AdapterConfig:  # Its fields have names of sections.
    return cls(**fields)
  return cls(**{name: _value(name, value) for name, value in fields.items()})


def _value(name: str, fields: Any) -> Any:
  """Returns the value of a field, a section as its config class."""
  if name not in ('attention', *_SECTIONS) or (
    name == 'yarn' and fields is None
  ):
    return fields
  if name == 'mtp' and not fields:
    return None
  if not isinstance(fields, Mapping):
    raise ValueError(f'{name} must be a section, not {fields!r}.')
  if name != 'attention':
    return _from_dict(_SECTIONS[name], fields)
  kind = fields.get('kind')
  if kind not in _ATTENTIONS:
    raise ValueError(
      f'attention.kind must be one of {sorted(_ATTENTIONS)}, not {kind!r}.'
    )
  return _from_dict(_ATTENTIONS[kind], fields)
