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


TEXTS = {'path': 'ä\n"\\', 'first': 3, 'deep': [{'a': None}], 'x': 1.5}


@pytest.mark.parametrize('arguments', [{}, TEXTS])
def test_json_calls_render_and_parse_are_inverse(arguments):
  call = tool_calls.JsonCall(name='read', arguments=arguments)
  assert tool_calls.parse_json(tool_calls.render_json(call)) == call


def test_arguments_may_be_left_out_and_space_stand_around():
  assert tool_calls.parse_json(' \n{"tool": "test"}\n').arguments == {}


@pytest.mark.parametrize(
  'text, message',
  [
    ('', 'empty call; a call is {"tool": NAME'),
    ('read a.py', 'not JSON: Expecting value at line 1 column 1'),
    ('{"tool": "read"}\n{"tool"', 'not JSON: Extra data at line 2 column 1'),
    ('{"tool": "read",\n}', 'line 2 column 1'),
    ('{"tool": "a", "tool": "b"}', 'names a key twice'),
    ('{"tool": "a", "arguments": {"x": NaN}}', 'NaN is no JSON number'),
    ('{"tool": "a", "arguments": {"x": ' + '9' * 5000 + '}}', 'not JSON'),
    ('[' * 100_000, 'too deeply nested'),
    ('"read"', 'must be {"tool": NAME'),
    ('{"tool": 5}', 'NAME a string'),
    ('{"tool": "a", "path": "b"}', 'hold "tool" and "arguments" and nothing'),
    ('{"tool": "a", "arguments": []}', '"arguments" must be an object'),
    ('{' + '"' + 'x' * (4 << 20), 'not JSON: Unterminated string'),
  ],
)
def test_what_is_no_call_says_why_and_briefly(text, message):
  with pytest.raises(tool_calls.ToolCallError) as caught:
    tool_calls.parse_json(text)
  assert message in str(caught.value)
  assert len(str(caught.value)) < 200
