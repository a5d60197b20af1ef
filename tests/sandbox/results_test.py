"""Reading what untrusted code wrote: rules, cost, and text safe to show."""

import json
import time
import unicodedata

import pytest

from composer_jax.sandbox import results


def test_the_parser_bounds_depth_types_and_number():
  assert results.parse(b'[["ok", "[[[{"]]', 1) == [['ok', '[[[{']]
  for data, rule in (
    (b'[' * 100_000, 'nested deeper'),
    (b'[["ok", NaN]]', 'NaN'),
    (b'[["ok", 1e999]]', '1e999'),
    (b'[["ok", "\\ud800"]]', 'UTF-8'),
    (b'[["ok", ' + b'9' * 9999 + b']]', 'digits'),
    (b'[["ok", 1]]', 'list of 2'),
    (b'[["ok", 1], ["no", 1]]', 'not'),
    (b'[["ok", 1], ["raised", 1]]', 'not'),
    (b'\xff', 'UTF-8'),
    (b'', 'not JSON'),
  ):
    with pytest.raises(ValueError, match=rule):
      results.parse(data, 2)


@pytest.mark.parametrize('end', [b'', b'\\', b'"', b'"]'])
def test_quotes_that_do_not_pair_cost_one_pass(end):
  # Searching from each quote anew takes over ten seconds for these.
  data = b'[["ok", "' + b'\\"' * 32_700 + end
  began = time.process_time()
  with pytest.raises(ValueError, match='not JSON'):
    results.parse(data, 1)
  assert time.process_time() - began < 2


def test_brackets_after_an_escaped_quote_belong_to_the_string():
  text = '\\"' + '[' * 100
  data = json.dumps([['ok', text]]).encode()
  assert results.parse(data, 1) == [['ok', text]]


@pytest.mark.parametrize('data, text', [
    (b'plain\ttext\n', 'plain\ttext\n'),
    ('\u00fc \u4f60 \U0001f600'.encode(), '\u00fc \u4f60 \U0001f600'),
    (b'\x1b[31mred\x1b[0m', '\ufffdred\ufffd'),
    (b'\x1b]0;title\x07after', '\ufffdafter'),
    (b'\x1b]52;c;c2VjcmV0\x1b\\after', '\ufffdafter'),
    (b'\x1bP1$r0m\x1b\\after', '\ufffdafter'),
    (b'\x1b]8;;http://x\x07link\x1b]8;;\x07', '\ufffdlink\ufffd'),
    (b'\x1b]never ends', '\ufffd'),
    ('\x9b2Jx'.encode(), '\ufffdx'),
    (b'\x1bcreset \x1b(0 \x1b', '\ufffdreset \ufffd \ufffd'),
    (b'shown\rhidden\r\n', 'shown\nhidden\n'),
    (b'a\x08\x08b\x00\x07\x7f', 'a\ufffd\ufffdb' + '\ufffd' * 3),
    (b'\xff\xc3', '\ufffd\ufffd'),
    ('a\u202etxt.exe\u2066 \u2028'.encode(), 'a\ufffdtxt.exe\ufffd \ufffd'),
])  # fmt: skip
def test_escapes_and_controls_are_taken_out(data, text):
  assert results.clean(data) == text


def test_any_bytes_become_text_without_controls():
  for first in range(256):
    for second in (0x1B, 0x5B, 0x9D, 0xC2, 0x41):
      text = results.clean(bytes((first, second, 0x9B, 0x1B, first)))
      kinds = {unicodedata.category(x) for x in text if x not in '\t\n'}
      assert not kinds & {'Cc', 'Cs', 'Zl', 'Zp'}, text
