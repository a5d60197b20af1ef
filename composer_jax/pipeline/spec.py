"""A whole run as frozen dataclasses: what the mains make of a ConfigDict.

Each section of a config becomes one dataclass of `pipeline.sections` or of the
module it is for; a field that is missing, unknown or out of range is an error
that names it.
"""

import dataclasses
from typing import Any

from composer_jax.agent import episode, rewards, summarize
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.optim import groups as optim_groups
from composer_jax.optim import roles
from composer_jax.parallel import layouts
from composer_jax.pipeline import sections
from composer_jax.rl import batching, mismatch, policy_loss, update
from composer_jax.rl.hints import distill
from composer_jax.rollout import options as rollout_options
from composer_jax.tasks import curriculum
from composer_jax.tasks import sections as task_sections
from composer_jax.tasks.repository import environment, tools
from composer_jax.train import accumulation
from composer_jax.train import placement as placements


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
  """Everything a run is; equal specs give equal runs (at staleness 0).

  Attributes:
    seed: of everything that is drawn.
    initial: folder that `experiments.hf_import` made, whose model, weights and
      tokenizer the run starts from; '' for random weights and a tokenizer of
      its own.
    layout: one of `layouts.BY_NAME`.
    parallel: of what devices exchange.
    others: sections.
  """

  seed: int
  initial: str
  layout: str
  mesh: sections.Mesh
  parallel: placements.ParallelOptions
  model: model_config.ModelConfig
  tokenizer: sections.Tokenizer
  data: sections.Data
  cpt: sections.Stage
  sft: sections.Stage
  demonstrations: sections.Demonstrations
  tasks: task_sections.Tasks
  episode: episode.EpisodeOptions
  summary: summarize.SummaryOptions
  rewards: rewards.RewardOptions
  hints: task_sections.Hints
  curriculum: curriculum.CurriculumOptions
  sandbox: sections.Sandbox
  rollout: sections.Rollout
  rl: sections.RL
  delta: sections.Delta
  evaluation: sections.Evaluation
  telemetry: sections.Telemetry

  @property
  def lm_model(self) -> model_config.ModelConfig:
    """The model as pretraining and SFT compute it: in fast numerics.

    They have no sampler to agree with, and they run on the whole mesh, while
    batch-invariant numerics are those of one device. What `model.numerics` says
    is for rollouts, evaluations and RL, which trains on one device.
    """
    return dataclasses.replace(self.model, numerics='fast')

  def batch_shape(self) -> batching.BatchShape:
    """Of the microbatches of RL."""
    return batching.shape_of(
      self.model, rows=self.rl.rows, seq_len=self.rl.seq_len
    )

  def update_options(self) -> update.UpdateOptions:
    return self.rl.update_options(
      self.seed,
      refreshed=self.rollout.on_swap == rollout_options.REFRESH,
      hints=self.hints.loss,
    )

  def __post_init__(self):
    for name, stage in (('cpt', self.cpt), ('sft', self.sft)):
      if stage.steps < 1 and not (name == 'cpt' and self.initial):
        raise ValueError(
          f'--config.{name}.steps must be at least 1, not {stage.steps}; 0 '
          'leaves out cpt alone, and of an imported model (--config.initial).'
        )
    if self.demonstrations.conversations and not self.initial:
      raise ValueError(
        f'--config.demonstrations.conversations '
        f'({self.demonstrations.conversations!r}) needs the chat template of '
        'an imported model: --config.initial.'
      )
    # Each checks its values: made here, so that an impossible one is told
    # before anything is trained.
    for name, stage in (('cpt', self.cpt), ('sft', self.sft), ('rl', self.rl)):
      try:
        stage.optimizer_options()
      except ValueError as error:
        raise ValueError(f'--config.{name}: {error}') from error
    self._check_roles()
    self.update_options()
    self._check_tasks()
    try:
      self.rollout.engine_options(self.episode.max_tokens)
    except ValueError as error:
      raise ValueError(f'--config.rollout: {error}') from error
    if self.rl.replay and not self.rollout.record_routes:
      raise ValueError(
        '--config.rl.replay needs the routes that rollouts record: set '
        '--config.rollout.record_routes=True, or --config.rl.replay=False.'
      )
    try:
      self.batch_shape()
    except ValueError as error:
      raise ValueError(f'--config.rl.seq_len: {error}') from error
    if (
      self.delta.store.startswith('memory:')
      and self.rl.placement == 'processes'
    ):
      raise ValueError(
        f'--config.delta.store {self.delta.store!r} is of one process: set '
        "--config.rl.placement='colocated', or leave it '' for the workdir."
      )
    if self.layout not in layouts.BY_NAME:
      raise ValueError(
        f'--config.layout must be one of {tuple(layouts.BY_NAME)}, not '
        f'{self.layout!r}.'
      )
    for name, seq_len in (('sft', self.sft.seq_len), ('rl', self.rl.seq_len)):
      if self.episode.max_tokens > seq_len:
        raise ValueError(
          f'--config.episode.max_tokens ({self.episode.max_tokens}) must not '
          f'exceed --config.{name}.seq_len ({seq_len}): a trajectory has to '
          'fit a row.'
        )
    for name, stage in (('cpt', self.cpt), ('sft', self.sft)):
      accumulation.check_rows(
        stage.batch_size,
        stage.accumulate,
        self.mesh.replica * self.mesh.fsdp,
        f'--config.{name}.batch_size',
      )
      self._check_row(f'--config.{name}.seq_len', stage.seq_len, self.mesh)
    self._check_rl_mesh()

  def _check_tasks(self) -> None:
    try:
      self.summary.limit(self.episode.max_tokens)
    except ValueError as error:
      raise ValueError(f'--config.summary: {error}') from error
    if not self.tasks.is_deletion:
      return
    if self.sandbox.level == 'static':
      raise ValueError(
        f'--config.tasks.family {self.tasks.family!r} is judged by running '
        "tests, and --config.sandbox.level 'static' executes nothing: choose "
        "'auto'."
      )
    if 'pytest' not in self.sandbox.packages:
      raise ValueError(
        f'--config.tasks.family {self.tasks.family!r} is judged by pytest: '
        "--config.sandbox.packages must name 'pytest', not only "
        f'{self.sandbox.packages}.'
      )

  def _check_row(self, name: str, seq_len: int, mesh: sections.Mesh) -> None:
    """Raises unless a row divides into what context shards hold of it."""
    pieces, why = mesh.context, 'the context axis of its mesh'
    if pieces > 1 and self.parallel.sequence_order != 'contiguous':
      # Each shard has an early and a late piece.
      pieces, why = 2 * pieces, f'{why}, twice for zigzag order,'
    if seq_len % pieces:
      raise ValueError(
        f'{name} ({seq_len}) must divide by {why} ({pieces}); the nearest '
        f'that does is {max(round(seq_len / pieces), 1) * pieces}.'
      )

  def _check_rl_mesh(self) -> None:
    mesh = self.rl.mesh
    accumulation.check_rows(
      self.rl.rows, 1, mesh.replica * mesh.fsdp, '--config.rl.rows'
    )
    self._check_row('--config.rl.seq_len', self.rl.seq_len, mesh)
    if mesh.size > 1 and self.model.numerics == 'batch_invariant':
      raise ValueError(
        f'--config.rl.mesh of {mesh.size} devices cannot compute in '
        "--config.model.numerics 'batch_invariant', which is of one device: "
        "the order of a sum depends on how many there are. Choose 'fast', or "
        'a mesh of 1 x 1 x 1.'
      )

  def _check_roles(self) -> None:
    """Raises for roles that name no parameter, or fit it not."""
    for name, stage in (('cpt', self.cpt), ('sft', self.sft)):
      if stage.optimizer != 'muon' or not stage.muon.roles:
        continue
      shapes, axes = decoder.abstract(self.model)
      try:
        roles.tree(shapes['params'], axes['params'], stage.muon.roles)
      except ValueError as error:
        raise ValueError(f'--config.{name}.muon.roles: {error}') from error


_SECTIONS = {
  'mesh': sections.Mesh,
  'parallel': placements.ParallelOptions,
  'tokenizer': sections.Tokenizer,
  'data': sections.Data,
  'cpt': sections.Stage,
  'sft': sections.Stage,
  'demonstrations': sections.Demonstrations,
  'tasks': task_sections.Tasks,
  'episode': episode.EpisodeOptions,
  'summary': summarize.SummaryOptions,
  'rewards': rewards.RewardOptions,
  'hints': task_sections.Hints,
  'curriculum': curriculum.CurriculumOptions,
  'sandbox': sections.Sandbox,
  'rollout': sections.Rollout,
  'rl': sections.RL,
  'delta': sections.Delta,
  'evaluation': sections.Evaluation,
  'telemetry': sections.Telemetry,
}


# Sections within sections, made by their dotted names.
_INNER = {
  'cpt.muon': optim_groups.MuonChoices,
  'sft.muon': optim_groups.MuonChoices,
  'tasks.repository': environment.RepositoryOptions,
  'tasks.repository.bounds': tools.Bounds,
  'hints.loss': distill.HintLossOptions,
  'rl.gate': mismatch.GateOptions,
  'rl.loss': policy_loss.LossOptions,
  'rl.mesh': sections.Mesh,
}


def _section(name: str, cls: Any, fields: dict[str, Any]) -> Any:
  if not isinstance(fields, dict):
    raise ValueError(f'config.{name} must be a section, not {fields!r}.')
  known = {f.name for f in dataclasses.fields(cls)}
  for problem, names in (
    ('has no', sorted(set(fields) - known)),
    ('lacks', sorted(known - set(fields))),
  ):
    if names:
      raise ValueError(
        f'config.{name} {problem} field {", ".join(names)}; its fields are '
        f'{", ".join(sorted(known))}.'
      )
  made = {}
  for field, value in fields.items():
    inner = f'{name}.{field}'
    if inner in _INNER:
      made[field] = _section(inner, _INNER[inner], value)
    else:
      made[field] = tuple(value) if isinstance(value, list) else value
  try:
    return cls(**made)
  except ValueError as error:
    # Those of `sections` say where they are; others know no config.
    if '--config.' in str(error):
      raise
    raise ValueError(f'--config.{name}: {error}') from error


def from_dict(config: dict[str, Any]) -> Spec:
  """Builds a Spec from nested dictionaries, naming what does not fit."""
  known = {f.name for f in dataclasses.fields(Spec)}
  if set(config) != known:
    raise ValueError(
      f'The config has unknown sections {sorted(set(config) - known)} and '
      f'lacks {sorted(known - set(config))}.'
    )
  made = {
    name: _section(name, cls, config[name]) for name, cls in _SECTIONS.items()
  }
  return Spec(
    seed=config['seed'],
    initial=config['initial'],
    layout=config['layout'],
    model=model_config.ModelConfig.from_dict(config['model']),
    **made,
  )
