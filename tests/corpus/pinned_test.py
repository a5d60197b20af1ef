"""Laws of the default corpus: the same text wherever it is built."""

import ast
import base64
import contextlib
import hashlib
import importlib.metadata
import pathlib
import re
import sys
import zipfile

import pytest
from packaging import requirements

from composer_jax.corpus import build as corpus_lib
from composer_jax.corpus import of_run, sources
from experiments import pin_corpus
from tests.corpus import build_test

ROOT = pathlib.Path(__file__).parents[2]
PINNED = sources.read_pins([sources.PINNED])


def base_closure(**environment) -> set[str]:
  """Distributions that an installation without any extra brings.

  Args:
    **environment: values of markers, such as those of another Python.
  """
  text = (ROOT / 'setup.py').read_text()
  required = re.search(r'REQUIRED = (\[.*?\])', text, re.S)
  assert required
  due = [(line, frozenset({''})) for line in ast.literal_eval(required[1])]
  seen = set()
  while due:
    line, extras = due.pop()
    requirement = requirements.Requirement(line)
    if requirement.marker and not any(
      requirement.marker.evaluate({**environment, 'extra': extra})
      for extra in extras
    ):
      continue
    name = sources.normalise(requirement.name)
    extras = frozenset({'', *requirement.extras})
    if (name, extras) not in seen:
      seen.add((name, extras))
      # What this machine has not, such as colorama, has no needs that matter.
      with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        due += [(x, extras) for x in importlib.metadata.requires(name) or ()]
  return {name for name, _ in seen}


def test_the_list_is_of_constraints_txt_and_alike_on_every_machine():
  """By markers, versions would differ; wheels of a platform may in files."""
  constraints = (ROOT / 'constraints.txt').read_text().splitlines()
  closure = set.intersection(
    *(
      base_closure(
        python_version=python,
        python_full_version=f'{python}.0',
        sys_platform=platform,
        platform_machine='arm64' if platform == 'darwin' else 'aarch64',
      )
      for python in ('3.11', '3.12', '3.13', '3.14')
      for platform in ('linux', 'darwin')
    )
  )
  assert len(PINNED) > 10
  for name, sha256 in PINNED.items():
    release = name.removeprefix('pypi:')
    assert sha256, release
    assert release in constraints, (
      f'{release} is not in constraints.txt, or only under a marker. After it '
      'was renewed: python -m experiments.pin_corpus.'
    )
    package = release.partition('==')[0]
    assert package in closure, f'{package} needs an extra'
    wheel = importlib.metadata.distribution(package).read_text('WHEEL') or ''
    tags = re.findall('^Tag: (.*)$', wheel, re.M)
    assert tags and all(t.endswith('-none-any') for t in tags), (package, tags)


def test_what_constraints_txt_installed_is_what_is_pinned(tmp_path):
  told = []
  found = sources.find_all([sources.PINNED], report=told.append)
  assert [s.name for s in found] == list(PINNED)
  assert not told
  text = sources.PINNED_LIST.read_text()
  own = tmp_path / 'pinned.sources'
  own.write_text(re.sub('=[0-9a-f]{64}', '=' + '0' * 64, text))
  pin_corpus.renew(own)
  assert own.read_text() == text


def link_base(site: pathlib.Path) -> None:
  """Fills a folder with links to what the base installs, and to no more."""
  site.mkdir()
  for name in sorted(base_closure()):
    distribution = importlib.metadata.distribution(name)
    for entry in distribution.files or ():
      if '..' not in entry.parts and not (site / entry.parts[0]).exists():
        top = distribution.locate_file(entry.parts[0])
        (site / entry.parts[0]).symlink_to(top)


def test_the_corpus_is_the_same_without_what_the_tests_install(
  tmp_path, monkeypatch
):
  """The full size takes half a minute, and reads more of the same files."""
  data = of_run.DataOptions(max_bytes=600_000)

  def build(name):
    return of_run.build_corpus(
      data, tmp_path / name, corpus_lib.HoldOut(), seed=0, report=told.append
    )

  told: list[str] = []
  everything = build('everything')
  assert told[-1] == f'corpus: SHA-256 {everything.fingerprint}'
  link_base(tmp_path / 'site')
  outside = [p for p in sys.path if not p.endswith('-packages')]
  monkeypatch.setattr(sys, 'path', [*outside, str(tmp_path / 'site')])
  with pytest.raises(importlib.metadata.PackageNotFoundError):
    importlib.metadata.distribution('pytest')
  base = build('base')
  assert base.fingerprint == everything.fingerprint
  assert base.documents == everything.documents
  (tmp_path / 'site/optax').unlink()
  with pytest.raises(ValueError, match='optax.*holds no Python'):
    build('without')


@pytest.fixture
def installed(tmp_path, monkeypatch):
  """Three installed releases, and a list that pins them."""
  site = tmp_path / 'site'
  lines = []
  for name in ('one', 'two', 'three'):
    data = build_test.code(name).encode()
    digest = hashlib.sha256(data).digest()
    recorded = base64.urlsafe_b64encode(digest).decode().rstrip('=')
    build_test.write(
      site,
      {
        f'{name}/a.py': data,
        f'{name}-1.0.dist-info/METADATA': f'Name: {name}\nVersion: 1.0\n',
        f'{name}-1.0.dist-info/RECORD': f'{name}/a.py,sha256={recorded},9\n',
      },
    )
  monkeypatch.syspath_prepend(str(site))
  for name in ('one', 'two', 'three'):
    source = sources.find(f'pypi:{name}==1.0')
    assert source is not None
    lines.append(f'pypi:{name}==1.0 sha256={source.sha256()}')
  (tmp_path / 'own.sources').write_text('\n'.join(lines))
  return tmp_path


def spoil(installed):
  site = installed / 'site'
  (site / 'one/a.py').write_text(build_test.code('other'))
  build_test.write(
    site, {'two-1.0.dist-info/METADATA': 'Name: two\nVersion: 2.0\n'}
  )
  (site / 'three-1.0.dist-info').rename(installed / 'elsewhere')


def test_all_that_differs_is_told_at_once_with_the_cure(installed):
  names = [str(installed / 'own.sources')]
  assert len(sources.find_all(names)) == 3
  spoil(installed)
  with pytest.raises(ValueError) as error:
    sources.find_all(names)
  message = str(error.value)
  for part in (
    'pypi:one==1.0 has SHA-256 ',
    'since it was installed, one/a.py changed',
    'pypi:two==1.0 is installed in version 2.0',
    'pypi:three==1.0 is not installed',
    '--no-deps one==1.0 two==1.0 three==1.0`',
    '--config.data.differences=note',
  ):
    assert part in message, message


def test_differences_can_be_noted_instead(installed):
  names = [str(installed / 'own.sources')]
  spoil(installed)
  told: list[str] = []
  found = sources.find_all(names, differences='note', report=told.append)
  assert [(s.name, s.version) for s in found] == [
    ('pypi:one==1.0', '1.0'),
    ('pypi:two==1.0', '2.0'),
  ]
  assert len(told) == 3 and 'three==1.0 is not installed' in told[2]
  with pytest.raises(ValueError, match="'stop', 'note'.*not 'ignore'"):
    of_run.DataOptions(differences='ignore')


def test_an_archive_stands_in_for_what_is_not_installed(installed):
  site = installed / 'site'
  with zipfile.ZipFile(installed / 'three-1.0-py3-none-any.whl', 'w') as wheel:
    wheel.write(site / 'three/a.py', 'three/a.py')
  (site / 'three-1.0.dist-info').rename(installed / 'elsewhere')
  found = sources.find_all([str(installed / 'own.sources')], installed)
  assert len(found) == 3
