"""Trains a small model with optax and the distributed Muon of this library.

  python -m experiments.examples.muon_in_optax --steps=60

The model is a residual network in a plain dict of arrays, which lie on a mesh
of eight emulated CPU devices. Nothing about Muon is configured but the learning
rate: matrices are found by names and shapes, embedding and head go to Adam, and
shardings are read off the arrays.
"""

from absl import flags

from experiments import start

_STEPS = flags.DEFINE_integer('steps', 60, 'Optimizer steps.', lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float('learning_rate', 0.02, "Muon's step size.")

NUM_LAYERS, VOCAB_SIZE, EMBED_DIM, FFW_DIM = 3, 64, 32, 96


def main():
  import jax

  # The number of devices is fixed when the first array is made.
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 8)

  import jax.numpy as jnp
  import optax
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  from composer_jax.optim.muon import alias, inference
  from composer_jax.train import reporting

  mesh = jax.make_mesh((4, 2), ('fsdp', 'tensor'), (AxisType.Auto,) * 2)
  shapes_and_specs = {
    'embed': ((VOCAB_SIZE, EMBED_DIM), P('tensor', 'fsdp')),
    'layers': {
      'up': ((NUM_LAYERS, EMBED_DIM, FFW_DIM), P(None, 'fsdp', 'tensor')),
      'down': ((NUM_LAYERS, FFW_DIM, EMBED_DIM), P(None, 'tensor', 'fsdp')),
      'norm': ((NUM_LAYERS, EMBED_DIM), P()),
    },
    'head': ((EMBED_DIM, VOCAB_SIZE), P('fsdp', 'tensor')),
  }
  is_leaf = lambda x: isinstance(x, tuple)
  keys = iter(jax.random.split(jax.random.key(0), 8))

  def parameter(shape_and_spec):
    shape, spec = shape_and_spec
    x = jax.random.normal(next(keys), shape) / shape[-2] ** 0.5
    return jax.device_put(x, NamedSharding(mesh, spec))

  params = jax.tree.map(parameter, shapes_and_specs, is_leaf=is_leaf)

  def loss_fn(params, tokens_BT):
    x_BTD = params['embed'][tokens_BT[:, :-1]]

    def layer(x_BTD, weights):
      y_BTD = x_BTD / jnp.sqrt(jnp.mean(x_BTD**2, -1, keepdims=True) + 1e-6)
      y_BTD = y_BTD * (1 + weights['norm'])
      return x_BTD + jax.nn.gelu(y_BTD @ weights['up']) @ weights['down'], None

    x_BTD, _ = jax.lax.scan(layer, x_BTD, params['layers'])
    logits_BTV = x_BTD @ params['head']
    return optax.softmax_cross_entropy_with_integer_labels(
      logits_BTV, tokens_BT[:, 1:]
    ).mean()

  # Muon for matrices, and AdamW with a rate of its own for all else.
  optimizer = alias.muon(
    optax.cosine_decay_schedule(_LEARNING_RATE.value, _STEPS.value),
    adam=optax.adamw(3e-3),
  )
  # Outside of jit, where the arrays tell how they lie.
  state = optimizer.init(params)

  @jax.jit
  def step(params, state, tokens_BT):
    loss, gradients = jax.value_and_grad(loss_fn)(params, tokens_BT)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  print('Matrices, as dimensions of input and output; None is left to Adam:')
  print(inference.dimension_numbers(params))
  print(reporting.muon_metrics(alias.plan(params)))

  # Each token is followed by one and the same other token.
  successor_V = jax.random.permutation(jax.random.key(1), VOCAB_SIZE)
  tokens = [jax.random.randint(jax.random.key(2), (64,), 0, VOCAB_SIZE)]
  for _ in range(8):
    tokens.append(successor_V[tokens[-1]])
  batch = NamedSharding(mesh, P('fsdp'))
  tokens_BT = jax.device_put(jnp.stack(tokens, axis=1), batch)

  for number in range(_STEPS.value):
    params, state, loss = step(params, state, tokens_BT)
    if number % 10 == 0 or number == _STEPS.value - 1:
      print(f'step {number:3d}  loss {loss:.4f}')


if __name__ == '__main__':
  start.run(main)
