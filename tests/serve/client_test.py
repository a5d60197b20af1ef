"""A policy over HTTP gives what the server sampled."""

import dataclasses

import numpy as np
import pytest

from composer_jax.agent import episode, rewards
from composer_jax.core import records
from composer_jax.serve import chat, client, endpoint
from composer_jax.serve.api import chat_format
from composer_jax.tasks.list_functions import environment, family, runners
from composer_jax.tasks.practice import conversation
from composer_jax.text import tokenizer as tokenizer_lib
from tests.serve import faulty
from tests.serve import scripted as serving

TASK = family.generate(3, 'unseen_all')
EDIT = f'edit {TASK.path} {TASK.function}\n{TASK.reference}'
HONEST = ['list', f'read {TASK.path}', EDIT, 'test', 'finish']
OPTIONS = episode.EpisodeOptions(
  max_tokens=4000, max_turns=9, max_call_tokens=300
)


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train([*TASK.files.values(), *HONEST * 4], 290)


class _Engine(serving.ScriptedEngine):
  """Routes the token at p to experts p and p + 1, from the last one on."""

  def step(self):
    return [self._routed(end) for end in super().step()]

  def _routed(self, end):
    start = max(end.routes_start - 1, 0)
    stop = end.routes_start + len(end.consumed_expert_ids_TMA)
    return dataclasses.replace(
      end,
      routes_start=start,
      consumed_expert_ids_TMA=_routes(start, stop),
      consumed_version_T=np.insert(
        end.consumed_version_T, 0, [self.version] * (end.routes_start - start)
      ),
    )


def _routes(start, stop):
  at_T = np.arange(start, stop)
  ids_TA = np.stack([at_T, at_T + 1], 1) % 4
  return np.repeat(ids_TA[:, None], 2, axis=1).astype(np.uint16)


@pytest.fixture
def served(tokenizer):
  """A server whose engine writes one of `engine.calls` each turn."""
  engine = _Engine(None, per_step=64)
  engine.options.max_len = 8000
  engine.calls = []

  def script(request):
    del request
    text = engine.calls.pop(0)
    return [*tokenizer.encode(text).tolist(), tokenizer.END]

  engine.script = script
  limits = dataclasses.replace(serving.LIMITS, max_body_bytes=200_000)
  form = chat_format.OwnFormat(tokenizer)
  with serving.serving(engine, tokenizer, form, limits) as running:
    yield running


def _endpoint(url, **more):
  return endpoint.Endpoint(url=f'{url}/v1', **more)


def _play(policy, tokenizer):
  made = environment.FunctionEnvironment(TASK, runners.TrustedRunner())
  return episode.run(
    made, policy, tokenizer, OPTIONS, group=5, member=2, seed=7
  )


def test_an_episode_over_tokens_has_everything_a_trainer_needs(
  served, tokenizer
):
  served.engine.calls = list(HONEST)
  policy = client.TokenPolicy(_endpoint(served.url))
  rollout = _play(policy, tokenizer)
  assert rollout.verdict.passed
  (trajectory,) = rollout.trajectories
  sampled_T = trajectory.loss_mask_T
  version = served.engine.version
  assert (trajectory.context_version_T == version - 1).all()
  for name in ('policy_version_T', 'consumed_version_T'):
    first, *others = getattr(trajectory, name).tolist()
    assert first == version - 1 and set(others) == {version}
  assert (trajectory.logprobs_T == np.where(sampled_T, -0.25, 0)).all()
  np.testing.assert_array_equal(
    trajectory.expert_ids_TMA[:-1], _routes(0, len(trajectory) - 1)
  )
  serving.wait_for(lambda: not served.engine.held)


def test_a_window_that_the_server_forgot_is_sent_again(served, tokenizer):
  clock = faulty.Clock()
  policy = client.TokenPolicy(_endpoint(served.url, clock=clock))

  class Forgetful(environment.FunctionEnvironment):
    def call(self, text):
      # As if the server were restarted between two turns.
      for name in list(policy._sessions.values()):
        policy._forget(name)
      return super().call(text)

  whole = {}
  for kind in (environment.FunctionEnvironment, Forgetful):
    served.engine.calls = list(HONEST)
    whole[kind] = episode.run(
      kind(TASK, runners.TrustedRunner()),
      policy,
      tokenizer,
      OPTIONS,
      group=5,
      member=2,
      seed=7,
    )
  kept, lost = (r.trajectories[0] for r in whole.values())
  for field in dataclasses.fields(records.Trajectory):
    np.testing.assert_array_equal(
      getattr(kept, field.name), getattr(lost, field.name)
    )
  assert served.engine.calls == []
  # The refused requests were not sent twice.
  assert not clock.waits


def test_sampling_is_asked_for_as_the_request_says(served, tokenizer):
  seen = []
  served.engine.script = lambda request: seen.append(request) or [20, 21, 22]
  request = records.SampleRequest(
    session='a',
    context_T=np.array([40, 41], np.int32),
    max_new_tokens=3,
    stop_tokens=(21,),
    seed=(1, 2, 3),
    temperature=0.5,
    top_p=0.9,
    top_k=4,
    min_p=0.1,
  )
  policy = client.TokenPolicy(_endpoint(served.url, model='tiny'))
  completion = policy.complete(request)
  assert completion.tokens_T.tolist() == [20, 21] and completion.stopped
  policy.complete(dataclasses.replace(request, session='b', seed=(1, 2, 4)))
  first, second = seen
  for name in ('temperature', 'top_p', 'top_k', 'min_p', 'stop_tokens'):
    assert getattr(first, name) == getattr(request, name)
  assert first.context_T.tolist() == [40, 41]
  assert first.seed != second.seed and first.session != second.session
  policy.close('a')
  policy.close('b')
  policy.close('unknown')
  serving.wait_for(lambda: not served.engine.held)


@pytest.mark.parametrize('stream', [False, True])
def test_a_conversation_with_our_own_server_passes(served, stream):
  served.engine.calls = list(HONEST)
  talk = conversation.Conversation(
    environment.FunctionEnvironment(TASK, runners.TrustedRunner()),
    conversation.ChatOptions(),
    0,
  )
  ask = chat.ChatClient(_endpoint(served.url), stream=stream)
  talk.play(ask, (), rewards.UNPRICED, seed=1, max_tokens=300, temperature=1.0)
  assert talk.verdict.passed and talk.ended == 'finish'
  assert talk.usage()['tokens_in'] > talk.usage()['tokens_out'] > 0
