"""Nothing that a program does tells a later or parallel program anything.

A search, not a list: one program writes everywhere it can if a random bit is
set, another reads everything that it can (`traces`), and no feature of what it
read may predict the bit. Not searched for: timing of the processor and of
caches, the page cache among them, and whether another program runs at all. The
kernel has one counter for the inode numbers of all pipes of a machine; a
program that makes millions of them can steer it on every level but a micro VM.
"""

import collections
import json
import math
import random
import statistics
import threading
import time

import pytest

from composer_jax.sandbox import base
from composer_jax.sandbox import open as sandbox_open
from tests.sandbox import traces

LIMITS = base.Limits(
    wall_s=30.0, cpu_s=15.0, memory_bytes=256 << 20, processes=32,
    file_bytes=8 << 20, output_bytes=1 << 20,
)  # fmt: skip
_LEAST_P = 0.01
# Mounts and namespaces get the lowest free numbers, and the kernel clears dead
# ones away later: at once, they would tell how long the writer ran.
_HOLD_S, _SETTLE_S = 1.5, 0.1
_QUICK_PAIRS, _PAIRS = 24, 200


def play(sandbox, num_pairs, draw, mode, images=('', '')):
  """Writes a random bit and reads it, so many times; bits and features.

  Half of the bits are set. The writer is dead when the reader starts, unless
  the mode is 'parallel'.
  """
  bits = [index % 2 for index in range(num_pairs)]
  draw.shuffle(bits)
  rows = []
  hold_s = _HOLD_S if mode == 'parallel' else 0
  for pair, bit in enumerate(bits):
    with sandbox.open(images[0]) as first, sandbox.open(images[1]) as second:
      write = base.Command(
        argv=('-c', traces.WRITE, f'{hold_s}', f'{bit}', f'{pair}'), warm=True
      )
      writer = threading.Thread(target=first.run, args=(write,))
      writer.start()
      writer.join(_HOLD_S / 3 if mode == 'parallel' else None)
      time.sleep(_SETTLE_S)
      read = base.Command(argv=('-c', traces.READ, f'{pair}'), warm=True)
      result = second.run(read)
      writer.join()
    assert result.status == 'ok' and result.report, result
    rows.append(json.loads(result.report))
  return bits, rows


def predictors(bits, rows):
  """Names of features by the chance of so good a prediction, after Bonferroni.

  Features that divide the runs alike count as one.
  """
  tests = {}
  for name in sorted({name for row in rows for name in row}):
    values = [json.dumps(row.get(name)) for row in rows]
    counts = collections.Counter(values)
    for value, count in counts.items():
      if 3 <= count <= len(values) - 3:
        marks = tuple(other == value for other in values)
        tests.setdefault(max(marks, tuple(not m for m in marks)), name)
    numbers = tuple(_number(value) for value in values)
    if len(counts) > 2 and None not in numbers:
      ranks = {value: rank for rank, value in enumerate(sorted(set(numbers)))}
      tests.setdefault(tuple(ranks[number] for number in numbers), name)
  chance = lambda split: (_fisher if type(split[0]) is bool else _rank_sum)(
    bits, split
  )
  found = [(min(1.0, chance(s) * len(tests)), n) for s, n in tests.items()]
  return sorted(found)


def _number(text):
  try:
    return float(text.strip('"'))
  except ValueError:
    return None


def _fisher(bits, marks):
  """Returns the two-sided chance of so uneven a table of two by two."""
  total, ones, marked = len(bits), sum(bits), sum(marks)
  both = sum(bit and mark for bit, mark in zip(bits, marks))

  def chance(k):
    ways = math.comb(ones, k) * math.comb(total - ones, marked - k)
    return ways / math.comb(total, marked)

  low, high = max(0, marked - total + ones), min(ones, marked)
  bound = chance(both) * (1 + 1e-9)
  return sum(c for c in map(chance, range(low, high + 1)) if c <= bound)


def _rank_sum(bits, numbers):
  """Returns the two-sided chance of a rank sum so far from its mean.

  By the normal approximation with ties (Mann and Whitney).
  """
  order = sorted(numbers)
  first = {}
  for rank, value in enumerate(order):
    first.setdefault(value, []).append(rank + 1)
  ranks = [statistics.fmean(first[value]) for value in numbers]
  n1 = sum(bits)
  n0 = len(bits) - n1
  mean = n1 * (len(bits) + 1) / 2
  total = sum(rank for bit, rank in zip(bits, ranks) if bit)
  ties = sum(len(r) ** 3 - len(r) for r in first.values())
  n = len(bits)
  variance = n1 * n0 / 12 * (n + 1 - ties / (n * (n - 1)))
  if variance <= 0:
    return 1.0
  return math.erfc(abs(total - mean) / math.sqrt(2 * variance))


def search(mode, images, num_pairs, image=''):
  size = 2 if mode == 'parallel' else 1  # one zygote, or one for each program
  try:
    sandbox = sandbox_open.open_sandbox(
        'unshare', LIMITS, size=size, images=images, packages=('pytest',)
    )  # fmt: skip
  except ValueError as error:
    pytest.skip(f'no namespaces: {error}')
  with sandbox:
    suspects = None
    # Chance does not strike the same feature twice.
    for seed in range(2):
      both = image, 'repository'
      bits, rows = play(sandbox, num_pairs, random.Random(seed), mode, both)
      found = {n for p, n in predictors(bits, rows) if p <= _LEAST_P}
      suspects = found if suspects is None else suspects & found
      if not suspects:
        return
    raise AssertionError(f'a bit of one program is read from {suspects}')


def test_nothing_of_a_program_reaches_the_next(images):
  search('sequence', images, _QUICK_PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize('image', ['', 'repository'])
@pytest.mark.parametrize('mode', ['sequence', 'parallel'])
def test_nothing_of_a_program_reaches_another(images, mode, image):
  search(mode, images, _PAIRS, image)


def test_a_planted_trace_is_found():
  draw = random.Random(0)
  bits = [index % 2 for index in range(_QUICK_PAIRS)]
  draw.shuffle(bits)
  rows = [{f'noise {n}': draw.random() for n in range(2000)} for _ in bits]
  assert all(p > _LEAST_P for p, _ in predictors(bits, rows))
  for bit, row in zip(bits, rows):
    row['port'] = 98 if bit else None
    row['counter'] = 1000 * bit + draw.randrange(900)
  assert {n for p, n in predictors(bits, rows) if p <= _LEAST_P} >= {'port'}


def test_the_list_of_mounts_shows_nothing_of_the_host(boxes_of):
  with boxes_of('unshare').open('repository') as box:
    result = box.run(base.Command(argv=('cat', '/proc/self/mountinfo')))
  sources = {line.split()[3] for line in result.output.splitlines()}
  if boxes_of('unshare').about['overlay']:
    assert sources <= {'/', '/merged', '/irq', '/bus', '/fs'}, sources
    # Not even the number of the box.
    assert '/boxes' not in result.output
