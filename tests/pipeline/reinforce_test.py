"""What the RL stage does about damage that is, and is not, in its way."""

import numpy as np
import pytest

from composer_jax.delta import publish
from composer_jax.delta import store as stores
from composer_jax.pipeline import reinforce


def blocks(version):
  array = np.full(8, version, np.float32)
  return [('a', 'float32', (8,), ((0, 8),), array)]


@pytest.mark.parametrize('damage', ['rot', 'gone'])
def test_a_damaged_old_bundle_ends_no_run(tmp_path, damage):
  store = stores.Store(tmp_path)
  publisher = publish.Publisher(store, 'run', keyframe_every=3)
  names = []
  for version in range(4):
    publisher.publish(blocks(version), version)
    names.append(store.pointer('run').manifest)
  old = store.objects / names[1]
  if damage == 'rot':
    old.write_bytes(b'rot')
  else:
    old.unlink()
  said = []
  # Three versions and the base of the oldest: through the damaged one.
  reinforce.collect_garbage(publisher, 3, said.append)
  assert len(said) == 1 and names[1] in said[0]
  assert all((store.objects / name).exists() for name in (names[0], names[2]))
  publisher.publish(blocks(4), 4)
  # Once nobody needs it, it goes with the others.
  reinforce.collect_garbage(publisher, 1, said.append)
  assert len(said) == 1
  assert not any((store.objects / name).exists() for name in names[:3])
