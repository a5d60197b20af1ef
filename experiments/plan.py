"""Answers questions about a model on machines that are not there.

  python -m experiments.plan --config=configs/models/kimi_k2.py \
      --topology=v5p:8x8x8 --what=muon

Questions: 'params', the place and the bytes of every parameter; 'muon', which
device orthogonalises what, its operations, bytes and modelled times. Nothing is
allocated. What a flag, a config file or a mesh can be wrong in ends the program
with one line; --debug adds the traceback.
"""

import json

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
_WHAT = flags.DEFINE_string('what', 'params', 'The question: params, muon.')
_MESH = flags.DEFINE_string(
  'mesh',
  '',
  'replica,fsdp,context. Default: 2,N/4,2 where 4 divides the N devices, '
  '2,2,2 for 8; else 1,N,1.',
)
_LAYOUT = flags.DEFINE_string('layout', 'hsdp', 'hsdp or data_parallel.')
_DTYPE = flags.DEFINE_string('dtype', 'float32', 'Of the parameters.')
_JSON = flags.DEFINE_bool('json', False, 'Prints one JSON object.')


def _answer(fields):
  topologies.prepare()
  # After the flags: these imports load jax.
  from composer_jax.plan import case, muon, params

  # A question is a function from a Case to a list of tables.
  questions = {'muon': muon.tables, 'params': params.tables}
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
  except ValueError as error:
    start.fail(error)
  if _JSON.value:
    print(json.dumps({_WHAT.value: [table.to_json() for table in tables]}))
  else:
    print('\n\n'.join(table.to_text() for table in tables))


if __name__ == '__main__':
  start.run(_main)
