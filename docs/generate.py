"""Writes the reference of configs and metrics from the code, for mkdocs.

`./run.sh docs` runs it; the pages are made anew each time and never committed.
"""

import importlib

import mkdocs_gen_files

from composer_jax import sections, wiring
from composer_jax.report import metrics

MAIN_CONFIG = 'configs.composer.tiny'


def _cell(text: str) -> str:
  return text.replace('|', r'\|').replace('\n', ' ')


def config_page() -> str:
  config = importlib.import_module(MAIN_CONFIG).get_config()
  lines = [
    '# Configs',
    '',
    'Every field, with its value in `configs/composer/tiny.py`, its default '
    'and its meaning. `--config.FIELD=VALUE` sets it. A config file has to '
    'name the fields without default.',
  ]
  rows = {}
  for entry in wiring.resolved(config.to_dict()):
    default = (
      '' if entry.default is sections.REQUIRED else f'`{entry.default!r}`'
    )
    cells = (f'`{entry.name}`', f'`{entry.value!r}`', default, entry.meaning)
    section, _, _ = entry.name.rpartition('.')
    rows.setdefault(section, []).append(
      '| ' + ' | '.join(map(_cell, cells)) + ' |'
    )
  for section, table in rows.items():
    lines += [
      '',
      f'## `{section}`' if section else '## Top level',
      '',
      '| Field | Value | Default | Meaning |',
      '|---|---|---|---|',
      *table,
    ]
  return '\n'.join(lines) + '\n'


def metrics_page() -> str:
  lines = [
    '# Metrics',
    '',
    'What each metric of `metrics.jsonl` means, by stage. The report page of a '
    'run lists them too.',
  ]
  meanings = metrics.meanings()
  for stage in dict.fromkeys(stage for stage, _ in meanings):
    lines += ['', f'## `{stage}`', '', '| Metric | Meaning |', '|---|---|']
    lines += [
      f'| `{name}` | {_cell(meaning)} |'
      for (metric_stage, name), meaning in meanings.items()
      if metric_stage == stage
    ]
  return '\n'.join(lines) + '\n'


for page, text in (
  ('reference/config.md', config_page()),
  ('reference/metrics.md', metrics_page()),
):
  with mkdocs_gen_files.open(page, 'w') as file:
    file.write(text)
