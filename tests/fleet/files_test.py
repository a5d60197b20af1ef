"""The files of `docs/how_to/hosts` start what they say they do."""

import os
import shutil
import subprocess
import time

import jsonschema
import pytest
import yaml

from tests import programs

FOLDER = programs.ROOT / 'docs' / 'how_to' / 'hosts'
# What the scripts call, as far as it matters here: `srun` runs its command, and
# Python prints its arguments.
STANDS = {
  'bin/srun': 'while [[ "$1" == -* ]]; do shift; done\nexec "$@"',
  'bin/curl': """case "${!#}" in
*agent-worker-number) echo 2 ;;
*worker-network-endpoints) echo 'a:b:10.0.0.1,c:d:10.0.0.2,e:f:10.0.0.3' ;;
*) exit 22 ;; esac""",
  '.venv/bin/python': (
    'printf "%s\\n" "HOST=${COMPOSER_JAX_HOST:-}/${COMPOSER_JAX_HOSTS:-}" "$@"'
  ),
}


def with_stands(folder, stands):
  """Writes programs; returns an environment that finds those in bin/ first."""
  for stand, text in stands.items():
    path = folder / stand
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/usr/bin/env bash\n{text}\n')
    path.chmod(0o755)
  return os.environ | {'PATH': f'{folder}/bin:{os.environ["PATH"]}'}


def check(arguments, variables, expected):
  """The command starts as the host that the variables say."""
  option, module, *flags = arguments
  assert option == '-m' and '--launch=env' in flags
  done = programs.run(module, *flags, '--dry_run', env=os.environ | variables)
  assert done.returncode == 0, done.stderr
  assert f'[fleet] Hosts({expected}, processes=1, ' in done.stdout


@pytest.mark.parametrize(
  'name, variables, expected',
  [
    (
      'slurm.sh',
      {'SLURM_PROCID': '3', 'SLURM_NTASKS': '4'},
      'index=3, count=4',
    ),
    (
      'tpu_pod.sh',
      {'COMPOSER_JAX_HOST': '0', 'COMPOSER_JAX_HOSTS': '4'},
      'index=0, count=4',
    ),
  ],
)
def test_scripts_start_the_job(name, variables, expected, tmp_path):
  env = with_stands(tmp_path, STANDS)
  env |= {'COMPOSER_JAX_WORKDIR': str(tmp_path / 'run')}
  done = subprocess.run(
    ['bash', '-eu', FOLDER / name],
    cwd=tmp_path,
    env=env,
    capture_output=True,
    text=True,
    check=True,
  )
  host, *arguments = done.stdout.splitlines()
  assert host == ('HOST=2/3' if name == 'tpu_pod.sh' else 'HOST=/')
  check(arguments, variables, expected)
  if shutil.which('shellcheck'):
    subprocess.run(['shellcheck', FOLDER / name], check=True)


def closed(**properties):
  """Schema of an object with these properties and no other."""
  return {
    'type': 'object',
    'properties': properties,
    'required': list(properties),
    'additionalProperties': False,
  }


NAME = {'type': 'string', 'pattern': '^[a-z]([-a-z0-9]*[a-z0-9])?$'}
TEXT, COUNT = {'type': 'string'}, {'type': 'integer', 'minimum': 1}


def items(schema):
  return {'type': 'array', 'minItems': 1, 'items': schema}


# As the definitions of JobSet v1alpha2, batch/v1 and v1 have these fields.
CONTAINER = closed(
  name=NAME,
  image=TEXT,
  workingDir=TEXT,
  env=items(closed(name=TEXT, value=TEXT)),
  command=items(TEXT),
  resources=closed(limits={'type': 'object', 'additionalProperties': TEXT}),
  volumeMounts=items(closed(name=NAME, mountPath=TEXT)),
)
POD = closed(
  restartPolicy={'enum': ['Never', 'OnFailure']},
  containers=items(CONTAINER),
  volumes=items(
    closed(name=NAME, persistentVolumeClaim=closed(claimName=NAME))
  ),
)
JOB = closed(
  completionMode={'enum': ['Indexed']},
  parallelism=COUNT,
  completions=COUNT,
  backoffLimitPerIndex=COUNT,
  template=closed(spec=POD),
)
JOBSET = closed(
  apiVersion={'const': 'jobset.x-k8s.io/v1alpha2'},
  kind={'const': 'JobSet'},
  metadata=closed(name=NAME),
  spec=closed(
    failurePolicy=closed(maxRestarts=COUNT),
    replicatedJobs=items(
      closed(name=NAME, replicas=COUNT, template=closed(spec=JOB))
    ),
  ),
)


def test_the_jobset_starts_the_job():
  stored = yaml.safe_load((FOLDER / 'jobset.yaml').read_text())
  jsonschema.validate(stored, JOBSET)
  job = stored['spec']['replicatedJobs'][0]['template']['spec']
  pod = job['template']['spec']
  container = pod['containers'][0]
  variables = {v['name']: v['value'] for v in container['env']}
  assert job['parallelism'] == job['completions'] == 4
  mounted = {m['name'] for m in container['volumeMounts']}
  assert mounted == {v['name'] for v in pod['volumes']}
  variables['JOB_COMPLETION_INDEX'] = '1'  # As Kubernetes does.
  check(container['command'][1:], variables, 'index=1, count=4')


LABELS = closed(app=NAME)
DEPLOYMENT = closed(
  apiVersion={'const': 'apps/v1'},
  kind={'const': 'Deployment'},
  metadata=closed(name=NAME),
  spec=closed(
    replicas=COUNT,
    selector=closed(matchLabels=LABELS),
    template=closed(
      metadata=closed(labels=LABELS),
      spec=closed(
        terminationGracePeriodSeconds=COUNT,
        containers=items(CONTAINER),
        volumes=items(closed(name=NAME, secret=closed(secretName=NAME))),
      ),
    ),
  ),
)


def flags_of(command):
  """Checks that a worker knows these flags; returns them by name."""
  option, module, *flags = command
  assert (option, module) == ('-m', 'experiments.worker')
  known = programs.run(module, '--help').stdout
  given = dict(flag.removeprefix('--').split('=', 1) for flag in flags)
  for name in given:
    assert f'--{name}:' in known, name
  assert {'store', 'key'} <= given.keys()
  return given


def test_the_deployment_starts_workers_with_time_to_drain():
  stored = yaml.safe_load((FOLDER / 'workers.yaml').read_text())
  jsonschema.validate(stored, DEPLOYMENT)
  spec = stored['spec']
  assert (
    spec['selector']['matchLabels'] == spec['template']['metadata']['labels']
  )
  pod = spec['template']['spec']
  container = pod['containers'][0]
  flags = flags_of(container['command'][1:])
  assert float(flags['drain_s']) < pod['terminationGracePeriodSeconds']
  assert {m['name'] for m in container['volumeMounts']} == {
    v['name'] for v in pod['volumes']
  }
  (mount,) = container['volumeMounts']
  assert flags['key'].startswith(mount['mountPath'])


def test_the_script_starts_a_worker_on_each_host(tmp_path):
  """`ssh` runs its command here, without a login."""
  stands = {
    'bin/ssh': f'echo "$1" >> {tmp_path}/hosts; shift; bash -c "$*"',
    '.venv/bin/python': f'printf "%s\\n" "$@" > {tmp_path}/$$.arguments',
  }
  for stand, text in stands.items():
    path = tmp_path / stand
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/usr/bin/env bash\n{text}\n')
    path.chmod(0o755)
  (tmp_path / 'delta.key').write_text('secret')
  env = os.environ | {
    'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}',
    'HOME': str(tmp_path / 'home'),
  }
  script = [FOLDER / 'workers.sh', 's3://bucket/run', 'delta.key', 'a', 'b']
  subprocess.run(['bash', *script], cwd=tmp_path, env=env, check=True)
  assert (tmp_path / 'hosts').read_text().split() == ['a', 'a', 'b', 'b']
  deadline = time.monotonic() + 60
  while len(found := [*tmp_path.glob('*.arguments')]) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.02)
  for path in found:
    while len(arguments := path.read_text().splitlines()) < 4:
      time.sleep(0.02)
    flags = flags_of(arguments)
    key = tmp_path / 'home' / '.composer_jax' / 'delta.key'
    assert flags == {'store': 's3://bucket/run', 'key': str(key)}
    assert key.read_text() == 'secret' and key.stat().st_mode & 0o077 == 0
