"""What a step of a 1 TB policy would take, by figures measured on one core.

Arithmetic, not a measurement: rates times cores, bytes over links. Cores are
taken to scale as two threads did, and links to be full. A level of a tree of
caches adds a round trip and the time of a few packs, little beside the rest.
"""

import json
from collections.abc import Mapping

TERABYTE = 1e12
# Gbit/s of the links, and cores of each side in all of its hosts.
PLACES = ((1, 16), (10, 16), (10, 128), (100, 128))


def seconds(
  *, ratio: float, encode: float, apply: float, link: float, cores: int
) -> dict[str, float]:
  """Returns what each stage takes, one after another and overlapped.

  Args:
    ratio: full bytes over bundle bytes.
    encode: gigabytes of weights a second on one core, hashing included.
    apply: likewise, of verified applying.
    link: gigabits a second, of all hosts of a side together.
    cores: of each side.
  """
  encoding = TERABYTE / (1e9 * encode * cores)
  applying = TERABYTE / (1e9 * apply * cores)
  sending = 8 * TERABYTE / ratio / (1e9 * link)
  # To the store and out of it: receivers begin when the pointer has moved.
  return {
    'encode': encoding,
    'send, each way': sending,
    'apply': applying,
    'one after another': encoding + 2 * sending + applying,
    # Packs travel while others are encoded, or decoded.
    'overlapped': max(encoding, sending) + max(sending, applying),
  }


def tell(
  case: str, ratios: Mapping[str, float], rates: Mapping[str, float]
) -> None:
  """Prints a line for each tier, link and number of cores.

  Args:
    case: whose figures these are.
    ratios: full bytes over bundle bytes, by tier.
    rates: gigabytes a second of one core, by what was timed.
  """
  for tier in ('small', 'fast'):
    for link, cores in PLACES:
      found = seconds(
        ratio=ratios[tier],
        encode=rates[f'{tier} encode and hash'],
        apply=rates[f'{tier} verified apply'],
        link=link,
        cores=cores,
      )
      line = {
        'benchmark': 'delta',
        'case': f'arithmetic: seconds for 1 TB of bf16, {case}, {tier}, '
        f'{link} Gbit/s, {cores} cores a side',
        'bundle_gb': float(f'{1e3 / ratios[tier]:.3g}'),
        'all of it, each way': 8e3 / link,
        **{name: float(f'{value:.3g}') for name, value in found.items()},
      }
      print(json.dumps(line), flush=True)
