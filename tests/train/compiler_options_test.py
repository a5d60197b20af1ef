"""Each platform gets only options of its compiler."""

from composer_jax.train import compiler_options


def test_options_are_those_of_the_device():
  assert compiler_options.of('cpu') is None
  v5p = compiler_options.of('tpu', 'TPU v5')
  v5e = compiler_options.of('tpu', 'TPU v5 lite')
  assert compiler_options.of('tpu', 'TPU v6 lite') == v5p
  assert set(v5e) < set(v5p)
  # v5e has no sparse cores.
  assert not any('sparse_core' in name for name in v5e)
  assert any('sparse_core' in name for name in v5p)
  assert v5p['xla_tpu_enable_async_all_to_all'] == 'true'
