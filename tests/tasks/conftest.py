"""A small repository with tasks on it, and a sandbox for them."""

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as open_lib
from tests.tasks import small_package


@pytest.fixture(scope='session')
def larder(tmp_path_factory):
  """The set of hand-made tasks of `small_package`."""
  return small_package.task_set(tmp_path_factory.mktemp('larder'))


@pytest.fixture(scope='session')
def larder_sandbox(larder):
  """A sandbox of plain processes, which run our own code alone."""
  limits = base.Limits(
    wall_s=30.0,
    cpu_s=20.0,
    memory_bytes=1 << 30,
    processes=32,
    file_bytes=16 << 20,
    output_bytes=1 << 20,
  )
  sandbox = open_lib.open_sandbox(
    'rlimits',
    limits,
    allow_unsafe=True,
    images=larder.root,
    packages=('pytest',),
  )
  yield sandbox
  sandbox.close()
