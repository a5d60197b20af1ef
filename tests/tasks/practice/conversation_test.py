"""Conversations with chat models: every call answered, every limit named."""

import json

import pytest

from composer_jax.agent import environment, episode, rewards
from composer_jax.core import records, turns
from composer_jax.tasks.practice import conversation
from composer_jax.text import tool_calls

PRICES = rewards.RewardOptions(invalid_penalty=0.25, effort_coefficient=0.0)
PROTOCOL = 'Write JSON.'


class Counter(environment.Environment):
  """Counts calls of `add`; passes at two."""

  task_id = 'count'
  prompt = f'Count to two.\n\n{PROTOCOL}'
  protocol = PROTOCOL
  tools = ('add', 'finish')

  def __init__(self, breaks=False):
    self.texts, self.count, self.closed, self.breaks = [], 0, 0, breaks

  def call(self, text):
    self.texts.append(text)
    try:
      name = tool_calls.parse_json(text).name
      if name not in self.tools:
        raise tool_calls.ToolCallError('no such tool')
    except tool_calls.ToolCallError as error:
      return environment.ToolResult(
        text=f'error: {error}', tool='', outcome=turns.NOT_A_CALL
      )
    self.is_broken = self.breaks
    self.count += name == 'add'
    return environment.ToolResult(
      text=f'at {self.count}', tool=name, is_final=name == 'finish'
    )

  def verdict(self, finished):
    passed = finished and self.count == 2
    return records.Verdict(
      passed=passed,
      num_passed=int(passed),
      num_tests=1,
      status=records.GRADED if finished else records.UNFINISHED,
      sandbox_level='none',
    )

  def close(self):
    self.closed += 1


def call(name, **arguments):
  return json.dumps({'tool': name, 'arguments': arguments})


ADD, FINISH = call('add'), call('finish')


def answer(content=None, *calls, finish='stop', usage=None, **fields):
  """Returns an answer; each call is (id, name, arguments)."""
  made = [{'id': i, 'function': {'name': n, 'arguments': a}} for i, n, a in
          calls]  # fmt: skip
  message = {'role': 'assistant', 'content': content, **fields}
  if made:
    message['tool_calls'] = made
  return conversation.ModelMessage(
    message=message, finish=finish, usage=usage or {}, seconds=2.0
  )


class Script:
  """Gives answers in turn; an error is raised."""

  def __init__(self, *answers):
    self.left, self.requests = list(answers), []

  def __call__(self, messages, functions, **sampling):
    # As they are now: the list grows.
    self.requests.append((json.loads(json.dumps(messages)), sampling))
    made = self.left.pop(0) if self.left else answer(ADD)
    made = answer(made) if isinstance(made, str) else made
    if isinstance(made, Exception):
      raise made
    return made


def play(script, env=None, functions=(), **options):
  talk = conversation.Conversation(
    env or Counter(), conversation.ChatOptions(**options), 1
  )
  talk.play(script, functions, PRICES, seed=100, temperature=0.7)
  return talk


def test_text_calls_are_carried_out_and_the_episode_is_judged():
  script, env = Script(ADD, 'What now?', ADD, FINISH), Counter()
  played = play(script, env)
  assert played.verdict.passed and played.ended == 'finish'
  assert played.tools == ('add', '', 'add', 'finish')
  assert (played.num_turns, played.num_invalid, played.member) == (4, 1, 1)
  assert played.reward == 0.75 and env.closed == 1
  messages, sampling = script.requests[-1]
  assert [m['role'] for m in messages] == ['user', *['assistant', 'user'] * 3]
  assert messages[0]['content'].startswith(Counter.prompt)
  assert messages[1:3] == [
    {'role': 'assistant', 'content': ADD},
    {'role': 'user', 'content': 'at 1'},
  ]
  assert sampling == {'temperature': 0.7, 'seed': 103}


def test_a_model_is_told_of_tools_that_the_prompt_does_not_name():
  class Terse(Counter):
    protocol, prompt = '', 'Count to two.'

    def usage(self, tool):
      return f'{tool}!'

  script = Script(FINISH)
  play(script, Terse())
  ((prompt,), _) = script.requests[0]
  assert 'The tools:\nadd!\nfinish!\n\nA message may' in prompt['content']


@pytest.mark.parametrize('content', [
    f'I think.\n```json\n{ADD}\n```\nand\n```\n{ADD}\n```',
    f'<think>```\nnot me\n```</think>\n```\n{ADD}\n```\n```\n{ADD}\n```',
    f'I see ```add``` twice.</think>```\n{ADD}\n```  \n```x\n{ADD}\n```',
])  # fmt: skip
def test_blocks_of_a_message_are_calls_in_order(content):
  script, env = Script(content, FINISH), Counter()
  played = play(script, env)
  assert env.texts == [ADD, ADD, FINISH] and played.verdict.passed
  messages, _ = script.requests[-1]
  # The text beside the calls goes back as it came.
  assert messages[1]['content'] == content
  assert messages[2]['content'] == 'answer 1:\nat 1\n\nanswer 2:\nat 2'


def test_blocks_that_never_close_are_read_once():
  # In the square of these lines, they would take an hour.
  content = '```x\n' * 100_000
  env = Counter()
  played = play(Script(content, FINISH), env)
  assert env.texts == [content.strip(), FINISH] and played.ended == 'finish'
  env = Counter()
  play(Script(f'```\n```x\n{ADD}\n```\n\n```a\n\n```\nb', FINISH), env)
  assert env.texts == [f'```x\n{ADD}', '', FINISH]


def test_parallel_native_calls_are_each_answered_in_order():
  thought = {'reasoning_content': 'Two are needed.', 'index': 7}
  calls = ('x', 'add', '{}'), ('x', 'add', ''), ('', 'add', '[1]')
  three = answer('I add.', *calls, **thought)
  script, env = Script(three, answer(None, ('y', 'finish', '{}'))), Counter()
  played = play(script, env, native_tools=True, functions=[{}])
  assert env.texts == [ADD, ADD, 'add [1]', FINISH]
  assert played.verdict.passed and played.num_invalid == 1
  messages, _ = script.requests[-1]
  # The environment's words on how to write calls are left out.
  assert messages[0]['content'] == 'Count to two.'
  sent, *answers = messages[1:]
  assert sent['reasoning_content'] == 'Two are needed.'
  assert sent['content'] == 'I add.' and 'index' not in sent
  ids = [c['id'] for c in sent['tool_calls']]
  assert len(set(ids)) == 3 and ids[0] == 'x' and all(ids)
  # Servers refuse a conversation whose arguments are no object.
  functions = [c['function'] for c in sent['tool_calls']]
  assert all(json.loads(f['arguments']) == {} for f in functions)
  assert [m['tool_call_id'] for m in answers] == ids
  texts = [m['content'] for m in answers]
  assert texts[:2] == ['at 1', 'at 2'] and texts[2].startswith(
    'error: not JSON'
  )


def test_calls_after_the_last_one_are_answered_and_not_carried_out():
  calls = [(str(i), n, '{}') for i, n in enumerate(('add', 'finish', 'add'))]
  env = Counter()
  played = play(Script(answer('', *calls)), env, native_tools=True)
  assert env.count == 1 and played.num_turns == 2
  assert played.transcript[-1]['content'].startswith('not carried out')


@pytest.mark.parametrize('name', ['', 'a b', 'x' * 65, 'ä', None])
def test_a_name_that_no_server_takes_back_is_replaced(name):
  script = Script(
    answer('', ('1', name, '{}')), answer('', ('2', 'finish', ''))
  )
  play(script, native_tools=True)
  sent = script.requests[1][0][1]['tool_calls'][0]['function']
  assert sent['name'] == 'unknown'


def test_text_where_calls_are_native_is_told_what_is_missing():
  script = Script('I am done.', answer(None, ('1', 'finish', '{}')))
  played = play(script, native_tools=True)
  assert script.requests[1][0][-1] == {
    'role': 'user',
    'content': 'error: no call of a tool; the episode ends with a call of '
    'finish',
  }
  assert played.num_invalid == 1 and played.ended == 'finish'


@pytest.mark.parametrize('native', [False, True])
def test_an_answer_that_was_cut_carries_out_nothing(native):
  cut = answer(ADD, ('1', 'add', '{}'), ('2', 'ad', ''), finish='length')
  end = answer(None, ('3', 'finish', '{}')) if native else FINISH
  script, env = Script(cut, end), Counter()
  played = play(script, env, native_tools=native)
  assert env.texts == [FINISH] and played.usage()['cut'] == 1
  assert played.num_invalid == 1
  answers = script.requests[1][0][2:]
  assert [a['role'] for a in answers] == (['tool'] * 2 if native else ['user'])
  assert all('cut off' in a['content'] for a in answers)


@pytest.mark.parametrize('refused', [
    answer('', refusal='I may not.'),
    answer('I', finish='content_filter'),
])  # fmt: skip
def test_a_refusal_ends_the_episode_and_is_kept(refused):
  played = play(Script(ADD, refused))
  assert played.ended == 'refusal'
  assert played.verdict.status == records.UNFINISHED
  last = played.transcript[-1]
  kept = (last.get('refusal'), last['finish'])
  assert kept in (('I may not.', 'stop'), (None, 'content_filter'))


# The prompt, and two calls with their answers.
LENGTH = len(Counter.prompt + conversation.BLOCKS) + 2 * len(ADD + 'at 1')


@pytest.mark.parametrize('limit, options, answers', [
    ('max_turns', {'max_turns': 3}, 3),
    ('max_characters', {'max_characters': LENGTH}, 2),
    ('max_characters', {'max_characters': LENGTH + 1}, 3),
    ('max_context_tokens', {'max_context_tokens': 40}, 2),
])  # fmt: skip
def test_a_limit_that_is_hit_is_named(limit, options, answers):
  usages = [{'prompt_tokens': n, 'completion_tokens': 10} for n in (20, 30)]
  script = Script(*(answer(ADD, usage=u) for u in usages))
  played = play(script, **options)
  assert played.ended == limit and played.usage()['attempts'] == answers
  assert played.verdict.status == records.UNFINISHED


def test_one_message_cannot_make_more_calls_than_there_are_turns():
  calls = [(str(i), 'add', '{}') for i in range(9)]
  script, env = Script(answer('', *calls)), Counter()
  played = play(script, env, native_tools=True, max_turns=4)
  assert env.count == played.num_turns == 4 and played.ended == 'max_turns'


def test_the_last_call_is_announced():
  script = Script()
  play(script, max_turns=3)
  said = [m[-1]['content'] for m, _ in script.requests[1:]]
  assert said == ['at 1', 'at 2' + episode.LAST_CALL]


def test_a_sandbox_that_failed_ends_the_episode():
  assert play(Script(ADD), Counter(breaks=True)).ended == 'sandbox'


def test_an_endpoint_that_fails_says_nothing_about_the_model():
  env = Counter()
  played = play(Script(ADD, conversation.EndpointError('http://x: 503')), env)
  assert played.verdict.status == records.INFRASTRUCTURE
  assert played.verdict.detail == 'http://x: 503' and played.ended == 'endpoint'
  assert env.closed == 1 and len(played.transcript) == 4


@pytest.mark.parametrize('message, code', [
    ("This model's maximum context length is 4096 tokens.", ''),
    ('Bad request', 'context_length_exceeded'),
    ('Bad request', 'no_room'),
    ('prompt is too long: 9 tokens > 8 maximum', ''),
])  # fmt: skip
def test_a_full_context_of_the_endpoint_is_the_episodes_end(message, code):
  error = conversation.EndpointError(message, code=code, status=400)
  played = play(Script(ADD, error))
  assert played.ended == 'context'
  assert played.verdict.status == records.UNFINISHED
  other = conversation.EndpointError(message, code=code, status=500)
  assert play(Script(other)).ended == 'endpoint'


def test_tokens_cost_and_time_are_added_up():
  usage = {'prompt_tokens': 1000, 'completion_tokens': 500}
  priced = play(
    Script(answer(ADD, usage=usage), answer(FINISH, usage=usage)),
    price_in=2.0,
    price_out=10.0,
  )
  assert priced.usage() == {
    'ended': 'finish',
    'tokens_in': 2000,
    'tokens_out': 1000,
    'cost_usd': 0.014,
    'answer_s': [2.0, 2.0],
    'attempts': 2,
    'cut': 0,
  }
  # What the endpoint charges is known better there.
  named = [answer(t, usage=usage | {'cost': 0.5}) for t in (ADD, FINISH)]
  assert play(Script(*named), price_in=2.0).usage()['cost_usd'] == 1.0
  odd = answer(FINISH, usage={'prompt_tokens': None, 'cost': 'free'})
  assert play(Script(odd)).usage()['tokens_in'] == 0


@pytest.mark.parametrize(
  'value',
  [-5, -500, 10**400, 10**13, float('nan'), float('inf'), True, '9', None, []],
)
def test_what_counts_nothing_is_not_counted(value):
  names = ('prompt_tokens', 'completion_tokens', 'cost')
  bad = answer(ADD, usage=dict.fromkeys(names, value))
  script = Script(bad, answer(ADD, usage=dict.fromkeys(names, 3)), FINISH)
  talk = conversation.Conversation(Counter(), conversation.ChatOptions(), 1)
  prices = rewards.RewardOptions(effort_coefficient=0.1)
  talk.play(script, (), prices, seed=1)
  counted = talk.usage()
  assert [counted[n] for n in ('tokens_in', 'tokens_out', 'cost_usd')] == [
    3
  ] * 3
  assert talk.verdict.passed and 0 < talk.reward <= 1


def test_a_transcript_has_everything_that_was_said_and_its_facts():
  usage = {'prompt_tokens': 3, 'completion_details': {'reasoning_tokens': 2}}
  first = answer('I add.', ('1', 'add', '{}'), reasoning='Hm.', usage=usage)
  played = play(
    Script(first, answer('', ('2', 'finish', '{}'))), native_tools=True
  )
  user, said, added, *_ = played.transcript
  assert user == {'role': 'user', 'content': 'Count to two.'}
  assert said['reasoning'] == 'Hm.' and said['content'] == 'I add.'
  assert said['tool_calls'] == first.message['tool_calls']
  assert (said['usage'], said['seconds'], said['attempts']) == (usage, 2.0, 1)
  assert added.pop('seconds') >= 0
  assert added == {
    'role': 'tool',
    'call': ADD,
    'content': 'at 1',
    'tool': 'add',
    'outcome': 'ok',
  }
  json.dumps(played.transcript)


@pytest.mark.parametrize('options, message', [
    ({'max_turns': 0}, 'max_turns must be .* got 0'),
    ({'body': '[1]'}, 'body must be a JSON object'),
    ({'price_in': -1.0}, 'price_in must be'),
])  # fmt: skip
def test_options_that_cannot_be_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    conversation.ChatOptions(**options)
