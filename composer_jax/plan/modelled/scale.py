"""`--what=scale`: replicas over a data-centre network, modelled.

Nothing here is compiled or measured: closed forms of failures that come at
random (J. W. Young, CACM 1974; J. T. Daly, FGCS 2006), of a ring that sums
gradients between replicas, and of bundles that relays pass on. A failure of any
device stops all replicas, as in `train.loop`: they restart from the last
checkpoint.
"""

import dataclasses
import math

from composer_jax.core import checks
from composer_jax.models import config as model_config
from composer_jax.models import flops
from composer_jax.plan import report

_HOUR = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleOptions:
  """What a run measures on one replica, and the machines' failures.

  Attributes:
    replicas: replicas over the data-centre network.
    mtbf_hours: mean hours between failures of one device.
    checkpoint_s: seconds that a checkpoint stops training.
    restart_s: seconds from a failure to the first step after it.
    step_s: seconds of a step on one replica.
    network_gbs: GB a second into a device from other replicas, and into a
      receiver of bundles.
    bundle_gb: GB of a bundle.
    receivers: engines that receive each bundle.
    fan_out: receivers to which one that has a bundle hands it on.
    round_trip_s: seconds before a receiver's first byte.
  """

  replicas: int = 1
  mtbf_hours: float = 50_000.0
  checkpoint_s: float = 30.0
  restart_s: float = 600.0
  step_s: float = 10.0
  network_gbs: float = 6.25
  bundle_gb: float = 10.0
  receivers: int = 1000
  fan_out: int = 8
  round_trip_s: float = 0.1

  def __post_init__(self):
    checks.at_least(self, 1, 'replicas', 'receivers')
    checks.at_least(self, 2, 'fan_out')
    names = {f.name for f in dataclasses.fields(self)}
    counts = {'replicas', 'receivers', 'fan_out'}
    checks.positive(self, *sorted(names - counts))


def goodput(
  interval: float, checkpoint: float, restart: float, mtbf: float
) -> float:
  """Returns the share of time that ends in kept steps.

  Args:
    interval: seconds of steps from one checkpoint to the next.
    checkpoint: seconds of a checkpoint.
    restart: seconds after a failure, in which others may follow.
    mtbf: mean seconds between failures of all devices, which are independent.
  """
  exponent = (interval + checkpoint) / mtbf
  if exponent + restart / mtbf > 700:  # Beyond a float: nothing is kept.
    return 0.0
  wall = mtbf * math.exp(restart / mtbf) * math.expm1(exponent)
  return interval / wall


def best_interval(checkpoint: float, mtbf: float) -> float:
  """Returns the seconds between checkpoints of the highest goodput.

  Daly's expansion, within a few thousandths of the optimum's goodput.
  """
  if checkpoint >= 2 * mtbf:
    return mtbf
  root = math.sqrt(checkpoint / (2 * mtbf))
  return 2 * mtbf * root * (1 + root / 3 + root * root / 9) - checkpoint


def fan_out_seconds(o: ScaleOptions) -> float:
  """Returns the time until all receivers hold a bundle.

  Relays pass on chunks while they receive: one link's time, divided among the
  receivers of a relay, and a round trip a level.
  """
  levels, held = 0, 1
  while held < o.receivers:
    levels, held = levels + 1, held * o.fan_out
  link = o.bundle_gb / o.network_gbs
  return link * min(o.fan_out, o.receivers) + levels * o.round_trip_s


def sum_seconds(model_bytes: float, devices: int, o: ScaleOptions) -> float:
  """Returns the time of a ring that sums float32 gradients over replicas."""
  share = 2 * (o.replicas - 1) / o.replicas
  return share * model_bytes / devices / (o.network_gbs * 1e9)


def tables(
  model: model_config.ModelConfig, devices: int, o: ScaleOptions
) -> list[report.Table]:
  """Returns the goodput by failure rate and interval, and the network's times.

  `devices` are those of one replica.
  """
  count, rows = devices * o.replicas, []
  for hours in (o.mtbf_hours * f for f in (0.2, 1.0, 5.0)):
    mtbf = hours * _HOUR / count
    best = best_interval(o.checkpoint_s, mtbf)
    lengths = (best / 4, best, best * 4)
    shares = (goodput(x, o.checkpoint_s, o.restart_s, mtbf) for x in lengths)
    rows.append((hours, mtbf / 60, best / 60, *shares))
  wire = sum_seconds(4.0 * flops.params_total(model), devices, o)
  return [
    report.Table(
      title=(
        f'MODELLED goodput of {count} devices, {o.replicas} replicas of '
        f'{devices}; a checkpoint takes {o.checkpoint_s:g} s, a restart '
        f'{o.restart_s:g} s'
      ),
      columns=(
        *('device_mtbf_hours', 'minutes_to_a_failure', 'best_minutes'),
        *('at_a_quarter', 'at_best', 'at_four_times'),
      ),
      rows=rows,
    ),
    report.Table(
      title=f'MODELLED network of {o.network_gbs:g} GB/s into a device',
      columns=('what', 'seconds', 'of_a_step'),
      rows=[
        ('sum of gradients over replicas', wire, wire / o.step_s),
        (
          f'a bundle of {o.bundle_gb:g} GB to {o.receivers} receivers',
          fan_out_seconds(o),
          fan_out_seconds(o) / o.step_s,
        ),
      ],
    ),
  ]
