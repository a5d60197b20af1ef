"""Collects from a workdir what the study keeps: metrics, evaluations, an audit.

The audit searches for every body that solved a held-out task, under any names,
in all that the policy was shown: the corpus, the other texts of the tokenizer,
the SFT transcripts, and the files of the RL tasks, whose other functions have
bodies. The policy's own edits in RL rollouts were trained on but not shown, so
they are counted apart.
"""

import json
import pathlib
import re
from typing import Any

from composer_jax.core import files
from composer_jax.pipeline import stages
from composer_jax.tasks.list_functions import family
from composer_jax.tasks.practice import list_functions as practice
from composer_jax.telemetry import writer
from experiments.studies import results

# Metrics that the study does not use and that take much space.
_LEFT = ('time', 'expert_load')
_EPISODES = 'evaluation_{}_episodes.jsonl'


def _solutions(path: pathlib.Path) -> list[str]:
  """Returns the body of the last edit of every episode that passed."""
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  return [
    row['edits'][-1].split('\n', 1)[1]
    for row in rows
    if row['passed'] and row['edits'] and '\n' in row['edits'][-1]
  ]


def _rl_texts(workdir: pathlib.Path) -> list[str]:
  """Returns prompts and files of every task that RL trained on, by group id.

  They are made again from the seed, as by `stages.collector_of`, since a
  group's file is deleted after its step.
  """
  config = files.read_json(workdir / 'config.json')
  seed = config['seed'] + stages.RL_SEED
  texts = []
  for group in range(config['rl']['steps'] * config['rl']['prompts']):
    task = family.generate(group, 'train', seed)
    texts += [task.prompt, *task.files.values()]
  return texts


def _sft_functions(workdir: pathlib.Path) -> list[str]:
  config = files.read_json(workdir / 'config.json')
  count = config['demonstrations']['functions']
  return [family.finished_function(i, config['seed']) for i in range(count)]


def shown(workdir: pathlib.Path, stage: str) -> dict[str, bytes]:
  """Returns all texts that a finished stage's policy was shown, by source."""
  texts = {
    'corpus': (workdir / 'corpus' / 'texts.bin').read_bytes(),
    'tokenizer_texts': '\n'.join(practice.protocol_texts()).encode(),
    'sft_transcripts': (workdir / 'sft_transcripts.txt').read_bytes(),
    'sft_functions': '\n'.join(_sft_functions(workdir)).encode(),
  }
  if stage == 'rl':
    texts['rl_tasks'] = '\n'.join(_rl_texts(workdir)).encode()
  return texts


def _form(body: str) -> bytes:
  """Returns a pattern of the body with any argument and loop variable."""
  names = re.search(r'for (\w+) in (\w+)', body)
  pattern, is_named = '', set()
  for word in re.split(r'(\w+)', body):
    if names is None or word not in names.groups():
      pattern += re.escape(word)
      continue
    group = f'n{names.groups().index(word)}'
    pattern += f'(?P={group})' if group in is_named else rf'(?P<{group}>\w+)'
    is_named.add(group)
  return pattern.encode()


def audit(workdir: pathlib.Path, stage: str) -> dict[str, Any]:
  """Counts bodies of solutions, and those that training data hold."""
  forms = [_form(b) for b in _solutions(workdir / _EPISODES.format(stage))]
  texts = shown(workdir, stage)
  own = b''.join(
    p.read_bytes() for p in sorted((workdir / 'rl_edits').glob('*.txt'))
  )

  def found(data: bytes) -> set[bytes]:
    return {form for form in set(forms) if re.search(form, data)}

  found_in = {name: found(data) for name, data in texts.items()}
  everywhere = set().union(*found_in.values())
  return {
    'solved': len(forms),
    'distinct': len(set(forms)),
    'bytes': {name: len(data) for name, data in texts.items()},
    'bytes_own_edits': len(own),
    'found_in': {name: len(hits) for name, hits in found_in.items()},
    'found_in_shown': len(everywhere),
    'found_in_own_edits': len(found(own)),
  }


def collect(workdir: pathlib.Path) -> list[results.Row]:
  """Returns the rows of an arm: one that describes it, and its metrics."""
  audits = {
    stage: audit(workdir, stage)
    for stage in ('sft', 'rl')
    if (workdir / f'evaluation_{stage}.json').exists()
  }
  paths = [
    workdir / f'{n}.json' for n in ('demonstrations', 'sandbox', 'stages')
  ]
  paths += sorted(workdir.glob('evaluation_*.json'))
  paths.append(workdir.with_name(f'{workdir.name}.probe') / 'probe.json')
  evaluations = {p.stem: files.read_json(p) for p in paths if p.exists()}
  about = {'stage': 'arm', 'arm': workdir.name, 'audit': audits, **evaluations}
  measured = [
    {'arm': workdir.name, **{k: v for k, v in row.items() if k not in _LEFT}}
    for row in writer.read(workdir)
  ]
  return [about, *measured]
