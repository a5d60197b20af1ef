"""Pivots: cut from conversations, judged by what a call does, played once."""

import json

import numpy as np
import pytest

from composer_jax import wiring
from composer_jax.agent import episode, summarize
from composer_jax.tasks.pivots import environment, equivalence, recorded
from composer_jax.tasks.practice import conversation
from composer_jax.tasks.repository import scripts
from composer_jax.text import tokenizer as tokenizers
from composer_jax.text import tool_calls
from configs.composer import tiny
from tests.hf.text import published_templates as published

TOOLS = [
  {
    'type': 'function',
    'function': {
      'name': name,
      'description': f'Does {name}.',
      'parameters': {'type': 'object', 'properties': {'path': {}}},
    },
  }
  for name in ('read', 'edit', 'run')
]


def turn(name, /, **arguments):
  function = {'name': name, 'arguments': json.dumps(arguments)}
  call = {'id': 'c', 'type': 'function', 'function': function}
  return {'role': 'assistant', 'content': 'Well,', 'tool_calls': [call]}


def answer(text):
  return {'role': 'tool', 'tool_call_id': 'c', 'content': text}


TALK = [
  {'role': 'system', 'content': 'Be good.'},
  {'role': 'user', 'content': [{'type': 'text', 'text': 'Mend a.py.'}]},
  turn('read', path='a.py'),
  answer('x = 1'),
  turn('edit', path='a.py', old='1', new='f( 2 )'),
  answer('edited'),
  turn('run', command="python -c 'import a'"),
]


def write(path, *lines):
  text = ''.join(f'{json.dumps(line)}\n' for line in lines)
  path.write_text(text)
  return path


@pytest.fixture
def file(tmp_path):
  lines = [
    {'id': f'talk-{i}', 'messages': TALK, 'tools': TOOLS} for i in range(30)
  ]
  return write(tmp_path / 'expert.jsonl', *lines)


def _spec(file, **more):
  config = tiny.get_config('smoke')
  config.tasks.family = 'pivots'
  config.tasks.folder = str(file)
  config.episode.update(max_tokens=1500, max_call_tokens=100)
  config.sft.seq_len = config.rl.seq_len = 1500
  config.tasks.update(more)
  return wiring.spec_of(config.to_dict())


def test_a_conversation_is_cut_at_each_call(file):
  found = recorded.read(file)
  assert len(found.pivots) == 90 and list(found.tools) == [
    'read',
    'edit',
    'run',
  ]
  one, two, three = found.pivots[:3]
  assert one.task_id == 'pivots/talk-0/0' and one.history == ()
  assert one.prompt == 'Be good.\n\nMend a.py.'
  read = '{"tool": "read", "arguments": {"path": "a.py"}}'
  assert two.history == ((read, 'x = 1'),)
  assert [a for _, a in three.history] == ['x = 1', 'edited']
  assert three.call.name == 'run'


@pytest.mark.parametrize(
  'messages, count',
  [
    (TALK[:5], 2),
    ([*TALK[:4], {'role': 'assistant', 'content': 'Done.'}, *TALK[4:]], 1),
    ([*TALK[:4], {'role': 'user', 'content': 'And?'}, *TALK[4:]], 1),
    ([*TALK[:2], {**TALK[2], 'tool_calls': TALK[2]['tool_calls'] * 2}], 0),
  ],
)
def test_it_is_cut_as_far_as_turns_are_single_calls(tmp_path, messages, count):
  line = {'messages': messages, 'tools': TOOLS}
  found = recorded.read(write(tmp_path / 'x', line))
  assert len(found.pivots) == count


@pytest.mark.parametrize(
  'line, words',
  [
    ([], 'no conversation'),
    ({'messages': 3}, 'no conversation'),
    ({'messages': []}, 'no conversation'),
    ({'messages': [{}]}, 'no conversation'),
    ({'messages': TALK}, 'lists the tools'),
    ({'messages': [TALK[1], turn('read', **{'': 1})], 'tools': 3}, 'no conv'),
    ({'messages': [{'role': 'user', 'content': '\ud800'}]}, 'no conversation'),
  ],
)
def test_other_lines_are_named(tmp_path, line, words):
  path = write(tmp_path / 'x', line)
  with pytest.raises(ValueError, match=words):
    recorded.read(path)


def test_damaged_files_are_named(tmp_path, monkeypatch):
  path = tmp_path / 'x'
  path.write_text('{"messages": [' + '[' * 5000)
  with pytest.raises(ValueError, match='line 1'):
    recorded.read(path)
  line = {'id': 'a', 'messages': TALK, 'tools': TOOLS}
  with pytest.raises(ValueError, match="named 'a'"):
    recorded.read(write(path, line, line))
  other = [{**TOOLS[0], 'function': {'name': 'read'}}]
  with pytest.raises(ValueError, match='differs'):
    recorded.read(write(path, line, {**line, 'id': 'b', 'tools': other}))
  monkeypatch.setattr(recorded, 'MAX_LINE', 100)
  with pytest.raises(ValueError, match='of 100 bytes'):
    recorded.read(path)


def _call(name, /, **arguments):
  return tool_calls.JsonCall(name=name, arguments=arguments)


@pytest.mark.parametrize(
  'one, other, is_same',
  [
    (_call('read', path='a.py'), _call('read', path='./a.py'), True),
    (_call('read', path='a.py'), _call('read', path='b.py'), False),
    (_call('read', path='a.py'), _call('list', path='a.py'), False),
    (_call('read', path='a'), _call('read', path='a', first=1), False),
    (_call('read', first=1), _call('read', first=True), False),
    (_call('edit', new='f(2)'), _call('edit', new='f( 2 )'), True),
    (_call('edit', new='f(2)'), _call('edit', new='f(3)'), False),
    (_call('edit', new='# a'), _call('edit', new='# b'), False),
    (_call('edit', new=''), _call('edit', new='# b'), False),
    (_call('edit', new='a\n'), _call('edit', new='a  '), True),
    (_call('edit', new='if'), _call('edit', new='if '), True),
    (_call('edit', new='(' * 900), _call('edit', new='(' * 901), False),
    (_call('run', command='ls  -l'), _call('run', command='ls -l '), True),
    (_call('run', command='ls -l'), _call('run', command='ls -a'), False),
    (_call('run', command='rm a b'), _call('run', command="rm 'a b'"), False),
    (_call('run', command='rm $x'), _call('run', command="rm '$x'"), False),
    (_call('run', command='a; b'), _call('run', command='a ;b'), True),
    (_call('run', command='a\nb'), _call('run', command='a b'), False),
    (_call('run', command='a #b'), _call('run', command='a #c'), False),
    (_call('run', command='f(2)'), _call('run', command='f( 2 )'), True),
    (_call('run', command="a '"), _call('run', command='a  "'), False),
  ],
)
def test_calls_are_the_same_if_they_are_sure_to_do_the_same(
  one, other, is_same
):
  assert equivalence.same(one, other) == is_same
  assert equivalence.same(other, one) == is_same


LIMITS = episode.EpisodeOptions(
  max_tokens=4000, max_turns=8, max_call_tokens=400
)


def _play(family, pivot, policy, tokenizer):
  return episode.run(
    family.environment(pivot, None),
    policy,
    tokenizer,
    LIMITS,
    group=0,
    member=0,
    seed=0,
  )


def test_an_episode_is_one_turn_behind_its_history(file):
  family = wiring.family_of(_spec(file))
  tokenizer = tokenizers.Tokenizer.train(family.texts(), 400)
  for pivot in family._recorded.pivots[:3]:
    played = _play(family, pivot, family.gold(pivot, tokenizer), tokenizer)
    assert played.verdict.passed and played.num_turns == 1
    (window,) = played.trajectories
    # Only the expert's turn is learnt from; what was before is context.
    sampled = tokenizer.decode(window.tokens_T[window.loss_mask_T])
    assert sampled == f'{tool_calls.render_json(pivot.call)}<|end|>'
    assert not np.diff(window.loss_mask_T.astype(int)).min() < 0
    text = tokenizer.decode(window.tokens_T)
    for call, result in pivot.history:
      assert f'<|call|>{call}<|end|><|tool|>{result}<|end|>' in text
    for wrong in ('no call', '{"tool": "gone"}', '{"tool": "read"}'):
      policy = scripts.ScriptedCalls(tokenizer, [wrong])
      played = _play(family, pivot, policy, tokenizer)
      assert not played.verdict.passed and played.num_turns == 1


@pytest.mark.parametrize('native', [False, True])
def test_a_chat_model_is_shown_the_history(file, native):
  family = wiring.family_of(_spec(file))
  pivot = family._recorded.pivots[2]
  asked = []

  def ask(messages, functions, **_):
    asked.append([dict(m) for m in messages])
    call = turn('run', command="python -c  'import a'")
    text = tool_calls.render_json(pivot.call)
    message = call if native else {'role': 'assistant', 'content': text}
    return conversation.ModelMessage(
      message=message, finish='stop', usage={}, seconds=0.0
    )

  options = conversation.ChatOptions(native_tools=native)
  talk = conversation.Conversation(family.environment(pivot, None), options, 0)
  talk.play(ask, family.functions(), _spec(file).rewards, seed=1)
  (messages,) = asked
  roles = ['user', *(['assistant', 'tool' if native else 'user'] * 2)]
  assert [m['role'] for m in messages] == roles
  assert messages[-1]['content'] == 'edited'
  assert talk.verdict.passed and talk.num_turns == 1


def test_a_chat_model_has_one_turn_though_it_makes_no_call(file):
  family = wiring.family_of(_spec(file))
  asked = []

  def ask(messages, functions, **_):
    asked.append(messages)
    message = {'role': 'assistant', 'content': ''}
    return conversation.ModelMessage(
      message=message, finish='stop', usage={}, seconds=0.0
    )

  env = family.environment(family._recorded.pivots[0], None)
  talk = conversation.Conversation(env, conversation.ChatOptions(), 0)
  talk.play(ask, (), _spec(file).rewards, seed=1)
  assert len(asked) == 1 and not talk.verdict.passed


def test_history_is_written_as_the_chat_template_writes_it(file, tmp_path):
  found = recorded.read(file)
  folder = published.write(tmp_path / 'model', 'qwen3_moe')
  tokenizer, _ = published.speech(folder, [*found.tools.values()])
  env = environment.PivotEnvironment(found.pivots[2], found.tools)
  opened = summarize.Summarizer(
    tokenizer,
    env.prompt,
    summarize.OFF,
    max_tokens=1 << 16,
    max_call_tokens=64,
    protocol=env.protocol,
  )
  text = tokenizer.decode(opened.opening(env.history))
  for result in ('x = 1', 'edited'):
    assert f'<tool_response>\n{result}\n</tool_response>' in text
  call = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}'
  assert call in text and text.endswith('<|im_start|>assistant\n')


def test_conversations_are_held_out_whole(file):
  family = wiring.family_of(_spec(file))
  train = {p.source for p in family._of_split('train')}
  held_out = {p.source for p in family._of_split('held_out')}
  assert train and held_out and not train & held_out
  tokenizer = tokenizers.Tokenizer.train(family.texts(), 400)
  source = family.tasks(tokenizer, split='train', seed=1)
  drawn = [source.of_group(i).task_id for i in range(3 * len(train))]
  assert len(set(drawn)) == len(drawn)
  assert source.of_group(len(drawn)).task_id == drawn[0]
  assert source.of_id(drawn[4]).task_id == drawn[4]
  # What does not fit a window is left out.
  spec = _spec(file)
  small = wiring.family_of(spec)
  object.__setattr__(spec.episode, 'max_tokens', 60)
  with pytest.raises(ValueError, match='max_tokens'):
    small.tasks(tokenizer, split='train', seed=1)


def test_families_are_mixed_by_weight(file, larder):
  tools = 'read,run,finish'
  mixture = (
    f'pivots:3:{file}',
    f'deletion:2:{larder.root}',
    f'deletion:1:{larder.root}:{tools}',
  )
  config = tiny.get_config('smoke')
  config.tasks.update(family='mixed', mixture=mixture)
  config.sandbox.packages = ('pytest',)
  config.demonstrations.count = 1
  spec = wiring.spec_of(config.to_dict())
  family = wiring.family_of(spec)
  assert family.images() == str(larder.root)
  assert family.axes == (
    *('pivots-0/held_out', 'deletion-1/held_out', 'deletion-2/held_out'),
  )
  deal = [family._deal.of(i) for i in range(60)]
  for start in range(0, 60, 6):
    places = [place for place, _ in deal[start : start + 6]]
    assert sorted(places) == [0, 0, 0, 1, 1, 2]
  for place in range(3):
    numbers = [n for p, n in deal if p == place]
    assert numbers == list(range(len(numbers)))
  assert family._deal.counts(6) == [3, 2, 1]
  # Their tools differ, so that no template can list them.
  assert family.functions() == []
  one = wiring.family_of(_spec(file, family='mixed', mixture=mixture[:1]))
  assert [t['function']['name'] for t in one.functions()] == list(
    recorded.read(file).tools
  )


def test_a_mixed_task_is_that_of_its_part(file):
  mixture = (f'pivots:1:{file}', f'pivots:1:{file}')
  family = wiring.family_of(_spec(file, family='mixed', mixture=mixture))
  tokenizer = tokenizers.Tokenizer.train(family.texts(), 400)
  source = family.tasks(tokenizer, split='train', seed=3)
  drawn = [source.of_group(i) for i in range(4)]
  assert [t.part for t in drawn] == ['pivots-0', 'pivots-1'] * 2
  for task in drawn:
    assert source.of_id(task.task_id) == task
    env = family.environment(task, None)
    assert env.task_id == task.task_id and env.single_turn
    played = _play(family, task, family.gold(task, tokenizer), tokenizer)
    assert played.verdict.passed and played.task_id == task.task_id
  names = [c.task_id for c in source.pool(0)]
  assert len(set(names)) == len(names)
  assert {name.split('/')[0] for name in names} == {'pivots-0', 'pivots-1'}
  assert 'family:pivots-0' in source.pool(0)[0].labels
  held_out = family.tasks(tokenizer, split='pivots-1/held_out', seed=3)
  assert held_out.of_group(0).part == 'pivots-1'
  assert [t.part for t in family.listed('train', 3)] == [
    *('pivots-0', 'pivots-0', 'pivots-1'),
  ]


@pytest.mark.parametrize(
  'mixture, words',
  [
    ((), 'is needed'),
    (('pivots',), 'must be FAMILY'),
    (('pivots:x:y',), 'must be FAMILY'),
    (('pivots:0:y',), 'must be FAMILY'),
    (('gone:1:y',), 'gone'),
    (('mixed:1:y',), 'mixed'),
    (('list_functions:1:', 'pivots:1:x'), 'different calls'),
  ],
)
def test_a_wrong_mixture_is_named(mixture, words):
  config = tiny.get_config('smoke')
  config.tasks.update(family='mixed', mixture=mixture)
  with pytest.raises(ValueError, match=words):
    wiring.spec_of(config.to_dict())
