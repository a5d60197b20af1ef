"""Plays pinned suites with what a run publishes: `evaluate --follow`."""

import importlib.util
import json
import os
import pathlib
import time
from concurrent import futures
from typing import Any

_CONFIG = 'config.json'  # as in train.workdir, which loads jax
_WITHIN_S = 300.0  # for a run to show in its store


def fields_of(suite: Any) -> dict[str, Any]:
  """Loads the config file of a suite, with the suite's own values."""
  path, _, argument = suite.config.partition(':')
  spec = importlib.util.spec_from_file_location('config_of_suite', path)
  if spec is None or spec.loader is None or not os.path.isfile(path):
    raise ValueError(
      f'Suite {suite.name!r}: config {suite.config!r} must be a file.py, or '
      'file.py:ARGUMENT.'
    )
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  fields = module.get_config(argument).to_dict()
  for name, value in suite.fields.items():
    *sections, field = name.split('.')
    place = fields
    for section in sections:
      place = place.setdefault(section, {})
    place[field] = value
  return fields


def is_workdir(folder: str) -> bool:
  return (pathlib.Path(folder) / _CONFIG).exists()


def asked(options: Any) -> Any:
  """Returns what asks the endpoint of `evaluation.EvaluationOptions`."""
  from composer_jax.serve import chat, client, endpoint

  address = endpoint.Endpoint(
    url=options.url,
    model=options.model,
    api_key=options.api_key,
    patience_s=options.chat.patience_s,
    requests_per_minute=options.chat.requests_per_minute,
  )
  if options.policy == 'tokens':
    return client.TokenPolicy(address)
  fields = json.loads(options.chat.body)
  return chat.ChatClient(address, stream=options.chat.stream, fields=fields)


def play_engine(
  spec: Any,
  folder: pathlib.Path,
  engine: Any,
  source: pathlib.Path,
  *,
  url: str,
  **fields: Any,
) -> Any:
  """Plays a suite with an engine of this process; returns its summary.

  Args:
    folder: folder of the results; what it has is not played again.
    source: workdir of the run, with its tokenizer.
    url: name of the policy in the results.
    **fields: other fields of `evaluation.EvaluationOptions`.
  """
  from composer_jax import wiring
  from composer_jax.rollout import server
  from composer_jax.tasks.practice import evaluation

  options = evaluation.EvaluationOptions(
    policy='tokens',
    url=url,
    tokenizer=str(source / 'tokenizer.json'),
    **fields,
  )
  policy = server.EnginePolicy(engine)
  play = lambda: evaluation.evaluate(
    spec, wiring.systems_of(spec), options, folder, remote=lambda: policy
  )
  try:
    with futures.ThreadPoolExecutor(1, 'evaluation') as pool:
      summary = pool.submit(play)
      policy.serve(summary.done)
      return summary.result()
  finally:
    policy.close()


class PinnedSuites:
  """Suites of a file, played by weights that a run has in memory.

  Each version has a folder by the identity of its weights, so that the version
  which is served is played once, however many candidates it is compared to.
  """

  def __init__(self, path: str, workdir: pathlib.Path, run: Any):
    """Reads the file and the config of each suite; plays nothing.

    Args:
      run: spec of the run, whose model and engine play all suites.
    """
    from composer_jax import wiring
    from composer_jax.tasks.practice import following

    self._workdir, self._run, self._identity = workdir, run, ''
    self._engine: Any = None
    self._suites, models = following.load(path)
    if models:
      raise ValueError(
        f'{path} names models behind endpoints, which no gate compares: leave '
        'them out.'
      )
    self._specs = {s.name: wiring.spec_of(fields_of(s)) for s in self._suites}

  def play(self, values: Any, version: int, identity: str) -> dict[str, Any]:
    """Returns the rows of each suite, or of each of its packages."""
    from composer_jax.pipeline import stages
    from composer_jax.tasks.practice import evaluation

    rows: dict[str, list[Any]] = {}
    for suite in self._suites:
      spec = self._specs[suite.name]
      folder = self._workdir / 'live' / 'suites' / identity[:24] / suite.name
      if not (folder / evaluation.SUMMARY).exists():
        if self._engine is None:
          # Copied: the trainer donates its weights to the next step.
          self._engine = stages.make_engine(self._run, _copied(values), version)
        elif self._identity != identity:
          # A number may come again, of another candidate.
          self._engine.swap(_copied(values), version)
        self._identity = identity
        play_engine(
          spec,
          folder,
          self._engine,
          self._workdir,
          url=identity,
          split=suite.split,
          tasks=suite.tasks,
          samples=suite.samples,
          threads=self._run.rollout.num_slots,
        )
      played = list(evaluation.read(folder).values())
      packages = sorted({row['package'] for row in played})
      for package in packages:
        name = f'{suite.name} {package}' if len(packages) > 1 else suite.name
        rows[name] = [row for row in played if row['package'] == package]
    return rows


def _copied(values: Any) -> Any:
  import jax

  return jax.tree.map(lambda leaf: leaf.copy(), values)


def take_run(store: str, key: pathlib.Path, folder: pathlib.Path) -> None:
  """Puts what a player needs of the run in a store into a folder.

  Raises:
    ValueError: the store or the key is missing, or no run shows in it.
  """
  from composer_jax.core import files
  from composer_jax.delta import transport
  from composer_jax.delta.format import keys
  from composer_jax.fleet import joining
  from composer_jax.fleet.leases import documents, fleet_store

  if not key.is_file():
    raise ValueError(
      f'--follow={store} is no workdir of a run (it has no config.json). To '
      f'follow a store, --key ({str(key)!r}) must name a copy of the file '
      'delta.key in the workdir of its run.'
    )
  docs = documents.RunDocuments(
    fleet_store.FleetStore(store), keys.open_key(key), transport.RUN_ID
  )
  setup, _ = joining.find(docs, within_s=_WITHIN_S)
  joining.take(docs, setup, key, folder)
  files.write_json(folder / _CONFIG, setup['config'])


def follow(
  source: pathlib.Path,
  *,
  suites: str,
  store: str,
  out: pathlib.Path,
  versions: int,
  threads: int,
) -> None:
  """Plays the suites with each newer version that is found; blocks.

  Args:
    source: workdir of a run whose RL publishes, or folder of `take_run`.
    suites: file of `tasks.practice.following`.
    store: URL of the bundles; '' for the store of the run.
    versions: number of versions to play before it ends; 0 for no end.
    threads: episodes at a time.
  """
  # After the flags: these imports load jax.
  from composer_jax import wiring
  from composer_jax.core import files
  from composer_jax.report import versions as page
  from composer_jax.rollout import engine as engines
  from composer_jax.rollout import placing
  from composer_jax.serve import lifetime
  from composer_jax.tasks.practice import evaluation, following

  pinned, models = following.load(suites)
  # All of them first, so that a wrong one is named before anything is played.
  specs = {s.name: wiring.spec_of(fields_of(s)) for s in pinned}
  mesh = placing.mesh_of(1)
  served = lifetime.load(source, follow=True, store=store, mesh=mesh)
  receiver = served.receiver
  assert receiver is not None
  run = wiring.spec_of(files.read_json(source / _CONFIG))
  engine = engines.Engine(
    served.model,
    served.variables,
    served.version,
    run.engine_options(),
    mesh=mesh,
  )
  key = os.environ.get('COMPOSER_JAX_TOKEN', '').strip()

  def play(suite: Any, folder: pathlib.Path, player: Any) -> Any:
    spec = specs[suite.name]
    common = dict(
      split=suite.split,
      tasks=suite.tasks,
      samples=suite.samples,
      threads=threads,
    )
    begin = lambda options, remote: evaluation.evaluate(
      spec, wiring.systems_of(spec), options, folder, remote=remote
    )
    if isinstance(player, following.ComparedModel):
      options = evaluation.EvaluationOptions(
        policy='chat',
        url=player.url,
        model=player.model,
        api_key=key,
        chat=player.chat,
        **common,
      )
      ask = asked(options)
      return begin(options, lambda: ask)
    return play_engine(spec, folder, engine, source, url=player, **common)

  service = following.SuiteService(pinned, out, play)
  service.pin(models)
  for model in models:
    service.play_model(model)
  version, target_id = served.version, served.target_id
  played = 0
  while True:
    if service.is_due(version, target_id):
      print(f'[follow] playing version {version}', flush=True)
      row = service.play(version, target_id, f'{target_id}@{version}')
      for name, result in row['suites'].items():
        line = f'{result["passed"]} of {result["episodes"]}'
        if result['episodes']:
          line += f' [{result["low"]:.3f}, {result["high"]:.3f}]'
        if result['infrastructure']:
          line += f', {result["infrastructure"]} of infrastructure'
        print(f'[follow] version {version}, {name}: {line}')
      for change in row['changes']:
        if change['verdict']:
          print(
            f'[follow] {change["domain"]} is {change["verdict"]} than in '
            f'version {change["before"]}: {change["change"]:+.3f} '
            f'[{change["low"]:+.3f}, {change["high"]:+.3f}]'
          )
      print(f'[follow] {page.write(out)}', flush=True)
      played += 1
    if versions and played >= versions:
      return
    while (newer := receiver.poll()) is None:
      time.sleep(1.0)
    engine.swap(newer.variables, newer.version)
    version, target_id = newer.version, newer.target_id
