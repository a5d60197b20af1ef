"""What workers uploaded to a run's own store, read and changed on disk."""

import pathlib

from composer_jax import wiring
from composer_jax.core import files, group_bytes, records, seams
from composer_jax.fleet.leases import ledger as ledgers


def files_of(workdir: pathlib.Path) -> list[pathlib.Path]:
  return sorted((workdir / 'store/fleet/policy/groups').glob('[0-9]*'))


def replace(workdir: pathlib.Path, group: records.Group) -> None:
  """Puts another content in the place of a finished group, seals included."""
  docs = wiring._documents('', workdir)
  value, tag = docs.read_ledger()
  ledger = ledgers.from_json(value)
  entry = ledger.entries[group.group]
  (part,) = entry.parts
  span = dict(first=part.first, stop=part.stop)
  lease = seams.Lease(epoch=part.epoch, order=entry.order, **span)
  part.upload = docs.upload(lease, group_bytes.to_bytes(group))
  docs.swap_ledger(ledger.to_json(), tag)


def read(path: pathlib.Path) -> records.Group:
  assert files.sha256(path.read_bytes()) == path.name.split('.')[-1]
  return group_bytes.from_bytes(path.read_bytes())
