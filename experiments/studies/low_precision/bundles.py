"""Publishes the experts of a few steps as values and as codes; notes sizes.

  python -m experiments.studies.low_precision.bundles \\
      --workdir=runs/low_precision

The trainer computes in NVFP4. The first arm is the bfloat16 policy of the same
masters, which has no format.
"""

import dataclasses
import functools
import itertools
import pathlib
import tempfile
from typing import Any

import jax

from composer_jax.delta import publisher
from composer_jax.models import decoder
from experiments import start
from experiments.studies import results
from experiments.studies.low_precision import run
from experiments.studies.muon import training

_ROOT = pathlib.Path(__file__).parent
_RATES = (1e-5, 2e-4)  # of RL, and of the tiny job's RL
_STEPS = 6


def _states(config, rate, data):
  """Yields the state after each step of AdamW."""
  arm = training.Arm(optimizer='adam', learning_rate=rate, seed=0, steps=300)
  options = dataclasses.replace(arm.options(), warmup_steps=1)
  state, step = run.begin(config, options, 300, 0, False)
  step = jax.jit(step)
  yield state
  for batch in itertools.islice(run.stream(data, 0), _STEPS):
    yield (state := step(state, batch))


def main() -> None:
  data = run.corpus()
  config = run.model('nvfp4', 'mxfp8')
  codes = dataclasses.replace(config.precision, codes=True)
  arms: dict[str, Any] = {
    'bf16': config.precise(),
    'nvfp4, values': config,
    'nvfp4, codes': dataclasses.replace(config, precision=codes),
  }
  casts = {
    name: jax.jit(functools.partial(decoder.policy, config=arm))
    for name, arm in arms.items()
  }
  for rate in _RATES:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
      senders = {
        name: publisher.Publisher(f'{folder}/{i}', f'{folder}/{i}.key')
        for i, name in enumerate(arms)
      }
      for version, state in enumerate(_states(config, rate, data)):
        for name, sender in senders.items():
          policy = casts[name](state.variables())
          moe = policy['params']['moe_layers']['moe']
          sender.publish({n: moe[n] for n in ('gate_up', 'down')}, version)
          sender.wait()
          (info,) = sender.results()
          row = dict(stage='bundles', rate=rate, held=name, step=version)
          rows.append(row | dict(kind=info.kind, bytes=info.bytes))
      for sender in senders.values():
        sender.close()
    results.add(_ROOT / 'results', rows, by=('stage', 'rate', 'held'))


if __name__ == '__main__':
  start.run(main)
