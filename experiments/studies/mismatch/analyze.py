"""Turns results/ into table.md; computes nothing else.

python -m experiments.studies.mismatch.analyze
"""

import pathlib
from typing import Any

from composer_jax.telemetry import writer
from experiments import start

ROOT = pathlib.Path(__file__).parent

_HEAD = (
  *('policy', 'dtype', 'numerics', 'tokens', 'routes', 'mean k3', 'p99'),
  *('max', 'ratio > 2', 'routes that agree, by layer', 'tokens that differ'),
)
_WAYS = {
  'replay': 'replayed',
  'no_replay': 'routed afresh',
  'shifted': 'a token off',
}


def _cells(row: dict[str, Any], pass_name: str) -> list[str]:
  numbers = [
    row[f'mismatch_{n}_{pass_name}'] for n in ('kl', 'p99', 'max', 'large')
  ]
  # The trainer's own choices stand in the line of the pass that makes them.
  routes = ['', '']
  if pass_name == 'no_replay':
    layers = ', '.join(f'{v:.5f}' for v in row['route_agreement_layers'])
    routes = [layers, f'{row["routed_differently"]:.5f}']
  if pass_name == 'shifted':
    routes = [f'lowest {row["route_agreement_shifted"]:.3f}', '']
  arm = [row['name'], row['compute_dtype'], row['numerics']]
  tokens = str(row['sampled_tokens'])
  return [
    *arm,
    tokens,
    _WAYS[pass_name],
    *(f'{v:.2g}' for v in numbers),
    *routes,
  ]


def table(rows: list[dict[str, Any]]) -> str:
  """The results as Markdown, three lines an arm."""
  lines = [_HEAD, ['---'] * len(_HEAD)]
  lines += [_cells(row, pass_name) for row in rows for pass_name in _WAYS]
  return ''.join('| ' + ' | '.join(line) + ' |\n' for line in lines)


def ordered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Sorts SFT before RL, exact before coarse dtypes, fast numerics first."""
  return sorted(
    rows,
    key=lambda row: (
      row['name'] != 'sft',
      row['compute_dtype'] != 'float32',
      row['numerics'] != 'fast',
    ),
  )


def main() -> None:
  text = table(ordered(writer.read(ROOT / 'results')))
  (ROOT / 'table.md').write_text(text)
  print(text)


if __name__ == '__main__':
  start.run(main)
