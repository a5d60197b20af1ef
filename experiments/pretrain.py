"""Continued pretraining alone; SFT and RL can go on in the same --workdir.

  python -m experiments.pretrain --config=configs/composer/tiny.py \
      --workdir=runs/tiny
"""

from experiments import launch


def run(spec, systems, workdir, *, command):
  from composer_jax.pipeline import job as jobs
  from composer_jax.pipeline import stages

  with jobs.open_run(spec, systems, workdir, command) as job:
    stages.pretrain(job)


if __name__ == '__main__':
  launch.main(run)
