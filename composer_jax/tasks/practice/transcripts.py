"""Keeps SFT transcripts for people and audits; shared by task families."""

import numpy as np

from composer_jax.core import files, processes, records
from composer_jax.pipeline import job as jobs
from composer_jax.telemetry import progress

# Added to the run's seed; see `pipeline.stages`.
SEED = 1_000_003


def shown(
  job: jobs.Job, rollouts: list[records.Rollout], rates: dict[str, float]
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Keeps transcripts and their rates in the workdir.

  Returns:
    (tokens_T, loss_mask_T) of every window, in order.
  """
  described = ', '.join(f'{k} {v:.3g}' for k, v in rates.items())
  progress.teller('sft')(f'demonstrations: {described}')
  folder = processes.own_folder(job.workdir)
  files.write_json(folder / 'demonstrations.json', rates)
  job.log_episodes('sft', 0, rollouts[:3])
  text = '\n'.join(
    job.tokenizer.decode(t.tokens_T) for r in rollouts for t in r.trajectories
  )
  files.write_atomic(folder / 'sft_transcripts.txt', text.encode())
  return [(t.tokens_T, t.loss_mask_T) for r in rollouts for t in r.trajectories]
