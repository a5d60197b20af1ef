"""The sections of a run's config, one frozen dataclass each.

What spans sections, and the run as a whole, is checked in `pipeline.spec`.
"""

import dataclasses
from typing import Any

from composer_jax.delta.device import sender
from composer_jax.optim import groups as optim_groups
from composer_jax.rl import mismatch, policy_loss, update
from composer_jax.rl.hints import distill
from composer_jax.rollout import options as rollout_options
from composer_jax.sandbox import base as sandbox_base
from composer_jax.tasks.list_functions import demonstrations

PLACEMENTS = ('processes', 'colocated')
SANDBOX_LEVELS = (
  *('auto', *sandbox_base.LEVELS, *sandbox_base.OUTER_LEVELS, 'static'),
)


def _at_least(section: str, fields: Any, lowest: float, *names: str) -> None:
  for name in names:
    value = getattr(fields, name)
    if not value >= lowest:
      raise ValueError(
        f'--config.{section}.{name} must be at least {lowest}, not {value}.'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
  """Axes of the one mesh; their product is the number of devices."""

  replica: int
  fsdp: int
  context: int

  def __post_init__(self):
    for axis, size in dataclasses.asdict(self).items():
      if size < 1:
        raise ValueError(f'{axis} must be at least 1, not {size}.')

  @property
  def size(self) -> int:
    return self.replica * self.fsdp * self.context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
  """train_bytes: of the corpus that the merges are learnt from."""

  train_bytes: int

  def __post_init__(self):
    _at_least('tokenizer', self, 1000, 'train_bytes')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
  """The corpus of continued pretraining; see `corpus.build`."""

  sources: tuple[str, ...]
  weights: tuple[float, ...]
  archives: str
  max_bytes: int
  heldout_share: float
  fim_rate: float

  def __post_init__(self):
    if not self.sources:
      raise ValueError('--config.data.sources must name at least one source.')
    if not 0 < self.heldout_share < 1 or not 0 <= self.fim_rate <= 1:
      raise ValueError(
        '--config.data.heldout_share must lie in (0, 1) and fim_rate in '
        f'[0, 1]; got {self.heldout_share} and {self.fim_rate}.'
      )
    _at_least('data', self, 10_000, 'max_bytes')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """A language-model training stage: cpt or sft.

  Without steps it does not take place, which is for cpt of an imported model
  alone.
  """

  steps: int
  batch_size: int
  accumulate: int
  seq_len: int
  learning_rate: float
  adam_learning_rate: float
  warmup_steps: int
  decay_steps: int
  weight_decay: float
  grad_clip: float
  optimizer: str
  muon: optim_groups.MuonChoices
  bias_update_rate: float
  checkpoint_every: int
  eval_every: int
  eval_batches: int
  log_every: int

  def __post_init__(self):
    positive = ('batch_size', 'accumulate', 'seq_len', 'checkpoint_every')
    positive += ('eval_every', 'eval_batches', 'log_every')
    _at_least('cpt/sft', self, 1, *positive)
    _at_least('cpt/sft', self, 0, 'steps')
    if self.steps and self.warmup_steps + self.decay_steps > self.steps:
      raise ValueError(
        f'warmup_steps ({self.warmup_steps}) plus decay_steps '
        f'({self.decay_steps}) must not exceed steps ({self.steps}).'
      )

  def optimizer_options(self) -> optim_groups.OptimizerOptions:
    return optim_groups.OptimizerOptions(
      name=self.optimizer,
      learning_rate=self.learning_rate,
      adam_learning_rate=self.adam_learning_rate,
      warmup_steps=self.warmup_steps,
      decay_steps=self.decay_steps,
      final_ratio=0.1,
      weight_decay=self.weight_decay,
      grad_clip=self.grad_clip,
      muon=self.muon,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrations:
  """SFT transcripts: how many, and the noise that RL has to unlearn.

  Attributes:
    count: transcripts, on training tasks only.
    conversations: file of others to learn beside them, for an imported model;
      see `hf.text.conversations`. '' for none.
    others: probabilities, see `tasks.list_functions.demonstrations.Noise`.
  """

  count: int
  conversations: str
  wrong_tool: float
  wrong_arguments: float
  detour: float
  skip_read: float
  wrong_edit: float
  broken_edit: float
  skip_test: float
  give_up: float

  def __post_init__(self):
    _at_least('demonstrations', self, 1, 'count')
    self.noise()

  def noise(self) -> demonstrations.Noise:
    fields = dataclasses.asdict(self)
    for name in ('count', 'conversations'):
      del fields[name]
    return demonstrations.Noise(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
  """What judges code that the policy wrote, and its limits.

  Attributes:
    level: of isolation; 'auto' takes the best there is, 'static' executes
      nothing.
    allow_unsafe: accept 'rlimits', which isolates nothing.
    workers: calls at a time.
    packages: distributions that programs in a workspace can import; 'pytest'
      for tasks that have test suites.
    others: limits of each call, see `sandbox.base.Limits`.
  """

  level: str
  allow_unsafe: bool
  workers: int
  packages: tuple[str, ...]
  wall_s: float
  cpu_s: float
  memory_bytes: int
  processes: int
  file_bytes: int
  output_bytes: int

  def __post_init__(self):
    if self.level not in SANDBOX_LEVELS:
      raise ValueError(
        f'--config.sandbox.level must be one of {SANDBOX_LEVELS}, not '
        f'{self.level!r}.'
      )
    _at_least('sandbox', self, 1, 'workers')
    self.limits()

  def limits(self) -> sandbox_base.Limits:
    fields = dataclasses.asdict(self)
    for name in ('level', 'allow_unsafe', 'workers', 'packages'):
      del fields[name]
    return sandbox_base.Limits(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
  """The rollout engine; see `rollout.options.EngineOptions`.

  Attributes:
    devices: that its model is shared out over, the first ones.
    others: as there.
  """

  devices: int
  num_slots: int
  prefill_chunk: int
  prefill_rows: int | tuple[int, ...]
  decode_rows: tuple[int, ...]
  decode_steps: int
  page_size: int
  num_pages: int
  record_routes: bool
  share_prefixes: bool
  on_swap: str

  def __post_init__(self):
    _at_least('rollout', self, 1, 'devices')

  def engine_options(self, max_len: int) -> rollout_options.EngineOptions:
    fields = dataclasses.asdict(self)
    del fields['devices']
    return rollout_options.EngineOptions(max_len=max_len, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RL:
  """The reinforcement-learning stage; `mesh` is of its trainer."""

  mesh: Mesh
  steps: int
  prompts: int
  rollouts_per_prompt: int
  placement: str
  max_staleness: int
  learning_rate: float
  warmup_steps: int
  decay_steps: int
  adam_b1: float
  adam_b2: float
  grad_clip: float
  loss: policy_loss.LossOptions
  kl_coefficient: float
  reward: str
  replay: bool
  gate: mismatch.GateOptions
  rows: int
  seq_len: int
  checkpoint_every: int
  mismatch_every: int
  episodes_every: int
  wait_timeout_s: float
  max_restarts: int

  def __post_init__(self):
    if self.placement not in PLACEMENTS:
      raise ValueError(
        f'--config.rl.placement must be one of {PLACEMENTS}, not '
        f'{self.placement!r}.'
      )
    zero = ('steps', 'max_staleness', 'mismatch_every', 'max_restarts')
    _at_least('rl', self, 0, *zero)
    positive = ('checkpoint_every', 'episodes_every', 'wait_timeout_s')
    positive += ('rows', 'seq_len')
    _at_least('rl', self, 1, *positive)
    if self.warmup_steps + self.decay_steps > max(self.steps, 1):
      raise ValueError(
        f'--config.rl.warmup_steps ({self.warmup_steps}) plus '
        f'--config.rl.decay_steps ({self.decay_steps}) must not exceed '
        f'--config.rl.steps ({self.steps}).'
      )

  def update_options(
    self, seed: int, *, refreshed: bool, hints: distill.HintLossOptions
  ) -> update.UpdateOptions:
    return update.UpdateOptions(
      prompts=self.prompts,
      rollouts_per_prompt=self.rollouts_per_prompt,
      replay=self.replay,
      reward=self.reward,
      kl_coefficient=self.kl_coefficient,
      loss=self.loss,
      mismatch_every=self.mismatch_every,
      refreshed=refreshed,
      gate=self.gate,
      seed=seed,
      hints=hints,
    )

  def optimizer_options(self) -> optim_groups.OptimizerOptions:
    return optim_groups.OptimizerOptions(
      name='adam',
      learning_rate=self.learning_rate,
      adam_learning_rate=self.learning_rate,
      warmup_steps=self.warmup_steps,
      decay_steps=self.decay_steps,
      final_ratio=0.1,
      weight_decay=0.0,
      grad_clip=self.grad_clip,
      b1=self.adam_b1,
      b2=self.adam_b2,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
  """How policies travel from the trainer to whoever samples.

  Attributes:
    store: folder or URL where this run, and no other, keeps its bundles; ''
      for `store` in the workdir.
    poll_s: between two looks of the rollout process.
    others: see `delta.device.sender.BundleOptions`.
  """

  store: str
  poll_s: float
  tier: str
  keyframe_every: int
  skip_levels: tuple[int, ...]
  history: bool
  keyframes: str
  expires_s: float
  verify: bool
  threads: int

  def __post_init__(self):
    if not self.poll_s > 0:
      raise ValueError(
        f'--config.delta.poll_s must be positive, not {self.poll_s}.'
      )
    self.bundle_options()

  def bundle_options(self) -> sender.BundleOptions:
    fields = dataclasses.asdict(self)
    for name in ('store', 'poll_s'):
      del fields[name]
    return sender.BundleOptions(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """episodes: held-out ones, before and after RL."""

  episodes: int

  def __post_init__(self):
    _at_least('evaluation', self, 1, 'episodes')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Telemetry:
  """Where metrics go beside metrics.jsonl."""

  tensorboard: bool
  wandb: bool
