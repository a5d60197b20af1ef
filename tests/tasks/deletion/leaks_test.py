"""Copies of deleted code are found whatever they are packed into."""

import base64
import gzip
import io
import json
import marshal
import sqlite3
import tarfile
import zipfile
import zlib

import pytest

from composer_jax.tasks.deletion import leaks

SECRET = """def running_balance(values):
    balance_so_far = 123456789
    for value in values:
        balance_so_far = balance_so_far * 3 + value
        if balance_so_far > 1000:
            balance_so_far -= len(values)
    return balance_so_far
"""
LEFT = 'def other(values):\n    return values\n'


def scan(data, left=LEFT):
  return leaks.scan({'data/thing': data}, [SECRET], [left])


def _zip(data):
  out = io.BytesIO()
  with zipfile.ZipFile(out, 'w', zipfile.ZIP_DEFLATED) as archive:
    archive.writestr('inner/a.py', data)
  return out.getvalue()


def _tar(data):
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode='w:gz') as archive:
    info = tarfile.TarInfo('a.py')
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
  return out.getvalue()


def _sqlite(data):
  connection = sqlite3.connect(':memory:')
  connection.execute('CREATE TABLE files2 (path TEXT, data BLOB)')
  # Longer than a page, so that its bytes do not lie in a row.
  padded = b'\0' * 5000 + data
  connection.execute('INSERT INTO files2 VALUES (?, ?)', ('m.data.ff', padded))
  connection.commit()
  return connection.serialize()


def _pyc(text):
  code = compile(text, 'm.py', 'exec')
  return b'\xa7\r\r\n' + b'\0' * 12 + marshal.dumps(code)


CONTAINERS = {
  'text': SECRET.encode(),
  'reindented': SECRET.replace('    ', '\t').encode(),
  'quoted in a document': f'It was\n\n```\n{SECRET}```\n'.encode(),
  'zip': _zip(SECRET.encode()),
  'zip in a zip': _zip(_zip(SECRET.encode())),
  'tar.gz': _tar(SECRET.encode()),
  'gzip': gzip.compress(SECRET.encode()),
  'zlib': zlib.compress(b'blob 99\0' + SECRET.encode()),
  'zlib inside': b'\0\1\2' + zlib.compress(SECRET.encode()) + b'\xff',
  'sqlite': _sqlite(SECRET.encode()),
  'zlib in sqlite': _sqlite(zlib.compress(SECRET.encode())),
  'bytecode': _pyc(SECRET),
  'utf-16': SECRET.encode('utf-16-le'),
  'comment': '\n'.join('# ' + r for r in SECRET.split('\n')).encode(),
  'string': f'OLD = """\n{SECRET}"""\n'.encode(),
  'string with escapes': f'OLD = {SECRET!r}\n'.encode(),
  'json': json.dumps({'source': SECRET.split('\n')}).encode(),
  'base64': b'OLD = "%s"' % base64.b64encode(SECRET.encode()),
  'base64 in lines': b'to:\n\n' + base64.encodebytes(SECRET.encode()),
  'gzip in base64': base64.urlsafe_b64encode(gzip.compress(SECRET.encode())),
}


@pytest.mark.parametrize('name', CONTAINERS)
def test_a_copy_is_found(name):
  assert scan(CONTAINERS[name]) == ('data/thing',)


OTHER = SECRET.replace('balance_so_far', 'x').replace('running_balance', 'y')
OTHER = OTHER.replace('123456789', '7').replace('* 3', '/ 5')


@pytest.mark.parametrize(
  'data',
  [
    LEFT.encode(),
    OTHER.encode(),
    _zip(OTHER.encode()),
    _sqlite(OTHER.encode()),
    _pyc(OTHER),
    b'Call `running_balance(values)`, see balance_so_far.',  # what users write
    b'PK\x03\x04 no archive \0',
    b'SQLite format 3\0 no database',
    b'\x1f\x8b no gzip',
    b'\x78\x9c no stream \0' * 500,
    b'',
  ],
)
def test_other_files_are_no_alarm(data):
  assert scan(data) == ()


def test_what_is_left_elsewhere_is_no_secret():
  for data in CONTAINERS.values():
    assert scan(data, left=SECRET) == ()
  assert leaks.copied_share([SECRET], [LEFT, SECRET]) == 1
  assert leaks.copied_share([SECRET], [LEFT, OTHER]) == 0
  share = leaks.copied_share([SECRET, OTHER], [OTHER])
  assert 0.2 < share < 0.8


@pytest.mark.parametrize('body', [
    'return _registry[key].pop(index, default_value)',
    'self.seen |= {item.casefold() for item in names}',
])  # fmt: skip
def test_a_short_body_is_a_secret(body):
  secret = f'def take(self, key, index):\n    {body}\n'
  scan_of = lambda data: leaks.scan({'a': data.encode()}, [secret], [LEFT])
  assert scan_of(f'def old_take(self, k):\n  x = 1; {body}\n') == ('a',)
  assert scan_of(body.replace('(', '( ').replace('.', '\n  .')) == ('a',)
  assert scan_of('Takes the item of a key. See `_registry` and casefold.') == ()


def test_compiled_code_of_short_names_is_found():
  secret = """def shared(first, second):
    out = set()
    for item in first:
        if item in second:
            out.add(item)
    return out
"""
  body = secret.partition('\n')[2]
  other = secret.replace('second', 'other')
  # A body compiles to no code of its own.
  for piece in (secret, body):
    scan_of = lambda data, it=piece: leaks.scan({'a': data}, [it], [LEFT])
    assert scan_of(base64.b64encode(secret.encode())) == ('a',)
    assert scan_of(_pyc(f'import os\n{secret}')) == ('a',)
    assert scan_of(_pyc(LEFT)) == ()
    far = b'\0' * 9000
    assert scan_of(far.join(map(_pyc, ['first = second', 'item = 1']))) == ()
  assert leaks.scan({'a': _pyc(other)}, [secret], [LEFT]) == ()
  assert leaks.scan({'a': _pyc(secret)}, [secret], [secret]) == ()


def test_an_old_copy_under_another_name_is_no_secret_and_no_task():
  lines = SECRET.replace('running_balance', 'old_balance').splitlines()
  old = '\n\n'.join(f'  {line}  # as before' for line in lines)
  assert leaks.copied_share([SECRET], [LEFT, old]) == 1


def test_documentation_may_be_quoted():
  doc = 'Joins the words of a text by a sign and drops all that are too short.'
  secret = f'def join(text):\n    """{doc}"""\n    return SIGN.join(text)\n'
  assert leaks.scan({'README': doc.encode() * 3}, [secret], [LEFT]) == ()


def test_a_bomb_is_not_unpacked_whole(monkeypatch):
  monkeypatch.setattr(leaks, '_MAX_PART', 1 << 16)
  bomb = zlib.compress(b'\0' * (4 << 20) + SECRET.encode(), 9)
  assert scan(b'\0' + bomb) == ()
