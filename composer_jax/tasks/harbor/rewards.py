"""Rewards by name, as a verifier wrote them to /logs/verifier.

It writes reward.json or else reward.txt; a number alone is the reward named
'reward'. The files come from a box and are parsed within bounds.
"""

import math
import re
from collections.abc import Mapping, Sequence

from composer_jax.sandbox import base, results

FOLDER = 'logs/verifier'
MAX_BYTES = 1 << 16
_MAX_NAMES, _MAX_NAME = 100, 100
_NUMBER = re.compile(
  r'\s*[-+]?[0-9]{0,30}(\.[0-9]{0,30})?(e[-+]?[0-9]{1,3})?\s*'
)


class NoReward(ValueError):
  """The verifier left no rewards that can be read; says why."""


def read(box: base.Box) -> dict[str, float]:
  """Returns the rewards in a verifier's box; a NoReward names the fault."""
  try:
    there = box.files(FOLDER)
  except base.FileRefused as error:
    raise NoReward(f'/{FOLDER} is no folder any more') from error
  for name, parse in (('reward.json', of_json), ('reward.txt', of_text)):
    path = f'{FOLDER}/{name}'
    if path not in there:
      continue
    try:
      return parse(box.read(path, MAX_BYTES))
    except base.FileRefused as error:
      raise NoReward(f'{name} cannot be read: {error}') from error
  raise NoReward('the verifier wrote neither reward.json nor reward.txt')


def of_text(data: bytes) -> dict[str, float]:
  text = data.decode('ascii', 'replace').lower()
  try:
    # Python would also read 1_0, nan and inf.
    number = float(text if _NUMBER.fullmatch(text) else '')
  except ValueError as error:
    raise NoReward(f'reward.txt holds no number: {text[:40]!r}') from error
  return {'reward': _finite(number, 'reward')}


def of_json(data: bytes) -> dict[str, float]:
  try:
    value = results.read_json(data)
  except ValueError as error:
    raise NoReward(f'reward.json: {error}') from error
  table = value if isinstance(value, dict) else {'reward': value}
  if not 0 < len(table) <= _MAX_NAMES:
    raise NoReward(f'reward.json names {len(table)} rewards')
  rewards = {}
  for name, number in table.items():
    if isinstance(number, bool) or not isinstance(number, int | float):
      raise NoReward(f'reward.json: {name[:40]!r} is no number')
    if len(name) > _MAX_NAME:
      raise NoReward(f'reward.json: a name of {len(name)} characters')
    rewards[name] = _finite(number, name)
  return rewards


def _finite(number: int | float, name: str) -> float:
  if abs(number) > 1e9 or not math.isfinite(number):
    raise NoReward(f'reward {name[:40]!r} is larger than a billion')
  return float(number)


def main(rewards: Mapping[str, float]) -> float:
  """Returns the reward of the name 'reward', or the mean of all."""
  if 'reward' in rewards or not rewards:
    return rewards.get('reward', 0.0)
  return sum(rewards.values()) / len(rewards)


def joined(
  steps: Sequence[Mapping[str, float]], strategy: str
) -> dict[str, float]:
  """Returns the rewards of a task of several steps, by their names."""
  if strategy == 'final' or len(steps) == 1:
    return dict(steps[-1])
  names = dict.fromkeys(name for rewards in steps for name in rewards)
  return {
    name: sum(rewards.get(name, 0.0) for rewards in steps) / len(steps)
    for name in names
  }
