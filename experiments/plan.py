"""Answers questions about a model on machines that you do not have.

  python -m experiments.plan --config=configs/models/kimi_k2.py \
      --topology=v5p:8x8x8 --what=compile --libtpu=FOLDER

Questions: 'params', placement and bytes of every parameter; 'memory', what
training and serving need on a device, counted, with and without adapters;
'routing',
rounds, bytes, memory and modelled time of an exchange by how uneven its routing
is; 'muon', the matrices that each device orthogonalises, with operations, bytes
and modelled times; 'search', the best few meshes by counted memory and modelled
transfers; 'scale', goodput and network times of many replicas, modelled from
--scale; 'compile', programs of a run compiled by the machines'
compiler (--program): if they fit, what they compute and send, and how much of
that overlaps with products. --html writes the answer as a page, too. Nothing is
allocated. A wrong flag, config file or mesh ends the program with one line;
--debug adds the traceback.
"""

import dataclasses
import json
import sys
import types
from typing import Any

from absl import flags

from composer_jax.plan import topologies
from experiments import start

_CONFIG = start.define_config(
  'configs/models/tiny.py',
  'A model config, or a config of a run, whose model is taken.',
)
_QUESTIONS = (
  *('params', 'memory', 'routing', 'muon', 'search', 'scale', 'compile'),
)
# Questions that take options of 'compile', with those.
_SHARED = {
  'memory': ('--batch', '--seq_len'),
  'search': ('--seq_len', '--optimizer'),
  'routing': ('--batch', '--seq_len', '--accumulate', '--transport', '--room'),
}
_JSON = flags.DEFINE_bool('json', False, 'Prints one JSON object.')
_HTML = flags.DEFINE_string('html', '', 'File for a page with the tables.')
_SCALE = flags.DEFINE_list(
  'scale',
  [],
  'What --what=scale is about, NAME=NUMBER: fields of '
  '`plan.modelled.scale.ScaleOptions`, such as '
  'replicas=196,checkpoint_s=20,restart_s=300.',
)
_text, _int = flags.DEFINE_string, flags.DEFINE_integer
_PLACE = [
  _text('topology', 'cpu:8', f'Machines: {", ".join(topologies.FORMS)}.'),
  _text('what', 'params', f'The question: {", ".join(_QUESTIONS)}.'),
  _text(
    'mesh',
    '',
    'replica,fsdp,context. Default: 2,N/4,2 where 4 divides the N devices, '
    '2,2,2 for 8; else 1,N,1.',
  ),
  _text('layout', 'hsdp', 'Layout of the parameters: hsdp or data_parallel.'),
  _text('dtype', 'float32', 'Dtype of the parameters.'),
]
_COMPILE = [
  flags.DEFINE_list(
    'program',
    ['train'],
    'Programs to compile, or all: train, evaluate, muon, rl, hint, rl_update, '
    'policy, publish, prefill, decode.',
  ),
  _int('slots', 16, 'Sessions that the engine works on at once.'),
  _int(
    'batch',
    0,
    'Rows of a step; 0: one a microbatch on each device that shards rows.',
  ),
  _int('seq_len', 4096, 'Tokens of a row.'),
  _int('accumulate', 1, 'Microbatches of a step.'),
  _text(
    'transport',
    'auto',
    'Transport of tokens to experts: auto, a2a or ragged_a2a.',
  ),
  flags.DEFINE_float(
    'room',
    2.0,
    'Copies of tokens that a buffer holds over their mean.',
  ),
  flags.DEFINE_list(
    'remat_saves',
    None,
    'Values that recomputation keeps; default: those of the config.',
  ),
  _text('optimizer', 'muon', 'Optimizer of the step: muon or adam.'),
  _text(
    'until',
    'code',
    'Last stage: code, or schedule, which the compiler of a TPU has sooner.',
  ),
  _text('libtpu', '', f'Folder made by `{topologies.LIBTPU}`.'),
]


def _fits(case: Any, rows: int, seq_len: int) -> Any:
  """Counts a train step with AdamW, and an engine of 16 slots beside it."""
  from composer_jax.core import platforms
  from composer_jax.models import config as model_config
  from composer_jax.optim import groups
  from composer_jax.pipeline import spec as specs
  from composer_jax.plan import memory, report
  from composer_jax.rollout import options as rollout_options

  machine = topologies.MACHINES[case.machine]
  mesh = specs.Mesh(**dict(case.mesh.shape))
  shape = rows or mesh.replica * mesh.fsdp, seq_len, True
  ranks = model_config.AdapterConfig(attention=16, shared=16, dense=16)
  options = rollout_options.EngineOptions(
    devices=mesh.size, max_len=seq_len, num_slots=16
  )
  lines = []
  for what, state, adapters in (
    ('all weights, float32 state', 'float32', case.model.adapters),
    ('all weights, bfloat16 state', 'bfloat16', case.model.adapters),
    ('all weights, int8 state', 'int8', case.model.adapters),
    ('adapters of rank 16', 'float32', ranks),
  ):
    model = dataclasses.replace(case.model, adapters=adapters)
    adam = groups.OptimizerOptions(name='adam', state=state)
    with platforms.targeting(machine.platform):
      needed = (
        memory.training('train', model, adam, mesh, case.layout, shape),
        memory.serving(model, options),
      )
    for need in needed:
      largest = max(need.terms, key=lambda term: need.terms[term])
      fits = not machine.hbm or need.total <= machine.hbm
      total, part = (x / 2**30 for x in (need.total, need.terms[largest]))
      fits_word = 'yes' if fits else 'no'
      lines.append((what, need.name, total, largest, part, fits_word))
  return report.Table(
    title=f'Counted GiB of one device of {case.where}; not compiled, not run',
    columns=('what', 'part', 'GiB', 'largest', 'its_GiB', 'fits'),
    rows=lines,
  )


def _routing(case: Any, q: types.SimpleNamespace) -> Any:
  """Counts an exchange of a microbatch of a train step."""
  from composer_jax.core import platforms
  from composer_jax.models import placement
  from composer_jax.parallel import exchange, rounds, shardings
  from composer_jax.plan import network, programs, skew
  from composer_jax.train import placement as train_placement
  from composer_jax.train import step

  programs.StepOptions(  # Refuses what a compiled step refuses.
    batch_size=q.batch,
    seq_len=q.seq_len,
    accumulate=q.accumulate,
    parallel=train_placement.ParallelOptions(
      transport=q.transport, room=q.room
    ),
  )
  transport = q.transport
  platform = topologies.MACHINES[case.machine].platform
  if transport == 'auto':
    transport = rounds.transport_of(platform)
  plan = placement.exchange_plan(
    case.model,
    layout=case.layout,
    mesh=case.mesh,
    transport=transport,
    room=q.room,
  )
  if plan is None or not plan.travels:
    raise ValueError(
      f'--what=routing: no token of {case.where} travels to an expert; choose '
      '--layout=hsdp on several devices.'
    )
  shard_rows = shardings.product(case.layout.batch, case.mesh)
  rows = q.batch or shard_rows * q.accumulate
  step.check_rows(rows, q.accumulate, shard_rows, '--batch')
  num_tokens = rows * q.seq_len // q.accumulate
  num_tokens //= shardings.product(plan.token_axes, case.mesh)
  with platforms.targeting(platform, case.machine):
    shards = exchange.shards_of(
      plan,
      num_tokens=num_tokens,
      num_active=case.model.moe.num_active,
      num_local=case.model.moe.num_experts // plan.expert_shards,
    )
  rates = network.rates(case.topology, tuple(case.mesh.shape.values()))
  return skew.table(case.model, shards, num_tokens, rates)


def _scale_options() -> Any:
  """Returns the options that --scale names; a ValueError names a wrong one."""
  from composer_jax.plan.modelled import scale

  known = {f.name: f.default for f in dataclasses.fields(scale.ScaleOptions)}
  chosen: dict[str, Any] = {}
  for text in _SCALE.value:
    name, _, value = text.partition('=')
    try:
      chosen[name] = type(known[name])(value)
    except (KeyError, ValueError):
      raise ValueError(
        f'--scale={text} must be NAME=NUMBER, with a name of {sorted(known)}.'
      ) from None
  return scale.ScaleOptions(**chosen)


def _answer(fields: dict[str, Any], q: types.SimpleNamespace) -> list[Any]:
  if q.what not in _QUESTIONS:
    raise ValueError(f'--what {q.what!r} is not one of {sorted(_QUESTIONS)}.')
  unused = [f'--{flag.name}' for flag in _COMPILE if flag.present]
  unused = [name for name in unused if name not in _SHARED.get(q.what, ())]
  if unused and q.what != 'compile':
    raise ValueError(
      f'{", ".join(unused)} can be set with --what=compile alone; --what is '
      f'{q.what!r}.'
    )
  # Before jax is imported, so that it takes no accelerator.
  topologies.prepare()
  from composer_jax.plan import case as cases
  from composer_jax.plan import muon, params
  from composer_jax.plan.modelled import scale, search

  case = cases.make(
    fields,
    topology_name=q.topology,
    mesh=q.mesh,
    layout=q.layout,
    dtype=q.dtype,
  )
  if q.what == 'params':
    return params.tables(case)
  if q.what == 'memory':
    return [_fits(case, q.batch, q.seq_len)]
  if q.what == 'muon':
    return muon.tables(case)
  if q.what == 'search':
    return [search.table(case, q.optimizer, q.seq_len)]
  if q.what == 'scale':
    return scale.tables(case.model, case.mesh.size, _scale_options())
  if q.what == 'routing':
    return [_routing(case, q)]
  return _compiled(case, q)


def _compiled(case: Any, q: types.SimpleNamespace) -> list[Any]:
  from composer_jax.plan import aot_process, compiled, programs
  from composer_jax.train import placement

  options = programs.StepOptions(
    batch_size=q.batch,
    seq_len=q.seq_len,
    accumulate=q.accumulate,
    slots=q.slots,
    optimizer=q.optimizer,
    remat_saves=None if q.remat_saves is None else tuple(q.remat_saves),
    parallel=placement.ParallelOptions(transport=q.transport, room=q.room),
  )
  names = programs.NAMES if q.program == ['all'] else q.program
  tables, made = [], []
  for name in names:
    task = aot_process.CompileTask(
      case=case,
      options=options,
      topology_name=q.topology,
      libtpu=q.libtpu,
      program=name,
    )
    program = aot_process.compile_step(task, q.until)
    made.append((case, program))
    tables += compiled.tables(case, program, q.seq_len)
  return tables + [compiled.overview(made)] * (len(made) > 1)


def _main():
  fields = start.config_fields(_CONFIG)
  asked = types.SimpleNamespace(
    **{flag.name: flag.value for flag in (*_PLACE, *_COMPILE)}
  )
  if 'model' in fields:
    from composer_jax import wiring

    wiring.spec_of(fields)  # Refuses names that a run's config does not have.
  tables = _answer(fields, asked)
  if _HTML.value:
    from composer_jax.core import files
    from composer_jax.report import document

    page = document.render('plan.html', tables=tables, asked=vars(asked))
    files.write_atomic(_HTML.value, page.encode())
  if _JSON.value:
    rows = [table.to_json() for table in tables]
    print(json.dumps({asked.what: rows}))
  else:
    print('\n\n'.join(table.to_text() for table in tables))
  if any(table.title.startswith('FAILED') for table in tables):
    sys.exit(1)


if __name__ == '__main__':
  start.run(_main, errors=(ValueError, RuntimeError))
