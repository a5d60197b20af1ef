"""A server is the only worker of a run, while clients ask it for answers."""

import re
import signal
import threading

import numpy as np
import openai
import pytest

from composer_jax.fleet import joining
from composer_jax.fleet.leases import ledger as ledgers
from tests.e2e import jobs
from tests.fleet import job_test, trainer_test

pytestmark = pytest.mark.slow


def ask(url, ending, answers):
  """Asks again and again, as several impatient clients do."""
  with openai.OpenAI(base_url=url, api_key='none', timeout=600) as client:
    while not ending.wait(0.5):
      done = client.chat.completions.create(
        model='policy-rl',
        messages=[{'role': 'user', 'content': 'Hi'}],
        max_tokens=16,
        n=2,
      )
      answers.append(done.usage.completion_tokens)


def test_a_server_that_lends_its_engine_changes_no_bit(straight, tmp_path):
  workdir, logs = tmp_path / 'run', [tmp_path / 'trainer', tmp_path / 'serve']
  jobs.copy_before_rl(straight, workdir)
  more = ('--config.fleet.workers=0', '--config.delta.poll_s=0.2')
  store, key = workdir / 'store', workdir / 'delta.key'
  flags = ('--lend', f'--store={store}', f'--key={key}', '--port=0')
  with (
    job_test.process(
      'experiments.composer', *jobs.arguments(workdir, *more), log=logs[0]
    ) as trainer,
  ):
    trainer_test.wait_for(key.exists, trainer.pid)
    with job_test.process('experiments.serve', *flags, log=logs[1]) as server:
      found = trainer_test.wait_for(
        lambda: re.search(
          r'Serving policy-rl, .* at (\S+)', logs[1].read_text()
        ),
        server.pid,
      )
      ending, answers = threading.Event(), []
      client = threading.Thread(target=ask, args=(found[1], ending, answers))
      client.start()
      try:
        assert trainer.wait() == 0, logs[0].read_text()[-3000:]
        # The run is over, and its last policy is served on.
        before = len(answers)
        trainer_test.wait_for(lambda: len(answers) > before, server.pid)
      finally:
        ending.set()
        client.join()
      server.send_signal(signal.SIGTERM)
      assert server.wait() == 0, logs[1].read_text()[-3000:]
  docs = joining.open_documents(str(store), key, 'policy')
  ledger = ledgers.from_json(docs.read_ledger()[0])
  assert ledger.totals() == {'trained': {'list_functions': 8}}
  weights = jobs.weights(workdir, 'rl')
  for name, array in jobs.weights(straight, 'rl').items():
    np.testing.assert_array_equal(weights[name], array, err_msg=name)
