"""mini-swe-agent mends a file in a folder, by its local environment.

Arguments: URL of the API, and the folder. Prints how the agent ended as JSON.
"""

import json
import os
import pathlib
import sys

os.environ['MSWEA_COST_TRACKING'] = 'ignore_errors'
os.environ['MSWEA_SILENT_STARTUP'] = '1'

import yaml
from minisweagent import config
from minisweagent.agents import default
from minisweagent.environments import local
from minisweagent.models import litellm_model


def main(url: str, folder: str) -> None:
  path = pathlib.Path(config.builtin_config_dir) / 'mini.yaml'
  settings = yaml.safe_load(path.read_text())
  fields = settings['agent']
  fields.pop('mode', None)
  model_fields = settings['model']
  model_fields['model_kwargs'] = {
    'api_base': url,
    'api_key': 'none',
    'max_tokens': 200,
  }
  model = litellm_model.LitellmModel(
    **{**model_fields, 'model_name': 'openai/tiny'}
  )
  environment = local.LocalEnvironment(cwd=folder)
  agent = default.DefaultAgent(model, environment, **fields)
  ended = agent.run('Mend total in stats.py.')
  print(json.dumps({**ended, 'calls': agent.n_calls}))


if __name__ == '__main__':
  main(*sys.argv[1:])
