"""Rolls out for a run on the engine of a server while no client needs it.

A client's request goes first: while one is open, no turn of an episode is given
to the engine, and the fleet is asked for nothing. An episode that has begun
waits for clients as long as a worker under notice may drain, and then goes to
other workers, with its finished turns.

  Consumes: leases and policies, through the worker; outcomes of its requests.
  Waits for: clients, who go first.
  Woken by: the engine's thread, before each step.
  Produces: requests of the engine, and the rollouts of a worker.
"""

import logging
from collections.abc import Callable

from composer_jax.core import records
from composer_jax.pipeline import rollout_worker

_log = logging.getLogger(__name__)


class Lender:
  """A rollout worker as guest of a service.

  Attributes:
    problem: why the engine is no longer lent; '' while it is. Its leases are
      then given back.
  """

  def __init__(self, worker: rollout_worker.RolloutWorker):
    self.problem = ''
    self._worker = worker
    # Until the run is joined again, which goes back with its weights.
    self._rewound: rollout_worker.Rewound | None = None

  def start(self, wake: Callable[[], None]) -> None:
    self._worker.policy.wake = wake
    self._worker.leases.start()

  def before_step(self, num_open: int) -> None:
    worker = self._worker
    if self.problem:
      return
    try:
      if self._rewound is None:
        self._play(num_open)
      elif not worker.served.engine.stats().sessions:
        worker.rejoin(self._rewound)
        self._rewound = None
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
      # Clients are served on, by the policy that is there.
      self._end(f'Nothing is lent any more: {error}')
    if not num_open:
      worker.policy.take_requests(wait=False)

  def _play(self, num_open: int) -> None:
    worker = self._worker
    worker.leases.pause(num_open > 0)
    try:
      worker.before_step()
    except rollout_worker.Rewound as rewound:
      # Sessions of clients go on with the weights that they began with.
      self._rewound = rewound
      worker.give_up()
      return
    if worker.leases.is_over and not worker.open_episodes:
      self._end('The run is over.')

  def _end(self, problem: str) -> None:
    _log.warning('%s', problem)
    self.problem = problem
    # Or its leases would wait here as those of a worker that stalls.
    self._worker.give_up()

  def take(self, outcome: records.Completion | records.Failure) -> bool:
    return self._worker.policy.hand_over(outcome)
