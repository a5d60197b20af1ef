"""Choices by platform follow the target of the trace."""

import jax

from composer_jax.core import platforms


def test_a_target_is_what_is_traced_for_and_for_how_long():
  here = platforms.current()
  assert here == jax.default_backend()
  assert not platforms.is_elsewhere()
  with platforms.targeting('tpu'):
    assert platforms.current() == 'tpu'
    assert platforms.is_elsewhere()
    with platforms.targeting('gpu'):
      assert platforms.current() == 'gpu'
    assert platforms.current() == 'tpu'
  assert platforms.current() == here


def test_a_function_is_traced_anew_for_each_target():
  seen = []

  @jax.jit
  def function(x):
    seen.append(platforms.current())
    return x

  function(1.0)
  with platforms.targeting('tpu'):
    function.trace(1.0)
    function.trace(1.0)
  function(1.0)
  assert seen == ['cpu', 'tpu']
