"""Recordings of a real env server become windows, and what is wrong is refused.

A thread plays the env server: it sends the recorded requests of the harness to
the real token route, and the recorded frames to the real client.
"""

import contextlib
import dataclasses
import pathlib
import threading
import types

import httpx2
import msgpack
import numpy as np
import pytest
import zmq

from composer_jax.agent import rewards
from composer_jax.core import group_bytes, records
from composer_jax.tasks.verifiers import (
  client,
  endpoint,
  environment,
  options,
  process,
  traces,
)
from tests.tasks.verifiers import record, scripted

HERE = pathlib.Path(__file__).parent
HTTP = httpx2.Client(trust_env=False)


def recorded(name):
  return msgpack.unpackb(
    (HERE / 'recorded' / f'{name}.msgpack').read_bytes(), strict_map_key=False
  )


def traces_of(recording):
  """The traces of a recording, as the client puts them together."""
  growing = client.GrowingTraces()
  *deltas, (_, reply) = recording['frames']
  for _, data in deltas:
    growing.add(msgpack.unpackb(data, strict_map_key=False))
  reply = msgpack.unpackb(reply, strict_map_key=False)
  return growing.whole(reply['head'], reply['traces'])['traces']


def changed(recording, change):
  """A recording whose messages are what `change(kind, fields)` makes them."""
  frames = []
  for kind, data in recording['frames']:
    fields = msgpack.unpackb(data, strict_map_key=False)
    if (fields := change(kind, fields)) is not None:
      frames.append([kind, msgpack.packb(fields)])
  return {**recording, 'frames': frames}


class RecordedServer:
  """Answers one run by a recording; `methods` are those that were asked."""

  def __init__(self, recording, address):
    self.methods, self._recording, self._over = [], recording, threading.Event()
    self._socket = zmq.Context.instance().socket(zmq.ROUTER)
    self._socket.bind(address)
    self._thread = threading.Thread(target=self._serve)
    self._thread.start()

  def _serve(self):
    while not self._over.is_set():
      if not self._socket.poll(20):
        continue
      sender, name, method, payload = self._socket.recv_multipart()
      self.methods.append(method)
      if method != b'run':
        continue
      asked = msgpack.unpackb(payload)['client']
      headers = {**asked['headers'], 'authorization': 'Bearer key'}
      url = asked['base_url'].removesuffix('/v1') + '/inference/v1/generate'
      for body in self._recording['bodies']:
        HTTP.post(url, json=body, headers=headers)
      for kind, data in self._recording['frames']:
        self._socket.send_multipart([sender, name, kind.encode(), data])

  def close(self):
    self._over.set()
    self._thread.join()
    self._socket.close()


@pytest.fixture
def play(tmp_path):
  """play(recording) -> (chain, verdict, what the server was asked)."""
  opened = contextlib.ExitStack()

  def drive(recording, policy=None, limits=record.LIMITS, **changes):
    address = f'ipc://{tmp_path}/server'
    server = RecordedServer(recording, address)
    with contextlib.closing(server), opened:
      route = endpoint.TokenRoute('key', limits.max_tokens)
      opened.callback(route.close)
      service = environment.EnvService(
        program=types.SimpleNamespace(
          address=address, process=types.SimpleNamespace(poll=lambda: None)
        ),
        route=route,
        options=options.VerifiersOptions(**changes),
        tokenizer='import',
        vocab_size=record.VOCAB,
        max_stops=record.STOPS,
      )
      task = process.ListedTask(**recording['task'])
      env = environment.HarnessedEnvironment(task, service)
      policy = policy or scripted.ScriptedTokens(recording['turns'])
      chain = record.chain_of(policy)
      try:
        assert env.drive(chain, limits)
      finally:
        drive.methods = server.methods
      return chain, env.verdict(True)

  return drive


@pytest.mark.parametrize('name', ['null', 'bash'])
def test_a_real_trace_becomes_the_window_that_was_sampled(play, name):
  recording = recorded(name)
  chain, verdict = play(recording)
  (window,) = chain.trajectories()
  said = [token for turn in recording['turns'] for token in turn]
  assert window.tokens_T[window.loss_mask_T].tolist() == said
  last = recording['bodies'][-1]['token_ids']
  whole = [*last, *recording['turns'][-1]]
  assert window.tokens_T.tolist() == whole
  assert verdict.passed and verdict.score == pytest.approx(1.2)
  # All that the trace says is the same, but for the token that no pass read.
  (trace,) = traces_of(recording)
  (branch,) = traces.branches(trace)
  np.testing.assert_array_equal(branch.tokens_T, window.tokens_T)
  np.testing.assert_array_equal(branch.sampled_T, window.loss_mask_T)
  np.testing.assert_array_equal(branch.logprobs_T, window.logprobs_T)
  np.testing.assert_array_equal(branch.expert_ids_TMA, window.expert_ids_TMA)
  assert (window.expert_ids_TMA[-1] == records.NO_ROUTE).all()
  assert (window.expert_ids_TMA[:-1] != records.NO_ROUTE).all()
  rows_TMA = traces.array(trace['nodes'][-1]['routed_experts'])
  np.testing.assert_array_equal(rows_TMA[-1], rows_TMA[-2])


def test_a_rewritten_history_trains_each_sampled_token_once(play):
  """The template dropped the reasoning of the first turn before the second."""
  recording = recorded('rewritten')
  chain, verdict = play(recording)
  first, second = chain.trajectories()
  for window, turn in zip((first, second), recording['turns'], strict=True):
    assert window.tokens_T[window.loss_mask_T].tolist() == turn
    assert (window.expert_ids_TMA[-1] == records.NO_ROUTE).all()
  assert [t.trajectory for t in chain.turns] == [0, 1]
  assert not verdict.passed and verdict.status == records.GRADED
  assert verdict.score == pytest.approx(0.2)


def test_what_is_in_no_trainable_trace_is_left_out(play):
  """As of a request that was sent again, or of a judge's."""
  recording = recorded('null')
  other = {**recording['bodies'][0], 'token_ids': [3, 4, 5]}
  recording['bodies'].insert(0, other)
  recording['turns'].insert(0, [9, 9])
  chain, verdict = play(recording)
  (window,) = chain.trajectories()
  assert window.tokens_T[window.loss_mask_T].tolist() == recording['turns'][1]
  assert [t.trajectory for t in chain.turns] == [0]
  assert verdict.passed


def test_versions_are_those_that_the_policy_gave(play):
  recording = recorded('bash')
  policy = scripted.ScriptedTokens(recording['turns'])
  complete = policy.complete

  def rising(request):
    done = complete(request)
    policy.version += 1
    return done

  policy.complete = rising
  (window,) = play(recording, policy)[0].trajectories()
  of_turns = window.policy_version_T[window.loss_mask_T]
  sizes = [len(turn) for turn in recording['turns']]
  np.testing.assert_array_equal(of_turns, np.repeat([0, 1], sizes))


def in_nodes(edit):
  """Changes the sampled nodes of all deltas by `edit(node)`."""

  def change(kind, fields):
    for node in fields.get('nodes', ()) if kind == 'delta' else ():
      if any(node['mask']):
        edit(node)
    return fields

  return change


def another_logprob(node):
  node['logprobs'][0] -= 0.5


def another_route(node):
  old = node['routed_experts']
  data = bytes([old['data'][0] ^ 1, *old['data'][1:]])
  node['routed_experts'] = {**old, 'data': data}


def another_token(node):
  node['token_ids'][-1] += 1


@pytest.mark.parametrize(
  'edit, said',
  [
    (another_logprob, 'other log-probabilities than the policy gave'),
    (another_route, 'other routes than the policy gave'),
    (another_token, '3 sampled tokens that the policy of this run did not'),
  ],
)
def test_a_trace_that_disagrees_with_the_policy_is_refused(play, edit, said):
  with pytest.raises(ValueError, match=said):
    play(changed(recorded('null'), in_nodes(edit)))


def test_a_lost_part_is_noticed(play):
  def without_nodes(kind, fields):
    return None if 'nodes' in fields else fields

  with pytest.raises(ValueError, match='a part of it was lost'):
    play(changed(recorded('null'), without_nodes))

  def refused(kind, fields):
    refusal = {'success': False, 'error': 'no such task'}
    return refusal if kind == 'reply' else fields

  with pytest.raises(ValueError, match='server refused: no such task'):
    play(changed(recorded('null'), refused))


def test_a_trace_that_is_played_once_more_begins_anew():
  part = {'trace': 'a', 'nodes': [{}], 'open': {'id': 'a'}}
  growing = client.GrowingTraces()
  for delta in (part, {'trace': 'a', 'discard': True}, part):
    growing.add(delta)
  (trace,) = growing.whole({}, [{'id': 'a', 'nodes': 1, 'calls': 0}])['traces']
  assert trace['nodes'] == [{}]


def test_what_an_environment_says_is_cut(play):
  given = {'a' * 2000: {'score': 1.0, 'weight': 1.0}}
  _, verdict = play(changed(recorded('null'), ended(rewards=given)))
  assert verdict.passed and len(verdict.detail) == 500


def test_only_one_trainable_agent_may_be(play):
  def judging(kind, fields):
    for part in (fields.get('open'), fields.get('set')):
      if part and 'agent' in part:
        part['agent']['trainable'] = False
    return fields

  with pytest.raises(ValueError, match='has 0 trainable agents'):
    play(changed(recorded('null'), judging))


def test_an_agent_that_asks_another_model_is_refused(play):
  def untrained(kind, fields):
    for part in fields.get('nodes', ()) if kind == 'delta' else ():
      part.update(mask=[False] * len(part['mask']), logprobs=[])
    return fields

  with pytest.raises(ValueError, match='asked another model than the policy'):
    play(changed(recorded('null'), untrained))


def ended(**changes):
  """A change of the episode's end, and of its traces'."""

  def change(kind, fields):
    if kind == 'reply':
      fields['head'] |= {'ok': changes.get('ok', True)}
    elif 'set' in fields:
      known = fields['set'].keys() & changes.keys()
      fields['set'] |= {k: changes[k] for k in known}
    return fields

  return change


def test_infrastructure_is_told_from_what_the_policy_did(play):
  broken = changed(recorded('null'), ended(ok=False))
  _, verdict = play(broken)
  assert verdict.status == records.INFRASTRUCTURE
  cut = changed(recorded('null'), ended(stop_condition='max_turns'))
  _, verdict = play(cut)
  assert (verdict.status, verdict.passed) == (records.UNFINISHED, False)
  assert verdict.score == pytest.approx(1.2)
  # The second request is refused, so that the harness fails.
  limits = dataclasses.replace(record.LIMITS, max_turns=1)

  def failed(kind, fields):
    ended(ok=False)(kind, fields)
    return {**fields, 'traces': []} if kind == 'reply' else None

  broken = changed(recorded('bash'), failed)
  chain, verdict = play(broken, limits=limits)
  assert (verdict.status, verdict.score) == (records.UNFINISHED, 0.0)
  assert '--config.episode.max_turns (1)' in verdict.detail
  assert len(chain.turns) == 1


def test_the_policys_own_failure_ends_the_episode_and_cancels_it(play):
  class Revoked(Exception):
    """As a lease that went to another worker."""

  def revoked(request):
    raise Revoked

  policy = types.SimpleNamespace(complete=revoked, close=lambda session: None)
  silent = {**recorded('null'), 'frames': []}
  with pytest.raises(Revoked):
    play(silent, policy)
  assert play.methods == [b'run', b'cancel']


def test_an_env_server_that_hangs_is_left(play):
  silent = {**recorded('null'), 'frames': []}
  _, verdict = play(silent, timeout_s=0.5)
  assert verdict.status == records.INFRASTRUCTURE
  assert 'in time' in verdict.detail and play.methods[-1] == b'cancel'


def test_a_prompt_without_room_is_an_error_of_the_config(play):
  limits = dataclasses.replace(record.LIMITS, max_tokens=16)
  nothing = changed(recorded('null'), ended(ok=False))
  with pytest.raises(ValueError, match=r'max_tokens \(16\) leaves no room'):
    play(nothing, limits=limits)
  assert play.methods == [b'run']  # Another try would be refused, too.


def test_an_environment_that_asks_nothing_is_tried_again(play):
  silent = changed({**recorded('null'), 'bodies': []}, ended(ok=False))
  with pytest.raises(ValueError, match='cannot be played: it asked'):
    play(silent)
  assert play.methods == [b'run'] * 3


def test_an_env_server_that_ends_is_told_in_its_words(play, monkeypatch):
  dead = types.SimpleNamespace(
    address='ipc:///nobody',
    process=types.SimpleNamespace(poll=lambda: 1),
    fault=lambda: 'it ended',
  )
  request = environment.EnvService.request

  def dying(service, *args):
    asked = request(service, *args)
    vars(service.program).update(vars(dead))
    return asked

  monkeypatch.setattr(environment.EnvService, 'request', dying)
  with pytest.raises(ValueError, match='it ended'):
    play({**recorded('null'), 'frames': []}, timeout_s=5.0)


def test_the_least_reward_that_is_enough(play):
  score = play(recorded('null'))[1].score
  assert play(recorded('null'), pass_reward=score)[1].passed
  more = float(np.nextafter(score, 2.0))
  assert not play(recorded('null'), pass_reward=more)[1].passed


@pytest.mark.parametrize(
  'stop, is_timeout, reasons, cut',
  [
    ('agent_completed', False, ['stop'], False),
    ('agent_completed', False, ['length', 'stop'], False),
    ('agent_completed', False, ['stop', 'length'], True),
    ('agent_completed', True, ['stop'], True),
    ('max_turns', False, ['stop'], True),
    ('agent_completed', False, [], False),
  ],
)
def test_what_a_limit_cut_is_unfinished(stop, is_timeout, reasons, cut):
  calls = [{'error': None, 'finish_reason': reason} for reason in reasons]
  calls.append({'error': 'refused', 'finish_reason': 'length'})
  trace = {'stop_condition': stop, 'is_timeout': is_timeout, 'calls': calls}
  assert traces.is_cut(trace) == cut


def policy_of(turns, **changes):
  limits = dataclasses.replace(record.LIMITS, **changes)
  chain = record.chain_of(scripted.ScriptedTokens(turns))
  policy = endpoint.EpisodePolicy(chain, limits, 2, record.VOCAB, record.STOPS)
  return policy, chain


def asking(*token_ids, **params):
  return {'token_ids': [*token_ids], 'sampling_params': params}


@pytest.mark.parametrize(
  'params, said',
  [
    ({'temperature': 0.5}, r'temperature \(0.5\) must be that of the run, 1.0'),
    ({'top_p': 0.9}, r'top_p \(0.9\) would change the distribution'),
    ({'presence_penalty': 1.0}, 'presence_penalty'),
  ],
)
def test_sampling_that_is_not_trained_on_is_refused(params, said):
  policy, _ = policy_of([[7]])
  with pytest.raises(endpoint.Refusal, match=said):
    policy.complete(asking(1, 2, **params))
  policy.complete(asking(1, 2, temperature=1.0, top_p=1.0, top_k=-1))
  assert not policy.refusal  # Of the run's limits there was none.


@pytest.mark.parametrize(
  'ids, params',
  [
    ([], {}),
    (5, {}),
    (None, {}),
    *(([1, i], {}) for i in (-5, 10**9, record.VOCAB, 1.7, '1', True, [2])),
    *(([1], {'max_tokens': most}) for most in (-3, 0, '5', 2.5, True)),
    *(
      ([1], {'stop_token_ids': e}) for e in (['a'], 'a', [1024], [1.0], [1] * 5)
    ),
    *(([1], {'routed_experts_prompt_start': i}) for i in (-1, 'a')),
    ([1], [1]),
  ],
)
def test_a_bad_request_is_refused_and_no_failure_of_the_policy(ids, params):
  policy, chain = policy_of([[7]])
  with pytest.raises(endpoint.Refusal):
    policy.complete({'token_ids': ids, 'sampling_params': params})
  assert policy.failure is None and not chain.turns
  most = {'max_tokens': 1, 'stop_token_ids': [1, 2, 3, record.VOCAB - 1]}
  policy.complete(asking(record.VOCAB - 1, **most))
  assert policy.failure is None and len(chain.turns) == 1


def test_an_answer_says_how_it_ended_and_what_was_routed():
  policy, _ = policy_of([[7], [8, 9]])
  for ids, said, ends, reason in (
    ((1, 2), [7], [7], 'stop'),
    ((1, 2, 7, 3), [8, 9], [7], 'length'),
  ):
    (choice,) = policy.complete(asking(*ids, stop_token_ids=ends))['choices']
    assert (choice['token_ids'], choice['finish_reason']) == (said, reason)
    # No pass consumed the last token.
    assert choice['routed_experts']['shape'][0] == len(ids) + len(said) - 1


@pytest.mark.parametrize(
  'changes, params, most',
  [
    ({}, {}, 9),
    ({}, {'max_tokens': 5}, 5),
    ({}, {'max_tokens': 50}, 9),
    ({'max_sampled_tokens': 3}, {'max_tokens': 5}, 3),
    ({'max_tokens': 6}, {}, 4),
  ],
)
def test_no_limit_of_the_run_is_exceeded(changes, params, most):
  policy, chain = policy_of([[7]], **{'max_call_tokens': 9, **changes})
  complete, asked = chain.policy.complete, []
  chain.policy.complete = lambda r: asked.append(r) or complete(r)
  policy.complete(asking(1, 2, **params))
  assert [request.max_new_tokens for request in asked] == [most]


def test_windows_grow_and_are_bounded():
  policy, chain = policy_of([[7], [8], [9], [10]])
  policy.complete(asking(1, 2))
  policy.complete(asking(1, 2, 7, 3))
  policy.complete(asking(1, 4))
  assert [len(t) for t in chain.trajectories()] == [5, 3]
  with pytest.raises(endpoint.Refusal, match=r'max_windows \(2\)'):
    policy.complete(asking(5))
  policy.end()
  with pytest.raises(endpoint.Refusal, match='over'):
    policy.complete(asking(1, 4, 9))


def test_the_token_route_wants_its_key_and_an_open_episode():
  policy, _ = policy_of([[7]])
  with contextlib.closing(endpoint.TokenRoute('key', 64)) as route:
    root = route.url.removesuffix('/v1')
    right = {'authorization': 'Bearer key'}
    models = HTTP.get(f'{route.url}/models', headers=right).json()
    assert models['data'][0]['max_model_len'] == 64
    assert HTTP.get(f'{route.url}/models').status_code == 401
    url, body = f'{root}/inference/v1/generate', asking(1, 2)
    assert HTTP.post(url, json=body, headers=right).status_code == 404
    with route.playing(policy) as name:
      right[endpoint.EPISODE] = name
      for wrong in ({}, {'token_ids': ['a']}, {'token_ids': [2**40]}):
        answer = HTTP.post(url, json=wrong, headers=right)
        assert answer.status_code == 400, answer.text
      for wrong in (b'[]', b'5', b'[' * 100_000, b'\xff\xfe\xfa'):
        answer = HTTP.post(url, content=wrong, headers=right)
        assert answer.status_code == 400, answer.text
      assert HTTP.post(url, json=body, headers=right).status_code == 200
    assert HTTP.post(url, json=body, headers=right).status_code == 404


def node(parent, token, **fields):
  return {
    'parent': parent,
    'token_ids': [token],
    'mask': [True],
    'logprobs': [-1.0],
    'routed_experts': None,
    **fields,
  }


def test_a_compaction_that_was_not_taken_is_no_branch():
  attempt = [{'node': 0, 'type': 'compaction_attempt'}]
  nodes = [
    node(None, 1, mask=[False], logprobs=[]),
    node(0, 2, semantic_parents=attempt),
    node(0, 3, semantic_parents=attempt),
    node(None, 4, semantic_parents=[{'node': 2, 'type': 'compaction'}]),
  ]
  found = [b.tokens_T.tolist() for b in traces.branches({'nodes': nodes})]
  assert found == [[1, 3], [4]]


@pytest.mark.parametrize('parents', [(1, 0), (None, -1), (None, 1), (None, 7)])
def test_a_parent_is_an_earlier_node(parents):
  nodes = [node(parent, i) for i, parent in enumerate(parents)]
  nodes.append(node(1, 2))
  with pytest.raises(ValueError, match='must be an earlier node'):
    traces.branches({'nodes': nodes})


def routes(ids, dtype):
  value_TMA = np.array([[ids]], dtype)
  return {
    'data': value_TMA.tobytes(),
    'dtype': value_TMA.dtype.str,
    'shape': value_TMA.shape,
  }


@pytest.mark.parametrize(
  'fields',
  [
    *({'token_ids': [i]} for i in (1.7, '3', True, 2**31, -1, 10**400, [1])),
    {'mask': ['no']},
    {'logprobs': ['-1.0']},
    *({'routed_experts': routes([0, i], np.int32)} for i in (1 << 16, -1)),
    {'routed_experts': routes([0, 1.9], float)},
    {'routed_experts': {**routes([0, 1], np.uint8), 'dtype': 'zz'}},
    {'routed_experts': {'data': b'', 'dtype': 'u1'}},
    {'routed_experts': routes([[0, 1]], np.uint8)},
  ],
)
def test_no_number_of_a_trace_becomes_another(fields):
  right = node(None, 3, routed_experts=routes([0, 1], np.uint8))
  (branch,) = traces.branches({'nodes': [right]})
  assert branch.tokens_T.tolist() == [3]
  with pytest.raises(ValueError, match='of a trace has|A trace has an array'):
    traces.branches({'nodes': [right, {**right, 'parent': 0, **fields}]})


@pytest.mark.parametrize(
  'score',
  [float('nan'), float('inf'), 1e300, -1e300, '1', None],
)
def test_a_score_that_is_no_number_is_the_environments_failure(play, score):
  given = {'a': {'score': score, 'weight': 1.0}, 'b': None}
  _, verdict = play(changed(recorded('null'), ended(rewards=given)))
  assert verdict.status == records.INFRASTRUCTURE
  assert 'reward' in verdict.detail and verdict.score is None


def test_rewards_of_any_size_differ_by_a_finite_number():
  bound = float(np.finfo(np.float32).max) / 2
  reward_of = lambda score: traces.reward_of(
    {'rewards': {'a': {'score': score, 'weight': 1}}}
  )
  assert np.isfinite(np.float32(reward_of(bound) - reward_of(-bound)))
  for score in (np.nextafter(bound, np.inf), 10**400):
    with pytest.raises(ValueError, match='reward'):
      reward_of(score)


def test_a_reward_of_any_size_is_what_success_earns(play):
  chain, verdict = play(recorded('null'))
  verdict = dataclasses.replace(verdict, score=-0.25, passed=False)
  reward, terms = rewards.score(
    verdict, chain.turns, (), rewards.UNPRICED, num_sampled=3, open_todos=0
  )
  assert (reward, terms) == (-0.25, {'success': -0.25})
  rollout = records.Rollout(
    task_id='t',
    group=0,
    member=0,
    trajectories=chain.trajectories(),
    verdict=verdict,
    reward=reward,
    num_turns=1,
    num_invalid=0,
  )
  group = records.Group(group=0, task_id='t', rollouts=(rollout,))
  read = group_bytes.from_bytes(group_bytes.to_bytes(group))
  assert read.rollouts[0].verdict == verdict
  with pytest.raises(ValueError, match='finite'):
    dataclasses.replace(verdict, score=float('nan'))
