"""Picks what holds a store, by its URL."""

import pathlib
import re
from typing import Any

from composer_jax.delta import (
  store_backend,
  store_http,
  store_local,
  store_remote,
)

_REMOTE = dict.fromkeys(('http', 'https'), store_http.HttpBackend) | (
  dict.fromkeys(store_remote.KINDS, store_remote.RemoteBackend)
)

# What was meant as a URL must not become a folder of that name.
_ALMOST_A_URL = re.compile('(s3a?|gc?s|az|https?|file|memory):')


def clean(url: str) -> str:
  """The URL without what makes two spellings of one place; checked."""
  protocol, mark, path = url.partition('://')
  is_web = protocol in ('http', 'https')
  if not mark:
    bad = not url or _ALMOST_A_URL.match(url)
  else:
    # A query would end up in the middle of each object's address.
    bad = not path.strip('/') or (is_web and {'?', '#'} & set(path))
    bad = bad or protocol not in (*_REMOTE, 'file', 'local')
    bad = bad or (protocol in _REMOTE and '//' in f'/{path.rstrip("/")}')
  if bad:
    raise ValueError(
      f'{url!r} names no store; take a directory, s3://BUCKET/PREFIX, '
      'gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, memory://NAME or, to read, '
      'http://HOST:PORT.'
    )
  return url.rstrip('/') or '/'


def open_backend(
  url: str,
  traffic: store_backend.Traffic,
  options: dict[str, Any],
) -> store_backend.Reader:
  protocol, mark, path = url.partition('://')
  if not mark:
    return store_local.LocalBackend(pathlib.Path(url), traffic)
  if protocol in ('file', 'local'):
    return store_local.LocalBackend(pathlib.Path(path), traffic)
  return _REMOTE[protocol](url, traffic, options)
