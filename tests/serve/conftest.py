"""A tokenizer whose text is its bytes, and servers of scripted engines."""

import contextlib
import dataclasses
import json

import httpx2
import openai
import pytest

from composer_jax.serve.api import chat_format
from composer_jax.text import tokenizer as tokenizers
from tests.serve import scripted


@pytest.fixture(scope='session')
def tokenizer():
  """A tokenizer of bytes and few merges: 'he', 'hello' and the like."""
  return tokenizers.Tokenizer.train(['hello world hello world'], 270)


@pytest.fixture(scope='module')
def shared(tokenizer):
  """A server with the usual limits, whose engine plays the script of `say`."""
  engine = scripted.ScriptedEngine(lambda request: [tokenizer.END])
  form = chat_format.OwnFormat(tokenizer)
  with scripted.serving(engine, tokenizer, form) as running:
    yield running


@pytest.fixture(scope='module')
def shared_client(shared):
  """OpenAI's own client, without retries."""
  url = f'{shared.url}/v1'
  with openai.OpenAI(base_url=url, api_key='none', max_retries=0) as made:
    yield made


@pytest.fixture
def say(shared, shared_client, tokenizer):
  """say(text or bytes or script, per_step) -> a client of that engine."""

  def use(script, per_step=1):
    if isinstance(script, str):
      script = script.encode()
    if isinstance(script, bytes):
      # Byte by byte: characters and stop strings lie across tokens.
      ids = [tokenizer._bytes.index(bytes([b])) for b in script]
      script = lambda _: [*ids, tokenizer.END] + [tokenizer.PAD] * 100
    shared.engine.script, shared.engine.per_step = script, per_step
    return shared_client

  yield use
  shared.settle()


@pytest.fixture
def serve(tokenizer):
  """serve(script, ...) -> a running server, stopped at the end."""
  with contextlib.ExitStack() as stack:

    def start(
      script,
      *,
      limits=None,
      poll=None,
      token='',
      form=None,
      **more,
    ):
      receiver = None
      if poll is not None:
        receiver = scripted.ScriptedReceiver(poll)
      engine = scripted.ScriptedEngine(script, **more)
      return stack.enter_context(
        scripted.serving(
          engine,
          tokenizer,
          form or chat_format.OwnFormat(tokenizer),
          dataclasses.replace(scripted.LIMITS, **(limits or {})),
          receiver,
          token,
        )
      )

    yield start


@pytest.fixture
def client():
  """client(server, token) -> OpenAI's own client, without retries."""
  with contextlib.ExitStack() as stack:

    def make(server, token='none'):
      return stack.enter_context(
        openai.OpenAI(
          base_url=f'{server.url}/v1', api_key=token, max_retries=0, timeout=20
        )
      )

    yield make


@pytest.fixture
def post():
  """post(server, path, body) -> the answer, with any body."""
  with httpx2.Client(timeout=20) as http:

    def send(server, path, body=None, method='POST', headers=None):
      data = body if isinstance(body, bytes | None) else json.dumps(body)
      headers = {'content-type': 'application/json', **(headers or {})}
      url = server.url + path
      return http.request(method, url, headers=headers, content=data)

    yield send
