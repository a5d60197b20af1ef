"""Measures drafts on the episodes of a finished run of the main job.

  python -m experiments.studies.speculation.run --workdir=runs/tiny

After RL: the groups that the run still has. After SFT: episodes that its policy
plays here on held-out tasks.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags

from composer_jax import wiring
from composer_jax.agent import episode as episodes
from composer_jax.core import files
from composer_jax.pipeline import stages
from composer_jax.rollout import drafts
from composer_jax.serve import lifetime
from composer_jax.train import workdir as workdirs
from experiments import start
from experiments.studies import results
from experiments.studies.mismatch import probe
from experiments.studies.speculation import replayed

ROOT = pathlib.Path(__file__).parent
_WORKDIR = flags.DEFINE_string('workdir', 'runs/tiny', 'Of a finished run.')
_HEADS = flags.DEFINE_string(
  'heads', '', "Run whose SFT trained heads for this one's; '' for itself."
)
_TOKENS = flags.DEFINE_integer(
  'tokens', 3000, 'Least number of tokens that the SFT policy samples.'
)
_STAGES = flags.DEFINE_list('stages', ['sft', 'rl'], 'Stages to measure.')
_ROLLOUTS = 8
_KINDS = ('read', 'edit', 'test', 'finish')


def _of_run(workdir: pathlib.Path, seed: int) -> list[replayed.Episode]:
  """The episodes that a run still has, in the order of versions."""
  made = []
  for group in wiring.kept_groups(workdir):
    for member, rollout in enumerate(group.rollouts):
      for window, t in enumerate(rollout.trajectories):
        own = (seed + stages.RL_SEED, group.group, member)
        first = int(t.policy_version_T[np.argmax(t.loss_mask_T)])
        made.append(_episode(t, (*own, window) if window else own, first))
  return sorted(made, key=lambda e: e.version)


def _episode(trajectory, seed, version) -> replayed.Episode:
  return replayed.Episode(
    tokens_T=trajectory.tokens_T,
    sampled_T=trajectory.loss_mask_T,
    seed=seed,
    version=version,
    group=seed[1],
    temperature=trajectory.temperature,
  )


def _played(policy: Any, limits: Any) -> list[replayed.Episode]:
  """Episodes that a policy plays here; a group counts as a version."""
  options = probe.ProbeOptions(tokens=_TOKENS.value, rollouts=_ROLLOUTS)
  made = []
  for i, trajectory in enumerate(probe.sample(policy, limits, options)):
    group, member = divmod(i, _ROLLOUTS)
    made.append(_episode(trajectory, (probe.SEED, group, member), group))
  return made


def _rows(
  some: Sequence[replayed.Episode],
  made: Sequence[np.ndarray],
  tokenizer: Any,
  depths: Sequence[int],
) -> Iterator[results.Row]:
  """Yields sums of all turns, and of those of each kind."""
  for depth in depths:
    sums: dict[str, list[int]] = {}
    for episode, drafts_TK in zip(some, made, strict=True):
      for first, count, right in replayed.passes(episode, drafts_TK, depth):
        text = tokenizer.decode(episode.tokens_T[first : first + count])
        word = text.split()[0] if text.split() else ''
        kind = word.partition('<')[0]
        for name in ('all', kind if kind in _KINDS else 'other'):
          reached = [sum(r >= k for r in right) for k in range(1, depth + 1)]
          row = [count, len(right), *reached]
          before = sums.get(name, [0] * len(row))
          sums[name] = [a + b for a, b in zip(before, row, strict=True)]
    for kind, (tokens, passes, *reached) in sums.items():
      yield dict(
        depth=depth, kind=kind, tokens=tokens, passes=passes, right=reached
      )


def _by_tables(
  tested: list[replayed.Episode],
  earlier: list[replayed.Episode],
  length: int,
) -> Iterator[tuple[str, int, list[np.ndarray]]]:
  """Yields names and ages of tables, and their drafts; 0 for no age."""

  def drafted(grams):
    return replayed.by_ngrams(tested, grams, length)

  yield 'session', 0, drafted(drafts.NGrams(1))
  of_earlier = replayed.learnt(earlier)
  yield 'earlier', 0, drafted(of_earlier)
  # The other episodes of the same task have ended, too.
  made = []
  for episode in tested:
    others = [
      e for e in tested if e.group == episode.group and e is not episode
    ]
    grams = replayed.learnt(others, of_earlier)
    made += replayed.by_ngrams([episode], grams, length)
  yield 'siblings', 0, made
  # Tables of two versions each, of which the newer is `age` versions old.
  versions = sorted({e.version for e in (*earlier, *tested)})
  for age in range(1, len(versions) - 1):
    two = versions[-2 - age : -age]
    yield (
      'aged',
      age,
      drafted(replayed.learnt(e for e in earlier if e.version in two)),
    )


def _drafted(
  workdir: pathlib.Path, stage: str, config: Any
) -> Iterator[results.Row]:
  """Yields the rows of all drafters on the episodes of a stage."""
  limits = episodes.EpisodeOptions(**config['episode'])
  length = limits.max_tokens
  policy = sft = lifetime.load(workdir, stage='sft')
  if stage == 'sft':
    some = _played(sft, limits)
    tested = some[len(some) // 2 :]
  else:
    policy = lifetime.load(workdir, stage='rl')
    some = _of_run(workdir, config['seed'])
    tested = [e for e in some if e.version == some[-1].version]
  earlier = some[: len(some) - len(tested)]

  def rows(drafter, age, made, depths=range(1, replayed.DEPTH + 1)):
    shown = dict(episodes=len(tested), earlier=len(earlier))
    for row in _rows(tested, made, sft.tokenizer, depths):
      yield {**shown, 'drafter': drafter, 'age': age, **row}

  for name, age, made in _by_tables(tested, earlier, length):
    if stage == 'rl' or name != 'aged':
      yield from rows(name, age, made)
  drawn = replayed.drawn(tested, sft.variables, sft.model, length)
  yield from rows('sft', 0, [replayed.by_model(x) for x in drawn])
  with_heads = lifetime.load(pathlib.Path(_HEADS.value or workdir), stage='sft')
  heads = policy.variables.get('mtp') or with_heads.variables.get('mtp')
  if heads is not None:
    drawn = replayed.drawn(
      tested, policy.variables, with_heads.model, length, heads=heads
    )
    made = [replayed.by_heads(x) for x in drawn]
    yield from rows('heads', 0, made, range(1, len(drawn[0])))


def main():
  workdir = pathlib.Path(_WORKDIR.value)
  config = files.read_json(workdir / workdirs.CONFIG)
  for stage in _STAGES.value:
    common = dict(run=config['seed'], stage=stage)
    rows = [{**common, **row} for row in _drafted(workdir, stage, config)]
    by = (*common, 'episodes', 'earlier')
    results.add(ROOT / 'results', rows, by=by)


if __name__ == '__main__':
  start.run(main)
