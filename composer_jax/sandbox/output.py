"""Makes bytes that untrusted programs printed safe to show and to log."""

import re

# Sequences before single characters: CSI; OSC, DCS, SOS, PM and APC with their
# strings, ended or not; two-character escapes. As 7-bit and as C1 characters.
_ESCAPES = re.compile(
  r'(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?'
  r'|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?'
  r'|\x1b[ -/]*[0-~]?'
)
# What moves the cursor back or rings; directions that make text look otherwise
# than it reads; characters that JSON readers and editors take for line ends.
_CONTROLS = re.compile(
  '[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f'
  '\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]'
)
_SHOWN = '\N{REPLACEMENT CHARACTER}'


def clean(data: bytes) -> str:
  """Text without escapes and control characters, but for tab and newline.

  A terminal that shows it does nothing but print. What is not UTF-8, and each
  sequence that was taken out, shows as U+FFFD; a lone carriage return becomes a
  newline, so that progress bars stay readable and nothing is overwritten.
  """
  text = data.decode('utf-8', 'replace')
  text = text.replace('\r\n', '\n').replace('\r', '\n')
  return _CONTROLS.sub(_SHOWN, _ESCAPES.sub(_SHOWN, text))
