"""What untrusted code may write as its result, and what reading it costs."""

import json
import time

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
