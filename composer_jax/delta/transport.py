"""How a run's policies get from its trainer to whoever samples with them.

The trainer publishes every policy as a signed bundle in a store; whoever
samples follows the store. Both placements of a run use it. What a workdir has
of them: `delta.key`, which signs and verifies, and, unless the config says
otherwise, the bundles themselves in `store`.
"""

import collections
import contextlib
import dataclasses
import functools
import logging
import pathlib
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from composer_jax.core import files, processes, records, seams
from composer_jax.delta import chain, chunking, publisher, subscriber
from composer_jax.delta.store import objects
from composer_jax.models import config as model_config
from composer_jax.models import decoder, placement
from composer_jax.parallel import layouts
from composer_jax.rollout import engine as engines
from composer_jax.telemetry import writer as writers
from composer_jax.train import state as train_state

RUN_ID = 'policy'
DIRECT = 'direct:'
WORKERS = 'workers'  # folder with those of a run's own rollout workers
KEY = 'delta.key'
PUBLISHED, RECEIVED = 'delta', 'received'  # stages of the lines on record
_STORE, _MEMORY = 'store', 'received'
# Between two looks of who waits for the first policy.
_LOOK_S = 0.05
# Of a BundleInfo, what a line says of a version that was made just now.
_COSTS = ('cut_bytes', 'keyframe_bytes', 'encode_s', 'upload_s')
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaOptions(chain.BundleOptions):
  """How each policy of RL reaches the engine; no result depends on it.

  Attributes:
    store: folder or URL (s3://bucket/run) of this run alone; '' for `store` in
      the workdir. 'direct:' hands policies over on the devices, with nothing
      written, where trainer and engine share one process.
    poll_s: seconds between looks of the rollout process; more for a URL.
  """

  store: str = ''
  poll_s: float = 0.05
  keyframe_every: int = 100
  threads: int = 1

  def __post_init__(self):
    chain.BundleOptions.__post_init__(self)
    if not self.poll_s > 0:
      raise ValueError(
        f'--config.delta.poll_s must be positive, not {self.poll_s}.'
      )


def store_of(workdir: pathlib.Path, store: str) -> str:
  """Where a run keeps its bundles: what its config says, '' for its workdir."""
  return store or str(workdir / _STORE)


def memory_of(workdir: pathlib.Path, store: str) -> pathlib.Path:
  """File where a run's rollouts remember the newest pointer of one store."""
  name = files.sha256(store_of(workdir, store).encode())[:16]
  return workdir / _MEMORY / f'{name}.pointer'


# The trainer's side.


class Publication:
  """What the trainer publishes: each version once and on record.

  Not thread-safe. A run that was killed goes on with `first`: lines of later
  versions are dropped, and identities of earlier ones are read from theirs.
  """

  def __init__(
    self,
    sender: 'publisher.Publisher | _Handover',
    writer: writers.Writer,
    workdir: pathlib.Path,
    first: int,
    model: model_config.ModelConfig,
  ):
    # Compiled, since nothing that it returns is its argument then: the train
    # step that comes next donates the state.
    self._policy = jax.jit(functools.partial(decoder.policy, config=model))
    sender.rewind(first)
    writer.truncate(PUBLISHED, first)
    # By one of several processes: its rollout worker writes there, too.
    if processes.is_first():
      writers.keep(workdir / writers.RECEIVED, lambda row: row['step'] <= first)
    self._publisher, self._writer = sender, writer
    # Every version before the first was published, else there would be no
    # checkpoint of the first.
    self._identities = {
      row['step']: row['target_id']
      for row in writers.read(workdir)
      if row['stage'] == PUBLISHED
    }

  def publish(self, state: train_state.TrainState, version: int) -> None:
    """Begins to publish a state's policy; the state may be donated then."""
    policy = self._policy(state.variables())
    self._publisher.publish(policy, version, owned=True)
    self.check()

  def check(self) -> None:
    """Writes down what was published by now, or raises why it was not."""
    for info in self._publisher.results():
      is_known = info.version in self._identities
      self._identities[info.version] = info.target_id
      if is_known:
        continue  # Of a run that goes on: its line tells how it was made.
      names = ('target_id', 'kind', 'bytes', 'full_bytes')
      # 0 seconds: it had been published when the run was killed, before its
      # line was there.
      names += _COSTS if info.encode_s else ()
      fields = {name: getattr(info, name) for name in names}
      if info.encode_s:
        fields['changed'] = info.changed / info.elements
      self._writer.write(PUBLISHED, info.version, **fields)

  def wait(self) -> None:
    """Returns once all is published and written down; raises as `check`."""
    self._publisher.wait()
    self.check()

  def identity(self, version: int) -> str:
    """Returns the identity of the weights of a version that was published."""
    return self._identities[version]

  def fault_of(self, group: records.Group) -> str:
    """Says that other weights sampled a group than published; '' if not."""
    if not group.versions <= self._identities.keys():
      # A worker may have what is published already and not yet reported.
      self.wait()
    for version in sorted(group.versions):
      published = self._identities.get(version)
      sampled = (group.policies or {}).get(version)
      if published is None or sampled != published:
        return (
          f'Group {group.group} was sampled with weights {sampled or "none"} '
          f'as version {version}; published under it are {published or "none"}'
        )
    return ''

  def collect_garbage(self, keep: int, say: Callable[[str], None]) -> None:
    """Frees, behind what is under way, what no receiver needs any more."""
    self._publisher.gc(keep, say)

  def close(self) -> None:
    """Waits for what is under way and ends the publisher's thread."""
    self._publisher.close()


# The rollouts' side.


class Receiver:
  """Follows a run's bundles and rebuilds its policies as device arrays.

  Attributes:
    store: folder or URL where it looks.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    model: model_config.ModelConfig,
    store: str = '',
    *,
    memory: pathlib.Path | None = None,
    threads: int = 2,
    mesh: jax.sharding.Mesh | None = None,
  ):
    """Reads nothing yet: the run may not have begun to publish.

    Args:
      workdir: workdir of the run; its key is read from there.
      memory: file that keeps the newest pointer seen; see `follower.Follower`.
      mesh: devices of the engine that decodes; chunks go straight to those
        whose shards they meet. None takes them whole, to the first device.
    """
    policy = functools.partial(decoder.policy, config=model)
    like = jax.eval_shape(policy, decoder.abstract(model)[0])
    if mesh is not None and mesh.size > 1:
      places = placement.variable_shardings(
        model, layout=layouts.DECODE, mesh=mesh
      )
      like = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        like,
        jax.tree.broadcast(decoder.without_base(places), like),
      )
    self.store = store_of(workdir, store)
    self._news = subscriber.Subscriber(
      self.store,
      workdir / KEY,
      like,
      run_id=RUN_ID,
      memory=memory,
      threads=threads,
    )

  @property
  def problem(self) -> str | None:
    """Reason why the last look found nothing to use; None if it did not."""
    return self._news.problem

  def poll(self) -> seams.ReceivedPolicy | None:
    """Returns the newest policy if it is newer than the last, else None.

    A ValueError says, at every look, that the weights are not of the model.
    """
    began = time.perf_counter()
    if (variables := self._news.poll()) is None:
      return None
    jax.block_until_ready(variables)
    stats, version = self._news.follower.stats, self._news.version
    assert stats is not None and version is not None
    transfer_s = max(0.0, time.perf_counter() - began - stats.wall_s)
    return seams.ReceivedPolicy(
      version=version,
      target_id=self._news.target_id,
      variables=variables,
      received={**dataclasses.asdict(stats), 'transfer_s': transfer_s},
    )


def first(receiver: 'Receiver | _Handover', within_s: float) -> Any:
  """Waits for a `seams.ReceivedPolicy`; a ValueError if none comes in time."""
  deadline = time.monotonic() + within_s
  while (policy := receiver.poll()) is None:
    if time.monotonic() > deadline:
      raise ValueError(
        f'No usable policy in {receiver.store} within {within_s:g} s '
        f'({receiver.problem or "nothing there"}); is RL running?'
      )
    time.sleep(_LOOK_S)
  return policy


class Placing:
  """A `core.seams.WeightReceiver`: receives policies and places them.

  It does so when it is asked to, in the process that also publishes, or in a
  thread of its own, beside the engine's steps, which keeps the newest policy
  until somebody takes it. The thread is woken by the clock and by `close`.

  Attributes:
    problem: reason why the thread found nothing to serve; '' for none.
    thread: thread that `follow` starts if there is an interval.
  """

  def __init__(
    self,
    receiving: 'Receiver | _Handover',
    interval_s: float | None = None,
    notify: Callable[[], None] = lambda: None,
  ):
    """Takes a receiver.

    Args:
      interval_s: seconds between two looks of the thread; None for no thread.
      notify: function to call after something new was placed.
    """
    self.problem = ''
    # A read that hangs must not keep the process from ending.
    self.thread = threading.Thread(target=self._run, name='poller', daemon=True)
    self._receiving, self._interval_s = receiving, interval_s
    self._notify, self._stopping = notify, threading.Event()
    self._newest = collections.deque[seams.PlacedPolicy](maxlen=1)
    self._engine: engines.Engine | None = None
    # Why the newest policy does not fit the engine.
    self._refused: str | None = None
    # Weights that the thread frees, so that no step waits for it.
    self._dropped: queue.SimpleQueue[Any] = queue.SimpleQueue()

  def first(self, within_s: float) -> seams.ReceivedPolicy:
    return first(self._receiving, within_s)

  def follow(self, engine: engines.Engine) -> None:
    self._engine = engine
    if self._interval_s is not None:
      self.thread.start()

  def look(self) -> None:
    # A problem of what this process published a moment ago: waiting would not
    # mend it, and the policy before it may not sample what is due.
    if self._interval_s is None:
      self._look()

  def _look(self) -> None:
    """Places what is newer; a ValueError says that it cannot be used."""
    while not self._dropped.empty():
      self._dropped.get()
    assert self._engine is not None
    policy = self._receiving.poll()
    if reason := self._receiving.problem or (not policy and self._refused):
      raise ValueError(reason)
    if policy is not None:
      began = time.perf_counter()
      try:
        placed = self._engine.place(policy.variables, policy.version)
      except ValueError as error:
        self._refused = str(error)
        raise
      place_s = time.perf_counter() - began
      self._refused, self.problem = None, ''
      self._newest.append(
        seams.PlacedPolicy(
          version=policy.version,
          target_id=policy.target_id,
          variables=placed,
          received={**policy.received, 'place_s': place_s},
        )
      )
      self._notify()

  def _run(self) -> None:
    try:
      while not self._stopping.wait(self._interval_s):
        try:
          self._look()
          self.problem = ''
        except (ValueError, OSError) as error:
          if str(error) != self.problem:
            _log.warning('Nothing newer can be served: %s', error)
          self.problem = str(error)
    except BaseException as error:
      # Passed on to the log; but it is also why nothing newer will be served.
      self.problem = f'nothing is followed any more: {error!r}'
      raise

  def newest(self) -> seams.PlacedPolicy | None:
    """Returns what is newer if nobody took it; from any thread."""
    with contextlib.suppress(IndexError):
      return self._newest.popleft()
    return None

  def take(self) -> seams.PlacedPolicy | None:
    """Returns what is placed, if it is newer; raises if nothing will come."""
    if self._interval_s is not None and not self.thread.is_alive():
      raise RuntimeError(
        f'What follows {self._receiving.store} ended: {self.problem}.'
      )
    return self.newest()

  def drop(self, weights_before: Any) -> None:
    if self._interval_s is not None:
      self._dropped.put(weights_before)

  def served(
    self, policy: seams.ReceivedPolicy, **seconds: float
  ) -> dict[str, Any]:
    row = {'stage': RECEIVED, 'step': policy.version, 'time': time.time()}
    return row | {'target_id': policy.target_id, **policy.received, **seconds}

  def close(self) -> None:
    """Ends the thread after its look, which nobody waits for."""
    self._stopping.set()


# Both sides.


class _Handover:
  """Both ends within one process, device to device: publisher and receiver.

  Identities are those that bundles of the same weights would have.
  """

  store, problem = DIRECT, None

  def __init__(self):
    self._done: list[chain.BundleInfo] = []
    self._newest: seams.ReceivedPolicy | None = None

  def publish(self, tree: Any, version: int, *, owned: bool) -> None:
    assert owned
    began = time.perf_counter()
    target_id, elements, size = chunking.identify(publisher.blocks(tree))
    same: Any = dict(version=version, target_id=target_id)
    received = {'route': ('direct',), 'bytes': 0}
    self._newest = seams.ReceivedPolicy(
      **same, variables=tree, received=received
    )
    costs: Any = dict(bytes=0, full_bytes=size, elements=elements)
    costs |= dict(changed=elements, encode_s=time.perf_counter() - began)
    self._done.append(
      chain.BundleInfo(**same, kind='direct', base_id='', **costs)
    )

  def results(self) -> list[chain.BundleInfo]:
    done, self._done = self._done, []
    return done

  def rewind(self, version: int) -> None:
    if self._newest is not None and self._newest.version > version:
      self._newest = None

  def wait(self) -> None:
    """Does nothing: what was published is there."""

  def gc(self, keep: int, say: Callable[[str], None]) -> None:
    """Does nothing: nothing was written."""

  def close(self) -> None:
    self._newest = None

  def poll(self) -> seams.ReceivedPolicy | None:
    newest, self._newest = self._newest, None
    return newest


class PolicyTransport:
  """A `core.seams.WeightTransport`, by a store or within one process."""

  def __init__(
    self,
    workdir: pathlib.Path,
    model: model_config.ModelConfig,
    options: DeltaOptions,
  ):
    self._workdir, self._model, self._options = workdir, model, options
    self._memory = memory_of(workdir, options.store)
    self._direct = _Handover() if options.store == DIRECT else None

  def publisher(self, writer: writers.Writer, first: int) -> Publication:
    sender = self._direct
    if sender is None:
      sender = publisher.Publisher(
        store_of(self._workdir, self._options.store),
        self._workdir / KEY,
        RUN_ID,
        self._options,
      )
      if sender.version is None and processes.is_first():
        # A store that is new, or was deleted: older pointers are no measure.
        # Those of its own workers, too.
        inside = self._memory.relative_to(self._workdir)
        for path in self._workdir.glob(f'{WORKERS}/*/{inside}'):
          path.unlink()
        self._memory.unlink(missing_ok=True)
    return Publication(sender, writer, self._workdir, first, self._model)

  def receiver(self, *, in_background: bool) -> seams.WeightReceiver:
    receiving = self._direct or Receiver(
      self._workdir,
      self._model,
      self._options.store,
      memory=self._memory,
      threads=self._options.threads,
    )
    interval_s = self._options.poll_s if in_background else None
    return Placing(receiving, interval_s)


def check_store(workdir: pathlib.Path, options: DeltaOptions) -> str:
  """Returns the place of a new run; refuses one that is taken or read-only."""
  if options.store == DIRECT:
    return DIRECT
  store = objects.Store(store_of(workdir, options.store))
  store.check_writable()
  if store.read_pointer(RUN_ID) is not None:
    raise ValueError(
      f'--config.delta.store: {store.url} has the policies of another run; '
      'name an empty place.'
    )
  if store.root is not None:
    missing = [p for p in (store.root, *store.root.parents) if not p.exists()]
    try:
      store.root.mkdir(parents=True, exist_ok=True)
      tempfile.TemporaryFile(dir=store.root).close()
      for path in missing:
        path.rmdir()
    except OSError as error:
      raise ValueError(
        f'--config.delta.store: {store.url} cannot be written '
        f'({error.strerror}); name a folder that can.'
      ) from error
  return store.url
