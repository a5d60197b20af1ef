"""Errors of shapes that do not divide name the dimension and what fits."""

import jax
import numpy as np
import pytest

from composer_jax.models import config as model_config
from composer_jax.models import decoder, placement
from composer_jax.parallel import (
  layouts,
  sequence,
  shardings,
  topology,
)
from composer_jax.train import placement as train_placement
from composer_jax.train import step as train_step
from tests.parallel import step_programs as programs


def _place(shape=(2, 2, 2), **change):
  """Asks for the shardings of a model's variables."""
  config = programs.config(**change)
  placement.variable_shardings(
    config, layout=layouts.TRAIN, mesh=topology.make_mesh(*shape)
  )


@pytest.mark.parametrize(
  'shape, change, parts',
  [
    (
      (2, 2, 2),
      dict(embed_dim=74),
      [
        'Parameter params/',
        'its embed dimension (74) must divide by the mesh axes ',
        'fsdp=2 x context=2 (4)',
        'the nearest that does is 72 or 76.',
      ],
    ),
    # Fewer than the devices, so no smaller number fits.
    (
      (1, 8, 1),
      dict(embed_dim=4),
      ['its embed dimension (4) must divide by', 'nearest that does is 8.'],
    ),
    (
      (1, 8, 1),
      dict(
        moe=dict(num_experts=6, ffw_dim=22),
        embed_dim=76,
        attention=programs.GQA,
      ),
      ['embed dimension (76)', 'fsdp=8 x context=1 (8)', '72 or 80'],
    ),
  ],
)
def test_a_dense_dimension_names_parameter_axis_sizes_and_cure(
  shape, change, parts
):
  with pytest.raises(ValueError) as caught:
    _place(shape, **change)
  for part in parts:
    assert part in str(caught.value)


def test_experts_that_fit_nowhere_name_every_way_out():
  mesh = topology.make_mesh(2, 4, 1)
  with pytest.raises(ValueError) as caught:
    shardings.spec(
      'params/moe_layers/moe/gate_up',
      (3, 5, 9, 2, 7),
      ('layer', 'expert', 'embed', 'gate_up', 'ffw'),
      layout=layouts.TRAIN,
      mesh=mesh,
    )
  message = str(caught.value)
  for part in (
    'Parameter params/moe_layers/moe/gate_up: its 5 experts do not divide',
    'replica=2 x fsdp=4 x context=1 (8)',
    "{'embed': 9, 'ffw': 7}",
    '8 experts, embed of 8 or 16, ffw of 8; or change the mesh.',
  ):
    assert part in message


@pytest.mark.parametrize(
  'rows, length, parts',
  [
    (6, 16, ['batch size (6)', 'replica=2 x fsdp=2 (4)', 'is 4 or 8.']),
    (3, 16, ['batch size (3)', 'is 4.']),
    (8, 15, ['sequence size (15)', 'context=2 (2)', 'is 14 or 16.']),
  ],
)
def test_a_batch_names_its_dimension_and_what_would_fit(rows, length, parts):
  config = programs.config()
  plan = placement.exchange_plan(
    config, layout=layouts.TRAIN, mesh=topology.make_mesh(2, 2, 2)
  )
  shapes, _ = decoder.abstract(config)
  zeros_BT = jax.ShapeDtypeStruct((rows, length), 'int32')
  with pytest.raises(ValueError) as caught:
    jax.eval_shape(decoder.Decoder(config, plan).apply, shapes, *[zeros_BT] * 3)
  for part in parts:
    assert part in str(caught.value)


def test_zigzag_rows_divide_into_two_pieces_for_each_shard():
  with pytest.raises(ValueError) as caught:
    sequence.to_device(np.zeros((2, 36)), 8)
  for part in (
    'length (36)',
    'two pieces',
    'zigzag order (16)',
    'is 32 or 48.',
  ):
    assert part in str(caught.value)


def test_microbatches_divide_rows_over_shards():
  with pytest.raises(ValueError) as caught:
    train_step.check_rows(20, 4, 4, 'batch_size')
  for part in (
    'batch_size (20)',
    'accumulate (4)',
    'replica x fsdp (4)',
    '16 or 32.',
  ):
    assert part in str(caught.value)


@pytest.mark.parametrize(
  'sizes, parts',
  [
    ((3, 2, 1), ['needs 6 devices', 'there are 8', ': replica=4 would fit.']),
    ((2, 4, 2), ['needs 16', ': replica=1 or fsdp=2 or context=1 would fit.']),
    ((3, 3, 3), ['needs 27', 'must equal the number of devices.']),
    ((0, 4, 2), ['needs 0', 'must equal the number of devices.']),
  ],
)
def test_a_mesh_names_the_axis_that_would_fit(sizes, parts):
  with pytest.raises(ValueError) as caught:
    topology.make_mesh(*sizes)
  for part in parts:
    assert part in str(caught.value)


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(transport='pigeon'), "transport must be one of .*'a2a'.*'pigeon'"),
    (dict(sequence_order='odd'), "sequence_order .*'zigzag'.* got 'odd'"),
    (dict(room=0), 'room must be .* 0'),
  ],
)
def test_options_of_the_exchange_name_what_is_known(options, message):
  with pytest.raises(ValueError, match=message):
    train_placement.ParallelOptions(**options)


def test_remat_saves_names_what_can_be_saved():
  with pytest.raises(ValueError, match="'weights', 'ahead'.*got .'wieghts'"):
    programs.config(remat_saves=('wieghts',))
  assert set(programs.config().remat_saves) <= set(model_config.REMAT_NAMES)
