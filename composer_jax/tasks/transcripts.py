"""What SFT learns: transcripts of the tool protocol, by scripts that know.

Of generated tasks they err on purpose (`tasks.list_functions.demonstrations`),
of deletion tasks they are the solutions (`tasks.repository.scripts`).
"""

import itertools

import numpy as np

from composer_jax.agent import episode
from composer_jax.core import files, records
from composer_jax.hf.text import conversations
from composer_jax.pipeline import job as jobs
from composer_jax.tasks import families
from composer_jax.tasks.list_functions import demonstrations
from composer_jax.tasks.repository import scripts
from composer_jax.telemetry import progress

# Added to the run's seed; see `stages`.
SEED = 1_000_003


def documents(job: jobs.Job) -> tuple[list, list]:
  """(tokens, loss mask) of what SFT learns, and of transcripts held out."""
  talks = _conversations(job)
  if job.spec.tasks.is_deletion:
    chains = solutions_of(job)
    # At least one, also of few; the set's tasks are not endless.
    count = len(chains) - max(1, len(chains) // 20)
    # Whole chains: windows of a task that is learnt would hold nothing out.
    learnt, held_out = (
      list(itertools.chain(*part)) for part in (chains[:count], chains[count:])
    )
    return [*learnt, *talks], held_out
  count = job.spec.demonstrations.count
  transcripts, advised = demonstrations_of(job, count + max(32, count // 20))
  learnt = [*transcripts[:count], *itertools.chain(*advised[:count])]
  return [*learnt, *talks], transcripts[count:]


def _conversations(job: jobs.Job) -> list[tuple[np.ndarray, np.ndarray]]:
  path = job.spec.demonstrations.conversations
  if not path:
    return []
  found = conversations.load(job.workdir / conversations.FILE)
  jobs.tell('sft')(f'{len(found)} conversations of {path}')
  return found


def demonstrations_of(
  job: jobs.Job, count: int
) -> tuple[
  list[tuple[np.ndarray, np.ndarray]],
  list[list[tuple[np.ndarray, np.ndarray]]],
]:
  """Transcripts as (tokens, loss mask), and their error rates to the log.

  Where RL gives hints, there is a list beside each transcript of calls that go
  by one: what SFT leaves is the teacher that will read them. One that is
  longer than a row is left out and counted.
  """
  say = jobs.tell('sft')
  say(f'playing {count} demonstrations')
  rollouts = []
  with progress.Progress('sft', count) as bar:
    for rollout in demonstrations.transcripts(
      job.tokenizer,
      seed=job.spec.seed + SEED,
      count=count,
      noise=job.spec.demonstrations.noise(),
      options=job.spec.episode,
      hints=job.spec.hints.options(),
    ):
      rollouts.append(rollout)
      bar.update(len(rollouts))
  rates = demonstrations.describe(rollouts[:500], job.tokenizer)
  every = [list(demonstrations.hindsight(r, job.tokenizer)) for r in rollouts]
  # A transcript fits a row; with a hint in it, it need not.
  longest = job.spec.sft.seq_len
  advised = [[e for e in one if len(e[0]) <= longest] for one in every]
  rates['advised'] = sum(map(len, advised)) / count
  rates['advice_too_long'] = sum(map(len, every)) / count - rates['advised']
  return _shown(job, rollouts, rates), advised


def solutions_of(job: jobs.Job) -> list[list[tuple[np.ndarray, np.ndarray]]]:
  """Deletion tasks solved through their tools: chains of (tokens, loss mask).

  An episode with a call that a limit cut off would teach just that, and is left
  out. One that a limit ended is kept: what it shows is right.
  """
  spec, say = job.spec, jobs.tell('sft')
  tasks = families.demonstrated(spec)
  say(f'playing the solutions of {len(tasks)} tasks')
  rollouts = []
  with job.runner() as runner, progress.Progress('sft', len(tasks)) as bar:
    make = families.environment_of(spec, runner)
    for index, task in enumerate(tasks):
      rollout = episode.run(
        make(task),
        scripts.gold_policy(task, job.tokenizer, spec.tasks.repository.tools),
        job.tokenizer,
        spec.episode,
        group=index,
        member=0,
        seed=spec.seed + SEED,
        summary=spec.summary,
      )
      rollouts.append(rollout)
      bar.update(len(rollouts))
  kept = [r for r in rollouts if not r.num_invalid]
  if len(kept) < 2:
    raise ValueError(
      f'Of {len(tasks)} demonstrated tasks {len(kept)} have solutions whose '
      'calls fit --config.episode.max_call_tokens '
      f'({spec.episode.max_call_tokens}); SFT needs two. Raise it, or '
      '--config.demonstrations.count.'
    )
  counts = {
    'tasks': len(tasks),
    'episodes': len(kept),
    'tokens': sum(len(t) for r in kept for t in r.trajectories) / len(kept),
    'turns': sum(r.num_turns for r in kept) / len(kept),
    'passed': sum(r.verdict.passed for r in kept) / len(kept),
  }
  windows = iter(_shown(job, kept, counts))
  return [[next(windows) for _ in r.trajectories] for r in kept]


def _shown(
  job: jobs.Job, rollouts: list[records.Rollout], rates: dict[str, float]
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Leaves for people what SFT is shown; returns it as (tokens, loss mask)."""
  told = ', '.join(f'{k} {v:.3g}' for k, v in rates.items())
  jobs.tell('sft')(f'demonstrations: {told}')
  files.write_json(job.workdir / 'demonstrations.json', rates)
  job.log_episodes('sft', 0, rollouts[:3])
  # For audits: what the policy was shown, as text.
  text = '\n'.join(
    job.tokenizer.decode(t.tokens_T) for r in rollouts for t in r.trajectories
  )
  files.write_atomic(job.workdir / 'sft_transcripts.txt', text.encode())
  return [(t.tokens_T, t.loss_mask_T) for r in rollouts for t in r.trajectories]
