"""Collectives that the backward pass of a recomputed layer repeats."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from composer_jax.models import config as model_config
from tests.parallel import collectives, mesh_test, on_mesh

DEFAULT = mesh_test.UNEVEN.remat_saves


@functools.cache
def _repeated(saves):
  """Returns the kind and scope of the collectives of recomputation."""
  config = dataclasses.replace(mesh_test.UNEVEN, remat_saves=saves)
  # By default this is the program of mesh_test, compiled once.
  _, program, _ = on_mesh.compiled(
    config, (1, 2, 4), is_replayed=True, sequence_order='zigzag'
  )
  return [
    (operation.kind, operation.scope)
    for operation in collectives.read(program.as_text())
    if 'rematted_computation' in operation.scope
  ]


@pytest.mark.slow
def test_by_default_only_weights_travel_again():
  repeated = _repeated(DEFAULT)
  assert repeated
  for kind, scope in repeated:
    assert kind == 'all-gather' and 'gather_weights' in scope


@pytest.mark.slow
def test_with_weights_kept_nothing_travels_again():
  assert not _repeated((*DEFAULT, 'weights'))


@pytest.mark.slow
def test_weights_that_are_gathered_ahead_change_no_bit():
  config = mesh_test.UNEVEN
  ahead = dataclasses.replace(config, remat_saves=(*DEFAULT, 'ahead'))
  (_, before, _), (_, after, sent) = (
    on_mesh.sharded(c, (1, 2, 4)) for c in (config, ahead)
  )
  jax.tree.map(np.testing.assert_array_equal, after, before)
  # Only experts, which are cut by D here, are gathered again.
  again = [c for c in sent if 'rematted_computation' in c.scope]
  assert len(again) == 2


@pytest.mark.slow
def test_with_nothing_kept_keys_travel_again_and_copies_do_not():
  scopes = ' '.join(scope for _, scope in _repeated(()))
  assert 'dispatch' not in scopes and 'attention' in scopes


@pytest.mark.slow
def test_tokens_that_attend_in_chunks_give_the_same():
  config, mesh = mesh_test.WIDE, (2, 2, 2)
  _, before, _ = on_mesh.sharded(config, mesh, sequence_order='zigzag')
  _, after, _ = on_mesh.sharded(config, mesh, sequence_order='zigzag', chunks=2)
  on_mesh.assert_equal(after, before)


def test_an_unknown_name_to_save_is_refused():
  with pytest.raises(ValueError, match="remat_saves must be of .* got .'key'"):
    dataclasses.replace(mesh_test.UNEVEN, remat_saves=('key',))
  # Files hold lists.
  fields = mesh_test.UNEVEN.to_dict() | {'remat_saves': ['keys']}
  assert model_config.ModelConfig.from_dict(fields).remat_saves == ('keys',)
