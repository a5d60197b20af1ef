"""How a run's policies get from its trainer to whoever samples with them.

The trainer publishes every policy as a signed bundle in a store; whoever
samples follows the store. Both placements of a run use it. What a workdir has
of them: `delta.key`, which signs and verifies, and, unless the config says
otherwise, the bundles themselves in `store`.
"""

import collections
import dataclasses
import json
import pathlib
import queue
import tempfile
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
from composer_jax.telemetry import append
from composer_jax.telemetry import writer as writers
from composer_jax.train import state as train_state

RUN_ID = 'policy'
DIRECT = 'direct:'
KEY = 'delta.key'
PUBLISHED, RECEIVED = 'delta', 'received'  # stages of the lines on record
_STORE, _MEMORY = 'store', 'received'
# Between two looks of who waits for the first policy.
_LOOK_S = 0.05
# Of a BundleInfo, what a line says of a version that was made just now.
_COSTS = ('cut_bytes', 'keyframe_bytes', 'encode_s', 'upload_s')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaOptions(chain.BundleOptions):
  """How each policy of RL reaches the engine; no result depends on it.

  Attributes:
    store: folder or URL (s3://bucket/run) of this run alone; '' for `store` in
      the workdir. 'direct:' hands policies over on the devices, with nothing
      written, where trainer and engine share one process.
    poll_s: seconds between looks of the rollout process; more for a URL.
    keyframe_every: versions from a full one to the next, which only receivers
      that join late and repairs read.
    threads: number of threads that encode, and that decode; each side has a
      core of two.
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

# Compiled, since nothing that it returns is its argument then, not even what is
# no parameter: the train step that comes next donates the state.
_policy = jax.jit(decoder.policy)


class Publication:
  """What the trainer publishes: each version once and on record.

  Not thread-safe; its Publisher's thread is its own. A run that was killed goes
  on with `first`: later versions are void, their lines are dropped, and what
  earlier ones were is read from theirs.
  """

  def __init__(
    self,
    sender: 'publisher.Publisher | _Handover',
    writer: writers.Writer,
    workdir: pathlib.Path,
    first: int,
  ):
    sender.rewind(first)
    writer.truncate(PUBLISHED, first)
    # So did what a killed run received after `first`. By one of several
    # processes: the rollout worker that it starts writes there, too.
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
    self._written = set(self._identities)

  def publish(self, state: train_state.TrainState, version: int) -> None:
    """Begins to publish a state's policy; the state may be donated then.

    Raises:
      ValueError, OSError: an earlier version could not be published.
    """
    policy = _policy(state.variables())
    self._publisher.publish(policy, version, owned=True)
    self.check()

  def check(self) -> None:
    """Writes down what was published by now; waits for nothing.

    Raises:
      ValueError, OSError: a version could not be published.
    """
    for info in self._publisher.results():
      self._identities[info.version] = info.target_id
      if info.version in self._written:
        continue  # Of a run that goes on: its line tells how it was made.
      self._written.add(info.version)
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

  def check_identities(self, groups: list[records.Group]) -> None:
    """Refuses groups that other weights sampled than those published.

    Raises:
      ValueError: names the group, the version and both identities; or a version
        could not be published.
    """
    needed = {version for group in groups for version in group.versions}
    if not needed <= self._identities.keys():
      # A worker may have what is published already and not yet reported.
      self.wait()
    for group in groups:
      for version in sorted(group.versions):
        published = self._identities.get(version)
        sampled = (group.policies or {}).get(version)
        if published is None or sampled != published:
          raise ValueError(
            f'Group {group.group} was sampled with weights '
            f'{sampled or "none"} as version {version}; published under it are '
            f'{published or "none"}. Delete '
            'its file in groups/ and run the same command again to sample it '
            'anew.'
          )

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
      model: config of the model whose policies they are.
      store: store as the run's config has it.
      memory: file of the newest pointer seen, so that not even a receiver that
        was started again takes an older one; None remembers while it lives.
      threads: number of threads that decode.
      mesh: devices of the engine that decodes; chunks go straight to those
        whose shards they meet. None takes them whole, to the first device.
    """
    self.store, self._key = store_of(workdir, store), workdir / KEY
    like = jax.eval_shape(decoder.policy, decoder.abstract(model)[0])
    if mesh is not None and mesh.size > 1:
      places = placement.variable_shardings(
        model, layout=layouts.DECODE, mesh=mesh
      )
      like = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding),
        like,
        decoder.without_base(places),
      )
    self._open = lambda: subscriber.Subscriber(
      self.store,
      self._key,
      like,
      run_id=RUN_ID,
      memory=memory,
      threads=threads,
    )
    self._subscriber: subscriber.Subscriber | None = None

  @property
  def problem(self) -> str | None:
    """Why the last look found nothing that can be used; None if it did not."""
    if self._subscriber is None:
      return None if self._key.exists() else f'there is no {self._key} yet'
    return self._subscriber.problem

  def poll(self) -> seams.ReceivedPolicy | None:
    """Returns the newest policy if it is newer than the last, else None.

    Raises:
      ValueError: the weights are not those of the model; at every look, as long
        as nothing newer comes.
    """
    if self._subscriber is None:
      if not self._key.exists():
        return None
      self._subscriber = self._open()
    began = time.perf_counter()
    if (variables := self._subscriber.poll()) is None:
      return None
    jax.block_until_ready(variables)
    stats, version = self._subscriber.follower.stats, self._subscriber.version
    assert stats is not None and version is not None
    transfer_s = max(0.0, time.perf_counter() - began - stats.wall_s)
    return seams.ReceivedPolicy(
      version=version,
      target_id=self._subscriber.target_id,
      variables=variables,
      received={**dataclasses.asdict(stats), 'transfer_s': transfer_s},
    )


def first(receiver: 'Receiver | _Handover', within_s: float) -> Any:
  """Waits for a trainer to publish; returns a `seams.ReceivedPolicy`.

  Raises:
    ValueError: it did not in time.
  """
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
  thread of its own, beside the engine's steps.

  Each policy served is a line of `received.jsonl`, which is the rollout side's:
  `metrics.jsonl` has one writer, the trainer. Both have one form, with the
  version as the step; `report.metrics` says what each metric means.
  """

  def __init__(
    self,
    receiving: 'Receiver | _Handover',
    workdir: pathlib.Path,
    interval_s: float | None = None,
  ):
    """Takes a receiver; looks by itself if an interval is given."""
    self._receiving = receiving
    path = pathlib.Path(workdir) / writers.RECEIVED
    self._lines = append.AppendFile(path, 'a line of received policies')
    self._lines.cut_torn_line()
    self._news: collections.deque[seams.PlacedPolicy] = collections.deque()
    self._engine: engines.Engine | None = None
    # Weights that the thread frees, so that no step waits for it.
    self._dropped: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._poller: subscriber.Poller | None = None
    if interval_s is not None:
      self._poller = subscriber.Poller(self._find, interval_s)

  def first(self, within_s: float) -> seams.ReceivedPolicy:
    return first(self._receiving, within_s)

  def follow(self, engine: engines.Engine) -> None:
    self._engine = engine
    if self._poller is not None:
      self._poller.thread.start()

  def look(self) -> None:
    # A problem of what this process published a moment ago: waiting would not
    # mend it, and the policy before it may not sample what is due.
    if self._poller is None and (policy := self._find()) is not None:
      self._news.append(policy)

  def _find(self) -> seams.PlacedPolicy | None:
    """Returns what is newer, where the engine serves it.

    Raises:
      ValueError: what is there cannot be used.
    """
    while not self._dropped.empty():
      self._dropped.get()
    assert self._engine is not None
    policy = self._receiving.poll()
    if self._receiving.problem is not None:
      raise ValueError(self._receiving.problem)
    if policy is None:
      return None
    began = time.perf_counter()
    placed = self._engine.place(policy.variables, policy.version)
    return seams.PlacedPolicy(
      version=policy.version,
      target_id=policy.target_id,
      variables=placed,
      received={**policy.received, 'place_s': time.perf_counter() - began},
    )

  def take(self) -> seams.PlacedPolicy | None:
    """Returns what is newer if it is placed; waits for nothing.

    Raises:
      RuntimeError: nothing newer will come.
    """
    if self._poller is None:
      return self._news.popleft() if self._news else None
    if not self._poller.thread.is_alive():
      raise RuntimeError(
        f'What follows {self._receiving.store} ended: {self._poller.problem}.'
      )
    return self._poller.take()

  def drop(self, weights_before: Any) -> None:
    if self._poller is not None:
      self._dropped.put(weights_before)

  def served(self, policy: seams.ReceivedPolicy, **seconds: float) -> None:
    row = {'stage': RECEIVED, 'step': policy.version, 'time': time.time()}
    row |= {'target_id': policy.target_id, **policy.received, **seconds}
    self._lines.append((json.dumps(row) + '\n').encode())

  def close(self) -> None:
    """Ends the thread after its look, which nobody waits for."""
    if self._poller is not None:
      self._poller.stop()
    self._lines.close()


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
    self._newest = seams.ReceivedPolicy(
      version=version,
      target_id=target_id,
      variables=tree,
      received={'route': ('direct',), 'bytes': 0},
    )
    info = chain.BundleInfo(
      version=version,
      kind='direct',
      target_id=target_id,
      base_id='',
      bytes=0,
      full_bytes=size,
      changed=elements,
      elements=elements,
      encode_s=time.perf_counter() - began,
    )
    self._done.append(info)

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
        self._memory.unlink(missing_ok=True)
    return Publication(sender, writer, self._workdir, first)

  def receiver(self, *, in_background: bool) -> seams.WeightReceiver:
    receiving = self._direct or Receiver(
      self._workdir,
      self._model,
      self._options.store,
      memory=self._memory,
      threads=self._options.threads,
    )
    interval_s = self._options.poll_s if in_background else None
    return Placing(receiving, self._workdir, interval_s)


def check_store(workdir: pathlib.Path, options: DeltaOptions) -> str:
  """Returns the place that a new run would publish to.

  Raises:
    ValueError: it can only be read, or a run is in it.
    OSError: it cannot be reached.
  """
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
