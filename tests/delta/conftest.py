"""A run of two versions, in packs small enough that a bundle has several."""

import pytest

from tests.delta import bundles


@pytest.fixture
def run(tmp_path):
  run = bundles.Run(tmp_path / 'store')
  run.add(0, pack_bytes=1500)
  run.add(1, base=0, pack_bytes=300)
  run.point(1)
  return run
