"""Picks what holds a store, by its URL."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

from composer_jax.delta import (
  retries,
  store_backend,
  store_gs,
  store_http,
  store_local,
  store_remote,
  store_s3,
)

_REMOTE = {
  's3': store_s3.S3Backend,
  's3a': store_s3.S3Backend,
  'gs': store_gs.GsBackend,
  'gcs': store_gs.GsBackend,
  'http': store_http.HttpBackend,
  'https': store_http.HttpBackend,
}

# What was meant as a URL must not become a folder of that name.
_ALMOST_A_URL = re.compile('(s3a?|gc?s|https?|file|memory):')


def clean(url: str) -> str:
  """The URL without what makes two spellings of one place; checked."""
  protocol, mark, path = url.partition('://')
  is_web = protocol in ('http', 'https')
  if not mark:
    bad = not url or _ALMOST_A_URL.match(url)
  else:
    # A query would end up in the middle of each object's address.
    bad = not path.strip('/') or (is_web and {'?', '#'} & set(path))
    bad = bad or (protocol in _REMOTE and '//' in f'/{path.rstrip("/")}')
  if bad:
    raise ValueError(
      f'{url!r} names no store; take a directory, s3://BUCKET/PREFIX, '
      'gs://BUCKET/PREFIX or http://HOST:PORT.'
    )
  return url.rstrip('/') or '/'


def open_backend(
  url: str,
  traffic: store_backend.Traffic,
  policy: retries.Policy,
  sleep: Callable[[float], None],
  options: dict[str, Any],
) -> store_backend.Backend:
  protocol, mark, path = url.partition('://')
  if not mark:
    return store_local.LocalBackend(pathlib.Path(url), traffic)
  if protocol in ('file', 'local'):
    return store_local.LocalBackend(pathlib.Path(path), traffic)
  kind = _REMOTE.get(protocol, store_remote.RemoteBackend)
  return kind(url, traffic, policy, sleep, options)
