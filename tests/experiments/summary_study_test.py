"""Laws of the study of summaries; its README shows the table of its results."""

import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from composer_jax.agent import episode
from experiments.studies import results
from experiments.studies.summary import analyze, stream, training

ROOT = pathlib.Path(__file__).parents[2]
TOKENIZER = stream.Words()


def played(tasks):
  """Rollouts of a policy that forgets nothing."""
  return [
    episode.run(
      stream.StreamEnvironment(task),
      stream.ScriptedPolicy(TOKENIZER, random.Random(0), 0.0),
      TOKENIZER,
      stream.EPISODE,
      group=0,
      member=0,
      seed=0,
      summary=stream.SUMMARY,
    )
    for task in tasks
  ]


@pytest.mark.parametrize('pieces', [stream.PIECES, 9])
def test_last_windows_alone_allow_one_in_eight(pieces):
  """Exactly: every value of an answer comes with every last window.

  The eight streams of an orbit are equally likely and differ in the answer
  alone where a window without its summary looks.
  """
  tasks = [
    stream.generate(index, 0, pieces).shifted(by)
    for index in range(12)
    for by in range(stream.NUM_VALUES)
  ]
  answers = [t.answer for t in tasks]
  rollouts = played(tasks)
  assert all(r.verdict.passed for r in rollouts)
  assert stream.oracle(rollouts, answers) == 1 / stream.NUM_VALUES <= 0.2
  for first in range(0, len(tasks), stream.NUM_VALUES):
    orbit = answers[first : first + stream.NUM_VALUES]
    assert len(set(orbit)) == stream.NUM_VALUES


def test_the_oracle_finds_a_leak():
  """Of streams whose last piece assigns what is asked for, it knows all."""
  leaky = []
  for index in range(10):
    task = stream.generate(index, 0, stream.PIECES)
    for by in range(stream.NUM_VALUES):
      shifted = task.shifted(by)
      last = f'{shifted.answer} {shifted.pieces[-1].rsplit(" ", 1)[0]}'
      leaky.append(
        stream.Stream(
          shifted.task_id, (*shifted.pieces[:-1], last), task.variable
        )
      )
  answers = [t.answer for t in leaky]
  assert stream.oracle(played(leaky), answers) == 1.0


def test_what_is_asked_for_is_told_early_only():
  for index in range(50):
    task = stream.generate(index, 1, stream.PIECES)
    late = ' '.join(task.pieces[stream.EARLY :]).split()
    assert not [w for w in late if w[0] == task.variable]
    assert any(w[0] in stream.VARIABLES and len(w) == 2 for w in late)
    assert all(len(p.split()) == stream.PIECE_TOKENS for p in task.pieces)


def test_windows_hold_one_piece_and_a_long_stream_ten_windows():
  trigger = stream.SUMMARY.trigger
  assert 10 * trigger <= stream.LONG_PIECES * stream.PIECE_TOKENS
  tasks = [stream.generate(0, 0, n) for n in (4, stream.LONG_PIECES)]
  for rollout, pieces in zip(played(tasks), (4, 40), strict=True):
    assert rollout.verdict.passed
    assert len(rollout.trajectories) == pieces
    assert max(map(len, rollout.trajectories)) <= trigger


def test_scripts_forget_as_often_as_they_are_told_to():
  kept = 1 - 0.3 * 7 / 8
  # The second piece assigns what is asked for in half of the streams anew.
  for noise, expected in ((0.0, 1.0), (0.3, (kept**3 + kept**2) / 2)):
    rollouts = [
      r
      for r in stream.transcripts(TOKENIZER, seed=0, count=250, noise=noise)
      if len(r.trajectories) == stream.PIECES
    ]
    rate = np.mean([r.verdict.passed for r in rollouts])
    # Three deviations of a share of 218; exact without noise.
    assert abs(rate - expected) <= 0.1 * bool(noise)


def test_the_masked_arm_trains_all_but_summaries():
  (rollout,) = played([stream.generate(0, 0, stream.PIECES)])
  masked = training.without_summaries(rollout)
  words = [
    TOKENIZER.decode(w.tokens_T[w.loss_mask_T]) for w in masked.trajectories
  ]
  assert words[0] == 'next <|end|> next <|end|>'
  assert words[-1].startswith('next <|end|> ')
  summaries = [t for t in rollout.turns if t.outcome == 'summary']
  lost = sum(
    int(a.loss_mask_T.sum() - b.loss_mask_T.sum())
    for a, b in zip(rollout.trajectories, masked.trajectories, strict=True)
  )
  assert lost == sum(t.stop - t.start for t in summaries) == 3 * 5


@pytest.mark.slow
def test_the_study_runs_and_trains_on_what_was_sampled(tmp_path):
  # A process of its own: other studies have flags of these names.
  command = [sys.executable, '-m', 'experiments.studies.summary.run']
  command += ['--quick', '--seeds=0', f'--results={tmp_path}']
  subprocess.run(command, cwd=ROOT, check=True)
  rows = results.read(tmp_path)
  steps = [r for r in rows if r['stage'] == 'rl']
  assert [(r['arm'], r['step']) for r in steps] == [
    ('chain', 1),
    ('chain', 2),
    ('masked', 1),
    ('masked', 2),
  ]
  # Windows are scored as they were sampled, each by its own routes.
  assert all(0 <= r['mismatch_kl'] < 1e-9 for r in steps)
  evaluated = [r for r in rows if r['stage'] == 'eval']
  assert len(evaluated) == 9
  assert all(r['longest_window'] <= 48 for r in evaluated)
  assert '| chain' in analyze.table(rows)


def test_the_study_shows_its_results():
  text = analyze.table(results.read(analyze.ROOT / 'results'))
  assert (analyze.ROOT / 'table.md').read_text() == text
  assert text.strip() in (analyze.ROOT / 'README.md').read_text()
