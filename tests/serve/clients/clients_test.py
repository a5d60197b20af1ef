"""Agents that were written for other servers complete tasks against this one.

Each runs in an environment of its own, with the packages that its users have.
A folder in COMPOSER_JAX_TEST_ENVIRONMENTS keeps the environments between runs.
"""

import dataclasses
import json
import pathlib
import subprocess

import pytest

from composer_jax.serve.api import chat_format
from tests import environments
from tests.serve import scripted

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
LIMITS = dataclasses.replace(scripted.LIMITS, max_body_bytes=1 << 20)
SUBMIT = 'echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'


@pytest.fixture
def serve(tokenizer):
  """serve(turns) -> the context manager of a server that plays them in turn."""

  def start(*turns):
    def script(request):
      # Every turn before this one began with the same token.
      place = int((request.context_T == tokenizer.CALL).sum()) - 1
      return [*tokenizer.encode(turns[place]), tokenizer.END]

    engine = scripted.ScriptedEngine(script, per_step=3, max_len=200_000)
    form = chat_format.OwnFormat(tokenizer)
    return scripted.serving(engine, tokenizer, form, LIMITS)

  return start


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """run(packages, script, arguments) -> what the script printed, as JSON."""

  def play(packages, script, *arguments, cwd=None):
    python = environments.python(packages, tmp_path_factory)
    done = subprocess.run(
      [python, HERE / f'{script}.py', *map(str, arguments)],
      capture_output=True,
      text=True,
      timeout=300,
      cwd=cwd,
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return json.loads(done.stdout.splitlines()[-1])

  return play


@pytest.mark.parametrize('api', ['chat', 'responses'])
def test_openais_agents_sdk(serve, run, api):
  with serve('add 2 3', '{"total": 5}') as server:
    played = run(['openai-agents'], 'agents_sdk', f'{server.url}/v1', api)
  assert played['answers'] == [5, 5]
  assert played['calls'] == [[2, 3]] * 2
  assert 'run_item_stream_event' in played['kinds']


def test_mini_swe_agent(serve, run, tmp_path):
  path = tmp_path / 'stats.py'
  path.write_text('def total(values):\n  return max(values)\n')
  turns = (
    'bash\ncat stats.py',
    "bash\nsed -i 's/max/sum/' stats.py && python3 -c 'import stats; "
    "print(stats.total([2, 3]))'",
    f'bash\n{SUBMIT}',
  )
  with serve(*turns) as server:
    ended = run(
      ['mini-swe-agent'], 'mini_swe_agent', f'{server.url}/v1', tmp_path
    )
  assert (ended['exit_status'], ended['calls']) == ('Submitted', 3)
  assert 'sum(values)' in path.read_text()


def test_inspect_with_its_local_sandbox(serve, run, tmp_path):
  turns = ('bash\necho 42 > answer.txt', 'submit\nDone.')
  packages = ['inspect-ai', 'openai']
  with serve(*turns) as server:
    ended = run(packages, 'inspect_local', f'{server.url}/v1', cwd=tmp_path)
  assert ended == {'status': 'success', 'scores': [1.0], 'error': ''}


def test_the_client_of_renderers(serve, run, tokenizer):
  # It asks for responses of httpx, which later clients of OpenAI do without.
  packages = ['renderers', 'openai<3']
  with serve('') as server:
    server.engine.script = lambda _: [40, 41, 9]
    result = run(packages, 'tokens_of_renderers', f'{server.url}/v1')
  assert result == {
    'prompt_ids': [5, 6, 7],
    'completion_ids': [40, 41, 9],
    'completion_logprobs': [-0.25] * 3,
    'finish_reason': 'stop',
    # Of five tokens that passes consumed; no pass consumed the sixth.
    'ids': [[[0, 1], [0, 1]]] * 5,
    'start': 0,
    'longest': 200_000,
  }
