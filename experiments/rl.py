"""Reinforcement learning, from the SFT policy in --workdir.

  python -m experiments.rl --config=configs/composer/tiny.py \
      --workdir=runs/tiny
"""

from experiments import launch


def run(spec, systems, workdir, *, command):
  from composer_jax.pipeline import job as jobs
  from composer_jax.pipeline import reinforce, stages

  with jobs.open_run(spec, systems, workdir, command) as job:
    reinforce.reinforce(job)
    stages.evaluate(job, 'rl')


if __name__ == '__main__':
  launch.main(run)
