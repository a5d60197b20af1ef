"""Laws of the sources: the files they have, by package and licence."""

import email
import importlib.metadata
import io
import pathlib
import sys
import tarfile
import zipfile

import numpy
import pytest

from composer_jax.corpus import licences, sources

CODE = b'def f(x):\n  return x\n' * 9
PKG_INFO = (
  b'Metadata-Version: 2.1\nName: Demo.Pack\nVersion: 1.2\n'
  b'Classifier: License :: OSI Approved :: MIT License\n\ntext\n'
)


@pytest.fixture
def sdist(tmp_path):
  path = tmp_path / 'Demo_Pack-1.2.tar.gz'
  with tarfile.open(path, 'w:gz') as archive:
    for name, data in {
      'PKG-INFO': PKG_INFO,
      'demo/a.py': CODE,
      'demo/tests/b.py': CODE,
      '../../escape.py': CODE,
    }.items():
      info = tarfile.TarInfo(f'Demo_Pack-1.2/{name}')
      info.size = len(data)
      archive.addfile(info, io.BytesIO(data))
  return path


def test_stdlib_is_the_standard_library_without_tests():
  source = sources.find('stdlib')
  packages = {f.package for f in source.files}
  assert {'json', 'asyncio', 'argparse', 'heapq'} <= packages
  assert not packages & {'test', 'lib2to3', 'site-packages', 'idlelib'}
  assert not any('/test/' in f'/{f.path}' for f in source.files)
  assert {f.licence for f in source.files} == {'PSF-2.0'}
  assert source.version == '.'.join(map(str, sys.version_info[:3]))
  assert sum(f.num_bytes for f in source.files) > 5_000_000


@pytest.mark.parametrize('name', ['sdist', 'pypi:demo.pack==1.2'])
def test_sdists_are_read_in_place(sdist, name):
  name = str(sdist) if name == 'sdist' else name
  source = sources.find(name, archives=sdist.parent)
  assert source.version == '1.2'
  by_path = {f.path: f for f in source.files}
  assert sorted(by_path) == [
    'Demo_Pack-1.2/../../escape.py',
    'Demo_Pack-1.2/demo/a.py',
  ]
  file = by_path['Demo_Pack-1.2/demo/a.py']
  assert (file.licence, file.read()) == ('MIT License', CODE)
  assert sources.normalise(file.package) == 'demo-pack'
  assert list(sdist.parent.iterdir()) == [sdist]


def test_wheels_and_folders_and_files(tmp_path):
  wheel = tmp_path / 'demo-2.0-py3-none-any.whl'
  with zipfile.ZipFile(wheel, 'w') as archive:
    archive.writestr('demo/a.py', CODE)
    archive.writestr('demo-2.0.dist-info/METADATA', PKG_INFO)
  source = sources.find('pypi:demo==2.0', archives=tmp_path)
  assert [(f.package, f.path) for f in source.files] == [('demo', 'demo/a.py')]
  single = tmp_path / 'one.py'
  single.write_bytes(CODE)
  assert [f.package for f in sources.find(str(single)).files] == ['one']
  package = tmp_path / 'whole'
  (package / 'sub').mkdir(parents=True)
  (package / '__init__.py').write_bytes(CODE)
  (package / 'sub/x.py').write_bytes(CODE)
  assert {f.package for f in sources.find(str(package)).files} == {'whole'}


def test_an_installed_release_is_a_source_with_its_licence():
  source = sources.find(f'pypi:numpy=={numpy.__version__}')
  assert {f.package for f in source.files} == {'numpy'}
  assert all('BSD' in f.licence for f in source.files)
  assert not source.changed()


def test_a_wheel_and_what_it_installed_have_one_hash(tmp_path):
  dist = importlib.metadata.distribution('pluggy')
  name = f'pypi:pluggy=={dist.version}'
  path = tmp_path / f'pluggy-{dist.version}-py3-none-any.whl'
  with zipfile.ZipFile(path, 'w') as archive:
    for file in dist.files:
      if file.suffix == '.py' or file.name == 'METADATA':
        archive.writestr(str(file), file.read_binary())
  wheel, installed = sources.find(name, archives=tmp_path), sources.find(name)
  assert len(wheel.files) > 3
  assert wheel.sha256() == installed.sha256()


def test_the_hash_is_of_the_content(tmp_path):
  for name in ('a', 'b'):
    (tmp_path / name / 'p').mkdir(parents=True)
    (tmp_path / name / 'p/x.py').write_bytes(CODE)
  first, second = (sources.find(str(tmp_path / n)).sha256() for n in 'ab')
  assert first == second
  (tmp_path / 'b/p/x.py').write_bytes(CODE + b'\n')
  assert sources.find(str(tmp_path / 'b')).sha256() != first


def test_errors_name_the_source(tmp_path, sdist):
  with pytest.raises(ValueError, match='must read pypi:NAME==VERSION'):
    sources.find('pypi:numpy')
  own = pathlib.Path(sources.__file__).parents[1]
  for path in (own, own / 'tasks', own / 'tasks/source.py'):
    with pytest.raises(ValueError, match='is composer_jax itself'):
      sources.find(str(path))
  with pytest.raises(ValueError, match="'/nowhere' does not exist"):
    sources.find('/nowhere')
  damaged = tmp_path / 'x-1.tar.gz'
  damaged.write_bytes(sdist.read_bytes()[:-40])
  with pytest.raises(ValueError, match='x-1.tar.gz is not a readable archive'):
    sources.find(str(damaged))
  (tmp_path / 'x.zip').write_bytes(b'no')
  with pytest.raises(ValueError, match='x.zip is not a readable archive'):
    sources.find(str(tmp_path / 'x.zip'))
  (tmp_path / 'x.txt').write_bytes(b'no')
  with pytest.raises(ValueError, match='neither Python nor an archive'):
    sources.find(str(tmp_path / 'x.txt'))


@pytest.mark.parametrize(
  'metadata, expected',
  [
    ('License-Expression: MIT OR Apache-2.0', 'MIT OR Apache-2.0'),
    ('Classifier: License :: OSI Approved', 'unknown'),
    ('License: BSD', 'BSD'),
    ('License: UNKNOWN', 'unknown'),
    ('Name: x', 'unknown'),
  ],
)
def test_licences_of_metadata(metadata, expected):
  parsed = email.message_from_string(metadata)
  assert licences.of_metadata(parsed) == expected
