"""Every example runs by the command in its docstring and shows what it says."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer_jax.core import batches
from composer_jax.rl import policy_loss
from experiments.examples import own_policy_loss
from tests import conftest

ROOT = pathlib.Path(__file__).parent.parent


def run(name: str, *flags: str) -> str:
  """Runs an example in a new process and returns its output."""
  environment = os.environ | {
    'XLA_FLAGS': ' '.join(f'{k}={v}' for k, v in conftest.COMPILING.items())
  }
  process = subprocess.run(
    [sys.executable, '-m', f'experiments.examples.{name}', *flags],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert process.returncode == 0, process.stderr
  return process.stdout


@pytest.mark.slow
def test_muon_in_optax():
  text = run('muon_in_optax', '--steps=21')
  assert "'embed': None" in text and "'norm': None" in text
  # Three layers of two matrices: one group, as one is the other's transpose.
  assert "'muon_matrices': 6, 'muon_groups': 1" in text
  losses = [float(x) for x in re.findall(r'loss (\S+)', text)]
  assert len(losses) == 3 and losses[-1] < losses[0] / 2


def test_the_readme_publishes_and_follows(tmp_path, monkeypatch):
  """The two programs of the README, run as they stand."""
  text = (ROOT / 'README.md').read_text()
  programs = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
  publishing, following = (p for p in programs if 'composer_jax.delta' in p)
  assert max(len(p.splitlines()) for p in (publishing, following)) <= 10
  monkeypatch.chdir(tmp_path)
  mesh = jax.make_mesh((8,), ('a',), (jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec('a')
  sharding = jax.sharding.NamedSharding(mesh, spec)
  first = {'w': jax.device_put(jnp.arange(64.0), sharding)}
  train_step = jax.jit(
    lambda params: jax.tree.map(lambda a: a * 1.5, params), donate_argnums=0
  )
  wanted = np.arange(64.0, dtype=np.float32) * np.float32(1.5) ** 5
  like = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), first
  )
  exec(publishing, {'train_step': train_step, 'params': first})
  names = {'params': like}
  exec(following, names)
  np.testing.assert_allclose(names['params']['w'], wanted, rtol=1e-6)
  assert names['params']['w'].sharding == sharding


def rewards(text: str) -> list[float]:
  return [float(x) for x in re.findall(r'reward +(\S+)', text)]


@pytest.mark.slow
def test_own_environment_learns_from_its_reward():
  text = run('own_environment', '--steps=11')
  first, last = rewards(text)
  assert last > first + 0.1


# Without --slow: the law of its gradient.
@pytest.mark.slow
def test_own_policy_loss_learns_in_the_real_step():
  text = run('own_policy_loss', '--steps=11')
  first, last = rewards(text)
  assert last > first + 0.1


def test_own_policy_loss_begins_as_reinforce_does():
  """At ratio 1 its gradient is that of every loss of the library."""
  train_BT = jnp.array([[-1.0, -2.0, -0.5]])
  batch = batches.RLBatch(
    tokens_BT=jnp.zeros((1, 3), int),
    segment_ids_BT=jnp.ones((1, 3), int),
    positions_BT=jnp.arange(3)[None],
    loss_weights_BT=jnp.array([[0.0, 1.0, 1.0]]),
    rollout_logprobs_BT=train_BT,
    advantages_BT=jnp.array([[3.0, 0.5, -2.0]]),
    temperatures_BT=jnp.ones((1, 3)),
    expert_ids_MBTA=None,
  )
  own = functools.partial(own_policy_loss.squared_error, strength=0.1)
  for loss in (own, policy_loss.loss):
    gradient_BT = jax.grad(loss, has_aux=True)(train_BT, -train_BT, batch)[0]
    np.testing.assert_allclose(gradient_BT, [[0.0, -0.5, 2.0]], rtol=1e-6)


@pytest.mark.slow
def test_routes_of_the_server_give_its_logprobs_and_others_do_not():
  text = run('serve_and_sample', '--tokens=12')
  same, other = re.findall(r'replayed with .*: (\S+)', text)
  # Bit for bit: the numerics are invariant, and the routes are part of them.
  assert float(same) == 0.0
  assert float(other) > 0.01
