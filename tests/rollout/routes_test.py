"""Routes of a session's turns join to one record, as arrays and as tapes.

An episode joins the arrays of completions; a client of the server joins tapes.
Between the turns weights are swapped and pages are taken, so that the engine
consumes tokens anew and reports it by `routes_start`.
"""

import dataclasses

import numpy as np

from composer_jax.agent import window
from composer_jax.core import records
from composer_jax.core.routes import codec
from composer_jax.models import decoder
from composer_jax.rollout import engine as engines
from tests.rollout import serving, swap_test


class Joined:
  """A window and a tape that get the same completions."""

  def __init__(self, config):
    self.scheme = codec.RouteScheme(
      num_experts=config.moe.num_experts,
      num_active=config.moe.num_active,
      layers=tuple(range(config.num_dense_layers, config.num_layers)),
    )
    self.window, self.tape_TMA = window.Window(), None
    self.starts, self.ends = [], []

  def add(self, context_T, completion):
    self.window.append(context_T, completion)
    sent = codec.decode(
      codec.encode(
        completion.consumed_expert_ids_TMA,
        self.scheme,
        start=completion.routes_start,
      )
    )
    # Routes of newer weights replace the recorded ones.
    kept_TMA = [] if self.tape_TMA is None else [self.tape_TMA[: sent.start]]
    self.tape_TMA = np.concatenate([*kept_TMA, sent.ids_TMA])
    self.starts.append(sent.start)
    self.ends.append(len(self.tape_TMA))
    assert len(self.tape_TMA) == self.window.length - 1

  def trajectory(self):
    return self.window.trajectory(1.3)


def test_turns_join_to_what_the_last_weights_to_consume_each_token_routed(
  make_config, make_variables
):
  config = make_config()
  policies = [decoder.policy(make_variables(config, i)) for i in range(2)]
  # `swap_test` compiles the same programs.
  options = dataclasses.replace(swap_test.OPTIONS, on_swap='refresh')
  engine = engines.Engine(config, policies[0], 0, options)
  joined = Joined(config)

  def turn(context, new, between=lambda: None):
    request = serving.request(0, context, new=new)
    engine.submit(request)
    between()
    outcomes = serving.finish(engine)
    joined.add(request.context_T, outcomes[request.session])

  def steps_then_swap():
    for _ in range(2):
      engine.step()
    engine.swap(policies[1], 2)

  turn(serving.tokens(0, 8), 4)
  turn([7], 3)  # Continues where the last turn ended.
  engine.swap(policies[1], 1)
  turn([8, 9], 3)  # The session is idle while weights are swapped.
  turn([5], 2)
  turn(
    [4], 6, steps_then_swap
  )  # The session is sampling while weights are swapped.
  turn([6], 2)
  # Other sessions take pages until this session has lost its own.
  for n in range(1, 8):
    other_request = serving.request(n, serving.tokens(n, 8), new=30)
    serving.complete(engine, other_request)
  turn([3], 3)
  assert joined.starts == [0, 11, 0, 20, 0, 30, 0]
  assert joined.ends == [11, 15, 20, 23, 30, 33, 37]

  trajectory = joined.trajectory()
  recorded_TMA = trajectory.expert_ids_TMA
  np.testing.assert_array_equal(recorded_TMA[:-1], joined.tape_TMA)
  assert (recorded_TMA[-1] == records.NO_ROUTE).all()
  _, routes_TMA = serving.recompute(
    config, [(policies[1], len(trajectory))], trajectory.tokens_T
  )
  np.testing.assert_array_equal(recorded_TMA[:-1], routes_TMA[:-1])
