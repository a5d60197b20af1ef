"""Clients of a server read exactly what its real engine sampled."""

import asyncio
import base64
import dataclasses
import re
import threading
import time

import jax
import numpy as np
import openai
import pytest

from composer_jax.core import records
from composer_jax.core.routes import codec
from composer_jax.models import config as config_lib
from composer_jax.models import decoder
from composer_jax.rollout import engine as engines
from composer_jax.serve import client as http_policy
from composer_jax.serve import endpoint
from composer_jax.serve.api import chat_format, texts
from composer_jax.serve.api import tokens as tokens_api
from tests.serve import scripted

OPTIONS = engines.EngineOptions(
  num_slots=8,
  max_len=96,
  prefill_chunk=16,
  prefill_rows=4,
  decode_steps=4,
  page_size=16,
  max_stop_tokens=4,
  num_top=3,
)
STREAMS = 64


class PacedEngine(engines.Engine):
  """Pauses between steps, so that clients of the same process can run."""

  pace_s = 0.0

  def step(self):
    time.sleep(self.pace_s)
    return super().step()


@pytest.fixture(scope='module')
def config(tokenizer):
  return config_lib.ModelConfig.from_dict(
    {
      'vocab_size': tokenizer.vocab_size,
      'embed_dim': 32,
      'num_layers': 2,
      'num_dense_layers': 1,
      'dense_ffw_dim': 32,
      'attention': {
        'kind': 'gqa',
        'num_heads': 2,
        'num_kv_heads': 1,
        'head_dim': 16,
        'qk_norm': 'none',
        'qkv_bias': False,
        'out_bias': False,
      },
      'rope': {'theta': 1e4, 'interleaved': False, 'yarn': None},
      'norm_eps': 1e-6,
      'tie_embeddings': True,
      'remat': False,
      'compute_dtype': 'float32',
      'numerics': 'fast',
      'moe': {
        'num_experts': 4,
        'num_active': 2,
        'ffw_dim': 16,
        'num_shared': 1,
        'router': 'sigmoid',
        'num_groups': 1,
        'num_active_groups': 1,
        'renormalize': True,
        'routed_scale': 1.0,
        'aux_loss_weight': 0.0,
        'z_loss_weight': 0.0,
        'replay_alpha': 0.0,
      },
    }
  )


@pytest.fixture(scope='module')
def policies(config):
  shapes, _ = decoder.abstract(config)

  def draw(seed):
    rng = np.random.default_rng(seed)
    return decoder.policy(
      jax.tree.map(
        lambda x: np.float32(0.3) * rng.normal(size=x.shape).astype('f4'),
        shapes,
      )
    )

  return [draw(0), draw(1)]


@pytest.fixture(scope='module')
def engine(config, policies):
  made = PacedEngine(config, policies[0], 3, OPTIONS)
  made.warm()
  return made


@pytest.fixture(scope='module')
def updates():
  """Pairs of (version, variables) for the server to follow."""
  return []


@pytest.fixture(scope='module')
def server(engine, tokenizer, updates):
  limits = dataclasses.replace(
    scripted.LIMITS, max_queue=STREAMS, max_choices=8, request_timeout_s=120.0
  )
  with scripted.serving(
    engine,
    tokenizer,
    chat_format.OwnFormat(tokenizer),
    limits,
    scripted.ScriptedReceiver(lambda: updates.pop() if updates else None),
  ) as running:
    yield running
  stats = engine.stats()
  assert stats.sessions == stats.running == stats.waiting == 0
  assert stats.pages_free + stats.pages_cached == stats.pages


@pytest.fixture(scope='module')
def client(server):
  url = f'{server.url}/v1'
  with openai.OpenAI(base_url=url, api_key='none', max_retries=0) as made:
    yield made


@pytest.fixture(autouse=True)
def nothing_leaks(server):
  yield
  idle = lambda: server.served.stats['sessions'] == 0
  scripted.wait_for(lambda: server.served.num_open == 0 and idle())


def _text(tokenizer, tokens):
  data = b''.join(texts.spelling(tokenizer, t) for t in tokens)
  return data.decode('utf-8', 'replace')


def _fields(index=0, **more):
  return {
    'model': 'tiny',
    'prompt': f'number {index} says ',
    'max_tokens': 24,
    'seed': index,
    **more,
  }


def _direct(engine_options, config, variables, version, requests):
  """Returns what a second engine samples with the same compiled programs."""
  made = engines.Engine(config, variables, version, engine_options)
  for request in requests:
    made.submit(request)
  ends = {}
  while made.num_unfinished:
    for end in made.step():
      ends[end.session] = end
  return [ends[request.session] for request in requests]


def _request(tokenizer, index, **more):
  return records.SampleRequest(
    **{
      'session': f'direct {index}',
      'context_T': tokenizer.encode(f'number {index} says '),
      'max_new_tokens': 24,
      'stop_tokens': (tokenizer.END, tokenizer.EOD),
      'seed': (index, 0),
      **more,
    }
  )


def _said(tokenizer, end):
  tokens = end.tokens_T.tolist()
  return _text(tokenizer, tokens[:-1] if end.stopped else tokens)


def test_answers_are_those_of_the_engine(client, config, policies, tokenizer):
  requests, asked = [], []
  for index, fields in enumerate(
    (
      {'temperature': 0.0},
      {'temperature': 0.0},
      {'temperature': 1.0},
      {'temperature': 0.7, 'top_p': 0.9},
    )
  ):
    requests.append(_request(tokenizer, index, **fields))
    asked.append(_fields(index, **fields))
  ends = _direct(OPTIONS, config, policies[0], 3, requests)
  for end, fields in zip(ends, asked, strict=True):
    answer = client.completions.create(**fields, logprobs=2)
    (choice,) = answer.choices
    assert choice.text == _said(tokenizer, end)
    assert choice.finish_reason == ('stop' if end.stopped else 'length')
    assert answer.usage.completion_tokens == len(end.tokens_T)
    raw = end.raw_logprobs_T[: len(choice.logprobs.token_logprobs)].tolist()
    np.testing.assert_allclose(choice.logprobs.token_logprobs, raw, rtol=1e-5)
    if fields['temperature'] == 0.0:
      # The likeliest token is the first of the alternatives.
      firsts = [max(top.values()) for top in choice.logprobs.top_logprobs]
      np.testing.assert_allclose(firsts, raw, rtol=1e-5)
    parts = client.completions.create(**fields, stream=True)
    assert ''.join(p.choices[0].text for p in parts) == choice.text


def test_a_stop_string_cuts_what_the_engine_says(client):
  whole = client.completions.create(**_fields(temperature=0.0)).choices[0].text
  stop = whole[5:8]
  fields = _fields(temperature=0.0, stop=[stop])
  cut = client.completions.create(**fields).choices[0]
  assert cut.text == whole[: whole.index(stop)]
  assert cut.finish_reason == 'stop'
  parts = client.completions.create(**fields, stream=True)
  assert ''.join(p.choices[0].text for p in parts) == cut.text


def test_choices_share_their_prompt(client, server):
  prompt = list(range(20, 60))
  before = server.served.stats['context_tokens']
  answer = client.completions.create(**_fields(n=4, prompt=prompt))
  scripted.wait_for(lambda: server.served.stats['sessions'] == 0)
  consumed = server.served.stats['context_tokens'] - before
  # Whole pages of it are consumed once.
  assert consumed < 2 * len(prompt)
  assert len({c.text for c in answer.choices}) > 1
  assert answer.usage.prompt_tokens == len(prompt)
  # Nobody had sent it before.
  assert answer.usage.prompt_tokens_details.cached_tokens == 0
  # And by the next request, too.
  again = client.completions.create(**_fields(prompt=prompt))
  assert again.usage.prompt_tokens_details.cached_tokens >= 32


def test_a_session_equals_one_window(server, post, config, policies, tokenizer):
  prompt, more = [30, 31, 32, 33, 34], [40, 41]
  fields = {'max_tokens': 6, 'temperature': 0.0, 'session': 'one'}
  first = post(server, '/v1/tokens', {'prompt': prompt, **fields}).json()
  held = first['session_length']
  body = {'prompt': more, 'session_length': held, **fields}
  second = post(server, '/v1/tokens', body).json()
  parts = [first['choices'][0], second['choices'][0]]
  sampled = [np.array(p['tokens'], np.int32) for p in parts]
  whole = np.concatenate([prompt, sampled[0], more]).astype(np.int32)
  (end,) = _direct(
    OPTIONS,
    config,
    policies[0],
    3,
    [
      _request(
        tokenizer,
        0,
        context_T=whole,
        max_new_tokens=6,
        stop_tokens=(),
        temperature=0.0,
      )
    ],
  )
  assert sampled[1].tolist() == end.tokens_T.tolist()
  # The tapes of both turns, put together, are the tape of the window.
  tapes = [codec.decode(base64.b64decode(p['routes']['data'])) for p in parts]
  assert tapes[0].scheme == tapes[1].scheme == tokens_api.scheme_of(config)
  assert tapes[0].start == 0 and tapes[1].start == held - 1
  ids_TMA = np.concatenate([tape.ids_TMA for tape in tapes])
  np.testing.assert_array_equal(ids_TMA, end.consumed_expert_ids_TMA)
  gone = post(server, '/v1/tokens/sessions/one', method='DELETE')
  assert gone.status_code == 200


def test_an_agents_policy_over_http_is_the_engine_itself(
  server, config, policies
):
  made = engines.Engine(config, policies[0], 3, OPTIONS)
  policy = http_policy.TokenPolicy(
    endpoint.Endpoint(url=f'{server.url}/v1', model='tiny')
  )
  for context in ([30, 31, 32], [40, 41]):
    request = records.SampleRequest(
      session='one',
      context_T=np.array(context, np.int32),
      max_new_tokens=6,
      stop_tokens=(50,),
      seed=(1, 2, 3),
    )
    sampled = policy.complete(request)
    # The server draws by the one number that the policy made of three.
    seed = (http_policy.seed_of(request), 0)
    made.submit(dataclasses.replace(request, seed=seed))
    ends = []
    while made.num_unfinished:
      ends += made.step()
    names = ('policy_version_T', 'context_version_T', 'consumed_version_T')
    for field in ('tokens_T', 'consumed_expert_ids_TMA', *names):
      np.testing.assert_array_equal(
        getattr(sampled, field), getattr(ends[0], field)
      )
    for field in ('logprobs_T', 'raw_logprobs_T'):
      np.testing.assert_allclose(
        getattr(sampled, field), getattr(ends[0], field), rtol=1e-5
      )
    assert sampled.routes_start == ends[0].routes_start
    assert sampled.stopped == ends[0].stopped
  policy.close('one')


def test_the_reported_logprobs_are_of_both_distributions(server, post):
  body = {'prompt': [30, 31], 'max_tokens': 8, 'top_logprobs': 3}
  body |= {'temperature': 0.5, 'top_k': 2, 'seed': 1}
  (choice,) = post(server, '/v1/tokens', body).json()['choices']
  for token, logprob, raw, top in zip(
    choice['tokens'],
    choice['logprobs'],
    choice['raw_logprobs'],
    choice['top_logprobs'],
    strict=True,
  ):
    ids, scores = zip(*top, strict=True)
    assert token in ids[:2] and raw == pytest.approx(
      scores[ids.index(token)], rel=1e-5
    )
    # Two are left, at half the temperature.
    weights = np.exp(2 * (np.array(scores[:2]) - scores[0]))
    wanted = np.log(weights[ids.index(token)] / weights.sum())
    assert logprob == pytest.approx(wanted, abs=1e-4)


def test_streams_survive_those_that_break_off(
  server, config, policies, tokenizer, post
):
  _load(server, config, policies[0], tokenizer, post, STREAMS)


@pytest.mark.slow
def test_streams_survive_ten_times_as_many(
  server, config, policies, tokenizer, post
):
  for _ in range(10):
    _load(server, config, policies[0], tokenizer, post, STREAMS)


def _num_left(server, post):
  text = post(server, '/metrics', method='GET').text
  match = re.search(r'completions",status="499"} ([\d.]+)', text)
  return float(match[1]) if match else 0.0


def _load(server, config, variables, tokenizer, post, count):
  """Opens streams at once; every third is broken off midway."""
  threads, left = threading.active_count(), _num_left(server, post)
  wanted = _direct(
    OPTIONS,
    config,
    variables,
    server.served.version,
    [
      _request(tokenizer, i, temperature=0.9, max_new_tokens=60)
      for i in range(count)
    ],
  )

  async def one(made, index):
    stream = await made.completions.create(
      **_fields(index, temperature=0.9, max_tokens=60), stream=True
    )
    text = ''
    if index % 6 == 0:
      await stream.close()  # most of them wait for a slot
      return None
    async for part in stream:
      text += part.choices[0].text
      if index % 3 == 0 and len(text) > index % 7:
        await stream.close()
        return None
    return text

  async def all_of_them():
    async with openai.AsyncOpenAI(
      base_url=f'{server.url}/v1', api_key='none', max_retries=0, timeout=120
    ) as made:
      return await asyncio.gather(*(one(made, i) for i in range(count)))

  server.engine.pace_s = 0.003
  answers = asyncio.run(all_of_them())
  server.engine.pace_s = 0.0
  for index, (text, end) in enumerate(zip(answers, wanted, strict=True)):
    if index % 3:
      assert text == _said(tokenizer, end), index
  scripted.wait_for(lambda: server.served.stats['sessions'] == 0)
  stats = server.served.stats
  assert stats['running'] == stats['waiting'] == 0
  assert stats['pages_free'] + stats['pages_cached'] == stats['pages']
  assert server.served.num_open == 0
  assert threading.active_count() <= threads
  # Those were cancelled, and had not ended by themselves.
  assert _num_left(server, post) - left > count // 6
  assert server.served.unhealthy() == ''


def test_weights_change_while_a_stream_runs(
  server, client, updates, policies, post
):
  """The last test: it leaves other weights behind."""
  body = {'prompt': [30, 31], 'max_tokens': 80, 'seed': 5}
  body |= {'min_policy_version': 3}
  responses = []
  running = threading.Thread(
    target=lambda: responses.append(post(server, '/v1/tokens', body))
  )
  running.start()
  scripted.wait_for(lambda: server.served.stats['running'] or responses)
  updates.append((9, policies[1]))
  running.join(60)
  versions = responses[0].json()['choices'][0]['policy_versions']
  assert versions == sorted(versions) and set(versions) <= {3, 9}
  scripted.wait_for(lambda: server.served.version == 9)
  assert client.models.list().data[0].policy_version == 9
  body['min_policy_version'] = 9
  (choice,) = post(server, '/v1/tokens', body).json()['choices']
  assert set(choice['policy_versions']) == {9}
  body['min_policy_version'] = 10
  assert post(server, '/v1/tokens', body).status_code == 409
  # Weights that do not fit: refused, and these are served on.
  damaged = dict(policies[0])
  damaged['params'] = dict(list(policies[0]['params'].items())[1:])
  updates.append((10, damaged))
  scripted.wait_for(lambda: server.served.problem)
  assert server.served.version == 9
  body['min_policy_version'] = 9
  assert post(server, '/v1/tokens', body).status_code == 200


def test_nothing_was_compiled_anew(engine):
  before = dict(engine.traces)
  engine.warm()
  assert dict(engine.traces) == before
