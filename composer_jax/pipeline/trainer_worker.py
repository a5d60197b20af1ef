"""The training side of asynchronous RL: groups in, bundles out.

Which groups a step trains on is in `pipeline.consumption`.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from composer_jax.core import records
from composer_jax.pipeline import spec as specs
from composer_jax.rl import mismatch
from composer_jax.train import state as train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ports:
  """Everything the trainer touches outside itself.

  Attributes:
    wait: (step) -> the groups that it trains on; blocks. Placement `processes`
      watches the run's workers meanwhile, `colocated` samples the groups here.
    accept: (step, groups) -> None; remembers them, and lets groups be sampled
      that the next policy may begin.
    publish: (state, version) -> None; waits for the publication under way, then
      begins to publish the state's policy. The state may be donated at once.
    save: (step, state, is_last) -> None; starts a checkpoint if one is due.
    trained: (step) -> None; its groups are in the state.
    log: (step, metrics, groups) -> None; writes metrics and readable episodes.
    prepare: (state) -> None; what can be done before the first groups.
  """

  wait: Callable[[int], list[records.Group]]
  accept: Callable[[int, list[records.Group]], None]
  publish: Callable[[train_state.TrainState, int], None]
  save: Callable[[int, train_state.TrainState, bool], None]
  trained: Callable[[int], None]
  log: Callable[[int, dict[str, Any], list[records.Group]], None]
  prepare: Callable[[train_state.TrainState], None] = lambda state: None


def run(
  state: train_state.TrainState,
  learn: Callable[..., tuple[train_state.TrainState, dict[str, Any]]],
  ports: Ports,
  rl: specs.RLSection,
) -> train_state.TrainState:
  """Trains until `rl.steps`, from whatever step `state` is at.

  Consumes: finished Groups, each once.
  Waits for: all groups of the step.
  Woken by: rollout workers finishing.
  Produces: a published policy after each step, and checkpoints as often as the
    config says.

  Args:
    state: training state to go on from, donated.
    learn: (state, groups) -> (state, metrics), as `rl.update.update`.
    rl: steps of the run.

  Raises:
    ValueError: `ports.wait` raised it.
    mismatch.OutOfBand: the gate stopped a step; its metrics are written, its
      gradient is in neither weights nor checkpoints.
    FloatingPointError: a loss or gradient is not finite.
  """
  start = int(state.step)
  # Publish `start` again: a kill may have come between checkpoint and pointer.
  ports.publish(state, start)
  if start < rl.steps:
    ports.prepare(state)
  for step in range(start, rl.steps):
    began = time.monotonic()
    groups = ports.wait(step)
    waited = time.monotonic()
    ports.accept(step, groups)
    try:
      state, metrics = learn(state, groups)
    except mismatch.OutOfBand as error:
      # The report of a stopped run needs the metrics that stopped it.
      ports.log(step + 1, error.metrics, groups)
      raise
    trained = time.monotonic()
    ports.publish(state, step + 1)
    ports.trained(step)
    metrics |= {
      'wait_s': waited - began,
      'train_s': trained - waited,
      'publish_s': time.monotonic() - trained,
    }
    # Before the checkpoint: a resumed run relies on the metrics of its step.
    ports.log(step + 1, metrics, groups)
    ports.save(step + 1, state, step + 1 == rl.steps)
  return state


def fault_of_staleness(
  group: records.Group, step: int, max_staleness: int
) -> str:
  """Says why a group may not train at a step; '' where it may.

  No token may be sampled, nor its context computed, by a policy older than the
  bound allows, or newer than the trained one.
  """
  oldest, newest = min(group.versions), max(group.versions)
  if step - max_staleness <= oldest <= newest <= step:
    return ''
  return (
    f'Group {group.group} was sampled by versions {oldest} to {newest}; '
    f'version {step} with max_staleness {max_staleness} trains on '
    f'{max(step - max_staleness, 0)} to {step}'
  )
