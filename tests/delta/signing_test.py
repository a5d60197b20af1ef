"""Keys sign what only they can sign, and lie in files for their owner."""

import concurrent.futures
import hmac
import logging
import os

import pytest

from composer_jax.delta import publisher
from composer_jax.delta.format import keys

SEED = bytes(range(32))


@pytest.fixture
def key():
  return keys.Hmac(SEED)


def test_signature_is_of_every_bit_of_the_data(key):
  data = b'pointer'
  signature = key.sign(data)
  key.verify(data, signature)
  for at in range(8 * len(signature)):
    changed = bytearray(signature)
    changed[at // 8] ^= 1 << at % 8
    with pytest.raises(ValueError, match='signature is wrong'):
      key.verify(data, bytes(changed))
  for other in (b'', b'pointes', b'pointer\0'):
    with pytest.raises(ValueError, match='signature is wrong'):
      key.verify(other, signature)
  for cut in (b'', signature[:-1], signature + b'\0'):
    with pytest.raises(ValueError, match='signature is wrong'):
      key.verify(data, cut)
  with pytest.raises(ValueError, match='signature is wrong'):
    type(key)(SEED[::-1]).verify(data, signature)


def test_hmac_is_the_standard_one():
  assert keys.Hmac(SEED).sign(b'x') == hmac.digest(SEED, b'x', 'sha256')


def test_keys_of_the_wrong_length_are_refused():
  with pytest.raises(ValueError, match='at least 16 bytes, not 15'):
    keys.Hmac(bytes(15))


def test_keys_read_back_from_files_of_their_owner(key, tmp_path):
  path = tmp_path / 'keys' / 'key'
  keys.write_key(path, key)
  assert path.stat().st_mode & 0o777 == 0o600
  assert os.listdir(path.parent) == ['key']
  assert type(keys.open_key(path)) is type(key)
  keys.open_key(path).verify(b'x', key.sign(b'x'))
  text = path.read_text()
  with pytest.raises(FileExistsError):
    keys.write_key(path, type(key)(bytes(32)))
  assert path.read_text() == text and os.listdir(path.parent) == ['key']


def open_or_make(store, path):
  with publisher.Publisher(store, path) as opened:
    return opened._chain._run._key


def test_a_key_is_made_once(tmp_path):
  path = tmp_path / 'run' / 'delta.key'
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    made = list(pool.map(open_or_make, [tmp_path / 'store'] * 8, [path] * 8))
  assert len({k.sign(b'x') for k in made}) == 1
  assert path.stat().st_mode & 0o777 == 0o600
  kind, text = path.read_text().split()
  assert kind == 'hmac-sha256' and len(bytes.fromhex(text)) == 32
  os.unlink(path)
  again = open_or_make(tmp_path / 'store', path)
  assert again.sign(b'x') != made[0].sign(b'x')


def test_files_that_hold_no_such_key_are_refused_and_not_quoted(tmp_path):
  path = tmp_path / 'key'
  secret = SEED.hex()
  for text in (
    '',
    secret,
    f'hmac-md5 {secret}',
    f'hmac-sha256 {secret[:-1]}',
    f'hmac-sha256 {secret} {secret}',
    f'hmac-sha256 {secret}é',
    'hmac-sha256 abcd',
    f'ed25519-private {secret}',
  ):
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path)) as error:
      keys.open_key(path)
    assert secret not in str(error.value)
  with pytest.raises(FileNotFoundError):
    keys.open_key(tmp_path / 'none')


def test_secrets_that_others_may_read_are_reported(tmp_path, caplog):
  with caplog.at_level(logging.WARNING):
    keys.write_key(tmp_path / 'key', keys.Hmac(SEED))
    keys.open_key(tmp_path / 'key')
    assert not caplog.records
    os.chmod(tmp_path / 'key', 0o644)
    keys.open_key(tmp_path / 'key')
    assert 'chmod 600' in caplog.text
