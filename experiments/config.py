"""Prints a run's whole config: every field, its default and what it means.

  ./run.sh config
  ./run.sh config --config=configs/composer/gpu.py --config.rl.steps=200

A star marks what differs from the default. Fields in [brackets] have none: a
config file has to name them.
"""

import textwrap

from experiments import start

_CONFIG = start.define_config(
  'configs/composer/tiny.py', 'A config file of a run; see above.'
)


def _line(entry) -> str:
  from composer_jax import sections

  has_none = entry.default is sections.REQUIRED
  mark = ' ' if has_none or entry.value == entry.default else '*'
  name = f'[{entry.name}]' if has_none else entry.name
  text = f'{mark} {name} = {entry.value!r}'
  if mark == '*':
    text += f'  (default {entry.default!r})'
  meaning = textwrap.fill(
    entry.meaning, 80, initial_indent=' ' * 6, subsequent_indent=' ' * 6
  )
  return f'{text}\n{meaning}' if entry.meaning else text


def run() -> None:
  fields = start.config_fields(_CONFIG)
  # After the flags: this import loads jax.
  from composer_jax import wiring

  for entry in wiring.resolved(fields):
    print(_line(entry))


if __name__ == '__main__':
  start.run(run, errors=(ValueError,))
