"""What would start is told, and who may not join, before anything starts."""

import re
import shlex
import subprocess

import jsonschema
import pytest
import yaml

from composer_jax import wiring
from composer_jax.fleet import joining
from configs.composer import tiny
from tests import programs
from tests.fleet import files_test

FOLDER = files_test.FOLDER


@pytest.fixture(scope='module')
def shown(tmp_path_factory):
  """shown(**identity) -> flags of a run whose workers are of this commit."""

  def show(**identity):
    folder = tmp_path_factory.mktemp('run')
    key = folder / 'delta.key'
    docs = joining.open_documents(str(folder / 'store'), key, 'policy')
    spec = wiring.spec_of(tiny.get_config('smoke').to_dict())
    own = joining.code() | wiring.content_of(spec) | identity
    setup = dict(config=spec.as_dict(), level='unshare', identity=own)
    docs.write_setup(setup | {'files': {}})
    return {'store': str(folder / 'store'), 'key': str(key)}

  return show


def dry_run(module, flags, **changes):
  """Runs a main with flags, some of them replaced or (None) left out."""
  flags = {k: v for k, v in (flags | changes).items() if v is not None}
  given = [f'--{name}={value}' for name, value in flags.items()]
  return programs.run(module, *given, '--dry_run')


def test_a_worker_tells_what_it_would_do(shown):
  flags = shown()
  done = dry_run('experiments.worker', flags)
  assert done.returncode == 0, done.stderr
  assert 'this worker may join. It would serve' in done.stdout
  assert '8 episodes of' in done.stdout and 'judge in unshare' in done.stdout
  done = dry_run('experiments.worker', flags, boxes_on_ray='true')
  assert 'judge in ray' in done.stdout


def test_a_worker_of_another_commit_is_told_so(shown):
  for module in ('experiments.worker', 'experiments.fleet'):
    done = dry_run(module, shown(code='other'), within_s=1)
    assert done.returncode == 1
    assert "code is 'other' there" in done.stderr


# As the definitions of ray.io/v1, apps/v1 and v1 have these fields; by hand,
# since neither PyPI nor npm has KubeRay's.
closed, items = files_test.closed, files_test.items
NAME, TEXT, COUNT = files_test.NAME, files_test.TEXT, files_test.COUNT
ANY = {'type': 'object', 'additionalProperties': TEXT}
VOLUMES = items({'type': 'object', 'required': ['name']})
CONTAINER = {
  'type': 'object',
  'properties': {
    'name': NAME,
    'image': TEXT,
    'workingDir': TEXT,
    'command': items(TEXT),
    'resources': closed(limits=ANY),
    'securityContext': closed(privileged={'type': 'boolean'}),
    'ports': items(closed(containerPort=COUNT)),
    'volumeMounts': items(closed(name=NAME, mountPath=TEXT)),
  },
  'required': ['name', 'image'],
  'additionalProperties': False,
}
POD = {
  'type': 'object',
  'properties': {
    'terminationGracePeriodSeconds': COUNT,
    'containers': items(CONTAINER),
    'volumes': VOLUMES,
  },
  'required': ['containers'],
  'additionalProperties': False,
}
GROUP = dict(rayStartParams=ANY, template=closed(spec=POD))
REPLICAS = {'type': 'integer', 'minimum': 0}
RAYJOB = closed(
  apiVersion={'const': 'ray.io/v1'},
  kind={'const': 'RayJob'},
  metadata=closed(name=NAME),
  spec=closed(
    entrypoint=TEXT,
    shutdownAfterJobFinishes={'type': 'boolean'},
    rayClusterSpec=closed(
      enableInTreeAutoscaling={'const': True},
      headGroupSpec=closed(**GROUP),
      workerGroupSpecs=items(
        closed(
          groupName=NAME,
          minReplicas=REPLICAS,
          maxReplicas=REPLICAS,
          replicas=REPLICAS,
          **GROUP,
        )
      ),
    ),
  ),
)


def command_of(text):
  """Returns module and flags of a command line."""
  _, option, module, *flags = shlex.split(text)
  assert option == '-m'
  pairs = (flag.removeprefix('--').split('=', 1) for flag in flags)
  return module, dict(pairs)


def command_of_workers():
  """Returns module and flags of `workers.yaml`."""
  stored = yaml.safe_load((FOLDER / 'workers.yaml').read_text())
  (worker,) = stored['spec']['template']['spec']['containers']
  return command_of(' '.join(worker['command']))


def test_the_job_of_ray_starts_workers_and_boxes(shown):
  stored = yaml.safe_load((FOLDER / 'rayjob.yaml').read_text())
  jsonschema.validate(stored, RAYJOB)
  module, flags = command_of(stored['spec']['entrypoint'])
  cluster = stored['spec']['rayClusterSpec']
  workers, boxes = cluster['workerGroupSpecs']
  # There may be as many as are asked for: a GPU each, a processor a sandbox.
  limits = lambda g: g['template']['spec']['containers'][0]['resources'][
    'limits'
  ]
  assert workers['maxReplicas'] * int(limits(workers)['nvidia.com/gpu']) >= (
    int(flags['workers'])
  )
  assert boxes['maxReplicas'] * int(limits(boxes)['cpu']) >= int(flags['boxes'])
  grace = workers['template']['spec']['terminationGracePeriodSeconds']
  assert float(flags['drain_s']) < grace
  head = cluster['headGroupSpec']
  assert head['rayStartParams']['num-cpus'] == '0'  # Nothing runs there.
  (mount,) = head['template']['spec']['containers'][0]['volumeMounts']
  assert flags['key'].startswith(mount['mountPath'])
  done = dry_run(module, flags | shown(), ray=None)
  assert done.returncode == 0, done.stderr
  assert '[fleet] 40 workers on this machine: ' in done.stdout
  assert '--boxes=10' in done.stdout and '--drain_s=60' in done.stdout


def test_the_cache_of_a_region_is_that_of_its_workers():
  stored = yaml.safe_load_all((FOLDER / 'cache.yaml').read_text())
  deployment, service = stored
  spec = deployment['spec']['template']['spec']
  for container in spec['containers']:
    jsonschema.validate(container, CONTAINER)
  (container,) = spec['containers']
  names = {volume['name'] for volume in spec['volumes']}
  assert names == {m['name'] for m in container['volumeMounts']}
  (port,), (listens,) = service['spec']['ports'], container['ports']
  assert port['targetPort'] == listens['containerPort']
  assert (
    f'listen {port["targetPort"]};'
    in (programs.ROOT / 'configs' / 'delta' / 'nginx.conf').read_text()
  )
  assert (
    service['spec']['selector'] == deployment['spec']['selector']['matchLabels']
  )
  module, flags = command_of_workers()
  name = service['metadata']['name']
  assert flags['store'] == f'http://{name}:{port["port"]}'
  assert module == 'experiments.worker' and flags['writes'].startswith('s3://')


def test_a_worker_of_another_region_may_join(shown):
  """The command of `workers.yaml`, with this store and its writes."""
  module, flags = command_of_workers()
  here = shown()
  done = dry_run(module, flags | here, writes=here['store'])
  assert done.returncode == 0, done.stderr


def test_three_machines_start_what_they_should(shown, tmp_path):
  """`ssh` runs its command here, and `run.sh` is a trainer that waits."""
  stands = {
    'bin/ssh': f'echo "$1" >> {tmp_path}/hosts; shift; bash -c "$*"',
    '.venv/bin/python': f'echo "python $*" > {tmp_path}/$$.command',
    'run.sh': (
      f'echo "$*" > {tmp_path}/trainer; mkdir -p runs/elastic; '
      f'echo secret > runs/elastic/delta.key; '
      f'while [ $(ls {tmp_path}/*.command | wc -l) -lt 2 ]; do sleep 0.05; done'
    ),
  }
  env = files_test.with_stands(tmp_path, stands)
  env |= {'HOME': str(tmp_path / 'home')}
  script = [FOLDER / 'machines.sh', 's3://bucket/run', 'runs/elastic', 'a', 'b']
  subprocess.run(['bash', *script], cwd=tmp_path, env=env, check=True)
  assert (tmp_path / 'hosts').read_text().split() == ['a', 'a', 'b', 'b']
  trainer = (tmp_path / 'trainer').read_text()
  assert '--config.delta.store=s3://bucket/run' in trainer
  known = re.findall(r'--config\.([\w.]+)=', trainer)
  fields = tiny.get_config().to_dict()
  assert {name.partition('.')[0] for name in known} <= fields.keys() | {'fleet'}
  for path in tmp_path.glob('*.command'):
    module, flags = command_of(path.read_text())
    assert flags['store'] == 's3://bucket/run'
    assert (tmp_path / 'home/.composer_jax/delta.key').read_text() == 'secret\n'
    done = dry_run(module, flags | shown())
    assert done.returncode == 0, done.stderr
    assert '[fleet] 2 workers on this machine: ' in done.stdout
    assert '--boxes=8' in done.stdout
