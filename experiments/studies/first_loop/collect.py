"""Takes from a workdir what the study keeps: metrics, evaluations, the audit.

The audit looks for every body that solved a held-out task, byte for byte, in
all that the policy was trained on: the corpus, the SFT transcripts and the
policy's own edits in RL rollouts (which nobody showed it, so they are counted
apart).
"""

import json
import pathlib
import shutil

from composer_jax.core import files


def _solutions(path: pathlib.Path) -> list[str]:
  """The last edit's body of every episode that passed."""
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  return [
    row['edits'][-1].split('\n', 1)[1]
    for row in rows
    if row['passed'] and row['edits'] and '\n' in row['edits'][-1]
  ]


def audit(workdir: pathlib.Path, stage: str) -> dict[str, int]:
  """Counts solved bodies and those found verbatim in training data."""
  bodies = _solutions(workdir / f'evaluation_{stage}_episodes.jsonl')
  shown = (workdir / 'corpus' / 'texts.bin').read_bytes()
  shown += (workdir / 'sft_transcripts.txt').read_bytes()
  own = b''.join(
    p.read_bytes() for p in sorted((workdir / 'rl_edits').glob('*.txt'))
  )
  return {
    'solved': len(bodies),
    'distinct': len(set(bodies)),
    'bytes_shown': len(shown),
    'bytes_own_edits': len(own),
    'verbatim_in_shown': sum(b.encode() in shown for b in bodies),
    'verbatim_in_own_edits': sum(b.encode() in own for b in bodies),
  }


def collect(workdir: pathlib.Path, results: pathlib.Path) -> None:
  """Writes results/{metrics.jsonl,evaluation_*.json,audit.json,...}."""
  results.mkdir(parents=True, exist_ok=True)
  found = {}
  for stage in ('sft', 'rl'):
    if (workdir / f'evaluation_{stage}.json').exists():
      found[stage] = audit(workdir, stage)
  files.write_json(results / 'audit.json', found)
  for name in ('metrics.jsonl', 'demonstrations.json', 'sandbox.json'):
    if (workdir / name).exists():
      shutil.copyfile(workdir / name, results / name)
  for path in workdir.glob('evaluation_*.json'):
    shutil.copyfile(path, results / path.name)
