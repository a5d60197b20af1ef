"""How a rollout worker joins a run of which it has a store's URL and a key.

The run shows in its store what a worker must know: the config, the tokenizer,
and how code is judged; and what it must be: of the same code, Python and jax,
with the same import and task set. Another is refused by name. This needs no
jax, so that a worker which may not join says so at once.
"""

import dataclasses
import pathlib
import re
import secrets
import socket
import time
from typing import Any

from composer_jax.core import files
from composer_jax.delta.format import keys
from composer_jax.fleet import identity
from composer_jax.fleet.leases import documents, fleet_store, holder, uploads

KEY = 'delta.key'  # Where `delta.transport` looks for it in a folder.
_LOOK_S = 0.2


def code() -> dict[str, str]:
  """Identities of the code of this process and of what it runs on."""
  found = identity.of({}, '')
  return {name: found[name] for name in ('code', 'python', 'jax')}


def open_documents(
  store: str, key: pathlib.Path, run_id: str, writes: str = ''
) -> documents.RunDocuments:
  """Opens a run's documents; makes its key where no publisher made one.

  Args:
    writes: URL of the store behind one that can only be read; '' for itself.
  """
  place = fleet_store.FleetStore(store)
  behind = fleet_store.FleetStore(writes) if writes else None
  (behind or place).check_writable()
  opened = keys.make_key(key)
  return documents.RunDocuments(place, opened, run_id, writes=behind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined:
  """A run that this process may join.

  Attributes:
    config: resolved config of the run.
    level: isolation level that judges code.
    identity: what a worker must be, by name.
    digest: identity of the setup.
    folder: folder with the run's key and tokenizer.
  """

  docs: documents.RunDocuments
  config: dict[str, Any]
  level: str
  identity: dict[str, str]
  digest: str
  folder: pathlib.Path

  def check(self, own: dict[str, str]) -> None:
    """Raises a ValueError that names what differs from the run."""
    differing = [
      f'{name} is {self.identity.get(name)!r} there and {value!r} here'
      for name, value in sorted(own.items())
      if self.identity.get(name) != value
    ]
    if differing:
      raise ValueError(
        f'This worker may not join run {self.docs.run_id!r} in '
        f'{self.docs.store.url}: {"; ".join(differing)}. Start it in a '
        'checkout of the same commit, with the same environment and files.'
      )

  def leases(
    self,
    name: str,
    drain_s: float,
    capacity: int,
    rules: uploads.UploadRules | None,
  ) -> holder.StoredLeases:
    """Returns the door to the fleet of a worker; see `StoredLeases`."""
    options = self.config['fleet']
    times = holder.HolderTimes(
      # Some reports may be late or lost.
      beat_s=options['lease_s'] / 8,
      poll_s=self.config['delta']['poll_s'],
      drain_s=drain_s,
      save_s=options['save_s'],
    )
    told = dict(capacity=capacity, setup=self.digest)
    return holder.StoredLeases(self.docs, name, times, **told, rules=rules)


def find(
  docs: documents.RunDocuments, *, within_s: float
) -> tuple[dict[str, Any], str]:
  """Waits for a run; returns its setup and the identity of that.

  Raises:
    ValueError: no run shows in time, or its setup is of another key.
  """
  deadline = time.monotonic() + within_s
  while (found := docs.read_setup()) is None:
    if time.monotonic() > deadline:
      raise ValueError(
        f'{docs.store.url} shows no run {docs.run_id!r} within {within_s:g} s; '
        'is RL running, with this store (--config.delta.store)?'
      )
    time.sleep(_LOOK_S)
  return found


def take(
  docs: documents.RunDocuments,
  setup: dict[str, Any],
  key: pathlib.Path,
  folder: pathlib.Path,
) -> None:
  """Puts the key of a run and the files of its setup into a folder."""
  folder.mkdir(parents=True, exist_ok=True)
  if key.resolve() != (folder / KEY).resolve():
    (folder / KEY).unlink(missing_ok=True)
    keys.write_key(folder / KEY, keys.open_key(key))
  for name, content in setup['files'].items():
    path, data = folder / pathlib.Path(name).name, docs.get_file(content)
    if not path.exists() or path.read_bytes() != data:
      files.write_atomic(path, data)


def join(
  docs: documents.RunDocuments,
  key: pathlib.Path,
  folder: pathlib.Path,
  *,
  within_s: float,
) -> Joined:
  """Waits for a run, and puts what a worker needs of it into a folder.

  Raises:
    ValueError: as `find`, or this code is of another commit.
  """
  setup, digest = find(docs, within_s=within_s)
  joined = Joined(
    docs=docs,
    config=setup['config'],
    level=setup['level'],
    identity=setup['identity'],
    digest=digest,
    folder=folder,
  )
  joined.check(code())
  take(docs, setup, key, folder)
  return joined


def free_name() -> str:
  """Returns a name that no worker has had."""
  host = re.sub('[^A-Za-z0-9]+', '-', socket.gethostname()).strip('-')
  return f'{host[:40] or "worker"}-{secrets.token_hex(4)}'
