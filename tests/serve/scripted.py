"""An engine that samples the tokens of a test, and a server in a thread."""

import contextlib
import dataclasses
import threading
import time
import types

import numpy as np
import uvicorn

from composer_jax.core import records, seams
from composer_jax.rollout import sessions
from composer_jax.serve import app, http_server, service
from composer_jax.serve import options as options_lib
from composer_jax.serve.api import openai

LIMITS = options_lib.ServeOptions(
  max_queue=4,
  max_choices=4,
  max_body_bytes=20_000,
  default_max_tokens=16,
  max_connections=200,
  head_timeout_s=20.0,
  request_timeout_s=20.0,
  drain_s=5.0,
  session_idle_s=60.0,
  max_sessions=4,
  stall_s=30.0,
  poll_s=0.01,
)


@dataclasses.dataclass(frozen=True)
class Stats:
  sessions: int
  running: int
  waiting: int
  swap_s: float = 0.0
  sampled_tokens: int = 0
  draft_tokens: int = 0


@dataclasses.dataclass
class _Work:
  request: records.SampleRequest
  on_tokens: object
  script: list
  guide: object = None
  sampled: list = dataclasses.field(default_factory=list)


class ScriptedEngine:
  """Samples `script(request)`, `per_step` tokens of each session at a time.

  Where the script raises, the engine dies; a None in it is a failure.
  """

  def __init__(self, script, *, num_slots=2, per_step=1, version=7, max_len=64):
    self.script, self.per_step, self.version = script, per_step, version
    self.options = types.SimpleNamespace(
      num_slots=num_slots, max_len=max_len, max_stop_tokens=4, num_top=2
    )
    self.config = types.SimpleNamespace(
      vocab_size=400,
      num_layers=3,
      num_dense_layers=1,
      moe=types.SimpleNamespace(num_experts=4, num_active=2),
    )
    self.works, self.held, self.swaps = {}, {}, []
    self.draws = np.random.default_rng(0)
    # Cleared to let the engine stand still.
    self.go = threading.Event()
    self.go.set()
    self.dies = None

  @property
  def num_unfinished(self):
    return len(self.works)

  def stats(self):
    running = min(len(self.works), self.options.num_slots)
    return Stats(len(self.held), running, len(self.works) - running)

  def submit(self, request, on_tokens=None, guide=None, is_first=False):
    held = self.held.get(request.session, 0)
    self.held[request.session] = held + len(request.context_T)
    script = list(self.script(request))
    work = _Work(request, on_tokens, script, guide)
    self.works[request.session] = work

  def close(self, session):
    self.works.pop(session, None)
    self.held.pop(session, None)

  def place(self, variables, version):
    if variables == 'damaged':
      raise ValueError(f'params/x of version {version} is missing.')
    return types.SimpleNamespace(version=version)

  is_refreshing = False

  def switch(self, placed):
    assert placed.version >= self.version or not self.held
    self.version = placed.version
    self.swaps.append(placed.version)

  def step(self):
    if self.dies:
      raise self.dies
    self.go.wait(0.01)
    if not self.go.is_set():
      return []
    ended = []
    for work in list(self.works.values())[: self.options.num_slots]:
      ended += self._advance(work)
    return ended

  def room(self, expected):
    return None

  def _guided(self, guide, wanted):
    """Returns what is wanted if that is likeliest, else another token."""
    bias_V = np.array(guide.bias())
    assert bias_V.max() > -np.inf
    bias_V[wanted] += 0.5
    likeliest = np.flatnonzero(bias_V == bias_V.max())
    token = int(self.draws.choice(likeliest))
    guide.take(token)
    return [token]

  def _advance(self, work):
    request, name = work.request, work.request.session
    room = request.max_new_tokens - len(work.sampled)
    part = work.script[len(work.sampled) :][: min(self.per_step, room)]
    if work.guide is not None:
      part = self._guided(work.guide, part[:1])
    if None in part:
      self.close(name)
      return [
        records.Failure(
          session=name, position=5, version=self.version, reason='NaN logits.'
        )
      ]
    stops = [i for i, t in enumerate(part) if t in request.stop_tokens]
    part = part[: stops[0] + 1] if stops else part
    work.sampled += part
    if work.on_tokens is not None:
      work.on_tokens(
        sessions.SampledTokens(
          session=name,
          position=self.held[name],
          **_arrays(part, self.version),
        )
      )
    if not stops and len(work.sampled) < request.max_new_tokens:
      return []
    del self.works[name]
    self.held[name] += len(work.sampled)
    consumed = len(request.context_T) + len(work.sampled) - 1
    start = self.held[name] - consumed - 1
    # A swap came after the session's first token.
    consumed_T = np.full(consumed, self.version, np.int32)
    consumed_T[: not start] -= 1
    ids_TMA = np.broadcast_to(np.arange(2, dtype=np.uint16), (consumed, 2, 2))
    return [
      records.Completion(
        session=name,
        consumed_expert_ids_TMA=np.ascontiguousarray(ids_TMA),
        consumed_version_T=consumed_T,
        stopped=bool(stops),
        routes_start=start,
        num_cached=3,
        **_arrays(work.sampled, self.version),
      )
    ]


class ScriptedReceiver:
  """Receives what `poll()` says: version and variables."""

  problem = None

  def __init__(self, poll):
    self._poll = poll

  def poll(self):
    update = self._poll()
    if update is None:
      return None
    version, variables = update
    return seams.ReceivedPolicy(
      version=version, target_id='', variables=variables, received={}
    )


def _arrays(tokens, version):
  tokens_T = np.array(tokens, np.int32)
  top_ids_TX = np.stack([tokens_T, tokens_T + 1], axis=1)
  return {
    'tokens_T': tokens_T,
    'logprobs_T': np.full(len(tokens), -0.25, np.float32),
    'raw_logprobs_T': np.full(len(tokens), -0.5, np.float32),
    'policy_version_T': np.full(len(tokens), version, np.int32),
    'context_version_T': np.full(len(tokens), version - 1, np.int32),
    'top_ids_TX': top_ids_TX.astype(np.int32),
    'top_logprobs_TX': np.full((len(tokens), 2), -0.5, np.float32),
  }


@dataclasses.dataclass
class Running:
  """A server that answers at `url`."""

  url: str
  served: service.Service
  server: uvicorn.Server
  thread: threading.Thread

  @property
  def engine(self):
    return self.served._engine

  def settle(self):
    """Waits until nothing is open, which fails for a test that leaks."""
    wait_for(lambda: not self.served.num_open and not self.engine.works)


def wait_for(condition, seconds=300.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, f'not so after {seconds:g} s'
    time.sleep(0.005)


@contextlib.contextmanager
def serving(
  engine,
  tokenizer,
  form,
  limits=LIMITS,
  receiver=None,
  token='',
  guest=None,
  recorder=None,
):
  served = service.Service(engine, limits, receiver, guest=guest)
  model = openai.Model(
    name='tiny',
    tokenizer=tokenizer,
    stop_tokens=(tokenizer.END, tokenizer.EOD),
    form=form,
  )
  hosts = http_server.hosts_of('127.0.0.1', token)
  server = http_server.server_of(
    app.build(served, model, token, hosts, recorder), limits
  )
  with http_server.bind('127.0.0.1', 0, token) as sock:
    served.start()
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
      yield Running(http_server.url_of(sock), served, server, thread)
    finally:
      server.should_exit = True
      thread.join(10)
      ended = served.stop(10)
      assert ended and not thread.is_alive()
