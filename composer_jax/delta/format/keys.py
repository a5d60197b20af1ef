"""Signatures of pointers: a shared key, or a private and a public one.

With HMAC every subscriber could also publish; where subscribers are not to be
trusted so far, they get the public half of an Ed25519 pair instead.
"""

import hashlib
import hmac
import logging
import os
import pathlib
import secrets

from composer_jax.core import files

HMAC = 'hmac-sha256'
ED25519 = 'ed25519'
_MIN_KEY_BYTES = 16

_log = logging.getLogger(__name__)


# `algorithm` is part of what is signed; `verify` raises ValueError for a
# signature that is not of exactly this data. Who signs can verify, too.


_WRONG = 'the signature is wrong: damaged, or of another key'


class Hmac:
  """Signs and verifies with one secret key."""

  algorithm = HMAC

  def __init__(self, key: bytes):
    if len(key) < _MIN_KEY_BYTES:
      raise ValueError(
        f'an HMAC key must have at least {_MIN_KEY_BYTES} bytes, '
        f'not {len(key)}.'
      )
    self._key = key

  def sign(self, data: bytes) -> bytes:
    return hmac.digest(self._key, data, hashlib.sha256)

  def verify(self, data: bytes, signature: bytes) -> None:
    if not hmac.compare_digest(self.sign(data), signature):
      raise ValueError(_WRONG)

  def to_text(self) -> str:
    return f'{HMAC} {self._key.hex()}\n'


class Ed25519Verifier:
  """Verifies with a public key of 32 bytes."""

  algorithm = ED25519

  def __init__(self, public: bytes):
    keys, self._invalid = _ed25519()
    self._public = public
    self._key = keys.Ed25519PublicKey.from_public_bytes(public)

  def verify(self, data: bytes, signature: bytes) -> None:
    try:
      self._key.verify(signature, data)
    except self._invalid as error:
      raise ValueError(_WRONG) from error

  def to_text(self) -> str:
    return f'{ED25519}-public {self._public.hex()}\n'


class Ed25519Signer:
  """Signs with a private key of 32 bytes, and verifies like its public one."""

  algorithm = ED25519

  def __init__(self, private: bytes):
    keys, _ = _ed25519()
    self._private = private
    self._key = keys.Ed25519PrivateKey.from_private_bytes(private)
    self.public = Ed25519Verifier(self._key.public_key().public_bytes_raw())

  def sign(self, data: bytes) -> bytes:
    return self._key.sign(data)

  def verify(self, data: bytes, signature: bytes) -> None:
    self.public.verify(data, signature)

  def to_text(self) -> str:
    return f'{ED25519}-private {self._private.hex()}\n'


Signer = Hmac | Ed25519Signer
Verifier = Signer | Ed25519Verifier

_KINDS = {
  HMAC: Hmac,
  f'{ED25519}-private': Ed25519Signer,
  f'{ED25519}-public': Ed25519Verifier,
}


def make_hmac() -> Hmac:
  return Hmac(secrets.token_bytes(32))


def make_ed25519() -> Ed25519Signer:
  return Ed25519Signer(secrets.token_bytes(32))


def open_key(path: str | os.PathLike) -> Verifier:
  """Reads a key of any kind.

  Raises:
    ValueError: the file holds none; the message does not quote it.
  """
  path = pathlib.Path(path)
  with path.open('rb') as file:
    data = file.read(1024)
    mode = os.fstat(file.fileno()).st_mode
  try:
    kind, text = data.decode('ascii').split()
    make, key = _KINDS[kind], bytes.fromhex(text)
  except (ValueError, KeyError):
    raise ValueError(
      f'{path}: not a key file, which is one line of {" or ".join(_KINDS)}, '
      'a space, and the key in hexadecimal.'
    ) from None
  if mode & 0o077 and make is not Ed25519Verifier:
    _log.warning('%s: others may read this secret key; chmod 600 it.', path)
  try:
    return make(key)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def open_signer(path: str | os.PathLike) -> Signer:
  """Opens a key that signs; ValueError for one that can only verify."""
  key = open_key(path)
  if isinstance(key, Ed25519Verifier):
    raise ValueError(
      f'{path} is a public key, which cannot sign; name the private one.'
    )
  return key


def write_key(path: str | os.PathLike, key: Verifier) -> None:
  """Writes a key file of mode 0600; FileExistsError if there is one."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f'.{path.name}.{secrets.token_hex(8)}.tmp')
  descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  try:
    with open(descriptor, 'wb') as file:
      file.write(key.to_text().encode())
      file.flush()
      os.fsync(file.fileno())
    # Not a rename, which would replace a key that is in use.
    os.link(temporary, path)
  finally:
    os.unlink(temporary)
  files.fsync_directory(path.parent)


def _ed25519():
  try:
    from cryptography import exceptions
    from cryptography.hazmat.primitives.asymmetric import ed25519
  except ImportError as error:
    raise ValueError(
      'Ed25519 keys need the package cryptography: '
      "pip install -e '.[signing]' in the checkout."
    ) from error
  return ed25519, exceptions.InvalidSignature
