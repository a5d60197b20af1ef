"""Train steps of published models, compiled for the machines they would run on.

    python -m benchmarks.train_compile --libtpu=FOLDER [--code] [CASE ...]

Nothing runs and no accelerator is needed: `composer_jax.plan` compiles the
step that training runs (forward, backward with recomputation, Muon, donated
state) with libtpu or XLA:GPU. libtpu comes from

    pip install --target=FOLDER --no-deps libtpu==0.0.42.1

and cases of H200s need jax-cuda13-plugin and jax-cuda13-pjrt of the version of
jax, in an environment of their own; they are left out where the compiler is
not installed.

Each case is 2,048 tokens of rows of 4,096 on a device, which attend in two
chunks, and recomputation keeps gathered weights ('ahead'). Lines: GB of a
device against its memory; the share of the modelled time of collectives
(`plan.network`) in which products run, from the schedule; products against the
model's; seconds to compile. Tables before them name what products wait for.
Without --code a TPU's compiler stops when memory and schedule are final.
"""

import argparse
import importlib
import json
from typing import Any, NamedTuple

from benchmarks import interleaved

# Half a row a device, since context is 2 everywhere.
_SEQ_LEN = 4096


class _Case(NamedTuple):
  """A step to compile.

  Attributes:
    model: name of a file in configs/models.
    topology: name in `plan.topologies`.
    mesh: replica, fsdp, context. The narrow group (the last two) divides the
      embedding into multiples of a tile of TPUs; on GPUs it is a node.
  """

  model: str
  topology: str
  mesh: str


CASES = {
  'k2_v5p_512': _Case('kimi_k2', 'v5p:8x8x8', '4,64,2'),
  'k2_tpu7x_512': _Case('kimi_k2', 'tpu7x:8x8x4', '4,64,2'),
  'k2_h200_512': _Case('kimi_k2', 'h200:512', '64,4,2'),
  'qwen3_v5p_128': _Case('qwen3_235b_a22b', 'v5p:4x4x8', '2,32,2'),
  'qwen3_tpu7x_128': _Case('qwen3_235b_a22b', 'tpu7x:4x4x4', '2,32,2'),
  'qwen3_h200_128': _Case('qwen3_235b_a22b', 'h200:128', '16,4,2'),
}


def _run(name: str, arguments: argparse.Namespace) -> None:
  from composer_jax.models import flops
  from composer_jax.plan import (
    aot_process,
    compiled,
    muon,
    programs,
    topologies,
  )
  from composer_jax.plan import case as cases
  from composer_jax.train import placement

  subject = CASES[name]
  config = importlib.import_module(f'configs.models.{subject.model}')
  case = cases.make(
    config.get_config().to_dict(),
    topology_name=subject.topology,
    mesh=subject.mesh,
    layout='hsdp',
    dtype='float32',
  )
  options = programs.StepOptions(
    seq_len=_SEQ_LEN,
    accumulate=arguments.accumulate,
    parallel=placement.ParallelOptions(transport=arguments.transport, chunks=2),
    remat_saves=('keys', 'routes', 'ahead'),
  )
  is_tpu = topologies.MACHINES[case.machine].platform == 'tpu'
  task = aot_process.CompileTask(
    case=case,
    options=options,
    topology_name=subject.topology,
    libtpu=arguments.libtpu,
  )
  until = 'schedule' if is_tpu and not arguments.code else 'code'
  program = aot_process.compile_step(task, until)
  if arguments.folder:
    with open(f'{arguments.folder}/{name}.hlo', 'w') as file:
      file.write(program.text)
  summary = compiled.summary(case, program)
  print(
    '\n\n'.join(t.to_text() for t in compiled.tables(case, program, _SEQ_LEN))
  )
  print('#', name, json.dumps(summary), flush=True)

  def line(what: str, value: float, **fields: Any) -> None:
    interleaved.report(
      'train_compile',
      f'{what}: {name}',
      ([value], []),
      **fields,
    )

  line(
    'memory of a device',
    summary['peak'] / 1e9,
    unit='GB',
    limit=summary['hbm'] / 1e9,
    goal='fits',
    met=lambda *_: summary['fits'],
    note=f'a device has {summary["hbm"] / 1e9:.0f} GB',
  )
  line(
    'modelled time of collectives that products hide',
    summary['hidden_share'],
    unit='of the time',
    limit=1.0,
    goal='>= 0.9',
    met=lambda ours, _: ours >= 0.9,
    note=f'collectives take {summary["wire_seconds"]:.3g} s',
  )
  # Backward recomputes the forward pass once.
  model = 4 / 3 * flops.train_per_token(case.model, _SEQ_LEN, causal=True)
  model *= summary['tokens'] / summary['devices']
  model += muon.plan(case).flops
  uncounted = [*summary['unknown_kernels'], *summary['dynamic_loops']]
  without = f', without {", ".join(uncounted)}' if uncounted else ''
  line(
    'operations, with recomputation, Muon and full buffers',
    summary['flops'] / model,
    unit="times the model's",
    limit=1.0,
    goal='<= 1.25',
    met=lambda ours, _: ours <= 1.25,
    note=f'{summary["flops"] / 1e12:.4g} TFLOP of a device{without}',
  )
  line(
    'compilation, ' + ('to code' if summary['has_code'] else 'to the schedule'),
    summary['compile_seconds'],
    unit='s',
    limit=None,
    goal='no involuntary rematerialisation',
    met=lambda *_: not summary['rematerialisation_warnings'],
  )


def _is_there(topology: str, libtpu: str) -> bool:
  from composer_jax.plan import topologies

  try:
    topologies.prepare(topology, libtpu)
  except ValueError as error:
    print(f'# left out: {error}')
    return False
  return True


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('cases', nargs='*', default=[], metavar='CASE')
  parser.add_argument('--libtpu', default='', help='Folder with libtpu.')
  parser.add_argument(
    '--code', action='store_true', help='Compiles to the end.'
  )
  parser.add_argument('--transport', default='auto')
  parser.add_argument('--accumulate', type=int, default=1)
  parser.add_argument('--folder', default='', help='For the programs.')
  arguments = parser.parse_args()
  if unknown := {*arguments.cases} - {*CASES}:
    raise SystemExit(
      f'{sorted(unknown)} are unknown cases; known are {[*CASES]}.'
    )
  for name in arguments.cases or CASES:
    if _is_there(CASES[name].topology, arguments.libtpu):
      _run(name, arguments)


if __name__ == '__main__':
  main()
