"""inspect-ai plays a task with its `local` sandbox and scores its files.

Argument: URL of the API. Prints the status and the mean score as JSON.
"""

import json
import os
import sys

import inspect_ai
from inspect_ai import agent, dataset, model, scorer, tool, util


@scorer.scorer(metrics=[scorer.accuracy()])
def writes_the_answer():
  """Reads what the agent wrote."""

  async def score(state, target):
    text = await util.sandbox().read_file('answer.txt')
    return scorer.Score(value=text.strip() == target.text)

  return score


@inspect_ai.task
def write_a_file():
  """One sample: write 42 to a file."""
  return inspect_ai.Task(
    dataset=[dataset.Sample(input='Write 42 to answer.txt.', target='42')],
    solver=agent.react(tools=[tool.bash(timeout=30)]),
    scorer=writes_the_answer(),
    sandbox='local',
    message_limit=20,
  )


def main(url: str) -> None:
  os.environ['INSPECT_DISPLAY'] = 'none'
  served = model.get_model(
    'openai-api/local/tiny',
    base_url=url,
    api_key='none',
    config=model.GenerateConfig(max_tokens=200, max_retries=0),
  )
  (log,) = inspect_ai.eval(
    write_a_file(), model=served, display='none', log_dir='logs'
  )
  scores = log.results.scores if log.results else []
  values = [metric.value for s in scores for metric in s.metrics.values()]
  error = log.error.message if log.error else ''
  print(json.dumps({'status': log.status, 'scores': values, 'error': error}))


if __name__ == '__main__':
  main(*sys.argv[1:])
