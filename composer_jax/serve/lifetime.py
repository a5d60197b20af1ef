"""A server's life: a policy and its tokenizer, an engine, a port, the drain."""

import dataclasses
import pathlib
from typing import Any

import jax

from composer_jax.core import files
from composer_jax.delta.device import receiver as receivers
from composer_jax.hf import imported, importing
from composer_jax.hf.text import chat_template
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.parallel import layouts, topology
from composer_jax.rollout import engine as engines
from composer_jax.rollout import placing
from composer_jax.serve import policies
from composer_jax.train import placement as placements
from composer_jax.train import workdir as workdirs
from composer_jax.train.checkpoints import export

_MISSING = (
  '{name} is not installed, which the server needs: '
  'pip install composer_jax[serve].'
)
_GENERATION = 'generation_config.json'
STAGES = ('rl', 'sft', 'cpt')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedPolicy:
  """A policy to serve.

  Attributes:
    name: of the folder, and of the stage.
    model: its config.
    tokenizer: of either kind.
    stop_tokens: that end every answer which is text.
    template: of an imported checkpoint that has one, else None.
    is_own: the model speaks our protocol (`text.chat`).
    version: of the variables; optimizer steps of RL.
    variables: as the engine takes them.
    receiver: of newer policies; None where nothing follows.
  """

  name: str
  model: model_config.ModelConfig
  tokenizer: hf_tokenizer.AnyTokenizer
  stop_tokens: tuple[int, ...]
  template: chat_template.ChatTemplate | None
  is_own: bool
  version: int
  variables: Any
  receiver: receivers.Receiver | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeCommand:
  """What a command line says.

  Attributes:
    folder: workdir of a run, or an import.
    stage: whose export; '' for the last finished one.
    follow: serve what RL publishes.
    store: where to read that; '' for where the run keeps it.
    host: address to listen on.
    port: 0 takes a free one.
    name: of the model; '' for that of the folder.
    token: that clients must send; '' for none.
  """

  folder: pathlib.Path
  stage: str
  follow: bool
  store: str
  host: str
  port: int
  name: str
  token: str


def run(command: ServeCommand, config: dict[str, Any]) -> None:
  """Serves until a signal ends it; the config is that of configs/serve.

  Raises:
    ValueError: something cannot be served, says what; or a package is missing.
  """
  try:
    from composer_jax.serve import app, http_server, service
    from composer_jax.serve import options as serve_options
    from composer_jax.serve.api import chat_format
  except ModuleNotFoundError as error:
    if (error.name or '').startswith('composer_jax'):
      raise
    raise ValueError(_MISSING.format(name=error.name)) from error
  engine_options = _fields('engine', engines.EngineOptions, config['engine'])
  limits = _fields('limits', serve_options.ServeOptions, config['limits'])
  # First of all: a port that is taken is told before all that takes minutes.
  with http_server.bind(command.host, command.port, command.token) as sock:
    mesh = placing.mesh_of(config['devices'])
    source = load(
      command.folder,
      stage=command.stage,
      follow=command.follow,
      store=command.store,
      overrides={'numerics': config['numerics']},
      mesh=mesh,
    )
    engine = engines.Engine(
      source.model,
      source.variables,
      source.version,
      engine_options,
      mesh=mesh,
    )
    if source.is_own:
      form: Any = chat_format.OwnFormat(source.tokenizer)
    elif source.template is not None:
      form = chat_format.TemplateFormat(source.tokenizer, source.template)
    else:
      form = None
    model = app.Model(
      name=command.name or source.name,
      tokenizer=source.tokenizer,
      stop_tokens=source.stop_tokens,
      form=form,
    )
    # Before anyone can connect: whoever is answered is answered at once.
    print('Compiling.', flush=True)
    engine.warm()
    followed = newer(source.receiver) if source.receiver else None
    served = service.Service(engine, limits, followed)
    hosts = http_server.hosts_of(command.host, command.token)
    server = http_server.HttpServer(
      app.build(served, model, command.token, hosts), served
    )
    sock.listen()
    served.start()
    print(
      f'Serving {model.name}, policy version {source.version}, at '
      f'{http_server.url_of(sock)}/v1',
      flush=True,
    )
    try:
      server.run([sock])
    finally:
      served.stop()
  if served.problem:
    print(f'At the end, version {served.version}: {served.problem}')


def _fields(name: str, cls: Any, fields: dict[str, Any]) -> Any:
  known = {f.name for f in dataclasses.fields(cls)}
  unknown = sorted(set(fields) - known)
  if unknown:
    raise ValueError(
      f'--config.{name} has no field {", ".join(unknown)}; its fields are '
      f'{", ".join(sorted(known))}.'
    )
  try:
    # The command line makes lists of tuples.
    tuples = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
    return cls(**{**fields, **tuples})
  except TypeError as error:
    raise ValueError(f'--config.{name}: {error}.') from error


def load(
  folder: pathlib.Path,
  *,
  stage: str = '',
  follow: bool = False,
  store: str = '',
  wait_s: float = 300.0,
  overrides: dict[str, Any] | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> ServedPolicy:
  """Loads a policy.

  Args:
    folder: workdir of a run, or an import.
    stage: whose export; '' for the last finished one.
    follow: serve what RL publishes, as it does; for a run that is going on.
    store: where to read that; '' for where the run keeps it.
    wait_s: for the first policy that is followed.
    overrides: fields of the model's config that a server may choose.
    mesh: whose devices share the weights; None loads them on the first one.

  Raises:
    ValueError: there is nothing to serve; says what is missing.
  """
  if (folder / importing.RECORD).exists():
    if stage or follow:
      raise ValueError(
        f'{folder} is an import: it has no stages, and nothing to follow. '
        'Leave out --stage and --follow.'
      )
    return _imported(folder, overrides or {}, mesh)
  path = folder / workdirs.CONFIG
  if not path.exists():
    raise ValueError(
      f'{folder} is neither the workdir of a run (no {workdirs.CONFIG}) nor an '
      f'import (no {importing.RECORD}).'
    )
  config = files.read_json(path)
  model = _model(config['model'], overrides or {})
  receiver = None
  if follow:
    receiver = _receiver(folder, model, config, store)
    first = receiver.first(wait_s)
    version, variables = first.version, first.variables
    stage = 'rl'
  else:
    stage = stage or _last_stage(folder)
    version = export.finished_step(folder, stage) if stage == 'rl' else 0
    if version is None:
      raise ValueError(
        f'Stage {stage!r} of {folder} is not finished; finished are '
        f'{_finished(folder)}.'
      )
    variables = _policy(export.load(folder, stage, _like(model, mesh)))
  tokenizer = hf_tokenizer.load_any(folder / 'tokenizer.json')
  return ServedPolicy(
    name=f'{folder.name}-{stage}',
    model=model,
    tokenizer=tokenizer,
    stop_tokens=_ends(tokenizer),
    template=None,
    is_own=True,
    version=version,
    variables=variables,
    receiver=receiver,
  )


def _imported(
  folder: pathlib.Path,
  overrides: dict[str, Any],
  mesh: jax.sharding.Mesh | None,
) -> ServedPolicy:
  model = _model(imported.model_of(folder), overrides)
  tokenizer = hf_tokenizer.ImportedTokenizer.from_folder(
    folder, model.vocab_size
  )
  try:
    template = chat_template.load(folder)
  except ValueError as error:
    # Of pretraining alone: it completes texts.
    print(f'No chat: {error}', flush=True)
    template = None
  return ServedPolicy(
    name=folder.name,
    model=model,
    tokenizer=tokenizer,
    stop_tokens=_ends(tokenizer, folder / _GENERATION),
    template=template,
    is_own=False,
    version=0,
    variables=_policy(importing.load_variables(folder, _like(model, mesh))),
    receiver=None,
  )


def _ends(
  tokenizer: hf_tokenizer.AnyTokenizer, defaults: pathlib.Path | None = None
) -> tuple[int, ...]:
  """Tokens after which a model has said all, its own defaults included."""
  ends = [int(tokenizer.END), int(tokenizer.EOD)]
  if defaults is not None and defaults.exists():
    said = files.read_json(defaults).get('eos_token_id')
    said = said if isinstance(said, list) else [said]
    ends += [token for token in said if type(token) is int]
  return tuple(dict.fromkeys(ends))


def _model(
  fields: dict[str, Any], overrides: dict[str, Any]
) -> model_config.ModelConfig:
  # Absent from imports and runs that are older than these.
  fields = {'numerics': 'fast', **fields, **overrides}
  return model_config.ModelConfig.from_dict(fields)


def _receiver(
  folder: pathlib.Path,
  model: model_config.ModelConfig,
  config: dict[str, Any],
  store: str,
) -> receivers.Receiver:
  if 'delta' not in config:
    raise ValueError(
      f'{folder / workdirs.CONFIG} has no section delta: the run is older than '
      'signed bundles, and cannot be followed.'
    )
  store = store or config['delta']['store']
  return receivers.Receiver(folder, model, store)


def newer(receiver: receivers.Receiver) -> policies.Source:
  """Returns what a service follows, and may be rolled back to."""

  def poll() -> tuple[int, Any] | None:
    policy = receiver.poll()
    if policy is not None:
      return policy.version, policy.variables
    if receiver.problem is not None:
      raise ValueError(receiver.problem)
    return None

  def roll_back(version: int) -> tuple[int, Any]:
    policy = receiver.roll_back(version)
    return policy.version, policy.variables

  return policies.Source(poll=poll, roll_back=roll_back)


def _finished(folder: pathlib.Path) -> list[str]:
  return [s for s in STAGES if export.finished_step(folder, s) is not None]


def _last_stage(folder: pathlib.Path) -> str:
  finished = _finished(folder)
  if not finished:
    raise ValueError(
      f'No stage of {folder} is finished. While RL is running, serve what it '
      'publishes: --follow.'
    )
  return finished[0]


def _like(
  model: model_config.ModelConfig, mesh: jax.sharding.Mesh | None
) -> Any:
  mesh = mesh or topology.make_mesh(devices=jax.devices()[:1])
  placed = placements.build(model, mesh=mesh, layout=layouts.DECODE)
  shapes, _ = decoder.abstract(model)
  return jax.tree.map(
    lambda shape, sharding: jax.ShapeDtypeStruct(
      shape.shape, shape.dtype, sharding=sharding
    ),
    shapes,
    placed.variables,
  )


def _policy(variables: Any) -> Any:
  return jax.jit(decoder.policy, donate_argnums=0)(variables)
