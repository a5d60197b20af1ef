"""Text as it arrives equals the text of the whole, wherever it is cut."""

import random

import pytest

from composer_jax.serve.api import texts

STOPS = ('ab', 'abca', 'bc', 'éa', 'ca', 'a😀b')


def _tokens(data, rng):
  """Splits bytes into random tokens, some of them empty."""
  tokens = []
  while data:
    size = rng.randrange(4)
    tokens.append(texts.Token(data=data[:size], logprob=-float(len(tokens))))
    data = data[size:]
  return tokens


def _played(tokens, stops, sizes):
  """Adds tokens in groups; returns text, (token, offset)s, tokens used."""
  text, place, pieces, used = texts.Text(stops), 0, [], 0
  while place < len(tokens) and not text.stopped:
    size = next(sizes)
    piece, count = text.add(tokens[place : place + size])
    place, used = place + size, used + count
    pieces.append(piece)
  pieces.append(text.finish())
  begun = [
    pair for p in pieces for pair in zip(p.tokens, p.offsets, strict=True)
  ]
  return ''.join(p.text for p in pieces), begun, used, text.stopped


@pytest.mark.parametrize('seed', range(60))
def test_groups_of_tokens_change_nothing(seed):
  rng = random.Random(seed)
  spelled = ''.join(rng.choice('aabbccé😀') for _ in range(20)).encode()
  if seed % 3 == 0:
    spelled = spelled[:11] + b'\xff' + spelled[11:-1]
  tokens = _tokens(spelled, rng)
  stops = rng.sample(STOPS, rng.randrange(4))
  one = _played(tokens, stops, iter([1] * 99))
  assert one == _played(tokens, stops, iter([99]))
  assert one == _played(tokens, stops, iter(lambda: rng.randint(1, 5), 0))
  text, begun, used, stopped = one
  whole = spelled.decode('utf-8', 'replace')
  # The first stop string that is complete, found the plain way.
  ends = [(whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole]
  assert stopped == bool(ends)
  assert text == (whole[: min(ends)[1]] if ends else whole)
  assert [t for t, _ in begun] == tokens[: len(begun)]
  if not stopped:
    assert used == len(begun) == len(tokens)
  # Each begins where the text of those before it ends.
  place = 0
  for token, offset in begun:
    assert offset <= place
    place += len(token.data.decode('utf-8', 'replace'))


def test_of_two_the_one_that_is_complete_first_counts():
  scanner = texts.Scanner(['abcd', 'bc'])
  assert scanner.add('xabcd!') == 'xa'
  assert (scanner.mark, scanner.after) == ('bc', 'd!')
  scanner = texts.Scanner(['bc', 'abc'])
  assert scanner.add('xabcd') == 'x' and scanner.mark == 'abc'


def test_nothing_is_held_that_no_stop_begins_with():
  text = texts.Text(['STOP'])
  spelled = [
    text.add([texts.Token(data=c.encode(), logprob=0.0)])[0].text
    for c in 'STxS'
  ]
  assert spelled == ['', '', 'STx', '']
  assert text.finish().text == 'S'


def test_ids_beyond_the_vocabulary_are_shown(tokenizer):
  assert texts.spelling(tokenizer, 10_000) == b'<10000>'
  assert texts.spelling(tokenizer, tokenizer.END) == b'<|end|>'
