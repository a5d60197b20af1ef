"""Loads a policy, warms an engine and serves it until a signal."""

import dataclasses
import functools
import pathlib
import signal
import typing
from collections.abc import Callable
from typing import Any

import jax

from composer_jax.core import checks, files
from composer_jax.delta import transport as receivers
from composer_jax.hf import imported, importing
from composer_jax.hf.text import language
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.models import config as model_config
from composer_jax.models import decoder
from composer_jax.parallel import layouts, topology
from composer_jax.pipeline import rollout_worker
from composer_jax.rollout import engine as engines
from composer_jax.rollout import placing
from composer_jax.serve import lending
from composer_jax.text import chat
from composer_jax.train import placement as placements
from composer_jax.train import workdir as workdirs
from composer_jax.train.checkpoints import export

STAGES = ('rl', 'sft', 'cpt')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedPolicy:
  """A policy to serve.

  Attributes:
    name: name of the folder, and of the stage.
    stop_tokens: ids that end every answer of text.
    tokenizer: tokenizer, with the language of an imported checkpoint.
    chats: false for a checkpoint without a chat template.
    version: policy version of the variables, in optimizer steps of RL.
    variables: weights as the engine takes them; None where `engine` has them.
    target_id: identity of a policy that was published; '' of any other.
    receiver: receiver of newer policies; None where nothing is followed.
    engine: engine that serves it; None where it is still to be made.
    guest: user of the engine while clients do not ask for it; None for none.
  """

  name: str
  model: model_config.ModelConfig
  tokenizer: hf_tokenizer.AnyTokenizer
  stop_tokens: tuple[int, ...]
  chats: bool = True
  version: int = 0
  variables: Any
  target_id: str = ''
  receiver: receivers.Receiver | None = None
  engine: engines.Engine | None = None
  guest: lending.Lender | None = None


def run(
  load_policy: Callable[..., ServedPolicy],
  config: dict[str, Any],
  *,
  host: str,
  port: int,
  name: str = '',
  token: str = '',
  recorder: Any = None,
) -> None:
  """Serves until a signal ends it.

  Args:
    load_policy: returns the policy for `overrides` and `mesh`; see `load`.
    port: port to listen on; 0 takes a free one.
    name: name of the model; '' for that of the folder.
    token: bearer token that clients must send; '' asks for none.
    recorder: a `recording.AnswerRecorder`, closed at the end; None keeps
      nothing of what is served.

  Raises:
    ValueError: there is nothing to serve, or a package is missing.
  """
  try:
    from composer_jax.serve import app, http_server, service
    from composer_jax.serve import options as serve_options
    from composer_jax.serve.api import chat_format, openai
  except ModuleNotFoundError as error:
    if (error.name or '').startswith('composer_jax'):
      raise
    raise ValueError(
      f'{error.name} is not installed, which the server needs: '
      "pip install -e '.[serve]' in the checkout."
    ) from error
  engine_options = _fields('engine', engines.EngineOptions, config['engine'])
  limits = _fields('limits', serve_options.ServeOptions, config['limits'])
  # First of all: a taken port is an error before the minutes that follow.
  with http_server.bind(host, port, token) as sock:
    mesh = placing.mesh_of(config['devices'])
    overrides = {'numerics': config['numerics']}
    policy = load_policy(overrides=overrides, mesh=mesh)
    engine = policy.engine or engines.Engine(
      policy.model,
      policy.variables,
      policy.version,
      engine_options,
      mesh=mesh,
    )
    form: Any = chat_format.OwnFormat(policy.tokenizer)
    speech = chat.language_of(policy.tokenizer)
    if isinstance(speech, language.TemplateLanguage):
      form = chat_format.TemplateFormat(speech)
    elif not policy.chats:
      form = None
    model = openai.Model(
      name=name or policy.name,
      tokenizer=policy.tokenizer,
      stop_tokens=policy.stop_tokens,
      form=form,
    )
    # Before anything can connect: requests are answered at once.
    print('Compiling.', flush=True)
    engine.warm(guided=True)
    served = service.Service(
      *(engine, limits, policy.receiver),
      target_id=policy.target_id,
      guest=policy.guest,
    )
    hosts = http_server.hosts_of(host, token)
    server = http_server.server_of(
      app.build(served, model, token, hosts, recorder), limits
    )
    # uvicorn raises its signals again once it has drained.
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, signal.SIG_IGN)
    sock.listen()
    served.start()
    print(
      f'Serving {model.name}, policy version {policy.version}, at '
      f'{http_server.url_of(sock)}/v1',
      flush=True,
    )
    try:
      server.run([sock])
    finally:
      served.stop()
      if recorder is not None:
        recorder.close()
  if served.problem:
    print(f'At the end, version {served.version}: {served.problem}')


def _fields(name: str, cls: Any, fields: Any) -> Any:
  if not isinstance(fields, dict):
    raise ValueError(f'--config.{name} must be a section, not {fields!r}.')
  kinds, made = typing.get_type_hints(cls), dict(fields)
  for field, value in fields.items():
    checks.known_name(field, kinds, f'--config.{name}')
    if isinstance(value, list):  # The command line makes lists of tuples.
      made[field] = tuple(value)
    elif dataclasses.is_dataclass(kinds[field]):
      made[field] = _fields(f'{name}.{field}', kinds[field], value)
  try:
    return cls(**made)
  except TypeError as error:
    raise ValueError(f'--config.{name}: {error}.') from error
  except ValueError as error:
    text = f': {error}'.replace(f': {cls.__name__}.', '.', 1)
    raise ValueError(f'--config.{name}{text}') from error


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
    folder: workdir of a run, or folder of an import.
    stage: stage whose export is loaded; '' for the last finished one.
    follow: true loads what a running RL published last, and follows it.
    store: URL of the bundles to follow; '' for the store of the run.
    wait_s: seconds to wait for the first policy that is followed.
    overrides: fields of the model's config that a server may choose.
    mesh: devices that share the weights; None loads them on the first one.

  Raises:
    ValueError: there is nothing to serve; names what is missing.
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
  receiver, target_id = None, ''
  if follow:
    stage = 'rl'
    receiver = receivers.Receiver(
      folder, model, store or config['delta']['store'], mesh=mesh
    )
    first = receivers.first(receiver, wait_s)
    version, variables = first.version, first.variables
    target_id = first.target_id
  else:
    finished = [
      s for s in STAGES if export.finished_step(folder, s) is not None
    ]
    if not (stage or finished):
      raise ValueError(
        f'No stage of {folder} is finished. While RL is running, serve what it '
        'publishes: --follow.'
      )
    stage = stage or finished[0]
    version = export.finished_step(folder, stage) if stage == 'rl' else 0
    if version is None:
      raise ValueError(
        f'Stage {stage!r} of {folder} is not finished; finished are {finished}.'
      )
    like = decoder.without_base(_like(model, mesh))
    masters = export.load(folder, stage, like)
    variables = _policy_of(model, masters)
  if decoder.trained(variables) == 'adapters':
    kept = {k: v for k, v in _like(model, mesh).items() if k != 'adapters'}
    imported.check_identity(config['initial'], config['imported'], folder)
    base = importing.load_variables(config['initial'], kept)
    variables = {**variables, 'params': base['params']}
  tokenizer = language.load_any(folder / 'tokenizer.json')
  return ServedPolicy(
    name=f'{folder.name}-{stage}',
    model=model,
    tokenizer=tokenizer,
    stop_tokens=_ends(tokenizer),
    version=version,
    variables=variables,
    target_id=target_id,
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
    tokenizer.language = language.from_folder(folder, tokenizer)
    problem = 'it has no chat template'
  except ValueError as error:
    problem = str(error)
  if tokenizer.language is None:
    # A checkpoint of pretraining alone completes texts.
    print(f'No chat with {folder}: {problem}', flush=True)
  masters = importing.load_variables(folder, _like(model, mesh))
  return ServedPolicy(
    name=folder.name,
    model=model,
    tokenizer=tokenizer,
    stop_tokens=_ends(tokenizer, *language.ends_of(folder)),
    chats=tokenizer.language is not None,
    variables=_policy_of(model, masters),
  )


def _policy_of(model, masters):
  policy = functools.partial(decoder.policy, config=model)
  return jax.jit(policy, donate_argnums=0)(masters)


def lend(
  worker: rollout_worker.RolloutWorker, folder: pathlib.Path, name: str
) -> ServedPolicy:
  """Returns the policy that a rollout worker serves, to be lent to it.

  Args:
    folder: folder with the tokenizer of the run.
  """
  engine = worker.served.engine
  tokenizer = language.load_any(folder / 'tokenizer.json')
  return ServedPolicy(
    name=name,
    model=engine.config,
    tokenizer=tokenizer,
    stop_tokens=_ends(tokenizer),
    version=engine.version,
    variables=None,
    engine=engine,
    guest=lending.Lender(worker),
  )


def _ends(tokenizer: hf_tokenizer.AnyTokenizer, *more: int) -> tuple[int, ...]:
  """Returns ids that end an answer: those of the language, and of documents."""
  ends = chat.language_of(tokenizer).ends
  return tuple(dict.fromkeys([*ends, int(tokenizer.EOD), *more]))


def _model(
  fields: dict[str, Any], overrides: dict[str, Any]
) -> model_config.ModelConfig:
  return model_config.ModelConfig.from_dict({**fields, **overrides})


def _like(
  model: model_config.ModelConfig, mesh: jax.sharding.Mesh | None
) -> Any:
  mesh = mesh or topology.make_mesh(devices=jax.devices()[:1])
  placed = placements.build(model, mesh=mesh, layout=layouts.DECODE)
  shapes, _ = decoder.abstract(model)
  return jax.tree.map(
    lambda shape, place: shape.update(sharding=place), shapes, placed.variables
  )
