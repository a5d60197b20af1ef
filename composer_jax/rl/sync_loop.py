"""The algorithm on one page: sample, judge, compare, update, repeat.

Guided path, 1 of 10: it begins here. The record of an episode is in
`core.records`; how an update works, in `rl.advantage` to `rl.step`.
With `max_staleness` 0 the asynchronous pipeline computes exactly this, with the
rollouts in another process and the weights sent as delta bundles
(`tests/pipeline/sync_equality_test.py`, bit for bit).
"""

from collections.abc import Callable
from typing import Any

from composer_jax.rl import batching, collect, comparison, update
from composer_jax.rl import step as steps
from composer_jax.rollout import engine as engines
from composer_jax.train import state as train_state


def run(
  state: train_state.TrainState,
  functions: steps.Functions,
  collector: collect.Collector,
  make_engine: Callable[[Any, int], engines.Engine],
  options: update.UpdateOptions,
  shape: batching.BatchShape,
  *,
  num_steps: int,
  reference: Any = None,
  teacher: Any = None,
  gate: comparison.Gate | None = None,
) -> tuple[train_state.TrainState, list[dict[str, Any]]]:
  """Trains up to step `num_steps` on fresh groups of the current policy.

  Args:
    state: training state to go on from, donated.
    functions: compiled functions from `rl.step.build`.
    make_engine: (policy values, version) -> engine, called once.
    num_steps: optimizer steps of the whole run.
    reference: policy values for the KL penalty; None without one.
    teacher: policy values that read hints; None without a frozen teacher.
    gate: judges each step; None judges nothing.

  Returns:
    The final state and the metrics of every step.
  """
  engine = make_engine(functions.policy(state), int(state.step))
  history = []
  for step in range(int(state.step), num_steps):
    first = step * options.prompts
    groups = collect.groups(
      collector, engine, range(first, first + options.prompts)
    )
    state, metrics = update.update(
      state,
      groups,
      functions,
      options,
      shape,
      reference=reference,
      teacher=teacher,
      gate=gate,
    )
    engine.swap(functions.policy(state), step + 1)
    history.append(metrics)
  return state, history
