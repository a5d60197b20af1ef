"""The time that a step of a 1 TB policy would take, from figures of one core.

Arithmetic, not a measurement: rates times cores, bytes over links. It assumes
that cores scale as two threads did and that links are full. A level of
caches adds a round trip and the time of a few packs, which is small.
"""

from collections.abc import Mapping

from benchmarks import interleaved

TERABYTE = 1e12
# Gbit/s of the links, and cores of each side over all of its hosts.
PLACES = ((1, 16), (10, 16), (10, 128), (100, 128))


def seconds(
  *, ratio: float, encode: float, apply: float, link: float, cores: int
) -> dict[str, float]:
  """Returns seconds of each stage, one after another and overlapped.

  Args:
    ratio: full bytes over bundle bytes.
    encode: gigabytes of weights a second that one core encodes and hashes.
    apply: gigabytes of weights a second that one core verifies and applies.
    link: gigabits a second of all hosts of a side together.
    cores: cores of each side.
  """
  encoding = TERABYTE / (1e9 * encode * cores)
  applying = TERABYTE / (1e9 * apply * cores)
  sending = 8 * TERABYTE / ratio / (1e9 * link)
  # Twice over the link: receivers begin when the pointer has moved.
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
    case: label of the case that was measured.
    ratios: full bytes over bundle bytes, by tier.
    rates: gigabytes a second of one core, by timed job.
  """
  for tier in ('small', 'fast'):
    for link, cores in PLACES:
      stages = seconds(
        ratio=ratios[tier],
        encode=rates[f'{tier} encode and hash'],
        apply=rates[f'{tier} verified apply'],
        link=link,
        cores=cores,
      )
      told = ', '.join(f'{name} {value:.3g}' for name, value in stages.items())
      interleaved.report(
        'delta',
        f'1 TB, {case}, {tier}: {link} Gbit/s, {cores} cores a side',
        ([stages['overlapped']], [8e3 / link]),
        against='all weights, sent once',
        limit=None,
        goal='none',
        met=lambda *_: True,
        unit='s',
        note=f'arithmetic; bundle of {1e3 / ratios[tier]:.3g} GB; {told}',
      )
