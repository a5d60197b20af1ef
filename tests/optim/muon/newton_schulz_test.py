"""Newton-Schulz against the singular value decomposition in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.optim.muon import newton_schulz
from tests.models import hlo_flops

Options = newton_schulz.NewtonSchulz
STANDARD = Options(method='standard', dtype='float32')
GRAM = Options(dtype='float32')  # Where a matrix is long enough.
KELLER = dataclasses.replace(STANDARD, coefficients='keller')


# One compilation per shape, where running eagerly compiles every product.
@functools.partial(
  jax.jit,
  static_argnums=1,
  # Otherwise XLA drops roundings to bfloat16 between float32 operations.
  compiler_options={'xla_allow_excess_precision': False},
)
def orthogonalize(x, options):
  return newton_schulz.orthogonalize(x, options)


@functools.partial(jax.jit, static_argnums=1)
def together(x, options):
  return newton_schulz.orthogonalize_together(x, options)


def _spectra(p, q):
  """Returns {kind: matrix} of the momenta that matrices meet."""
  rng = np.random.default_rng(0)
  u, _ = np.linalg.qr(rng.normal(size=(p, p)))
  v, _ = np.linalg.qr(rng.normal(size=(q, p)))
  index = np.arange(p)
  noise = 1e-3 * rng.normal(size=(p, q)) / np.sqrt(q)
  matrices = {
    'gaussian': rng.normal(size=(p, q)),
    'power': (u / (1 + index)) @ v.T,
    'logspace': (u * np.logspace(0, -3, p)) @ v.T,
    'noisy rank 8': (u * (index < 8)) @ v.T + noise,
    'rank p/2': (u * (index < p // 2)) @ v.T,
    'rank 1': (u * (index < 1)) @ v.T,
  }
  return {kind: x.astype(np.float32) for kind, x in matrices.items()}


def _closed_form(x, options):
  """Applies the composed polynomial to the singular values in float64."""
  u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
  s = s / np.linalg.norm(s)
  for a, b, c in options.triples:
    s = a * s + b * s**3 + c * s**5
  return (u * s) @ vt


def _response(x, y):
  """Returns gains along the directions of x above 1 % of its largest."""
  u, s, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
  gains = np.einsum('ip,ij,pj->p', u, np.asarray(y, np.float64), vt)
  return gains[s > 1e-2 * s[0]]


@pytest.fixture(scope='module')
def spectra():
  return _spectra(64, 224)


def _outputs(spectra, options):
  stack = np.stack(list(spectra.values()))
  return dict(zip(spectra, orthogonalize(stack, options), strict=True))


@pytest.mark.parametrize(
  'options', [STANDARD, GRAM, KELLER], ids=('standard', 'gram', 'keller')
)
def test_float32_is_the_polynomial_of_the_singular_values(spectra, options):
  # The slopes at zero (up to 929) times 6e-8.
  for kind, y in _outputs(spectra, options).items():
    np.testing.assert_allclose(
      y,
      _closed_form(spectra[kind], options),
      rtol=0,
      atol=2e-4,
      err_msg=kind,
    )


@pytest.mark.parametrize(
  'options',
  [
    Options(dtype='bfloat16', method='standard'),
    Options(dtype='bfloat16'),
  ],
  ids=('standard', 'gram'),
)
def test_bfloat16_keeps_singular_values_near_one(spectra, options):
  for kind, y in _outputs(spectra, options).items():
    response = _response(spectra[kind], y)
    assert y.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(y, np.float64), 2) <= 1.13, kind
    assert response.min() >= 0.80, kind
    if kind == 'rank 1':
      # The composed polynomial is 0.908 at 1 and 1.05 at 1.004, which is as
      # near to 1 as bfloat16 keeps the one singular value.
      assert 0.88 < response.min() <= response.max() < 1.06


@pytest.mark.slow
@pytest.mark.parametrize(
  'shape,method',
  [
    ((128, 128), 'standard'),
    ((128, 192), 'standard'),
    ((128, 192), 'auto'),
    ((128, 448), 'standard'),
    ((128, 448), 'auto'),
    ((32, 512), 'auto'),
  ],
)
def test_bfloat16_at_other_sizes(shape, method):
  options = Options(dtype='bfloat16', method=method)
  test_bfloat16_keeps_singular_values_near_one(_spectra(*shape), options)


def test_shapes_of_any_orientation():
  rng = np.random.default_rng(1)
  shapes = [(6, 16), (16, 6), (8, 8), (1, 9), (9, 1), (1, 1), (2, 3, 5, 4)]
  inputs = [rng.normal(size=s).astype(np.float32) for s in shapes]
  options = Options(dtype='float32')
  outputs = jax.jit(
    lambda xs: [newton_schulz.orthogonalize(x, options) for x in xs]
  )(inputs)
  for x, y in zip(inputs, outputs, strict=True):
    assert y.shape == x.shape
    for index in np.ndindex(x.shape[:-2]):
      expected = _closed_form(x[index], options)
      np.testing.assert_allclose(y[index], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_scale_of_the_gradient_does_not_matter(dtype):
  x = np.random.default_rng(2).normal(size=(12, 20)).astype(np.float32)
  # Steps of sixteen keep the bits of x; squares overflow and vanish.
  powers = np.arange(-25, 26) * 4.0
  stack = x * np.exp2(powers).astype(np.float32)[:, None, None]
  assert stack.max() > 1e30 and abs(stack).max((1, 2)).min() < 1e-29
  y = orthogonalize(stack, Options(dtype=dtype))
  np.testing.assert_array_equal(*np.broadcast_arrays(y, y[25]))
  assert np.linalg.norm(np.asarray(y[0], np.float32), 2) > 0.8


@pytest.mark.parametrize('run', [orthogonalize, together])
@pytest.mark.parametrize('options', [STANDARD, GRAM])
def test_zero_stays_zero_and_nan_stays_in_its_matrix(run, options):
  x = np.random.default_rng(3).normal(size=(4, 8, 16)).astype(np.float32)
  x[1] = 0
  clean = run(x, options)
  np.testing.assert_array_equal(clean[1], x[1])
  x[2, 0, 0], x[3, 1, 1] = np.nan, np.inf
  poisoned = run(x, options)
  np.testing.assert_array_equal(poisoned[:2], clean[:2])
  assert np.isnan(poisoned[2:]).all()


def test_bits_do_not_depend_on_the_batch():
  x = np.random.default_rng(4).normal(size=(7, 448, 128)).astype(np.float32)
  options = Options(dtype='float32', deterministic=True)
  y = orthogonalize(x, options)
  backwards = orthogonalize(x[::-1][:5], options)
  np.testing.assert_array_equal(backwards[::-1], y[2:])
  # One matrix is another program, since XLA removes the loop.
  np.testing.assert_array_equal(orthogonalize(x[3:4], options)[0], y[3])


def test_together_equals_one_by_one(spectra):
  stack = np.stack(list(spectra.values()))
  for options in (STANDARD, GRAM):
    # Two orders of the same sums, amplified by the slope at zero.
    np.testing.assert_allclose(
      together(stack, options), orthogonalize(stack, options), atol=1e-4
    )


def _lowered(shape, options, platform):
  run = jax.jit(lambda x: newton_schulz.orthogonalize(x, options))
  traced = run.trace(jax.ShapeDtypeStruct(shape, jnp.float32))
  return traced.lower(lowering_platforms=(platform,)).as_text('hlo')


@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
@pytest.mark.parametrize(
  'options',
  [
    Options(dtype='float32'),
    Options(dtype='bfloat16', method='standard', deterministic=True),
  ],
)
def test_flops_are_those_of_the_program(options, platform):
  for shape in ((3, 8, 20), (3, 20, 8), (5, 12, 13)):
    text = _lowered(shape, options, platform)
    one = newton_schulz.flops(*shape[1:], options)
    assert hlo_flops.count(text, dynamic_trips=0) == shape[0] * one


def test_flops_in_closed_form():
  p, q = 3, 11
  square, cube = 2 * p * p * q, 2 * p**3
  flops = functools.partial(newton_schulz.flops, q, p)
  assert flops(STANDARD) == 10 * square + 5 * cube
  assert flops(GRAM) == 6 * square + 11 * cube


def test_auto_takes_gram_where_it_is_cheaper():
  options = Options()
  assert options.is_gram(8, 12) and options.is_gram(12, 8)
  assert not options.is_gram(8, 11)
  # As many operations there.
  assert newton_schulz.flops(8, 12, options) == newton_schulz.flops(
    8, 12, STANDARD
  )
  assert not STANDARD.is_gram(8, 80)


def test_an_accelerator_takes_the_batch_at_once_unless_deterministic():
  options = Options(dtype='bfloat16')
  batched = _lowered((3, 8, 20), options, 'tpu')
  alone = _lowered(
    (3, 8, 20), dataclasses.replace(options, deterministic=True), 'tpu'
  )
  assert ' while(' not in batched and 'f32[3,8,8]' in batched
  assert ' while(' in alone and ' while(' in _lowered(
    (3, 8, 20), options, 'cpu'
  )


def test_products_take_the_dtype_and_accumulate_in_float32():
  def dots(options):
    text = _lowered((3, 8, 20), options, 'tpu')
    return [line for line in text.splitlines() if ' dot(' in line]

  for line in dots(Options(dtype='bfloat16')):
    assert ' = f32[' in line
    assert 'operand_precision' not in line
  for line in dots(Options(dtype='float32')):
    assert 'operand_precision={highest,highest}' in line


def test_auto_dtype_is_the_platforms():
  assert Options().resolved('tpu').dtype == 'bfloat16'
  assert Options().resolved('cpu').dtype == 'float32'
  assert Options().resolved().dtype == 'float32'
  given = Options(dtype='bfloat16')
  assert given.resolved('cpu') == given


def _composed(triples, values):
  for a, b, c in triples:
    values = a * values + b * values**3 + c * values**5
  return values


def _is_safe(triples):
  values = np.linspace(0, 1.02, 20001)[1:]
  with np.errstate(over='ignore', invalid='ignore'):
    composed = _composed(triples, values)
  is_finite = np.isfinite(composed).all() and composed.max() < 2
  return bool(is_finite and composed.min() > 0 and _composed(triples, 1) > 0.5)


def test_every_list_is_safe():
  """It maps (0, 1.02] to positive, finite, useful values."""
  assert all(map(_is_safe, newton_schulz.COEFFICIENTS.values()))


def test_the_law_refuses_the_lists_that_are_left_out():
  # Emerging-Optimizers' 'aol' flips the sign of a rank-1 momentum; Polar
  # Express as published diverges above 1.
  aol = (
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
  )
  assert _composed(aol, 1) == pytest.approx(-0.994, abs=5e-4)
  stretch = 1.02 / 1.01
  nearly = [
    (a * stretch, b * stretch**3, c * stretch**5)
    for a, b, c in newton_schulz.COEFFICIENTS['polar_express']
  ]
  assert not _is_safe(aol) and not _is_safe(nearly)


@pytest.mark.parametrize(
  'name,low,high',
  [('keller', 0.682, 1.202), ('polar_express', 0.864, 1.124)],
)
def test_range_of_the_composed_polynomial(name, low, high):
  composed = _composed(
    newton_schulz.COEFFICIENTS[name], np.linspace(0.01, 1, 20001)
  )
  assert low - 6e-4 < composed.min() and composed.max() < high + 6e-4


def test_polar_express_is_stretched_to_cover_what_rounding_lifts():
  a, b, c = newton_schulz.COEFFICIENTS['polar_express'][0]
  np.testing.assert_allclose(
    [a * 1.02, b * 1.02**3, c * 1.02**5],
    [8.28721201814563, -23.595886519098837, 17.300387312530933],
    rtol=1e-12,
  )


@pytest.mark.parametrize(
  'fields,message',
  [
    (
      dict(coefficients='kellar'),
      "coefficients .* one of .*'keller'.* got 'kellar'",
    ),
    (dict(method='grams'), "method must be one of .*'standard'.* got 'grams'"),
    (
      dict(dtype='float16'),
      "dtype must be one of .*'bfloat16'.* got 'float16'",
    ),
  ],
)
def test_what_cannot_be_done_is_named(fields, message):
  with pytest.raises(ValueError, match=message):
    Options(**fields)
