"""Laws of tool calls as text."""

import pytest

from composer_jax.text import tool_calls


@pytest.mark.parametrize(
  'call, text',
  [
    (tool_calls.Call(name='test'), 'test'),
    (tool_calls.Call(name='read', arguments=('a.py',)), 'read a.py'),
    (
      tool_calls.Call(
        name='edit', arguments=('a.py', 'f'), payload='x = 1\n\nreturn x'
      ),
      'edit a.py f\nx = 1\n\nreturn x',
    ),
  ],
)
def test_render_and_parse_are_inverse(call, text):
  assert tool_calls.render(call) == text
  assert tool_calls.parse(text) == call


def test_parse_forgives_spaces_of_the_first_line_only():
  call = tool_calls.parse('  edit  a.py f \n  x\n')
  assert (call.name, call.arguments) == ('edit', ('a.py', 'f'))
  assert call.payload == '  x\n'


@pytest.mark.parametrize('text', ['', '  ', '\nread a.py'])
def test_a_blank_first_line_is_no_call(text):
  with pytest.raises(tool_calls.ToolCallError, match='empty call'):
    tool_calls.parse(text)


def test_words_with_white_space_cannot_be_rendered():
  with pytest.raises(tool_calls.ToolCallError, match="'a b' must be one word"):
    tool_calls.Call(name='read', arguments=('a b',))
