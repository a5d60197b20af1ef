"""What programs print is harmless to show."""

import unicodedata

import pytest

from composer_jax.sandbox import output


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
  assert output.clean(data) == text


def test_any_bytes_become_text_without_controls():
  for first in range(256):
    for second in (0x1B, 0x5B, 0x9D, 0xC2, 0x41):
      text = output.clean(bytes((first, second, 0x9B, 0x1B, first)))
      kinds = {unicodedata.category(x) for x in text if x not in '\t\n'}
      assert not kinds & {'Cc', 'Cs', 'Zl', 'Zp'}, text
