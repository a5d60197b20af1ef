"""The training side of asynchronous RL: groups in, bundles out."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from composer_jax.core import records
from composer_jax.pipeline import buffer as buffers
from composer_jax.pipeline import spec as specs
from composer_jax.rl import mismatch
from composer_jax.train import state as train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ports:
  """Everything the trainer touches outside itself.

  Attributes:
    buffer: finished groups.
    wait: (group ids) -> groups; blocks. Placement `processes` watches the
      rollout process meanwhile, `colocated` samples the groups here.
    accept: (groups) -> None; raises for groups that were sampled by weights
      other than the published ones.
    publish: (state, version) -> None; waits for the publication under way, then
      begins to publish the state's policy. The state may be donated at once.
    save: (step, state, is_last) -> None; starts a checkpoint if one is due.
    saved_step: () -> the newest step whose checkpoint is durable.
    log: (step, metrics, groups) -> None; writes metrics and readable episodes.
    prepare: (state) -> None; what can be done before the first groups.
  """

  buffer: buffers.GroupBuffer
  wait: Callable[[list[int]], list[records.Group]]
  accept: Callable[[list[records.Group]], None]
  publish: Callable[[train_state.TrainState, int], None]
  save: Callable[[int, train_state.TrainState, bool], None]
  saved_step: Callable[[], int]
  log: Callable[[int, dict[str, Any], list[records.Group]], None]
  prepare: Callable[[train_state.TrainState], None] = lambda state: None


def run(
  state: train_state.TrainState,
  learn: Callable[..., tuple[train_state.TrainState, dict[str, Any]]],
  ports: Ports,
  rl: specs.RLSection,
) -> train_state.TrainState:
  """Trains until `rl.steps`, from whatever step `state` is at.

  Consumes: finished Groups from the buffer, in the order of their ids.
  Waits for: all groups of the step; one staler than max_staleness is refused.
  Woken by: rollout workers finishing.
  Produces: a published policy after each step, and checkpoints as often as the
    config says.

  Args:
    state: training state to go on from, donated.
    learn: (state, groups) -> (state, metrics), as `rl.update.update`.
    rl: groups of a step, steps of the run, and the bound on staleness.

  Raises:
    ValueError: a group is too stale or was sampled by weights other than the
      published ones, or `ports.wait` raised it.
    mismatch.OutOfBand: the gate stopped a step; its metrics are written, its
      gradient is in neither weights nor checkpoints.
    FloatingPointError: a loss or gradient is not finite.
  """
  P = rl.prompts
  start = int(state.step)
  # Publish `start` again: a kill may have come between checkpoint and pointer.
  ports.publish(state, start)
  if start < rl.steps:
    ports.prepare(state)
  for step in range(start, rl.steps):
    began = time.monotonic()
    groups = ports.wait(list(range(step * P, (step + 1) * P)))
    waited = time.monotonic()
    check_staleness(groups, step, rl.max_staleness)
    ports.accept(groups)
    try:
      state, metrics = learn(state, groups)
    except mismatch.OutOfBand as error:
      # The report of a stopped run needs the metrics that stopped it.
      ports.log(step + 1, error.metrics, groups)
      raise
    trained = time.monotonic()
    ports.publish(state, step + 1)
    metrics |= {
      'wait_s': waited - began,
      'train_s': trained - waited,
      'publish_s': time.monotonic() - trained,
    }
    # Before the checkpoint: a resumed run relies on the metrics of its step.
    ports.log(step + 1, metrics, groups)
    ports.save(step + 1, state, step + 1 == rl.steps)
    ports.buffer.remove_below(ports.saved_step() * P)
  return state


def check_staleness(
  groups: list[records.Group], version: int, max_staleness: int
) -> None:
  """Refuses groups that `buffer.admitted` does not allow.

  Raises:
    ValueError: a token was sampled, or its context computed, by a policy older
      than the bound allows, or newer than the trained one.
  """
  for group in groups:
    oldest, newest = min(group.versions), max(group.versions)
    if not version - max_staleness <= oldest <= newest <= version:
      raise ValueError(
        f'Group {group.group} was sampled by versions {oldest} to {newest}; '
        f'version {version} with max_staleness {max_staleness} trains on '
        f'{max(version - max_staleness, 0)} to {version}. Delete its file in '
        'groups/ and run the same command again to sample it anew.'
      )
