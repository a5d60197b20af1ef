"""Routes tokens and says what was chosen, as a layer and the decoder do."""

from typing import NamedTuple

import jax

from composer_jax.models import router


class LayerStats(NamedTuple):
  """`core.batches.RouteStats` of one layer."""

  load_E: jax.Array
  aux_loss: jax.Array
  z_loss: jax.Array
  replay_agreement: jax.Array
  replay_replaced: jax.Array


def statistics(sums, config):
  stats = router.statistics(jax.tree.map(lambda x: x[None], sums), config)
  return LayerStats(
    stats.load_ME[0],
    stats.aux_loss_M[0],
    stats.z_loss_M[0],
    stats.replay_agreement_M[0],
    stats.replay_replaced_M[0],
  )


def route(logits_BTE, *, config, valid_BT, bias_E=None, replay_BTA=None):
  """Returns weights_BTA, ids_BTA and the statistics."""
  choice = router.choose(
    logits_BTE, config=config, bias_E=bias_E, replay_BTA=replay_BTA
  )
  sums = router.layer_sums(choice, valid_BT=valid_BT, replay_BTA=replay_BTA)
  return choice.weights_BTA, choice.ids_BTA, statistics(sums, config)
