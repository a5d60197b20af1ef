"""Compilation of kernels, cached on disk in a way that cannot go stale.

numba tells cached kernels apart by the file of the one function that it
compiles. Constants and functions of other files are compiled in all the same,
and a kernel that was cached before one of those changed would code another
format. A kernel's name in the cache therefore holds a digest of the sources of
all of the codec, of numba, of its options and of the processor. One name serves
one signature: numba's lists of several are torn by processes that compile at
the same time, each name here is written by one list of one entry.
"""

import functools
import hashlib
import logging
import pickle
import types
from collections.abc import Callable
from typing import Any

import llvmlite
import numba
from numba.core import registry

from composer_jax.delta import codec_model as model

# What a cache that cannot be placed, read or written raises: no writable
# folder (RuntimeError), a full disk, files cut short by a crash.
_CACHE_ERRORS = (OSError, RuntimeError, EOFError, pickle.UnpicklingError)

# Parts of kernels. They are compiled into those that call them and have no
# cache of their own, which could be older than its callers.
part: Any = functools.partial(numba.njit, nogil=True, error_model='numpy')


def kernel(signature: Any) -> Callable[[Callable], Callable]:
  """Compiles a function for one signature, or loads what was compiled."""
  return functools.partial(_compile, signature)


def _compile(signature, function):
  # A process that began before an update of the sources has old constants.
  if model.digest_of_sources() == model.SOURCES:
    key = hashlib.sha256(f'{signature} {_machine()}'.encode())
    key.update(model.SOURCES)
    named = types.FunctionType(function.__code__, function.__globals__)
    named.__qualname__ = f'{function.__name__}-{key.hexdigest()[:16]}'
    try:
      return part(signature, cache=True)(named)
    except _CACHE_ERRORS as error:
      logging.getLogger(__name__).warning(
        'kernel %s is compiled by every process anew: numba cannot cache it '
        '(%s: %s); NUMBA_CACHE_DIR names a folder that it may write to',
        *(function.__name__, type(error).__name__, error),
      )
  return part(signature)(function)


@functools.cache
def _machine() -> tuple:
  """What else the code depends on: versions, options and the processor."""
  config: Any = numba.config
  target: Any = registry.cpu_target.target_context
  return (
    *(numba.__version__, llvmlite.__version__),
    *(config.BOUNDSCHECK, config.OPT, config.DEBUGINFO_DEFAULT),
    *target.codegen().magic_tuple(),
  )
