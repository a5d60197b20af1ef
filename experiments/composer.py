"""The whole loop: continued pretraining, SFT, reinforcement learning, report.

  python -m experiments.composer --config=configs/composer/tiny.py \
      --workdir=runs/tiny

Every stage keeps its state in --workdir; the same command resumes a run that
was stopped at any moment, and does not repeat finished stages.
"""

from experiments import launch


def run(spec, systems, workdir, *, command):
  from composer_jax.pipeline import job as jobs
  from composer_jax.pipeline import reinforce, stages

  with jobs.open_run(spec, systems, workdir, command) as job:
    if spec.initial and spec.evaluation.imported:
      stages.evaluate(job, 'import')
    stages.pretrain(job)
    stages.finetune(job)
    stages.evaluate(job, 'sft')
    reinforce.reinforce(job)
    stages.evaluate(job, 'rl')


if __name__ == '__main__':
  launch.main(run)
