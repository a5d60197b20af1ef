"""Which host this is, and who may join."""

import pytest

from composer_jax.fleet import hosts, identity


@pytest.mark.parametrize(
  'text, expected',
  [
    ('local:2x4', hosts.Hosts(processes=2, devices=4)),
    ('local:3', hosts.Hosts(processes=3)),
    ('ray:2', hosts.Hosts(count=2, is_ray=True)),
    ('ray:2x4', hosts.Hosts(count=2, devices=4, is_ray=True)),
    (
      'ray:4x4@v6e',
      hosts.Hosts(count=0, is_ray=True, slice=('4x4', 'v6e')),
    ),
  ],
)
def test_a_launch_is_read(text, expected):
  assert hosts.parse(text, {}) == expected


@pytest.mark.parametrize(
  'text',
  ['', 'local', 'local:', 'local:0x2', 'local:2x', 'slurm:2', 'local:2@a'],
)
def test_another_launch_is_refused(text):
  with pytest.raises(ValueError, match='--launch must be local:'):
    hosts.parse(text, {})


@pytest.mark.parametrize(
  'variables, place',
  [
    ({'SLURM_PROCID': '3', 'SLURM_NTASKS': '8'}, (3, 8)),
    ({'JOB_COMPLETION_INDEX': '1', 'COMPOSER_JAX_HOSTS': '2'}, (1, 2)),
    ({'TPU_WORKER_ID': '2', 'TPU_WORKER_HOSTNAMES': 'a,b,c,d'}, (2, 4)),
    # Ours go first.
    (
      {
        'COMPOSER_JAX_HOST': '0',
        'COMPOSER_JAX_HOSTS': '2',
        'SLURM_PROCID': '7',
        'SLURM_NTASKS': '8',
      },
      (0, 2),
    ),
  ],
)
def test_schedulers_tell_the_number_of_a_host(variables, place):
  found = hosts.parse('env', variables)
  assert (found.index, found.count) == place
  assert found.total == place[1]


@pytest.mark.parametrize(
  'variables, message',
  [
    ({}, 'finds no number of this host: set COMPOSER_JAX_HOST and'),
    ({'SLURM_PROCID': '3'}, 'finds no number of this host'),
    ({'SLURM_PROCID': 'x', 'SLURM_NTASKS': '2'}, "they are 'x' and '2'"),
    (
      {'SLURM_PROCID': '2', 'SLURM_NTASKS': '2'},
      'must be one of 0 to SLURM_NTASKS - 1',
    ),
  ],
)
def test_a_host_without_a_number_is_told(variables, message):
  with pytest.raises(ValueError, match=message):
    hosts.parse('env', variables)


def test_what_differs_is_named():
  config = {'seed': 0, 'cpt': {'steps': 3}}
  first = identity.of(config, 'experiments.composer')
  identity.check(identity.of(config, 'experiments.composer'), first, 1)
  own = identity.of({'seed': 0, 'cpt': {'steps': 4}}, 'experiments.composer')
  with pytest.raises(ValueError) as error:
    identity.check(own | {'code': 'feed'}, first, 1)
  assert str(error.value).startswith(
    f"Host 1 may not join: code is '{first['code']}' on host 0 and 'feed' on "
    'host 1; config.cpt.steps is 3 on host 0 and 4 on host 1.'
  )
