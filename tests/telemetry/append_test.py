"""A record is appended whole, or not at all and with the path."""

import contextlib
import re
import resource

import pytest

from composer_jax.telemetry import append


@contextlib.contextmanager
def no_file_larger_than(num_bytes):
  """Imitates a full disk; Python itself ignores SIGXFSZ."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
  'room, told',
  [
    (0, 'Cannot append a word (File too large)'),
    (3, 'Only 3 of 6 bytes of a word fitted'),
  ],
)
def test_what_does_not_fit_leaves_what_is_there(tmp_path, room, told):
  path = tmp_path / 'words'
  file = append.AppendFile(path, 'a word', cure=', forget words')
  file.append(b'first ')
  with (
    no_file_larger_than(6 + room),
    pytest.raises(OSError, match=re.escape(told)) as error,
  ):
    file.append(b'second')
  assert path.read_bytes() == b'first '
  assert str(path) in str(error.value)
  assert 'Free space, forget words or choose another' in str(error.value)
  file.append(b'third')
  file.close()
  assert path.read_bytes() == b'first third'
