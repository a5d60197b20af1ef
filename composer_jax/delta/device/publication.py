"""What the trainer publishes: each version once, in the background, on record.

Consumes: states, in the order of their versions.
Waits for: the version before, if it is still under way; `wait` for all.
Woken by: the thread that encodes and uploads.
Produces: bundles of the policies, and one line 'delta' for each version.
"""

import pathlib
from collections.abc import Callable

import jax

from composer_jax.core import records
from composer_jax.delta import publish
from composer_jax.delta.device import sender as bundles
from composer_jax.models import decoder
from composer_jax.telemetry import writer as writers
from composer_jax.train import state as train_state

STAGE = 'delta'


class Publication:
  """The versions of one run; not thread-safe, its Sender's thread is its own.

  A run that was killed goes on with `first`: later versions are void, their
  lines are dropped, and what earlier ones were is read from theirs.
  """

  def __init__(
    self,
    sender: bundles.Sender,
    writer: writers.Writer,
    workdir: pathlib.Path,
    first: int,
  ):
    sender.rewind(first)
    writer.truncate(STAGE, first)
    self._sender = sender
    self._writer = writer
    # Every version before the first was published, else there would be no
    # checkpoint of the first.
    self._identities = {
      row['step']: row['target_id']
      for row in writers.read(workdir)
      if row['stage'] == STAGE
    }
    self._written = set(self._identities)

  def publish(self, state: train_state.TrainState, version: int) -> None:
    """Begins to publish a state's policy; the state may be donated then.

    Raises:
      ValueError, OSError: an earlier version could not be published.
    """
    self._sender.publish(_policy(state.variables()), version)
    self.check()

  def check(self) -> None:
    """Writes down what was published by now; waits for nothing.

    Raises:
      ValueError, OSError: a version could not be published.
    """
    for info in self._sender.results():
      self._identities[info.version] = info.target_id
      if info.version in self._written:
        continue  # Of a run that goes on: its line tells how it was made.
      self._written.add(info.version)
      self._writer.write(STAGE, info.version, **_line(info))

  def wait(self) -> None:
    """Returns once all is published and written down; raises as `check`."""
    self._sender.wait()
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
    """Frees, behind what is under way, what no receiver needs any more.

    Old versions whose bundles are damaged cost room and nothing else: they end
    no run, and `say` is told.
    """
    self._sender.gc(keep, say)

  def close(self) -> None:
    """Waits for what is under way and ends the sender's thread."""
    self._sender.close()


def _line(info: publish.BundleInfo) -> dict[str, str | float]:
  fields: dict[str, str | float] = {
    'target_id': info.target_id,
    'kind': info.kind,
    'bytes': info.bytes,
    'full_bytes': info.full_bytes,
  }
  if not info.encode_s:
    # It had been published when the run was killed, before its line was there.
    return fields
  return fields | {
    'changed': info.changed / info.elements,
    'cut_bytes': info.cut_bytes,
    'keyframe_bytes': info.keyframe_bytes,
    'skip_bytes': info.skip_bytes,
    'encode_s': info.encode_s,
    'upload_s': info.upload_s,
  }


# Compiled, since nothing that it returns is its argument then, not even what is
# no parameter: the train step that comes next donates the state.
_policy = jax.jit(decoder.policy)
