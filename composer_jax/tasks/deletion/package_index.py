"""Fetches files from a package index without executing anything.

pip builds the metadata of an sdist when it downloads one, which executes code
of the sdist. The indices that pip is configured with are asked directly instead
(PEP 691): for the list of files as JSON, then for the file.
"""

import hashlib
import http.client
import json
import ssl
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping

_JSON = 'application/vnd.pypi.simple.v1+json'
_PYPI = 'https://pypi.org/simple'
_TIMEOUT_S = 60.0
_MAX_LIST = 64 << 20
# Failures of the network or the server, and answers that are not such JSON.
_ERRORS = (
  OSError, http.client.HTTPException, ValueError, TypeError, KeyError,
)  # fmt: skip


def settings() -> dict[str, str]:
  """Options of pip by name, from its files and environment variables."""
  result = subprocess.run(
      [sys.executable, '-m', 'pip', 'config', 'list'], capture_output=True,
      text=True, stdin=subprocess.DEVNULL,
  )  # fmt: skip
  config: dict[str, str] = {}
  # From what counts least to what counts most: global, download, :env:.
  for line in sorted(result.stdout.splitlines(), reverse=True):
    key, _, value = line.partition('=')
    section, _, name = key.rpartition('.')
    if section in ('global', 'download', ':env:'):
      config[name] = value.strip('\'"')
  return config


def indices(config: Mapping[str, str]) -> list[str]:
  """Addresses of the indices over HTTP without a password, in pip's order."""
  if config.get('no-index', '').lower() in ('1', 'true', 'yes', 'on'):
    return []
  addresses = [config.get('index-url', _PYPI)]
  # In a file, pip takes one to a line, and its list writes the ends as \n.
  addresses += config.get('extra-index-url', '').replace('\\n', ' ').split()
  return [a.rstrip('/') for a in addresses if _is_http(a) and '@' not in a]


def _is_http(address: str) -> bool:
  return urllib.parse.urlsplit(address).scheme in ('http', 'https')


def fetch(
  project: str,
  is_wanted: Callable[[str], bool],
  sha256: str,
  config: Mapping[str, str],
  max_bytes: int,
) -> tuple[str, bytes]:
  """Downloads a file of a project.

  Args:
    project: normalised name of the project.
    is_wanted: true for the names of acceptable files.
    sha256: expected hash; '' accepts the hash that an index with a certificate
      lists.
    config: options of pip.
    max_bytes: largest size to accept.

  Returns:
    Name and content of the first acceptable file.

  Raises:
    LookupError: no index gave one; with the reason of each.
  """
  reasons = []
  for index in indices(config):
    if not sha256 and not index.startswith('https:'):
      reasons.append(f'{index} has no certificate and the pin has no SHA-256')
      continue
    try:
      for name, address, listed in _files(index, project, config):
        wanted = sha256 or listed
        if not is_wanted(name) or wanted != listed:
          continue
        data = _get(address, '*/*', config, max_bytes)
        if hashlib.sha256(data).hexdigest() == wanted:
          return name, data
      reasons.append(f'{index} has no such file with the hash')
    except _ERRORS as error:
      reasons.append(f'{index} failed: {error}')
  raise LookupError('; '.join(reasons) or 'pip has no index of this kind')


def _files(
  index: str, project: str, config: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
  """Yields name, address and SHA-256 of each file of a project."""
  listing = f'{index}/{project}/'
  for file in json.loads(_get(listing, _JSON, config, _MAX_LIST))['files']:
    sha256 = file['hashes'].get('sha256', '')
    address = urllib.parse.urljoin(listing, file['url'])
    # A listing may not send us to files of this machine.
    if sha256 and _is_http(address):
      yield file['filename'], address, sha256


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
