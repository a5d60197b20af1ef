"""Answers questions about a model on machines that are not there.

  python -m experiments.plan --config=configs/models/kimi_k2.py \
      --topology=v5p:8x8x8 --what=compile --libtpu=FOLDER

Questions: 'params', the place and the bytes of every parameter; 'muon', which
device orthogonalises what, its operations, bytes and modelled times; 'comms',
the bytes of a train step against the least; 'compile', the train step as the
machines' own compiler makes it: whether it fits, what it computes and sends,
and how much of that has products beside it. Nothing is allocated. What a flag,
a config file or a mesh can be wrong in ends the program with one line; --debug
adds the traceback.
"""

import json
import sys

from absl import flags

from composer_jax.plan import topologies
from experiments import start

_CONFIG = start.define_config(
  'configs/models/tiny.py',
  'A model config, or a config of a run, whose model is taken.',
)
_TOPOLOGY = flags.DEFINE_string(
  'topology', 'cpu:8', f'Machines: {", ".join(topologies.FORMS)}.'
)
_WHAT = flags.DEFINE_string(
  'what', 'params', 'The question: params, muon, comms, compile.'
)
_MESH = flags.DEFINE_string(
  'mesh',
  '',
  'replica,fsdp,context. Default: 2,N/4,2 where 4 divides the N devices, '
  '2,2,2 for 8; else 1,N,1.',
)
_LAYOUT = flags.DEFINE_string('layout', 'hsdp', 'hsdp or data_parallel.')
_DTYPE = flags.DEFINE_string('dtype', 'float32', 'Of the parameters.')
_JSON = flags.DEFINE_bool('json', False, 'Prints one JSON object.')
# Of comms and compile.
_BATCH = flags.DEFINE_integer(
  'batch', 0, 'Rows of a step; 0: one in a microbatch on each device of rows.'
)
_SEQ_LEN = flags.DEFINE_integer('seq_len', 4096, 'Tokens of a row.')
_ACCUMULATE = flags.DEFINE_integer('accumulate', 1, 'Microbatches of a step.')
_TRANSPORT = flags.DEFINE_string(
  'transport', 'auto', 'Of tokens to experts: auto, ring, a2a, ragged_a2a.'
)
_BUCKET = flags.DEFINE_float(
  'bucket', 1.25, 'Room for received rows in means; 0 for the worst case.'
)
# Of compile.
_SAVES = flags.DEFINE_list(
  'remat_saves', None, 'What recomputing keeps; default: as the config has it.'
)
_OPTIMIZER = flags.DEFINE_string('optimizer', 'muon', 'muon or adam.')
_UNTIL = flags.DEFINE_string(
  'until', 'code', 'code, or schedule, which a TPU compiler has much sooner.'
)
_LIBTPU = flags.DEFINE_string(
  'libtpu', '', 'Folder: pip install --target=FOLDER --no-deps libtpu==0.0.42.1'
)


def _compile(case):
  from composer_jax.plan import aot, aot_process, compiled
  from composer_jax.train import placement

  options = aot.StepOptions(
    batch_size=_BATCH.value,
    seq_len=_SEQ_LEN.value,
    accumulate=_ACCUMULATE.value,
    optimizer=_OPTIMIZER.value,
    bucket=_BUCKET.value,
    remat_saves=None if _SAVES.value is None else tuple(_SAVES.value),
    parallel=placement.ParallelOptions(transport=_TRANSPORT.value),
  )
  task = aot_process.Task(
    case=case,
    options=options,
    topology_name=_TOPOLOGY.value,
    libtpu=_LIBTPU.value,
  )
  return compiled.tables(
    case, aot_process.compile_step(task, _UNTIL.value), options.seq_len
  )


def _comms(case):
  from composer_jax.plan import comms

  count = _ACCUMULATE.value
  return comms.tables(
    case,
    batch_size=_BATCH.value // count,
    seq_len=_SEQ_LEN.value,
    transport=_TRANSPORT.value,
    bucket=_BUCKET.value or None,
    microbatches=count,
  )


def _answer(fields):
  topologies.prepare()
  # After the flags: these imports load jax.
  from composer_jax.plan import case, muon, params

  # A question is a function from a Case to a list of tables.
  questions = {
    'comms': _comms,
    'compile': _compile,
    'muon': muon.tables,
    'params': params.tables,
  }
  if _WHAT.value not in questions:
    raise ValueError(
      f'--what {_WHAT.value!r} is not one of {sorted(questions)}.'
    )
  return questions[_WHAT.value](
    case.make(
      fields,
      topology_name=_TOPOLOGY.value,
      mesh=_MESH.value,
      layout=_LAYOUT.value,
      dtype=_DTYPE.value,
    )
  )


def _main():
  try:
    tables = _answer(start.config_fields(_CONFIG))
  except (ValueError, RuntimeError) as error:
    start.fail(error)
  if _JSON.value:
    print(json.dumps({_WHAT.value: [table.to_json() for table in tables]}))
  else:
    print('\n\n'.join(table.to_text() for table in tables))
  if any(table.title.startswith('FAILED') for table in tables):
    sys.exit(1)


if __name__ == '__main__':
  start.run(_main)
