"""What uneven routing does to a plan: rounds, bytes, memory and time.

Routing is drawn, not traced: the chance of an expert is proportional to the
exponential of normal numbers, of which a layer's experts have one each and
those of a device's rows another, as documents have experts of their own. The
compiled program is the same for all of them; only its loop of further rounds
and the rows that its products meet differ.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from composer_jax.models import config as model_config
from composer_jax.parallel import rounds
from composer_jax.plan import network, report

_GIB = 1 << 30
_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  """How uneven tokens choose experts.

  Attributes:
    layer: standard deviation of the log of a layer's chances.
    rows: that of what a device's own rows add.
  """

  name: str
  layer: float
  rows: float


# Measured by `experiments/studies/routing`: at the end of SFT, and where load
# is not balanced yet, in RL's first steps. The last is a range beyond.
ROUTINGS = (
  Routing(name='uniform', layer=0.0, rows=0.0),
  Routing(name='measured', layer=0.4, rows=0.55),
  Routing(name='measured, worst', layer=1.1, rows=0.6),
  Routing(name='beyond', layer=2.0, rows=1.0),
)


class Effect(NamedTuple):
  """What a layer of one routing needs.

  Attributes:
    pair: largest copies of a pair of devices over their mean.
    busiest: copies of the busiest device over their mean.
    rounds: rounds of the exchange.
    sent: rows that travel over those that have to.
  """

  pair: float
  busiest: float
  rounds: int
  sent: float


def counts(
  routing: Routing,
  moe: model_config.MoEConfig,
  num_tokens: int,
  num_shards: int,
) -> np.ndarray:
  """Returns drawn copies by sender and expert, of `num_tokens` a sender."""
  random = np.random.default_rng(_SEED)
  shape = num_shards, moe.num_experts
  logs_PE = routing.layer * random.normal(size=shape[1:])
  logs_PE = logs_PE + routing.rows * random.normal(size=shape)
  chances_PE = _chances(np.exp(logs_PE), moe.num_active)
  return random.binomial(num_tokens, chances_PE)


def _chances(weights_PE: np.ndarray, num_active: int) -> np.ndarray:
  """Returns chances of at most 1 with the sum `num_active` in each row."""
  chances_PE = np.zeros_like(weights_PE)
  for _ in range(weights_PE.shape[1]):
    is_free_PE = chances_PE < 1
    left_P1 = num_active - (chances_PE * ~is_free_PE).sum(1, keepdims=True)
    share_PE = weights_PE * is_free_PE
    share_PE = left_P1 * share_PE / share_PE.sum(1, keepdims=True)
    chances_PE = np.where(is_free_PE, np.minimum(share_PE, 1), 1)
    if (chances_PE[is_free_PE] < 1).all():
      break
  return chances_PE


def effect(counts_PE: np.ndarray, shards: rounds.Shards) -> Effect:
  """Returns what an exchange of these copies takes."""
  pairs_PP = counts_PE.reshape(shards.num_shards, shards.num_shards, -1).sum(-1)
  received_P = pairs_PP.sum(0)
  number = int(shards.rounds_of(pairs_PP))
  sent = 1.0
  if shards.transport == 'a2a':
    sent = number * shards.rows * shards.num_shards**2 / pairs_PP.sum()
  return Effect(
    pair=float(pairs_PP.max() / pairs_PP.mean()),
    busiest=float(received_P.max() / received_P.mean()),
    rounds=number,
    sent=float(sent),
  )


def effects(
  moe: model_config.MoEConfig,
  shards: rounds.Shards,
  num_tokens: int,
  routings: Iterable[Routing] = ROUTINGS,
) -> Iterator[tuple[Routing, Effect]]:
  """Yields the effect of each routing of `num_tokens` tokens of a device."""
  for routing in routings:
    drawn_PE = counts(routing, moe, num_tokens, shards.num_shards)
    yield routing, effect(drawn_PE, shards)


def row_flops(model: model_config.ModelConfig, forwards: int = 3) -> int:
  """Returns operations of a copy of a token in a layer's experts.

  Three products forward, twice as many backward, and three again if the layer
  is recomputed; `forwards` 1 is a forward pass alone.
  """
  again = model.remat * (forwards >= 3)
  return (forwards + again) * 6 * model.embed_dim * model.moe.ffw_dim


def row_bytes(
  model: model_config.ModelConfig,
  shards: rounds.Shards,
  num_tokens: int,
  forwards: int = 3,
) -> float:
  """Returns bytes of rows that a device receives in a layer at even load.

  Rows travel there and back in both passes; see `rounds.bytes_received`.
  """
  others = (shards.num_shards - 1) / shards.num_shards
  width = model.embed_dim * jnp.dtype(model.compute_dtype).itemsize
  ways = 4 + model.remat if forwards >= 3 else 0
  ways += 2 * (forwards % 3)  # Passes that are forward alone.
  return ways * others * num_tokens * model.moe.num_active * width


def table(
  model: model_config.ModelConfig,
  shards: rounds.Shards,
  num_tokens: int,
  rates: network.MeshRates,
) -> report.Table:
  """Returns rounds, bytes, memory and modelled time of a layer by routing.

  Times are of the busiest device, its products at peak and an exchange of as
  many rows for all, one after the other; `num_tokens` are those of a device.
  """
  moe, keeps = model.moe, not model.remat
  copies = num_tokens * moe.num_active
  width = model.embed_dim * jnp.dtype(model.compute_dtype).itemsize
  even = row_bytes(model, shards, num_tokens)
  lines = []
  for routing, e in effects(moe, shards, num_tokens):
    received = even * e.sent
    busy = received if shards.transport == 'a2a' else even * e.busiest
    products = e.busiest * copies * row_flops(model) / rates.flops
    wire = rates.transfer_seconds(
      'all-to-all', busy, rates.strides(shards.axes), shards.num_shards
    )
    wire += 2 * (2 + keeps) * e.rounds * rates.latency
    lines.append(
      (
        routing.name,
        (routing.layer, routing.rows),
        e.pair,
        e.busiest,
        e.rounds,
        received / 1e6,
        shards.buffer * width / _GIB,
        1e3 * products,
        1e3 * wire,
      )
    )
  return report.Table(
    title=(
      f'A layer by how uneven its routing is: {shards.transport}, '
      f'{shards.num_shards} shards, {copies} copies of a device; times are '
      'modelled, of the busiest device'
    ),
    columns=(
      *('routing', 'unevenness', 'pair_over_mean', 'busiest_over_mean'),
      *('rounds', 'MB', 'buffer_GiB', 'products_ms', 'wire_ms'),
    ),
    rows=lines,
  )
