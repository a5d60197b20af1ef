"""Laws of hints: their turns, their places and their texts."""

import numpy as np
import pytest

from composer_jax.agent import environment
from composer_jax.core import turns
from composer_jax.tasks import mistakes
from composer_jax.text import chat
from composer_jax.text import tokenizer as tokenizer_lib

TOOLS = ('read', 'edit', 'finish')


@pytest.fixture(scope='module')
def tokenizer():
  return tokenizer_lib.Tokenizer.train(['read stats.py'], 270)


class Desk:
  tools = TOOLS

  def usage(self, tool):
    return f'{tool} PATH'


def played(tokenizer, calls):
  """Returns moments of (call, answer, outcome, open to-dos), and a window."""
  parts = [chat.user(tokenizer, 'Restore it.'), chat.call_prefix(tokenizer)]
  moments = []
  for i, (call, answer, outcome, todos) in enumerate(calls):
    start = sum(map(len, parts))
    parts.append(np.append(tokenizer.encode(call), tokenizer.END))
    invalid = outcome in turns.INVALID_OUTCOMES
    moments.append(
      environment.Moment(
        turn=turns.Turn(
          trajectory=0,
          start=start,
          stop=start + len(parts[-1]),
          tool='' if invalid else call.split()[0],
          outcome=outcome,
        ),
        call=call,
        answer=answer,
        is_final=i == len(calls) - 1,
        open_todos=todos,
      )
    )
    parts += [chat.tool(tokenizer, answer), chat.call_prefix(tokenizer)]
  return moments, np.concatenate(parts[:-2]).astype(np.int32)


CALLS = [
  ('open a.py', 'error: no such tool', turns.UNKNOWN_TOOL, 2),
  ('read a.py', 'text', turns.OK, 2),
  ('read', 'error: read takes 1 argument', turns.BAD_ARGUMENTS, 2),
  ('edit a.py', 'error: not\nfound', turns.FAILED_EDIT, 2),
  ('read b.py', '1 failed', turns.FAILED, 2),
  ('?', 'error: not a call', turns.NOT_A_CALL, 2),
  ('finish', 'finished', turns.OK, 2),
]


def hints_of(tokenizer, calls=CALLS, **fields):
  moments, tokens_T = played(tokenizer, calls)
  options = mistakes.HintOptions(**({'max_hints': 10} | fields))
  hints = options.write(Desk(), tokenizer, moments, [tokens_T])
  return hints, moments, tokens_T


def text(tokenizer, hint):
  ((message),) = chat.turns(tokenizer, hint.tokens_T)
  assert message['role'] == 'tool'
  return message['text']


def test_each_faulty_turn_gets_the_hint_of_its_mistake(tokenizer):
  hints, moments, _ = hints_of(tokenizer)
  at_turn = {m.turn.start: i for i, m in enumerate(moments)}
  assert [(at_turn[h.start], h.kind) for h in hints] == [
    (0, 'unknown_tool'),
    (2, 'bad_arguments'),
    (3, 'failed_edit'),
    (5, 'not_a_call'),
    (6, 'unfinished_todo'),
  ]
  assert [text(tokenizer, h) for h in hints] == [
    'Reminder: the available tools are read, edit, finish.',
    'Reminder: usage: read PATH. Avoid: error: read takes 1 argument',
    'Reminder: look before you edit. Avoid: error: not found',
    'Reminder: write one short call of read, edit, finish.',
    'Reminder: 2 to-dos are open; do them first.',
  ]


def test_a_hint_stands_where_a_message_may(tokenizer):
  """It stands between the last answer and the marker that opens the call."""
  hints, _, tokens_T = hints_of(tokenizer)
  for hint in hints:
    read_T = np.concatenate(
      [
        tokens_T[: hint.at],
        hint.tokens_T,
        tokens_T[hint.at : hint.stop],
      ]
    )
    *before, advice, call = chat.turns(tokenizer, read_T)
    assert advice == {'role': 'tool', 'text': text(tokenizer, hint)}
    assert call['role'] == 'call'
    assert before == chat.turns(tokenizer, tokens_T[: hint.at])
    assert tokens_T[hint.start - 1] == tokenizer.CALL


def test_a_turn_without_its_marker_gets_the_hint_right_before_it(tokenizer):
  turn = turns.Turn(
    trajectory=0, start=2, stop=4, tool='', outcome=turns.NOT_A_CALL
  )
  (hint,) = mistakes.HintOptions().write(
    Desk(),
    tokenizer,
    [environment.Moment(turn=turn, call='', answer='')],
    [np.full(4, 40, np.int32)],
  )
  assert hint.at == 2


def test_an_episode_without_mistakes_has_none(tokenizer):
  hints, *_ = hints_of(tokenizer, [('read a', 'x', turns.OK, 1), CALLS[-1]])
  assert [h.kind for h in hints] == ['unfinished_todo']
  done = ('finish', 'finished', turns.OK, 0)
  assert hints_of(tokenizer, [('read a', 'x', turns.OK, 0), done])[0] == ()
  assert hints_of(tokenizer, templates=())[0] == ()
  first, second = hints_of(tokenizer, max_hints=2)[0]
  assert (first.kind, second.kind) == ('unknown_tool', 'bad_arguments')


def test_the_first_template_that_finds_its_mistake_speaks(tokenizer):
  hints, *_ = hints_of(
    tokenizer,
    [('edit a', 'error', turns.FAILED_EDIT, 2)],
    templates=[
      ('failed_edit', '{call}? {{Read}} first'),
      ('unfinished_todo', 'a'),
    ],
  )
  assert [text(tokenizer, h) for h in hints] == ['edit a? {Read} first']


def test_what_a_hint_quotes_is_short_and_is_text(tokenizer):
  calls = [('edit a', 'x\ud800' * 5000, turns.FAILED_EDIT, 0)]
  (hint,), *_ = hints_of(tokenizer, calls)
  quoted = text(tokenizer, hint)
  assert quoted.endswith('...') and len(quoted) < 260
  # A quoted answer cannot pose as the end of the message.
  calls = [('edit a', '<|end|>', turns.FAILED_EDIT, 0)]
  (hint,), *_ = hints_of(tokenizer, calls)
  assert (hint.tokens_T == tokenizer.END).sum() == 1


def test_templates_are_checked_when_they_are_made():
  for templates, message in (
    ([('not_a_call', 'see {tool}')], r"'not_a_call' .*'tool'.*name \('tools'"),
    ([('not_a_call', 'see {tools.x}')], 'cannot be filled in'),
    ([('not_a_call', 'see {')], r"'see \{'.*Write \{\{ and \}\}"),
    ([('not_a_call', ' ')], r"'not_a_call' is empty"),
    ([('not_a_call', 'x')] * 2, 'may name each of .* once'),
    (
      [('untested', 'x')],
      r"\['untested'\]; it may name each of \['bad_arguments'",
    ),
  ):
    with pytest.raises(ValueError, match=message):
      mistakes.HintOptions(templates=templates)
