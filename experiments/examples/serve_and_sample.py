"""Serves a checkpoint, samples over HTTP, and replays the routes that came.

  python -m experiments.examples.serve_and_sample --source=runs/import/qwen3

Without --source it makes a tiny random checkpoint in the form of Hugging Face
and imports that. The server is a process of its own, as `./run.sh serve` starts
it. It answers with the experts that every token used. The trainer's forward
pass with the same experts gives the same log-probabilities: bit for bit in
batch-invariant numerics, which are asked for here, and else up to rounding.
"""

import contextlib
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
from absl import flags

from experiments import start

_SOURCE = flags.DEFINE_string(
  'source', '', 'Import or workdir to serve; by default a tiny random import.'
)
_PROMPT = flags.DEFINE_string('prompt', 'def mean(values):', 'Text to go on.')
_TOKENS = flags.DEFINE_integer('tokens', 24, 'Tokens to sample.', lower_bound=1)


@contextlib.contextmanager
def server(source: pathlib.Path):
  """Yields the URL of a server, which is stopped afterwards."""
  command = [sys.executable, '-m', 'experiments.serve', f'--source={source}']
  command += ['--port=0', '--config.numerics=batch_invariant']
  command += ['--config.engine.num_slots=2']
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    try:
      assert process.stdout is not None
      for line in process.stdout:
        print(f'[server] {line}', end='')
        if match := re.search(r'at (http\S+)', line):
          yield match[1]
          return
      raise RuntimeError('The server ended before it served.')
    finally:
      process.terminate()


def make_import(folder: pathlib.Path) -> pathlib.Path:
  """Writes a tiny checkpoint and imports it; both commands of run.sh."""
  from composer_jax.hf import importing
  from experiments import tiny_checkpoint

  tiny_checkpoint.write(folder / 'published', 'qwen3_moe', seed=0)
  importing.convert(folder / 'published', folder / 'imported')
  return folder / 'imported'


def sample(url: str, prompt_T: np.ndarray):
  """Returns a trajectory: tokens, log-probabilities and routes."""
  from composer_jax.agent import window
  from composer_jax.core import records
  from composer_jax.serve import client, endpoint

  policy = client.TokenPolicy(endpoint.Endpoint(url=url))
  request = records.SampleRequest(
    session='example',
    context_T=prompt_T,
    max_new_tokens=_TOKENS.value,
    stop_tokens=(),
    seed=(0,),
  )
  sampled = window.Window()
  sampled.append(request.context_T, policy.complete(request))
  policy.close(request.session)
  return sampled.trajectory(request.temperature)


def main():
  import dataclasses

  import jax
  import jax.numpy as jnp

  from composer_jax.models import decoder
  from composer_jax.rl import batching
  from composer_jax.rl import step as steps
  from composer_jax.serve import lifetime

  with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(_SOURCE.value or make_import(pathlib.Path(folder)))
    source = source.absolute()
    # The same weights here, and the tokenizer.
    served = lifetime.load(source, overrides={'numerics': 'batch_invariant'})
    with server(source) as url:
      trajectory = sample(url, served.tokenizer.encode(_PROMPT.value))

  routes_TMA = trajectory.expert_ids_TMA
  print('token           log-prob  experts by layer')
  for t in np.flatnonzero(trajectory.loss_mask_T)[:8]:
    text = served.tokenizer.decode(trajectory.tokens_T[[t]])
    experts = ' '.join(str(ids_A.tolist()) for ids_A in routes_TMA[t])
    print(f'{text!r:14}  {trajectory.logprobs_T[t]:8.3f}  {experts}')

  score = steps.scorer(decoder.Decoder(served.model))
  values = jax.tree.map(lambda x: x.astype(jnp.float32), served.variables)
  num_experts = served.model.moe.num_experts
  shape = batching.shape_of(served.model, rows=1, seq_len=512)

  def difference(ids_TMA: np.ndarray) -> float:
    """Largest difference to the server's log-probabilities under routes."""
    replayed = dataclasses.replace(trajectory, expert_ids_TMA=ids_TMA)
    (batch,) = batching.pack([replayed], [0.0], shape).microbatches
    logprobs_T = score(values, batch).logprobs_BT[0, : len(replayed)]
    gap_T = np.asarray(logprobs_T) - trajectory.logprobs_T
    return float(np.abs(gap_T[trajectory.loss_mask_T]).max())

  # No pass consumed the last token, which therefore has no route.
  others_TMA = routes_TMA.copy()
  others_TMA[:-1] = (routes_TMA[:-1] + 1) % num_experts
  print(f'replayed with the routes of the server: {difference(routes_TMA)}')
  print(f'replayed with other routes: {difference(others_TMA):.3g}')


if __name__ == '__main__':
  start.run(main)
