"""Every program of a run, compiled for the machines that it would run on.

    python -m benchmarks.programs --libtpu=FOLDER [CASE ...]
    python -m benchmarks.programs --table

Nothing runs and no accelerator is needed (see `benchmarks.train_compile`, which
says how to get the compilers). A case is MODEL-MACHINE-PROGRAM, such as
kimi_k2-v5p-rl; the programs are those of `plan.programs`. Each prints one JSON
line: GiB of one device with what takes them (arguments, what the run holds
beside the program, the compiler's temporaries), what `plan.memory` counts for
it, modelled seconds and hidden share, and rounds and seconds by how uneven
routing is. --table prints the kept lines as Markdown, for the docs.

The engine's programs have every layer of the model in sequence and take long to
compile. Of them the models of 4 and of 8 layers are compiled, and temporaries
and times extended by their difference; weights and cache are those of all
layers. Field `layers` says so.
"""

import argparse
import dataclasses
import importlib
import json
import pathlib
import time
from typing import Any

_SEQ_LEN, _SLOTS = 4096, 16
_GIB = 2**30
_RESULTS = pathlib.Path(__file__).parent / 'results' / 'programs.jsonl'
# Trainer's and engine's machines, with the trainer's replica, fsdp, context.
_PLACES = {
  'kimi_k2-v5p': ('v5p:8x8x8', '4,64,2', 'v5p:4x4x4'),
  'qwen3_235b_a22b-h200': ('h200:128', '16,4,2', 'h200:16'),
  'moe_1_5t-v5p': ('v5p:8x8x8', '16,16,2', 'v5p:4x4x8'),
  'moe_1_5t-tpu7x': ('tpu7x:8x8x4', '16,16,2', 'tpu7x:4x4x4'),
  'moe_1_5t-h200': ('h200:512', '64,4,2', 'h200:64'),
  'deepseek_v3-v5p': ('v5p:8x8x8', '4,64,2', 'v5p:4x4x4'),
  'deepseek_v3-tpu7x': ('tpu7x:8x8x4', '4,64,2', 'tpu7x:4x4x2'),
  'deepseek_v3-h200': ('h200:512', '64,4,2', 'h200:32'),
}
_WHOLE = 2  # Places of which all programs are compiled.
_ENGINE = ('prefill', 'decode')
_FEW = 4, 8  # layers, with mixtures in all models
_OTHERS = ('evaluate', 'muon', 'rl', 'hint', 'rl_update', 'policy', 'publish')


def names() -> list[str]:
  """Returns all cases, the most important first."""
  made = []
  for i, place in enumerate(_PLACES):
    programs = ('train', *_OTHERS, *_ENGINE) if i < _WHOLE else ()
    made += [f'{place}-{name}' for name in programs or ('train', 'decode')]
  return made


def task_of(name: str, libtpu: str = '', layers: int = 0) -> Any:
  """Returns the task that `plan.aot_process` compiles; 0 means all layers."""
  from composer_jax.plan import aot_process, programs
  from composer_jax.plan import case as cases

  model, machine, program = name.split('-')
  trainer, mesh, engine = _PLACES[f'{model}-{machine}']
  is_engine = program in _ENGINE
  config = importlib.import_module(f'configs.models.{model}')
  topology = engine if is_engine else trainer
  case = cases.make(
    config.get_config().to_dict(),
    topology_name=topology,
    mesh='' if is_engine else mesh,
    layout='hsdp',
    dtype='float32',
  )
  if layers:
    model = dataclasses.replace(case.model, num_layers=layers)
    case = dataclasses.replace(case, model=model)
  return aot_process.CompileTask(
    case=case,
    options=programs.StepOptions(seq_len=_SEQ_LEN, slots=_SLOTS),
    topology_name=topology,
    libtpu=libtpu,
    program=program,
  )


def need_of(task: Any) -> Any:
  """Returns what `plan.memory` counts; None for the programs it leaves out."""
  from composer_jax.core import platforms
  from composer_jax.optim import groups
  from composer_jax.pipeline import spec as specs
  from composer_jax.plan import memory, topologies
  from composer_jax.rollout import options as rollout_options

  case, o = task.case, task.options
  with platforms.targeting(topologies.MACHINES[case.machine].platform):
    if task.program == 'train':
      options = groups.OptimizerOptions(muon=case.muon or groups.MuonChoices())
      mesh = specs.Mesh(**dict(case.mesh.shape))
      shape = mesh.replica * mesh.fsdp, o.seq_len, False
      args: Any = (case.model, options, mesh, case.layout, shape)
      return memory.training('train', *args)
    if task.program in _ENGINE:
      engine = rollout_options.EngineOptions(
        devices=case.mesh.size, num_slots=o.slots, max_len=o.seq_len
      )
      return memory.serving(case.model, engine)
  return None


def extended(task: Any, few: Any, more: Any) -> dict[str, Any]:
  """Returns the facts of all layers from programs of `_FEW` layers."""
  from composer_jax.plan import compiled

  def whole(function: Any) -> float:
    a, b = (
      function(dataclasses.replace(task, case=cut(task.case, n)).case, made)
      for n, made in zip(_FEW, (few, more), strict=True)
    )
    return b + (b - a) * (task.case.model.num_layers - _FEW[1]) / (
      _FEW[1] - _FEW[0]
    )

  def cut(case: Any, layers: int) -> Any:
    model = dataclasses.replace(case.model, num_layers=layers)
    return dataclasses.replace(case, model=model)

  terms = {
    name: size
    for name, size in need_of(task).terms.items()
    if size and name not in ('logits', 'reshaped experts')  # Temporaries.
  }
  terms['temporaries'] = max(
    whole(lambda _, made: made.temporaries), more.temporaries
  )
  facts = compiled.summary(cut(task.case, _FEW[1]), more)
  seconds = whole(lambda case, m: compiled.summary(case, m)['modelled_seconds'])
  peak = sum(terms.values())
  return facts | {
    'terms': terms,
    'peak': peak,
    'fits': peak <= facts['hbm'],
    'largest': max(terms, key=lambda name: terms[name]),
    'modelled_seconds': seconds,
    'layers': list(_FEW),
  }


def line(name: str, task: Any, made: list[Any]) -> dict[str, Any]:
  """Returns the kept facts of a program, compiled whole or by `_FEW` layers."""
  from composer_jax.plan import compiled, topologies

  in_gib = lambda size: round(size / _GIB, 2)
  need, routings = need_of(task), []
  if len(made) == 1:
    facts = compiled.summary(task.case, made[0])
    for found in compiled.tables(task.case, made[0], _SEQ_LEN):
      if found.title.startswith('By how uneven'):
        routings = found.to_json()['rows']
  else:
    facts = extended(task, made[0], made[1])
  is_tpu = topologies.MACHINES[task.case.machine].platform == 'tpu'
  return {
    'benchmark': 'programs',
    'case': f'memory of a device: {name}',
    'against': '',
    'ours': in_gib(facts['peak']),
    'peer': None,
    'unit': 'GiB',
    'ratio': None,
    'spread': [],
    'limit': in_gib(facts['hbm']),
    'goal': 'fits',
    'met': facts['fits'],
    'command': f'python -m benchmarks.programs {name}',
    'machine': 'libtpu 0.0.42.1' if is_tpu else 'XLA:GPU of jax 0.10.2',
    'where': task.case.where,
    'layers': facts.get('layers'),
    'terms': {k: in_gib(v) for k, v in facts['terms'].items() if v},
    'largest': facts['largest'],
    # An engine's count is that of decode.
    'counted': in_gib(need.total)
    if need and task.program != 'prefill'
    else None,
    'seconds': round(facts['modelled_seconds'], 4),
    'hidden': round(facts['hidden_share'], 3),
    'routings': routings,
    'compile_s': round(facts['compile_seconds']),
  }


def table(lines: list[dict[str, Any]]) -> str:
  """Returns kept lines as Markdown."""
  head = 'program', 'devices', 'GiB of', 'most', 'counted', 'modelled s'
  text = f'| {" | ".join(head)} | fits |\n{"|---" * 7}|\n'
  for row in lines:
    name = row['case'].partition(': ')[2]
    most = f'{row["largest"]} {row["terms"][row["largest"]]:.3g}'
    cells = [
      name.replace('-', ' '),
      row['where'].partition(',')[0].split(' (')[0],
      f'{row["ours"]:.3g} of {row["limit"]:.3g}',
      most,
      f'{row["counted"]:.3g}' if row['counted'] else '',
      f'{row["seconds"]:.3g}' if row['seconds'] else '',
      'yes' if row['met'] else '**no**',
    ]
    text += f'| {" | ".join(cells)} |\n'
  return text


def routings(lines: list[dict[str, Any]]) -> str:
  """Returns rounds and seconds by how uneven routing is, as Markdown."""
  kinds = [
    r['routing'] for r in next(x for x in lines if x['routings'])['routings']
  ]
  text = f'| program | {" | ".join(kinds)} |\n{"|---" * (len(kinds) + 1)}|\n'
  for row in lines:
    if row['routings']:
      cells = [
        f'{r["rounds"]} · {r["rows_GB"]:.3g} GB · {r["seconds"]:.3g} s'
        for r in row['routings']
      ]
      name = row['case'].partition(': ')[2].replace('-', ' ')
      text += f'| {name} | {" | ".join(cells)} |\n'
  return text


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('cases', nargs='*', default=[], metavar='CASE')
  parser.add_argument('--libtpu', default='', help='Folder with libtpu.')
  parser.add_argument('--table', action='store_true')
  arguments = parser.parse_args()
  if arguments.table:
    lines = [*map(json.loads, _RESULTS.read_text().splitlines())]
    print(f'{table(lines)}\n{routings(lines)}')
    return
  if unknown := {*arguments.cases} - {*names()}:
    raise SystemExit(f'{sorted(unknown)} are unknown; known are {names()}.')
  from composer_jax.plan import aot_process, topologies

  topologies.prepare()  # Before jax is imported.
  for name in arguments.cases or names():
    is_engine = name.rpartition('-')[2] in _ENGINE
    tasks = [
      task_of(name, arguments.libtpu, layers)
      for layers in (_FEW if is_engine else (0,))
    ]
    task = task_of(name)
    is_tpu = topologies.MACHINES[task.case.machine].platform == 'tpu'
    start = time.perf_counter()
    try:
      topologies.prepare(task.topology_name, arguments.libtpu)
    except ValueError as error:
      print(f'# left out: {name}: {error}')
      continue
    until = 'schedule' if is_tpu else 'code'
    made = [aot_process.compile_step(each, until) for each in tasks]
    print(f'# {name}: {time.perf_counter() - start:.0f} s')
    print(json.dumps(line(name, task, made)), flush=True)


if __name__ == '__main__':
  main()
