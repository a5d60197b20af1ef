"""SFT on demonstrations, from the pretrained model in --workdir.

  python -m experiments.sft --config=configs/composer/tiny.py \
      --workdir=runs/tiny
"""

from experiments import launch


def run(spec, systems, workdir, *, command):
  from composer_jax.pipeline import job as jobs
  from composer_jax.pipeline import stages

  with jobs.open_run(spec, systems, workdir, command) as job:
    stages.finetune(job)
    stages.evaluate(job, 'sft')


if __name__ == '__main__':
  launch.main(run)
