"""Records what a real env server sends, for tests that run without one.

  python -m tests.tasks.verifiers.record PYTHON IMPORT

PYTHON has verifiers 0.4; IMPORT is an import of `experiments.hf_tiny`'s
qwen3_moe. Each recording has the bodies that the harness sent to the token
route, what the policy said, and the frames of the env server.
"""

import dataclasses
import pathlib
import sys

import msgpack
import zmq

from composer_jax.agent import episode, window
from composer_jax.hf.text import tokenizer as hf_tokenizer
from composer_jax.tasks.verifiers import (
  endpoint,
  environment,
  options,
  process,
)
from tests.tasks.verifiers import scripted

HERE = pathlib.Path(__file__).parent
EXAMPLES = HERE.parents[2] / 'experiments' / 'examples' / 'environments'
VOCAB, STOPS = 1024, 4
LIMITS = episode.EpisodeOptions(max_tokens=2048, max_call_tokens=256)
CALL = (
  '<tool_call>\n{"name": "bash", "arguments": {"command": "echo $((24+48))"}}\n'
  '</tool_call>'
)
QWEN = '{"name": "qwen3"}'
# The template leaves out reasoning of earlier turns: a second window.
PLAIN = '{"name": "default", "tool_parser": "qwen3"}'
# Name -> environment, renderer and turns; each sums 24 and 48.
EPISODES = {
  'null': ('addition', '', ['72']),
  'bash': ('shell', QWEN, [CALL, '72']),
  'rewritten': ('shell', PLAIN, [f'<think>\nAdd.\n</think>\n\n{CALL}', '73']),
}


def tokens_of(tokenizer, text):
  ids, _ = tokenizer.encode_markup(tokenizer.mark(text))
  return [*ids.tolist(), tokenizer.id_of('<|im_end|>')]


def service_of(python, folder, name, renderer):
  """The env server of an example, and the token route that it asks."""
  path = str(EXAMPLES / f'{name}.toml')
  program = process.start(python, path, process.read_config(path)['env'])
  return environment.EnvService(
    program=program,
    route=endpoint.TokenRoute(program.key, LIMITS.max_tokens),
    options=options.VerifiersOptions(python=python, renderer=renderer),
    tokenizer=str(folder),
    vocab_size=VOCAB,
    max_stops=STOPS,
  )


def chain_of(policy):
  return window.Chain(
    policy=policy, name='e', seed=(0, 0, 0), temperature=1.0, ends=()
  )


def play(service, task, turns):
  """Plays an episode; returns its chain and verdict."""
  chain = chain_of(scripted.ScriptedTokens(turns))
  env = environment.HarnessedEnvironment(task, service)
  assert env.drive(chain, LIMITS)
  return chain, env.verdict(True)


def _record(python, folder, name):
  tokenizer = hf_tokenizer.ImportedTokenizer.from_folder(folder, VOCAB)
  example, renderer, texts = EPISODES[name]
  turns = [tokens_of(tokenizer, text) for text in texts]
  service = service_of(python, folder, example, renderer)
  path = str(EXAMPLES / f'{example}.toml')
  task = process.listed(python, path, name)[0]
  bodies, frames = [], []
  policy = endpoint.EpisodePolicy(
    chain_of(scripted.ScriptedTokens(turns)), LIMITS, 8, VOCAB, STOPS
  )
  complete = policy.complete
  policy.complete = lambda body: bodies.append(body) or complete(body)
  with service.route.playing(policy) as episode_name:
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(service.program.address)
    request = service.request(task, episode_name, LIMITS)
    socket.send_multipart([b'x', b'run', msgpack.packb(request)])
    while not frames or frames[-1][0] != 'reply':
      _, kind, data = socket.recv_multipart()
      frames.append([kind.decode(), data])
    socket.close()
  service.close()
  recording = {
    'task': dataclasses.asdict(task),
    'bodies': bodies,
    'turns': turns,
    'frames': frames,
  }
  out = HERE / 'recorded' / f'{name}.msgpack'
  out.write_bytes(msgpack.packb(recording))
  print(name, len(bodies), len(frames), out.stat().st_size)


if __name__ == '__main__':
  for episode_of in EPISODES:
    _record(sys.argv[1], sys.argv[2], episode_of)
