"""Sdists are pinned, read without being executed, and laid out."""

import hashlib
import http.server
import io
import json
import pathlib
import tarfile
import threading
import zipfile

import pytest

from composer_jax.core import files as core_files
from composer_jax.tasks.deletion import package_index, sdists, workspace


def _add(archive, name, data=b'', **fields):
  info = tarfile.TarInfo(name)
  info.size = len(data)
  for field, value in fields.items():
    setattr(info, field, value)
  archive.addfile(info, io.BytesIO(data))


@pytest.fixture
def sdist(tmp_path):
  path = tmp_path / 'my_thing-1.5.tar.gz'
  with tarfile.open(path, 'w:gz') as archive:
    _add(archive, 'my_thing-1.5/PKG-INFO', b'Name: my-thing\n')
    _add(archive, 'my_thing-1.5/thing.py', b'x = 1\n')
    _add(archive, 'my_thing-1.5/../../evil.py', b'evil')
    _add(archive, 'my_thing-1.5/link', type=tarfile.SYMTYPE, linkname='/etc')
    _add(archive, 'my_thing-1.5/pipe', type=tarfile.FIFOTYPE)
  return path


def pin_of(path, **fields):
  digest = hashlib.sha256(path.read_bytes()).hexdigest()
  fields = {'name': 'My.Thing', 'version': '1.5', 'sha256': digest, **fields}
  return sdists.Pin(**fields)


def test_an_archive_gives_its_regular_files(sdist):
  files, digest = sdists.read(pin_of(sdist), sdist.parent)
  assert files == {'PKG-INFO': b'Name: my-thing\n', 'thing.py': b'x = 1\n'}
  assert digest == hashlib.sha256(sdist.read_bytes()).hexdigest()


def test_another_content_than_pinned_is_refused(sdist):
  pin = pin_of(sdist, sha256='0' * 64)
  with pytest.raises(sdists.Refused, match='requires 0000') as caught:
    sdists.read(pin, sdist.parent)
  assert caught.value.reason == 'hash'


class Index(http.server.BaseHTTPRequestHandler):
  """A package index with one project; speaks JSON alone."""

  archive: pathlib.Path
  sha256: str
  asked: list[str]

  def log_message(self, *args):
    del args

  def do_GET(self):
    self.asked.append(self.path)
    data = self.archive.read_bytes()
    if self.path == '/simple/my-thing/':
      assert self.headers['Accept'] == 'application/vnd.pypi.simple.v1+json'
      names = ('my_thing-1.4.tar.gz', '../my_thing-1.5.tar.gz')
      urls = dict.fromkeys(names, 'file:///etc/passwd')
      urls |= {self.archive.name: '../../files/it', 'My_Thing-1.5.zip': '/no'}
      hashes = {'sha256': self.sha256}
      data = json.dumps(
        {
          'files': [
            {'filename': name, 'url': url, 'hashes': hashes}
            for name, url in urls.items()
          ]
        }
      ).encode()
    self.send_response(200 if self.path != '/no' else 404)
    self.end_headers()
    self.wfile.write(data)


@pytest.fixture
def index(sdist, monkeypatch):
  Index.archive, Index.asked = sdist, []
  Index.sha256 = hashlib.sha256(sdist.read_bytes()).hexdigest()
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Index) as server:
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    address = f'http://127.0.0.1:{server.server_port}/simple/'
    monkeypatch.setenv('PIP_INDEX_URL', address)
    monkeypatch.setenv('NO_PROXY', '127.0.0.1')
    yield package_index.settings()
    server.shutdown()


def test_a_missing_sdist_is_fetched_from_the_index(
  sdist, index, tmp_path, monkeypatch
):
  assert index['index-url'].startswith('http://127.0.0.1')
  monkeypatch.setattr(package_index, 'settings', lambda: index)
  path = sdists.fetch(pin_of(sdist), tmp_path / 'archives')
  assert path.parent == tmp_path / 'archives'
  assert path.read_bytes() == sdist.read_bytes()
  assert Index.asked == ['/simple/my-thing/', '/files/it']
  with pytest.raises(sdists.Refused, match='no such file.* by hand') as caught:
    sdists.fetch(pin_of(sdist, version='2'), tmp_path / 'archives')
  assert caught.value.reason == 'download'


def test_an_index_is_not_believed(sdist, index):
  def fetch(sha256, config=index, max_bytes=1 << 20):
    return package_index.fetch(
      'my-thing', lambda name: name == sdist.name, sha256, config, max_bytes
    )

  def check_refused(reason, *arguments, **options):
    with pytest.raises(LookupError, match=reason):
      fetch(*arguments, **options)

  listed = Index.sha256
  assert fetch(listed)[0] == sdist.name
  check_refused('more than 10 bytes', listed, max_bytes=10)
  check_refused('no such file', '0' * 64)
  check_refused('no certificate', '')
  Index.sha256 = '0' * 64
  check_refused('no such file', '0' * 64)  # content unlike what is listed
  check_refused('no index', listed, {**index, 'no-index': '1'})


def test_indices_with_a_password_or_in_folders_are_not_asked():
  config = {
    'index-url': 'https://user:secret@host/simple',
    'extra-index-url': 'file:///opt/simple https://b/simple/\\nhttps://c',
  }
  assert package_index.indices(config) == ['https://b/simple', 'https://c']
  assert package_index.indices({}) == ['https://pypi.org/simple']


def test_a_damaged_archive_is_refused(sdist):
  sdist.write_bytes(sdist.read_bytes()[:-40])
  with pytest.raises(sdists.Refused, match='cannot be unpacked') as caught:
    sdists.read(pin_of(sdist), sdist.parent)
  assert caught.value.reason == 'archive'


def test_what_no_folder_can_hold_is_refused_or_left_out(tmp_path):
  path = tmp_path / 'thing-1.tar.gz'
  with tarfile.open(path, 'w:gz', errors='surrogateescape') as archive:
    for name in ('a.py', 'b' * 256, 'c\udcff.py', 'd/e/f.py'):
      _add(archive, f'thing-1/{name}')
  assert set(sdists.unpack(path)) == {'a.py', 'd/e/f.py'}
  with tarfile.open(path, 'w:gz') as archive:
    _add(archive, 'thing-1/d')
    _add(archive, 'thing-1/d/e/f.py')
  with pytest.raises(sdists.Refused, match="'d' as a file and as a folder"):
    sdists.unpack(path)


def test_an_archive_that_is_too_large_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(sdists, '_MAX_BYTES', 1000)
  path = tmp_path / 'a-1.zip'
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
    archive.writestr('a-1/a.py', 'x' * 2000)
  with pytest.raises(sdists.Refused, match='holds more than 1000 bytes'):
    sdists.unpack(path)


def test_a_folder_is_a_package_too(tmp_path):
  (tmp_path / '.git').mkdir()
  (tmp_path / '.git' / 'config').write_text('x')
  (tmp_path / 'a.py').write_text('x = 1\n')
  (tmp_path / 'link').symlink_to('/etc/passwd')
  pin = sdists.Pin(name='a', folder=str(tmp_path))
  files, first = sdists.read(pin, '')
  assert files == {'a.py': b'x = 1\n'}
  (tmp_path / 'a.py').write_text('x = 2\n')
  assert sdists.read(pin, '')[1] != first
  with pytest.raises(sdists.Refused, match='is not a folder') as caught:
    sdists.read(sdists.Pin(name='a', folder=str(tmp_path / 'b')), '')
  assert caught.value.reason == 'folder'


def test_pins_come_from_a_config():
  packages = {'a': {'version': '1'}, 'b': {'folder': 'x', 'held_out': True}}
  pins = sdists.pins_of(packages, ())
  assert [pin.name for pin in pins] == ['a', 'b']
  assert pins[1].held_out
  assert [pin.name for pin in sdists.pins_of(packages, ['b'])] == ['b']
  with pytest.raises(ValueError, match=r"\['c'\] are not among \['a', 'b'\]"):
    sdists.pins_of(packages, ['c'])
  with pytest.raises(ValueError, match="Package 'a' of the config.*colour"):
    sdists.pins_of({'a': {'colour': 'red'}}, ())
  with pytest.raises(ValueError, match="'a' needs a version or a folder"):
    sdists.pins_of({'a': {}}, ())


def test_what_could_leak_is_scrubbed():
  leaking = (
    'docs/index.rst', 'build/lib/a.py', '.git/HEAD', 'a/__pycache__/b.pyc',
    'a.egg-info/PKG-INFO', 'x/.mypy_cache/y.db', 'a/b.py.orig', 'a/c.pyc',
    'a/d~', 'x/site-packages/a.py', '.coverage',
  )  # fmt: skip
  staying = ('a/docs/x.py', 'a/build.py', 'README.md', 'tests/data/x.json')
  files = dict.fromkeys((*leaking, *staying), b'')
  kept, dropped = workspace.scrub(files)
  assert sorted(kept) == sorted(staying)
  assert dropped == sorted(leaking)


def layout(*paths):
  return workspace.layout(dict.fromkeys(paths, b''))


def test_layouts_are_told_apart():
  flat = layout(
    'a/__init__.py', 'a/b.py', 'a/tests/test_b.py', 'setup.py', 'conftest.py',
    'docs/conf.py', 'tox.ini', 'tests/data.json',
  )  # fmt: skip
  assert flat.source_roots == ('.',)
  assert flat.sources == ('a/__init__.py', 'a/b.py')
  assert flat.tests == ('a/tests/test_b.py',)
  assert flat.test_paths == (
    'a/tests/test_b.py', 'conftest.py', 'tests/data.json', 'tox.ini',
  )  # fmt: skip
  assert flat.module('a/__init__.py') == 'a'
  src = layout('src/a/__init__.py', 'src/a/b.py', 'tests/b_test.py')
  assert src.source_roots == ('src',)
  assert src.module('src/a/b.py') == 'a.b'
  module = layout('a.py', 'tests.py')
  assert (module.sources, module.tests) == (('a.py',), ('tests.py',))


def test_packages_without_tests_or_sources_are_refused():
  with pytest.raises(sdists.Refused, match='None of 1 files is') as caught:
    layout('a/__init__.py')
  assert caught.value.reason == 'no_tests'
  with pytest.raises(sdists.Refused) as caught:
    layout('test_a.py')
  assert caught.value.reason == 'no_sources'


def test_an_image_is_whole_or_absent(tmp_path):
  image = tmp_path / 'a-1'
  with pytest.raises(TypeError):
    workspace.write_image(image, {'a': b'', 'b': None}, ('.', b''))
  assert not list(tmp_path.iterdir())
  workspace.write_image(image, {'b/a.py': b'x'}, ('.', b'Name: a\n'))
  assert (image / 'b' / 'a.py').read_bytes() == b'x'
  assert (image / 'a-1.dist-info' / 'METADATA').read_bytes() == b'Name: a\n'


def test_the_image_of_a_killed_write_is_swept(tmp_path, monkeypatch):
  monkeypatch.setattr(workspace.os, 'rename', lambda *paths: None)
  workspace.write_image(tmp_path / 'a-2', {'b/a.py': b'x'}, ('.', b''))
  (scratch,) = tmp_path.iterdir()
  assert core_files.sweep(tmp_path) == [scratch]


def test_folders_are_named_after_themselves_or_by_hand(tmp_path):
  made = sdists.of_folders([f'{tmp_path}/My.Thing/', 'b=/c/d'], ['b'])
  pins = sdists.pins_of(made, ())
  assert [(p.normal_name, p.folder, p.held_out) for p in pins] == [
    ('my-thing', f'{tmp_path}/My.Thing/', False),
    ('b', '/c/d', True),
  ]
  with pytest.raises(ValueError, match=r"names \['c'\]; the folders are .*'b'"):
    sdists.of_folders(['b=/c/d'], ['c'])
