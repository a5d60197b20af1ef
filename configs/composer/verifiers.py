"""RL of an imported model on an environment of verifiers.

  python -m experiments.composer --workdir=runs/verifiers \
      --config=configs/composer/verifiers.py:IMPORT,ENVIRONMENT,PYTHON

IMPORT is a folder made by experiments.hf_import, ENVIRONMENT the TOML file of
an environment (experiments/examples/environments/ has three), PYTHON one that
has verifiers; see docs/how_to/own_environment.md. Not measured with a model
that could solve one.

`verifiers.py:IMPORT,ENVIRONMENT,PYTHON,smoke` is 20 steps of 8 episodes on a
CPU. On the sums of addition.toml a tiny model of random weights learned to
answer in digits: once, on a busy AMD EPYC, its reward went from 0.001 to 0.197,
of 0.2 without a right sum, with a mismatch of at most 9e-13 at every step.
"""

import ml_collections

from configs.composer import imported

_UNNAMED = ('IMPORT', 'ENVIRONMENT', 'PYTHON')


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  parts = arg.split(',') if arg else [*_UNNAMED]
  is_smoke = parts[3:] == ['smoke']
  if len(parts) != 3 + is_smoke:
    raise ValueError(
      f'verifiers.py:IMPORT,ENVIRONMENT,PYTHON[,smoke], not {arg!r}.'
    )
  folder, environment, python = parts[:3]
  c = imported.get_config(folder + ',smoke' * is_smoke if arg else '')
  c.initial = folder
  c.tasks.update(family='verifiers', folder=environment)
  c.tasks.verifiers = dict(
    python=python,
    # Of the model's chat template; without one, no tools can be called.
    renderer='',
    max_windows=8,  # a harness that rewrites its history begins new ones
    pass_reward=1.0,  # least reward that counts as solved
  )
  c.cpt.steps = c.sft.steps = 0  # RL alone
  # A reward is the environment's, and says what else shall count.
  c.rewards.update(
    invalid_penalty=0.0, effort_coefficient=0.0, unfinished_penalty=0.0
  )
  c.hints.loss.weight = 0.0
  # At each gate routes must be those of the weights that are trained.
  c.rl.max_staleness = 0
  if is_smoke:
    # Random weights learn only in large steps.
    c.rl.update(steps=20, rollouts_per_prompt=4, learning_rate=2e-2)
  return c
