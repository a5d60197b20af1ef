"""Bytes that training takes on a device: counted, and as compiled.

    python -m benchmarks.fits --libtpu=FOLDER [CASE ...]

Nothing runs and no accelerator is needed. A case is MODEL_MACHINE_DEVICES_HOW,
such as qwen3_v5p_8_adapters. HOW is float32, bfloat16 or int8 (all weights,
with state of this dtype), moved (all weights, float32 state in the memory of
the host; not for GPUs, whose compiler knows no such memory without one), or
adapters (of rank 16 on attention, dense and shared feed-forward). The step is
AdamW's on rows of 4,096 tokens, one a device and microbatch, with gradients of
two microbatches added up, in layout hsdp on a mesh of 1,N,1. `plan.memory`
counts what `plan.programs` compiles (see `benchmarks.train_compile`).
"""

import argparse
import dataclasses
import importlib
import itertools
import json
from typing import Any

from benchmarks import interleaved

_SEQ_LEN = 4096
_ROOM = 1.25  # Less than the default, which is for uneven loads.
_TOPOLOGIES = {
  'v5p': {1: 'v5p:1x1x1', 8: 'v5p:2x2x2', 64: 'v5p:4x4x4'},
  'h200': {n: f'h200:{n}' for n in (1, 8, 64)},
}
_MODELS = {
  'qwen3': 'qwen3_30b_a3b',
  'oss': 'qwen3_30b_a3b',
  'moonlight': 'moonlight_16b_a3b',
  'k2': 'kimi_k2',
}
# Its sizes in this project's layers.
_GPT_OSS = dict(vocab_size=201088, embed_dim=2880, num_layers=24)
_HOW = ('float32', 'bfloat16', 'int8', 'moved', 'adapters')
CASES = [
  '_'.join(map(str, case))
  for case in itertools.product(_MODELS, _TOPOLOGIES, (1, 8, 64), _HOW)
  if case[1::2] != ('h200', 'moved')
]


def _fields(name: str) -> dict[str, Any]:
  module = importlib.import_module(f'configs.models.{_MODELS[name]}')
  fields = module.get_config().to_dict()
  if name == 'oss':
    fields |= _GPT_OSS
    fields['attention'] |= dict(num_heads=64, num_kv_heads=8, head_dim=64)
    fields['moe'] |= dict(num_experts=32, num_active=4, ffw_dim=2880)
  return fields


def _run(name: str, libtpu: str) -> None:
  from composer_jax.core import platforms
  from composer_jax.models import config as model_config
  from composer_jax.optim import groups
  from composer_jax.pipeline import spec as specs
  from composer_jax.plan import aot_process, memory, programs, topologies
  from composer_jax.plan import case as cases
  from composer_jax.train import placement as train_placement

  model, machine, devices, how = name.split('_')
  count = int(devices)
  topology = _TOPOLOGIES[machine][count]
  case = cases.make(
    _fields(model),
    topology_name=topology,
    mesh=f'1,{count},1',
    layout='hsdp',
    dtype='float32',
  )
  if how == 'adapters':
    ranks = model_config.AdapterConfig(attention=16, shared=16, dense=16)
    adapted = dataclasses.replace(case.model, adapters=ranks)
    case = dataclasses.replace(case, model=adapted)
  state = how if how in ('bfloat16', 'int8') else 'float32'
  optimizer = dict(state=state, offload=how == 'moved')
  platform = topologies.MACHINES[machine].platform
  with platforms.targeting(platform):
    need = memory.training(
      'train',
      case.model,
      groups.OptimizerOptions(name='adam', **optimizer),
      specs.Mesh(fsdp=count),
      case.layout,
      (count, _SEQ_LEN, True),
    )
  task = aot_process.CompileTask(
    case=case,
    options=programs.StepOptions(
      seq_len=_SEQ_LEN,
      accumulate=2,
      optimizer='adam',
      parallel=train_placement.ParallelOptions(room=_ROOM),
      **optimizer,
    ),
    topology_name=topology,
    libtpu=libtpu,
  )
  until = 'schedule' if platform == 'tpu' else 'code'
  program = aot_process.compile_step(task, until)
  print(
    '#',
    name,
    json.dumps(
      {
        'terms': {k: round(v / 2**30, 2) for k, v in need.terms.items()},
        'arguments': round(program.traced.arguments / 2**30, 2),
        'temporaries': round(program.temporaries / 2**30, 2),
        'seconds': round(program.traced.seconds + program.seconds),
        'live': [(a.bytes >> 20, a.name, a.scope) for a in program.live[:12]],
      }
    ),
  )
  interleaved.report(
    'fits',
    name,
    ([need.total / 2**30], [program.peak / 2**30]),
    against='the compiler',
    unit='GiB',
    limit=None,
    goal='within 10 %',
    met=lambda _, ratio: abs(ratio - 1) <= 0.1,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('cases', nargs='*', default=[], metavar='CASE')
  parser.add_argument('--libtpu', default='', help='Folder with libtpu.')
  arguments = parser.parse_args()
  if unknown := {*arguments.cases} - {*CASES}:
    raise SystemExit(
      f'{sorted(unknown)} are unknown cases; known are {[*CASES]}.'
    )
  from composer_jax.plan import topologies

  for name in arguments.cases or CASES:
    _, machine, devices, _ = name.split('_')
    try:
      topologies.prepare(_TOPOLOGIES[machine][int(devices)], arguments.libtpu)
    except ValueError as error:
      print(f'# left out: {name}: {error}')
      continue
    _run(name, arguments.libtpu)


if __name__ == '__main__':
  main()
