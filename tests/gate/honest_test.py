"""Honest runs never stop, however their weights are swapped."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from composer_jax.core import records
from composer_jax.gate import health
from composer_jax.models import decoder
from composer_jax.rl import mismatch, update
from composer_jax.rl import step as steps
from composer_jax.rollout import engine as engines
from composer_jax.train import state as train_state
from tests.gate import catalogue_test
from tests.rl import replayed
from tests.rollout import serving

P, R, NUM_STEPS, STALENESS = 2, 4, 300, 2
GATES = {
  'float32': mismatch.GateOptions(),
  'bfloat16': mismatch.GateOptions(
    max_kl_exact=1e-4, min_exact_agreement=0.97, max_kl_afresh=1e-3
  ),
}


class Stream:
  """Samples groups ahead of the trainer, by an engine that is swapped."""

  def __init__(self, engine):
    self._engine, self._next, self._context = engine, 0, {}
    self._ended: dict[str, records.Completion] = {}

  def _admit(self, until):
    while self._next < until:
      rng = np.random.default_rng(self._next)
      context_T = rng.integers(0, replayed.V, 3 + self._next % 7)
      for member in range(R):
        name = f'{self._next}/{member}'
        self._context[name] = context_T.astype(np.int32)
        request = serving.request(
          0, context_T, new=int(rng.integers(4, 14)), seed=(self._next, member)
        )
        self._engine.submit(dataclasses.replace(request, session=name))
      self._next += 1

  def _step(self):
    for completion in self._engine.step():
      self._ended[completion.session] = completion
      self._engine.close(completion.session)

  def groups(self, step):
    self._admit((step + STALENESS + 1) * P)
    made = []
    for g in range(step * P, (step + 1) * P):
      rollouts = []
      for member in range(R):
        name = f'{g}/{member}'
        while name not in self._ended:
          self._step()
        context_T = self._context.pop(name)
        completion = self._ended.pop(name)
        rollout = catalogue_test.rollout_of(
          completion, context_T, g, member, 1.3
        )
        rollouts.append(rollout)
      group = records.Group(
        group=g, task_id=f'task {g}', rollouts=tuple(rollouts)
      )
      made.append(group)
    return made

  def swap(self, policy, version):
    while self._engine.is_refreshing:
      self._step()
    self._engine.swap(policy, version)


@pytest.mark.slow
@pytest.mark.parametrize('on_swap', ['keep', 'refresh'])
@pytest.mark.parametrize('dtype', GATES)
@pytest.mark.parametrize('name', replayed.CONFIGS)
def test_an_honest_run_never_stops(name, dtype, on_swap):
  config = dataclasses.replace(replayed.CONFIGS[name], compute_dtype=dtype)
  optimizer = optax.adam(1e-3)
  functions = steps.build(decoder.Decoder(config), optimizer)
  shape = replayed.shape(config, rows=4, seq_len=32)
  gate = health.HealthGate(
    functions, shape, GATES[dtype], max_staleness=STALENESS
  )
  options = update.UpdateOptions(
    prompts=P, rollouts_per_prompt=R, mismatch_every=0
  )
  # Copied, because the update donates its state.
  variables = jax.tree.map(jax.numpy.array, replayed.variables(config))
  state = train_state.create(variables, optimizer)
  policy = lambda state: decoder.policy(functions.policy(state))
  engine = engines.Engine(
    config,
    policy(state),
    0,
    engines.EngineOptions(
      num_slots=6, max_len=32, prefill_chunk=4, decode_steps=2, on_swap=on_swap
    ),
  )
  stream, worst = Stream(engine), {}
  swapped = False
  for step in range(NUM_STEPS):
    groups = stream.groups(step)
    swapped |= any(len(g.versions) > 1 for g in groups)
    state, metrics = update.update(
      state, groups, functions, options, shape, gate=gate
    )
    assert metrics['gate'] == []
    for key in ('mismatch_kl_exact', 'mismatch_kl_afresh'):
      worst[key] = max(worst.get(key, 0.0), metrics.get(key, 0.0))
    worst['agreement'] = min(
      worst.get('agreement', 1.0), metrics.get('exact_agreement', 1.0)
    )
    stream.swap(policy(state), step + 1)
  assert swapped
  print(name, dtype, on_swap, worst)
