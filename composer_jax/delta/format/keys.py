"""Signatures of pointers: one secret key, which all ends of a run share.

Whoever can verify could also sign. Stores and caches never see the key.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import pathlib
import secrets

from composer_jax.core import files

ALGORITHM = 'hmac-sha256'
_MIN_KEY_BYTES = 16

_log = logging.getLogger(__name__)


class Hmac:
  """Signs and verifies; `text` is the line of its file."""

  def __init__(self, key: bytes):
    if len(key) < _MIN_KEY_BYTES:
      raise ValueError(
        f'an HMAC key must have at least {_MIN_KEY_BYTES} bytes, '
        f'not {len(key)}.'
      )
    self._key, self.text = key, f'{ALGORITHM} {key.hex()}\n'

  def sign(self, data: bytes) -> bytes:
    return hmac.digest(self._key, data, hashlib.sha256)

  def verify(self, data: bytes, signature: bytes) -> None:
    """Raises ValueError for a signature that is not of exactly this data."""
    if not hmac.compare_digest(self.sign(data), signature):
      raise ValueError('the signature is wrong: damaged, or of another key')


def open_key(path: str | os.PathLike) -> Hmac:
  """Reads a key; a ValueError, which does not quote it, if there is none."""
  with open(path, 'rb') as file:
    data = file.read(1024)
    mode = os.fstat(file.fileno()).st_mode
  try:
    kind, text = data.decode('ascii').split()
    key = Hmac(bytes.fromhex(text) if kind == ALGORITHM else b'')
  except ValueError:
    raise ValueError(
      f'{path}: not a key file, which is one line of {ALGORITHM}, a space, and '
      f'a key of at least {_MIN_KEY_BYTES} bytes in hexadecimal.'
    ) from None
  if mode & 0o077:
    _log.warning('%s: others may read this secret key; chmod 600 it.', path)
  return key


def make_key(path: str | os.PathLike) -> Hmac:
  """Reads a key, which the first process that asks for it makes."""
  with contextlib.suppress(FileExistsError):
    if not os.path.exists(path):
      write_key(path, Hmac(secrets.token_bytes(32)))
  return open_key(path)


def write_key(path: str | os.PathLike, key: Hmac) -> None:
  """Writes a key file of mode 0600; FileExistsError if there is one."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'.{path.name}.{secrets.token_hex(8)}.tmp')
  descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  try:
    with open(descriptor, 'wb') as file:
      file.write(key.text.encode())
      file.flush()
      os.fsync(file.fileno())
    # Not a rename, which would replace a key that is in use.
    os.link(temporary, path)
  finally:
    os.unlink(temporary)
  files.fsync_directory(path.parent)
