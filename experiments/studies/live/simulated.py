"""Live learning with simulated users: servers and learner in one process.

Both servers follow their stores, record and answer over HTTP as those of
./run.sh serve do; only the clock of their events is simulated.
"""

import contextlib
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from composer_jax.live import episodes, events, learning, recorder, trial
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import stages
from composer_jax.rollout import engine as engines
from composer_jax.rollout import placing
from composer_jax.serve import app, http_server, lifetime, service
from composer_jax.serve import options as serve_options
from composer_jax.serve.api import chat_format, openai
from composer_jax.telemetry import progress
from experiments.studies.live import users as users_lib

_ARMS = (trial.CONTROL, trial.CANDIDATE)
_LIMITS = serve_options.ServeOptions(
  max_queue=256,
  max_choices=4,
  max_body_bytes=1 << 20,
  default_max_tokens=24,
  max_connections=256,
  head_timeout_s=60.0,
  request_timeout_s=300.0,
  drain_s=5.0,
  session_idle_s=60.0,
  max_sessions=16,
  stall_s=300.0,
  poll_s=0.1,
)
_COMING = 64  # users who come together


@contextlib.contextmanager
def serving(
  workdir: pathlib.Path, arm: str, recorded: Any
) -> Iterator[tuple[str, service.Service]]:
  """Serves an arm's store on a free port; gives its address and service."""
  policy = lifetime.load(
    workdir,
    follow=True,
    store=learning.served_from(workdir, arm),
    mesh=placing.mesh_of(1),
  )
  options = engines.EngineOptions(
    num_slots=16,
    max_len=96,
    prefill_chunk=32,
    prefill_rows=16,
    decode_steps=4,
    max_stop_tokens=4,
    num_top=0,
  )
  engine = engines.Engine(
    policy.model, policy.variables, policy.version, options
  )
  engine.warm()
  served = service.Service(
    engine, _LIMITS, policy.receiver, target_id=policy.target_id
  )
  model = openai.Model(
    name='live',
    tokenizer=policy.tokenizer,
    stop_tokens=policy.stop_tokens,
    form=chat_format.OwnFormat(policy.tokenizer),
  )
  server = http_server.server_of(
    app.build(served, model, recorder=recorded), _LIMITS
  )
  with http_server.bind('127.0.0.1', 0, '') as sock:
    sock.listen()
    served.start()
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    try:
      yield http_server.url_of(sock), served
    finally:
      server.should_exit = True
      thread.join()
      served.stop()


@dataclasses.dataclass
class SimulatedWorld:
  """Servers of both arms, and users who come whenever the learner waits."""

  crowd: users_lib.Users
  recorders: dict[str, recorder.Recorder]
  services: dict[str, service.Service]
  learner: Any

  def wait(self) -> bool:
    """Has the next users come, once servers have the newest weights."""
    self._await_weights()
    self.crowd.come(_COMING)
    for each in self.recorders.values():
      each.settle()
    return True

  def _await_weights(self) -> None:
    """Waits until every arm serves what its store has."""
    deadline = time.monotonic() + 120
    due = self.learner.served()
    while any(self.services[arm].version != v for arm, v in due.items()):
      if time.monotonic() > deadline:
        shown = {a: (s.version, s.problem) for a, s in self.services.items()}
        raise RuntimeError(f'Servers have {shown} and should have {due}.')
      time.sleep(0.05)


def run(
  spec: Any,
  systems: Any,
  workdir: pathlib.Path,
  command: Any,
  folder: pathlib.Path,
  suites: Any,
  cycles: int,
  patience: float,
) -> list[dict[str, Any]]:
  """Runs cycles, and pretraining and SFT before if need be; returns results."""
  say = progress.teller('live')
  with contextlib.ExitStack() as stack:
    job = stack.enter_context(jobs.open_run(spec, systems, workdir, command))
    stages.pretrain(job)
    stages.finetune(job)
    recorded = episodes.Episodes(folder, events.WindowOptions())
    clock = users_lib.Clock(_later(folder))
    recorders = {
      arm: recorder.Recorder(recorded, arm=arm, now=clock) for arm in _ARMS
    }
    for each in recorders.values():
      stack.callback(each.close)
    ports = learning.LivePorts(
      play=suites.play, wait=lambda: world.wait(), now=clock, say=say
    )
    learner = learning.Learner(job, recorded, spec.systems['live'], ports)
    stack.callback(learner.close)
    served = {
      arm: stack.enter_context(serving(workdir, arm, recorders[arm]))
      for arm in _ARMS
    }
    crowd = users_lib.Users(
      urls={arm: url for arm, (url, _) in served.items()},
      clock=clock,
      seed=spec.seed,
      patience=patience,
    )
    crowd.skip(len(recorded.claims()))
    world = SimulatedWorld(
      crowd=crowd,
      recorders=recorders,
      services={arm: each for arm, (_, each) in served.items()},
      learner=learner,
    )
    return [learner.cycle(number) for number in range(1, cycles + 1)]


def _later(folder: pathlib.Path) -> float:
  """Returns a time after all that is recorded."""
  latest = 1.8e9
  for path in folder.glob('users/*/*/events.jsonl'):
    for line in path.read_text().splitlines():
      latest = max(latest, json.loads(line)['at'])
  return latest + 7300.0
