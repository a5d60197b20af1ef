"""The files of `docs/how_to/hosts` start what they say they do."""

import os
import shutil
import subprocess

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
  for stand, text in STANDS.items():
    path = tmp_path / stand
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/usr/bin/env bash\n{text}\n')
    path.chmod(0o755)
  env = os.environ | {
    'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}',
    'COMPOSER_JAX_WORKDIR': str(tmp_path / 'run'),
  }
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
