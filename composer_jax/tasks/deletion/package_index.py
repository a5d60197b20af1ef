"""Fetches files from a package index without executing anything.

pip builds the metadata of an sdist when it downloads one, which executes what
the sdist brings. An index that speaks JSON (PEP 691) is asked directly instead:
for the list of files, then for the file. Indices that do not (folders, HTML
alone, a password in the address) are left to pip.
"""

import hashlib
import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping

_JSON = 'application/vnd.pypi.simple.v1+json'
_PYPI = 'https://pypi.org/simple'
_TIMEOUT_S = 60.0
_MAX_LIST = 64 << 20
# What a server or the way to it can do wrong; and an answer that is no JSON.
_ERRORS = (OSError, urllib.error.URLError, ValueError, TypeError, KeyError)


def settings() -> dict[str, str]:
  """What pip is configured with, the environment's values last."""
  result = subprocess.run(
      [sys.executable, '-m', 'pip', 'config', 'list'], capture_output=True,
      text=True, stdin=subprocess.DEVNULL,
  )  # fmt: skip
  found: dict[str, str] = {}
  lines = [line.partition('=') for line in result.stdout.splitlines()]
  for key, _, value in lines:
    section, _, name = key.rpartition('.')
    if section in ('global', 'download'):
      found[name] = value.strip('\'"')
  for key, value in os.environ.items():
    if key.startswith('PIP_') and value:
      found[key.removeprefix('PIP_').lower().replace('_', '-')] = value
  return found


def indices(config: Mapping[str, str]) -> list[str]:
  """Addresses of indices that can be asked directly, in pip's order."""
  if config.get('no-index', '').lower() in ('1', 'true', 'yes', 'on'):
    return []
  addresses = [config.get('index-url', _PYPI)]
  # In a file, pip takes one to a line, and its list writes the ends as \n.
  addresses += config.get('extra-index-url', '').replace('\\n', ' ').split()
  return [
    address.rstrip('/')
    for address in addresses
    if urllib.parse.urlsplit(address).scheme in ('http', 'https')
    and '@' not in urllib.parse.urlsplit(address).netloc
  ]


def fetch(
  project: str,
  is_it: Callable[[str], bool],
  sha256: str,
  config: Mapping[str, str],
  max_bytes: int,
) -> tuple[str, bytes] | None:
  """The first file of a project that is the one, and has the hash.

  Args:
    is_it: told the name of a file.
    sha256: that it must have; '' to take the index's word, which only one with
      a certificate is believed.
    max_bytes: of a file; a larger one is none.

  Returns:
    Its name and content; None where no index has it or could be asked.
  """
  for index in indices(config):
    if not sha256 and not index.startswith('https:'):
      continue
    try:
      for name, address, listed in _files(index, project, config):
        wanted = sha256 or listed
        if not is_it(name) or wanted != listed:
          continue
        data = _get(address, '*/*', config, max_bytes)
        if hashlib.sha256(data).hexdigest() == wanted:
          return name, data
    except _ERRORS:
      continue  # pip will say what is wrong with it
  return None


def _files(
  index: str, project: str, config: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
  """Name, address and SHA-256 of each file."""
  address = f'{index}/{project}/'
  for file in json.loads(_get(address, _JSON, config, _MAX_LIST))['files']:
    sha256 = file['hashes'].get('sha256', '')
    if sha256:
      where = urllib.parse.urljoin(address, file['url'])
      # A listing may not send us to files of this machine.
      if urllib.parse.urlsplit(where).scheme in ('http', 'https'):
        yield file['filename'], where, sha256


def _get(
  address: str, accept: str, config: Mapping[str, str], max_bytes: int
) -> bytes:
  context = None
  if address.startswith('https:'):
    context = ssl.create_default_context(cafile=config.get('cert') or None)
  request = urllib.request.Request(address, headers={'Accept': accept})
  with urllib.request.urlopen(
    request, timeout=_TIMEOUT_S, context=context
  ) as answer:
    data = answer.read(max_bytes + 1)
  if len(data) > max_bytes:
    raise ValueError(f'{address} holds more than {max_bytes} bytes.')
  return data
