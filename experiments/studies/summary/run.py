"""Trains the arms of the study and keeps a line of every step.

  python -m experiments.studies.summary.run

For each seed one SFT policy, and from it two arms of RL: the chain, whose
summaries are trained with the reward of the episode, and the same with the loss
of summaries masked. An arm that results/ has is not run again; of one that was
cut off the last line of each step counts.
"""

import pathlib
import time
from typing import Any

from absl import app, flags

from composer_jax.telemetry import machine, writer
from experiments.studies.summary import stream, training

_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'One SFT policy each.')
_RESULTS = flags.DEFINE_string(
  'results', str(pathlib.Path(__file__).parent / 'results'), 'Appended to.'
)
_QUICK = flags.DEFINE_bool('quick', False, 'Sizes of a test.')

ARMS = ('chain', 'masked')
_KEPT = ('pass_rate', 'entropy', 'grad_norm', 'mismatch_kl', 'tokens')


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments {argv[1:]}.')
  sizes = training.QUICK if _QUICK.value else training.Sizes()
  for seed in map(int, _SEEDS.value):
    folder = pathlib.Path(_RESULTS.value) / f'seed_{seed}'
    rows = writer.read(folder)
    if any(r['stage'] == 'end' for r in rows):
      continue
    judged = {
      r['arm'] for r in rows if r['stage'] == 'eval' and r['name'] == 'long'
    }
    with writer.Writer(folder, tensorboard=False) as out:
      about = training.about(sizes)
      out.write('setup', 0, machine=machine.describe(), **about)
      _run(seed, sizes, out, judged)
      out.write('end', sizes.steps, cpu_s=time.process_time())


def _run(
  seed: int, sizes: training.Sizes, out: writer.Writer, judged: set[str]
) -> None:
  """SFT, and RL of both arms from it; those judged before are not run again."""

  def judge(variables: Any, arm: str, step: int) -> None:
    for name, pieces, episodes, amnesic in (
      ('short', stream.PIECES, sizes.episodes, False),
      ('amnesic', stream.PIECES, sizes.episodes, True),
      ('long', stream.LONG_PIECES, max(sizes.episodes // 4, 1), False),
    ):
      found = training.evaluate(
        variables, seed=seed, pieces=pieces, episodes=episodes, amnesic=amnesic
      )
      print(seed, arm, step, name, found, flush=True)
      out.write('eval', step, name=name, seed=seed, arm=arm, **found)

  start = training.imitate(sizes, seed)
  if 'sft' not in judged:
    judge(start, 'sft', 0)
  for arm in ARMS:
    if arm in judged:
      continue
    end, step = start, 0
    for end, history in training.reinforce(  # noqa: B007
      start, sizes, seed=seed, masked=arm == 'masked'
    ):
      for metrics in history:
        step += 1
        kept = {name: metrics[name] for name in _KEPT}
        out.write('rl', step, seed=seed, arm=arm, **kept)
      rates = [m['pass_rate'] for m in history]
      print(seed, arm, step, sum(rates) / len(rates), flush=True)
    judge(end, arm, step)


if __name__ == '__main__':
  app.run(main)
