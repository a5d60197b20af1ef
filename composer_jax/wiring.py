"""Joins the spine and the systems: the only module that names both.

The mains call `spec_of` on a config, then `systems_of` on the spec. Tables of
names stand here and nowhere else.
"""

import functools
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from composer_jax import sections
from composer_jax.agent import environment
from composer_jax.core import checks, records, seams
from composer_jax.core.routes import codec
from composer_jax.corpus import build, of_run
from composer_jax.delta import transport
from composer_jax.fleet import joining
from composer_jax.fleet.leases import documents, exchange, uploads
from composer_jax.gate import health
from composer_jax.hf import imported
from composer_jax.hf.text import language as hf_language
from composer_jax.live import options as live_options
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import spec as specs
from composer_jax.plan import memory
from composer_jax.sandbox import options as sandbox_options
from composer_jax.tasks import (
  auditor,
  calibration,
  contained,
  curriculum,
  judging,
  scoring,
)
from composer_jax.tasks import options as task_options
from composer_jax.tasks.list_functions import family as generated
from composer_jax.tasks.practice import (
  harbor,
  hints,
  list_functions,
  mixed,
  pivots,
  repository,
  verifiers,
)
from composer_jax.telemetry import progress
from composer_jax.text import chat

# Value of `config.tasks.family` -> function from a spec to that TaskFamily;
# MODULE:CLASS names one of a user's own modules.
FAMILIES: dict[str, Callable[[specs.Spec], environment.TaskFamily]] = {
  'list_functions': list_functions.ListFunctions,
  'deletion': repository.RepositoryTasks,
  'harbor': harbor.HarborTasks,
  'pivots': pivots.Pivots,
  'verifiers': verifiers.VerifiersTasks,
}
FAMILIES['mixed'] = lambda spec: mixed.Mixed(
  spec, {name: make for name, make in FAMILIES.items() if name != 'mixed'}
)


# Sections of a config that belong to systems.
SECTIONS = {
  'tokenizer': of_run.TokenizerOptions,
  'data': of_run.DataOptions,
  'demonstrations': task_options.DemonstrationOptions,
  'tasks': task_options.TaskOptions,
  'curriculum': curriculum.CurriculumOptions,
  'sandbox': sandbox_options.SandboxOptions,
  'delta': transport.DeltaOptions,
  'fleet': exchange.FleetOptions,
  'hints': hints.HintSection,
  'language': hf_language.LanguageOptions,
  'live': live_options.LiveOptions,
}
_PLAIN = ('seed', 'initial', 'layout', 'accelerator')


def spec_of(config: Mapping[str, Any]) -> specs.Spec:
  """Builds the spec of a run from nested dictionaries.

  Raises:
    ValueError: a field is unknown, missing or has an impossible value; the
      message names it.
  """
  known = {**specs.SECTIONS, **SECTIONS}
  for name in config:
    checks.known_name(name, (*_PLAIN, *known), '--config')
  made = {
    name: sections.build(cls, config.get(name, {}), name)
    for name, cls in known.items()
  }
  plain = {name: config[name] for name in _PLAIN if name in config}
  systems = {name: made.pop(name) for name in SECTIONS}
  spec = specs.Spec(**plain, **made, systems=systems)
  _check(spec)
  return spec


def _check(spec: specs.Spec) -> None:
  """Checks rules that span systems, or a system and the spine."""
  family_of(spec).check()
  conversations = spec.systems['demonstrations'].conversations
  if conversations and not spec.initial:
    raise ValueError(
      f'--config.demonstrations.conversations ({conversations!r}) needs the '
      'chat template of an imported model: set --config.initial.'
    )
  rubric = spec.systems['tasks'].rubric
  if spec.rewards.judged_reward and not rubric.file:
    raise ValueError(
      f'--config.rewards.judged_reward ({spec.rewards.judged_reward}) needs '
      '--config.tasks.rubric.file, what episodes are scored by.'
    )
  store = spec.systems['delta'].store
  if store == transport.DIRECT and spec.rl.placement == 'processes':
    raise ValueError(
      f'--config.delta.store {store!r} lives in a single process: set '
      "--config.rl.placement='colocated', or --config.delta.store='' for a "
      'store in the workdir.'
    )


def family_of(spec: specs.Spec) -> environment.TaskFamily:
  """Returns the task family that a config names, of `FAMILIES` or a user's."""
  name = spec.systems['tasks'].family
  module, _, attribute = name.partition(':')
  try:
    # Every process of a run imports it by itself.
    make = FAMILIES.get(name) or getattr(
      importlib.import_module(module), attribute
    )
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
      f'--config.tasks.family must be one of {tuple(FAMILIES)} or a class that '
      f'can be imported as MODULE:CLASS, not {name!r}: {error}.'
    ) from error
  return make(spec)


def resolved(config: Mapping[str, Any]) -> Iterator[sections.Entry]:
  """Yields every field of a run's config with its default and meaning."""
  spec = spec_of(config)
  texts = sections.meanings(specs.Spec)
  for field in specs.Spec.__dataclass_fields__.values():
    if field.name in _PLAIN:
      yield sections.Entry(
        field.name,
        getattr(spec, field.name),
        field.default,
        texts[field.name],
      )
  for name in specs.SECTIONS:
    yield from sections.entries(getattr(spec, name), path=f'{name}.')
  for name, section in spec.systems.items():
    yield from sections.entries(section, path=f'{name}.')


def _contained(spec: specs.Spec) -> Any:
  """The family of a run, of which no episode ends it."""
  family, audit = family_of(spec), spec.systems['tasks'].auditor
  if audit.url:
    return auditor.AuditedFamily(family, audit.judge())
  return contained.ContainedFamily(family)


def systems_of(spec: specs.Spec) -> seams.Systems:
  """Binds a run's systems to its spec; opens and reads nothing yet."""
  family = _contained(spec)
  open_runner = functools.partial(_open_runner, spec, family)
  functions = family.functions()
  initial = _initial(spec, functions)
  return seams.Systems(
    family=family,
    corpus=functools.partial(corpus_of, spec, family),
    initial=initial,
    begin=functools.partial(_begin, spec, family, initial),
    load_tokenizer=functools.partial(hf_language.load_any, functions=functions),
    settle_judge=lambda workdir: judging.settle(
      workdir,
      spec.systems['sandbox'],
      open_runner,
      needs_execution=family.needs_execution,
    ),
    open_runner=open_runner,
    curriculum=_curriculum(spec),
    hints=spec.systems['hints'].write if spec.hints.weight else None,
    judge=_judge(spec),
    transport=functools.partial(_transport, spec),
    groups=functools.partial(_groups, spec),
    worker_command=functools.partial(_worker_command, spec),
    gate=functools.partial(
      health.HealthGate,
      options=spec.rl.gate,
      replay=spec.rl.replay,
      max_staleness=spec.rl.max_staleness,
      temperature=spec.episode.temperature,
      seed=spec.seed,
    ),
    write_report=_write_report,
  )


def _transport(
  spec: specs.Spec, workdir: pathlib.Path
) -> seams.WeightTransport:
  return transport.PolicyTransport(workdir, spec.model, spec.systems['delta'])


def content_of(spec: specs.Spec) -> dict[str, str]:
  """Identities of the files outside the workdir that a worker needs, too."""
  return {
    'task_set': family_of(spec).identity(),
    'imported': imported.identity(spec.initial) if spec.initial else '',
  }


def rules_of(spec: specs.Spec) -> uploads.UploadRules:
  """What the rollouts of a run can be at most."""
  model, summary = spec.model, spec.summary
  summaries = summary.max_summaries if summary.trigger else 0
  return uploads.UploadRules(
    members=spec.rl.rollouts_per_prompt,
    max_tokens=summary.limit(spec.episode.max_tokens),
    max_windows=max(1 + summaries, family_of(spec).max_windows),
    vocab_size=model.vocab_size,
    routes=codec.RouteScheme(
      num_experts=model.moe.num_experts,
      num_active=model.moe.num_active,
      layers=tuple(range(model.num_moe_layers)),
    ),
    temperature=spec.episode.temperature,
    resumes=model.numerics == 'batch_invariant' or spec.rl.max_staleness > 0,
  )


def kept_groups(workdir: pathlib.Path, store: str = '') -> list[records.Group]:
  """The groups whose uploads a run still has, whole, in order."""
  return exchange.kept(_documents(store, workdir))


def _documents(store: str, workdir: pathlib.Path) -> documents.RunDocuments:
  place = transport.store_of(
    workdir, '' if store == transport.DIRECT else store
  )
  key = workdir / transport.KEY
  return joining.open_documents(place, key, transport.RUN_ID)


def _groups(
  spec: specs.Spec, workdir: pathlib.Path, level: str
) -> seams.GroupExchange:
  own = joining.code() | content_of(spec)
  return exchange.StoredGroups(
    _documents(spec.systems['delta'].store, workdir),
    spec.systems['fleet'],
    rules_of(spec),
    workdir=workdir,
    setup=exchange.RunSetup(
      fields={'config': spec.as_dict(), 'level': level, 'identity': own},
      files=[workdir / jobs.TOKENIZER, workdir / hf_language.FILE],
    ),
    poll_s=spec.systems['delta'].poll_s,
    say=progress.teller('fleet'),
  )


def _worker_command(
  spec: specs.Spec, workdir: pathlib.Path, number: int
) -> list[str]:
  """The command of a worker on this machine, with a folder in the workdir."""
  store = transport.store_of(workdir, spec.systems['delta'].store)
  command = [sys.executable, '-m', 'experiments.worker', f'--store={store}']
  command += [f'--folder={workdir / transport.WORKERS / str(number)}']
  return [*command, f'--key={workdir / transport.KEY}']


def _open_runner(spec: specs.Spec, family: Any, level: str) -> Any:
  return judging.open_runner(
    spec.systems['sandbox'],
    level,
    images=family.images(),
    requirements=family.requirements(),
    folders=family.root_folders(),
  )


def corpus_of(
  spec: specs.Spec,
  family: Any,
  workdir: pathlib.Path,
  report: Callable[[str], None] = progress.teller('data'),  # noqa: B008
) -> of_run.RunCorpus:
  """The corpus of a run, built in its workdir if it is not there yet."""
  # Generated tasks are held out of every corpus, so that runs compare.
  data = spec.systems['data']
  return of_run.RunCorpus(
    built=of_run.build_corpus(
      data,
      workdir,
      build.HoldOut(
        packages=family.held_out_packages(), bodies=generated.holdout()
      ),
      seed=spec.seed,
      report=report,
    ),
    fim_rate=data.fim_rate,
    tokenizer_bytes=spec.systems['tokenizer'].train_bytes,
    vocab_size=spec.model.vocab_size,
    report=report,
  )


def _initial(
  spec: specs.Spec, functions: Sequence[Any]
) -> imported.ImportedModel | None:
  if not spec.initial:
    return None
  # Others begin anew in each document of a row.
  windows = {'episode.max_tokens': spec.episode.max_tokens}
  if spec.cpt.steps:
    windows['cpt.seq_len'] = spec.cpt.seq_len
  return imported.ImportedModel(
    folder=spec.initial,
    model=spec.model,
    conversations_file=spec.systems['demonstrations'].conversations,
    seq_len=spec.sft.seq_len,
    windows=windows,
    speech=spec.systems['language'],
    functions=functions,
  )


def _begin(
  spec: specs.Spec,
  family: environment.TaskFamily,
  initial: imported.ImportedModel | None,
  workdir: pathlib.Path,
) -> None:
  """Checks the files of a new run, and copies what it begins with."""
  family.check_files()
  if line := calibration.try_judge(spec.systems['tasks'].rubric):
    progress.teller('rubric')(line)
  if spec.cpt.steps or initial is None:
    spec.systems['data'].check_files()
  if spec.rl.steps:
    transport.check_store(workdir, spec.systems['delta'])
  if initial is not None:
    for line in memory.check(spec):
      progress.teller('memory')(line)
    initial.take(workdir)
    tokenizer = initial.tokenizer(workdir)
    ends = chat.language_of(tokenizer).ends
    if len(ends) > (most := spec.engine_options().max_stop_tokens):
      raise ValueError(
        f'{len(ends)} tokens end a turn of {initial.folder}, {ends}; an engine '
        f'takes {most}. Shorten eos_token_id in its generation_config.json.'
      )
    for split in ('train', *family.axes):  # Raises if prompts are too long.
      family.tasks(tokenizer, split=split, seed=spec.seed)


def _curriculum(spec: specs.Spec) -> Callable[..., Any] | None:
  if not spec.systems['curriculum'].enabled:
    return None
  return lambda tasks, workdir, seed: curriculum.DifficultyCurriculum(
    tasks.pool,
    curriculum.Ledger(workdir / curriculum.LEDGER),
    prompts=spec.rl.prompts,
    lag=spec.rl.window.lag,
    seed=seed,
  )


def _judge(spec: specs.Spec) -> Callable[..., Any] | None:
  options = spec.systems['tasks'].rubric
  if not options.file:
    return None
  open_scorer = functools.cache(options.scorer)

  def of_run(
    tokenizer: Any, workdir: pathlib.Path | None
  ) -> Callable[..., Any]:
    scorer = open_scorer()
    if workdir is not None:
      scorer.remember(workdir)
    return functools.partial(scoring.judge, scorer, tokenizer)

  return of_run


def _write_report(workdir: pathlib.Path) -> pathlib.Path:
  # Loads matplotlib, which a resumed run need not wait for.
  from composer_jax.report import document

  return document.write_report(workdir)
