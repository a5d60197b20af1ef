"""tiny.py with longer RL and no hints, for the study.

  python -m experiments.composer --config=configs/composer/first_loop.py \
      --workdir=runs/first_loop/0_main
"""

import ml_collections

from configs.composer import tiny


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """Takes the arguments of tiny.py."""
  c = tiny.get_config(arg)
  c.evaluation.episodes = 400
  # The study measures rewards alone; hints would also teach the shuffled
  # control.
  c.hints.loss.weight = 0.0
  if arg != 'smoke':
    c.rl.steps = 320
    c.rl.decay_steps = 240
  return c
