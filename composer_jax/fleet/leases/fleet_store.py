"""The keys of a store below fleet/, of which `documents` seals the values."""

import re
from collections.abc import Iterable

from composer_jax.delta.store import objects

_KEY = re.compile(r'fleet(/[A-Za-z0-9][\w.-]*)+/?', re.A)


class FleetStore(objects.Store):
  """A store of bundles that also keeps leases and groups."""

  def put_at(self, key: str, data: bytes) -> None:
    """Writes a key that this process alone writes."""
    self._writer().put(_checked(key), data)

  def read_at(self, key: str, most: int) -> bytes | None:
    """Reads a key past caches; None for none, ValueError if it is longer."""
    try:
      data = self._backend.read(_checked(key), 0, most + 1, fresh=True)
    except FileNotFoundError:
      return None
    if len(data) > most:
      raise ValueError(f'{self.url}/{key}: has more than {most} bytes.')
    return data

  def read_tagged_at(self, key: str, most: int) -> tuple[bytes, str] | None:
    """Reads a key that several write, and its tag; see `read_pointer`."""
    return self._backend.read_tagged(_checked(key), most)

  def swap_at(self, key: str, data: bytes, tag: str | None, most: int) -> str:
    """Replaces what has this tag, else Conflict; returns the new tag."""
    return self._writer().swap(_checked(key), data, tag, most)

  def find_at(self, top: str) -> list[str]:
    """Returns the keys below, without what others left there."""
    return sorted(filter(_KEY.fullmatch, self._writer().find(_checked(top))))

  def delete_at(self, keys: Iterable[str]) -> None:
    self._writer().delete([_checked(key) for key in keys], 0.0)


def _checked(key: str) -> str:
  if not _KEY.fullmatch(key):
    raise ValueError(f'{key!r} is no key of a fleet.')
  return key
