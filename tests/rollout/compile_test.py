"""After `warm()` the engine compiles nothing more."""

import jax
import numpy as np
import pytest

from composer_jax.models import decoder
from composer_jax.rollout import engine as engines
from tests.rollout import serving

OPTIONS = engines.EngineOptions(
  num_slots=4,
  max_len=serving.LENGTH,
  prefill_chunk=4,
  prefill_rows=3,
  decode_steps=2,
  page_size=4,
  num_pages=16,
  on_swap='refresh',
)


@pytest.fixture
def compiled():
  """Names of the functions compiled while the test runs."""
  names = []

  def listen(event, duration, **details):
    del duration
    if event == '/jax/core/compile/backend_compile_duration':
      names.append(details.get('fun_name', event))

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_nothing_is_compiled_in_steady_state(
  make_config, make_variables, compiled
):
  config = make_config(num_layers=1, num_dense_layers=0)
  # Weights as training leaves them, on a device, and as a store returns them.
  policies = [
    jax.device_put(decoder.policy(make_variables(config, 0))),
    jax.tree.map(np.asarray, decoder.policy(make_variables(config, 1))),
  ]
  engine = engines.Engine(config, policies[0], 0, OPTIONS)
  engine.warm()
  engine.swap(policies[1], 0)
  names = {'extend 3', 'decode 4', 'decode 4 truncating'}
  assert engine.traces == dict.fromkeys(names, 1)
  compiled.clear()
  rng = np.random.default_rng(0)
  finished, version = 0, 0
  for index in range(30):
    engine.submit(
      serving.request(
        index,
        serving.tokens(index % 5, int(rng.integers(1, 20))),
        new=int(rng.integers(1, 12)),
        top_k=int(rng.integers(0, 3)),
        temperature=float(rng.choice([0, 0.5, 1])),
      )
    )
    for _ in range(rng.integers(0, 6)):
      finished += len(engine.step())
    if index % 10 == 9:
      version += 1
      engine.swap(policies[version % 2], version)
    if index > 20 and engine.is_open(f'session {index - 15}'):
      engine.close(f'session {index - 15}')
  finished += len(serving.finish(engine))
  assert finished > 15
  assert compiled == []
  assert engine.traces == dict.fromkeys(names, 1)
  # A second engine of the same shapes reuses the programs.
  other_engine = engines.Engine(config, policies[0], 0, OPTIONS)
  other_engine.warm()
  assert other_engine.traces == dict.fromkeys(names, 1)
