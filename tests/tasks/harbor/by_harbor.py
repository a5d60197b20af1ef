"""Harbor's parser, oracle and verifier, in boxes of our provider.

Argument: a folder of task directories. Prints {name: [reward of the solution,
reward of doing nothing]} as JSON. Runs in an environment with Harbor.
"""

import asyncio
import json
import pathlib
import sys
import tempfile

from harbor.models.task import config, task
from harbor.models.trial import config as trial_config
from harbor.trial import trial as trials

PROVIDER = 'composer_jax.tasks.harbor.provider:BoxEnvironmentProvider'


async def reward(path, agent, out):
  """Returns the reward of one trial by Harbor's own runner."""
  made = await trials.Trial.create(
    trial_config.TrialConfig(
      task=trial_config.TaskConfig(path=path),
      trials_dir=out,
      agent=trial_config.AgentConfig(name=agent),
      environment=trial_config.EnvironmentConfig(
        import_path=PROVIDER, kwargs={'bases': 'python:3.*'}
      ),
    )
  )
  result = await made.run()
  if result.exception_info is not None:
    raise RuntimeError(f'{path}: {result.exception_info}')
  return result.verifier_result.rewards['reward']


async def main(folder):
  outcomes = {}
  with tempfile.TemporaryDirectory() as out:
    for path in sorted(pathlib.Path(folder).iterdir()):
      if not (path / 'task.toml').exists():
        continue
      read = task.Task(path)
      assert task.Task.is_valid_dir(path)
      # What Harbor writes of it reads as the same.
      text = read.config.model_dump_toml()
      assert config.TaskConfig.model_validate_toml(text) == read.config
      outcomes[read.name] = [
        await reward(path, agent, pathlib.Path(out))
        for agent in ('oracle', 'nop')
      ]
  print(json.dumps(outcomes))


if __name__ == '__main__':
  asyncio.run(main(*sys.argv[1:]))
