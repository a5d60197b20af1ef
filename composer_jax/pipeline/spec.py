"""A whole run as frozen dataclasses, which the mains build from a config.

Every section of a config is one dataclass. `composer_jax.wiring` makes those of
the systems (`tasks`, `data`, `sandbox`, ...); the others are here or in the
module that reads them. An impossible value is refused before the workdir is
claimed or anything is trained.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from composer_jax.agent import episode, rewards, summarize
from composer_jax.core import checks
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups as optim_groups
from composer_jax.optim import roles
from composer_jax.parallel import layouts
from composer_jax.pipeline import consumption
from composer_jax.rl import batching, mismatch, update
from composer_jax.rl.hints import distill
from composer_jax.rollout import options as rollout_options
from composer_jax.train import heads as train_heads
from composer_jax.train import loop
from composer_jax.train import placement as placements
from composer_jax.train import step as train_step


def _optimizer(stage: Any, **others: Any) -> optim_groups.OptimizerOptions:
  """Returns the options of an optimizer, of which a stage has some by name."""
  names = {f.name for f in dataclasses.fields(optim_groups.OptimizerOptions)}
  names &= {f.name for f in dataclasses.fields(stage)}
  own = {name: getattr(stage, name) for name in names}
  return optim_groups.OptimizerOptions(**own, **others)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
  """Axes of the one mesh; their product is the number of devices.

  Attributes:
    replica: copies of everything but the experts.
    fsdp: devices over which the weights of one replica are sharded.
    context: devices over which the tokens of a row are sharded.
  """

  replica: int = 1
  fsdp: int = 1
  context: int = 1

  def __post_init__(self):
    checks.at_least(self, 1, 'replica', 'fsdp', 'context')

  @property
  def size(self) -> int:
    return self.replica * self.fsdp * self.context


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSection:
  """What all stages say of their optimizer.

  Attributes:
    learning_rate: peak rate; that of Muon is at Moonlight's scale.
    warmup_steps: steps of linear increase from zero to the peak rate.
    decay_steps: last steps, of linear decrease to a tenth of the peak rate.
    grad_clip: largest global norm of gradients; larger ones are scaled down.
    state: 'float32', or with 'adam' 'bfloat16': masters and moments take half
      the memory and are rounded stochastically; 'int8': moments a quarter.
    offload: true: masters and moments are in the host's memory; needs 'adam'.
  """

  learning_rate: float = 5e-3
  warmup_steps: int = 20
  decay_steps: int = 100
  grad_clip: float = 1.0
  state: str = 'float32'
  offload: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOptions(OptimizerSection, loop.TrainingOptions):
  """A language-model training stage: cpt or sft.

  Attributes:
    adam_learning_rate: peak rate of the AdamW beside Muon.
    weight_decay: decoupled decay, times the learning rate; vectors have none.
    optimizer: 'muon' on matrices with AdamW on the rest, or 'adam' on all.
    muon: choices of Muon; unused by 'adam'.
    bias_update_rate: change of the routers' selection bias per step.
    eval_batches: batches averaged in a held-out loss.
    opening: tokens at the beginning of every document that the first two epochs
      have alone; 0 for whole documents at once. To copy names from a prompt
      into a first call is learnt soonest where nothing else stands.
  """

  adam_learning_rate: float = 2e-3
  weight_decay: float = 0.1
  optimizer: str = 'muon'
  muon: optim_groups.MuonChoices = optim_groups.MuonChoices()
  bias_update_rate: float = 1e-3
  eval_batches: int = 8
  opening: int = 0

  def __post_init__(self):
    super().__post_init__()
    checks.at_least(self, 1, 'eval_batches')
    checks.at_least(self, 0, 'opening')
    if self.steps:
      optim_groups.check_schedule(self, self.steps)

  def optimizer_options(self) -> optim_groups.OptimizerOptions:
    return _optimizer(self, name=self.optimizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLSection(OptimizerSection, update.LearningOptions):
  """The reinforcement-learning stage.

  Attributes:
    mesh: devices of the trainer, in the run's layout. One by default: on a CPU
      the rollout process needs the other core.
    steps: optimizer steps; 0 skips RL and evaluates SFT only.
    placement: 'processes', or 'colocated': trainer and engine take turns.
    max_staleness: largest number of optimizer steps that a sampling policy may
      lag behind the trainer; 0 equals the synchronous loop.
    overtake: most groups that may be trained before an older one that is not
      ready, at most max_staleness * prompts; 0 trains in order. So many fewer
      are under way: (max_staleness + 1) * prompts - overtake.
    adam_b1: decay of Adam's first moment.
    adam_b2: decay of Adam's second moment.
    rows: rows of a microbatch.
    seq_len: tokens of a row.
    checkpoint_every: steps from one checkpoint to the next.
    gate: bands for what the records of a step say.
    episodes_every: steps from one readable episode of the report to the next.
    wait_timeout_s: seconds without rollouts of any worker after which a run
      ends.
    max_restarts: restarts in a row of a worker of this run, with no rollouts of
      any worker in between, before the run ends.
  """

  mesh: Mesh = Mesh()
  steps: int = 125
  placement: str = 'processes'
  max_staleness: int = 1
  overtake: int = 0
  learning_rate: float = 3e-4
  warmup_steps: int = 3
  decay_steps: int = 95
  adam_b1: float = 0.9
  adam_b2: float = 0.95
  rows: int = 8
  seq_len: int = 320
  checkpoint_every: int = 5
  gate: mismatch.GateOptions = mismatch.GateOptions()
  episodes_every: int = 10
  wait_timeout_s: float = 300.0
  max_restarts: int = 3

  def __post_init__(self):
    checks.one_of(self, 'placement', ('processes', 'colocated'))
    zero = ('steps', 'max_staleness', 'mismatch_every', 'max_restarts')
    checks.at_least(self, 0, *zero, 'overtake')
    most = self.max_staleness * self.prompts
    rule = f'be at most max_staleness * prompts ({most})'
    checks.require(self, 'overtake', self.overtake <= most, rule)
    positive = ('checkpoint_every', 'episodes_every', 'rows', 'seq_len')
    checks.at_least(self, 1, *positive)
    checks.number(self, 1, 'wait_timeout_s')
    optim_groups.check_schedule(self, max(self.steps, 1))

  @property
  def window(self) -> consumption.GroupWindow:
    fields = dataclasses.fields(consumption.GroupWindow)
    return consumption.GroupWindow(
      **{f.name: getattr(self, f.name) for f in fields}
    )

  def optimizer_options(self) -> optim_groups.OptimizerOptions:
    decays = dict(b1=self.adam_b1, b2=self.adam_b2)
    return _optimizer(self, name='adam', weight_decay=0.0, **decays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSection:
  """The evaluations before and after RL.

  Attributes:
    episodes: held-out tasks of each evaluation, on each axis; no task of a
      folder twice.
    samples: episodes of each task.
    imported: true to evaluate an imported model before any training, too.
  """

  episodes: int = 200
  samples: int = 1
  imported: bool = False

  def __post_init__(self):
    checks.at_least(self, 1, 'episodes', 'samples')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetrySection:
  """Where metrics go beside metrics.jsonl.

  Attributes:
    tensorboard: true to write event files to `tensorboard` in the workdir.
    wandb: true to log to Weights & Biases; needs wandb installed.
  """

  tensorboard: bool = True
  wandb: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """Everything a run is; equal specs give equal runs (at staleness 0).

  Attributes:
    seed: seed of all random numbers.
    initial: folder made by `experiments.hf_import`, whose model, weights and
      tokenizer the run starts from; '' for random weights and a new tokenizer.
    layout: 'data_parallel', or 'hsdp', the dual-mesh layout.
    accelerator: true for a config that would take days without a GPU or TPU: on
      a CPU alone the program asks before it goes on.
    systems: sections of the systems, by name.
  """

  seed: int = 0
  initial: str = ''
  layout: str = 'data_parallel'
  accelerator: bool = False
  mesh: Mesh
  parallel: placements.ParallelOptions
  model: model_config.ModelConfig
  cpt: StageOptions
  sft: StageOptions
  episode: episode.EpisodeOptions
  summary: summarize.SummaryOptions
  rewards: rewards.RewardOptions
  rollout: rollout_options.ServingOptions
  rl: RLSection
  mtp: train_heads.HeadSection = train_heads.HeadSection()
  evaluation: EvaluationSection
  telemetry: TelemetrySection
  systems: Mapping[str, Any]

  @property
  def hints(self) -> distill.HintLossOptions:
    """Loss of the hints; the system `hints` decides where to write them."""
    return self.systems['hints'].loss

  @property
  def lm_model(self) -> model_config.ModelConfig:
    """The model with fast numerics, for pretraining and SFT.

    These need not agree with a sampler and use the whole mesh, while
    batch-invariant numerics need a single device. `model.numerics` applies to
    rollouts, evaluations and RL.
    """
    return dataclasses.replace(self.model, numerics='fast')

  @property
  def shares_base(self) -> bool:
    """True if an engine can serve frozen arrays of its process on one device.

    In float32 it keeps a wider copy, which spares every step the conversion.
    """
    dtype = self.rollout.compute_dtype or self.model.compute_dtype
    is_one = self.rl.mesh.size == self.rollout.devices == 1
    return self.model.adapters.enabled and is_one and dtype == 'bfloat16'

  def as_dict(self) -> dict[str, Any]:
    """The resolved config: nested dictionaries of plain values."""
    fields = dataclasses.asdict(self)
    return fields | fields.pop('systems')

  def batch_shape(self) -> batching.BatchShape:
    """Returns the shape of a microbatch of RL."""
    rl = self.rl
    shards = rl.mesh.replica * rl.mesh.fsdp
    return batching.shape_of(
      self.model, rows=rl.rows, seq_len=rl.seq_len, shards=shards
    )

  def engine_options(self) -> rollout_options.EngineOptions:
    return rollout_options.EngineOptions(
      max_len=self.episode.max_tokens, **vars(self.rollout)
    )

  def update_options(self) -> update.UpdateOptions:
    names = [f.name for f in dataclasses.fields(update.LearningOptions)]
    return update.UpdateOptions(
      **{name: getattr(self.rl, name) for name in names},
      seed=self.seed,
      hints=self.hints,
    )

  def __post_init__(self):
    checks.at_least(self, 0, 'seed')
    self._check_rows('rl', 'rows', self.rl, self.rl.mesh, 1)
    # Build what each stage will need, to find an impossible value before
    # anything is trained.
    for name, make in (
      ('cpt', self.cpt.optimizer_options),
      ('sft', self.sft.optimizer_options),
      ('rl', self.rl.optimizer_options),
      ('rl', self.update_options),
      ('rl.seq_len', self.batch_shape),
      ('rollout', self.engine_options),
      ('summary', lambda: self.summary.limit(self.episode.max_tokens)),
      ('cpt.muon.roles', lambda: self._check_roles(self.cpt)),
      ('sft.muon.roles', lambda: self._check_roles(self.sft)),
    ):
      try:
        make()
      except ValueError as error:
        if '--config.' in str(error):
          raise
        raise ValueError(f'--config.{name}: {error}') from error
    for name, stage in (('cpt', self.cpt), ('sft', self.sft)):
      if stage.steps < 0 or not (stage.steps or self.initial):
        raise ValueError(
          f'--config.{name}.steps must be at least 1, not {stage.steps}. A '
          'stage of an imported model (--config.initial) is skipped with 0.'
        )
    if self.rl.replay and not self.rollout.record_routes:
      raise ValueError(
        '--config.rl.replay needs the routes that rollouts record: set '
        '--config.rollout.record_routes=True, or --config.rl.replay=False.'
      )
    is_untrained = {self.mtp.cpt, self.mtp.sft, self.mtp.rl} == {'off'}
    by_heads = self.rollout.speculation.drafter == 'heads'
    if by_heads and is_untrained and not self.initial:
      raise ValueError(
        "--config.rollout.speculation.drafter is 'heads', which no stage "
        'trains: set one of --config.mtp.cpt, sft and rl to "joint".'
      )
    if self.initial and self.summary.trigger and self.summary.max_tokens < 10:
      raise ValueError(
        f'--config.summary.max_tokens must be at least 10 for an imported '
        f'model, not {self.summary.max_tokens}: a chat template may frame the '
        'query for a summary with some tokens more than are reserved for it.'
      )
    self._check_adapters()
    self._check_gate()
    self._check_shapes()

  def _check_adapters(self) -> None:
    """Raises for adapters without frozen weights, or with Muon."""
    if not self.model.adapters.enabled:
      return
    if not self.initial:
      raise ValueError(
        '--config.model.adapters train beside the frozen weights of an '
        'imported model: set --config.initial, or all ranks to 0.'
      )
    for name, stage in (('cpt', self.cpt), ('sft', self.sft)):
      if stage.steps and stage.optimizer != 'adam':
        raise ValueError(
          f'--config.{name}.optimizer must be "adam" for adapters '
          f'(--config.model.adapters), not {stage.optimizer!r}: Muon is for '
          'whole matrices.'
        )

  def _check_gate(self) -> None:
    """Raises for bands that honest records in bfloat16 would not keep."""
    gate, name = self.rl.gate, self.rollout.experts
    served = rollout_options.served(self.model, self.rollout)
    if served.precision != self.model.precision and gate.action == 'off':
      raise ValueError(
        f'--config.rollout.experts={name} samples with other experts than '
        f'--config.model.precision.experts={self.model.precision.experts} '
        'trains, and --config.rl.gate.action=off would not tell. Set both '
        'alike, or the gate to "stop" or "flag".'
      )
    dtypes = {self.model.compute_dtype, self.rollout.compute_dtype}
    is_bitwise = self.model.numerics == 'batch_invariant' and len(dtypes) == 1
    if is_bitwise or gate.action != 'stop':
      return
    few_bits = self.model.precision.experts
    if few_bits not in ('bf16', 'int4') and gate.max_kl_exact < 1e-4:
      raise ValueError(
        f'--config.rl.gate.max_kl_exact={gate.max_kl_exact:g} would stop '
        f'honest records: with --config.model.precision.experts={few_bits} a '
        'last bit of an activation can change its code. Set it to 1e-4, or '
        '--config.model.numerics=batch_invariant, where no bit differs.'
      )
    if 'bfloat16' not in dtypes and not self.rollout.cache_dtype:
      return
    for name, value, is_tight in (
      ('max_kl_exact', gate.max_kl_exact, gate.max_kl_exact < 1e-6),
      (
        'min_exact_agreement',
        gate.min_exact_agreement,
        gate.min_exact_agreement > 0.99,
      ),
      ('max_kl_afresh', gate.max_kl_afresh, gate.max_kl_afresh < 1e-4),
    ):
      if is_tight:
        raise ValueError(
          f'--config.rl.gate.{name}={value:g} is a band for float32 and would '
          'stop honest records of an engine or a trainer in bfloat16 '
          '(--config.rollout.compute_dtype, model.compute_dtype), or of a '
          'cache in float8 (--config.rollout.cache_dtype). Set '
          '--config.rl.gate.max_kl_exact to 1e-4 (1e-3 if the two differ), '
          'min_exact_agreement to 0.97 and max_kl_afresh to 1e-3, or '
          '--config.rl.gate.action=flag.'
        )

  def _check_shapes(self) -> None:
    """Raises for rows and tokens that do not divide over the meshes."""
    if self.layout not in layouts.BY_NAME:
      raise ValueError(
        f'--config.layout must be one of {tuple(layouts.BY_NAME)}, not '
        f'{self.layout!r}.'
      )
    for name, seq_len in (('sft', self.sft.seq_len), ('rl', self.rl.seq_len)):
      if self.episode.max_tokens > seq_len:
        raise ValueError(
          f'--config.episode.max_tokens ({self.episode.max_tokens}) must not '
          f'exceed --config.{name}.seq_len ({seq_len}): a trajectory must fit '
          'in a row.'
        )
    for name, stage in (('cpt', self.cpt), ('sft', self.sft)):
      accumulate = stage.accumulate
      self._check_rows(name, 'batch_size', stage, self.mesh, accumulate)
    mesh = self.rl.mesh
    if mesh.size > 1 and self.model.numerics == 'batch_invariant':
      raise ValueError(
        f'--config.rl.mesh has {mesh.size} devices, but '
        "--config.model.numerics 'batch_invariant' needs a single one: the "
        "order of a sum depends on the number of devices. Choose 'fast', or a "
        'mesh of 1 x 1 x 1.'
      )

  def _check_rows(
    self, path: str, rows: str, section: Any, mesh: Mesh, accumulate: int
  ) -> None:
    """Raises unless rows, a field, and their tokens divide over a mesh."""
    path, shards = f'--config.{path}', mesh.replica * mesh.fsdp
    num_rows = getattr(section, rows)
    train_step.check_rows(num_rows, accumulate, shards, f'{path}.{rows}')
    pieces, divisor = mesh.context, 'the context axis of its mesh'
    if pieces > 1 and self.parallel.sequence_order != 'contiguous':
      # Each shard has an early and a late piece.
      pieces, divisor = 2 * pieces, f'{divisor}, twice for zigzag order,'
    checks.divides(pieces, divisor, section.seq_len, f'{path}.seq_len')

  def _check_roles(self, stage: StageOptions) -> None:
    """Raises for Muon roles that match no parameter, or not its shape."""
    if stage.optimizer == 'muon' and stage.muon.roles:
      shapes, axes = decoder.abstract(self.model)
      roles.tree(shapes['params'], axes['params'], stage.muon.roles)


# Sections of a config that belong to the spine.
SECTIONS: dict[str, Any] = {
  field.name: field.type
  for field in dataclasses.fields(Spec)
  if dataclasses.is_dataclass(field.type)
}
