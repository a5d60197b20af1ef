"""A step of several processes is the one of a single process."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys

import pytest


def facts(count: int) -> list[dict]:
  """Lowers the step in `count` processes; the first one compiles it."""
  with contextlib.closing(socket.socket()) as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  started = [
    subprocess.Popen(
      [
        *(sys.executable, '-m', 'tests.plan.process_programs'),
        *map(str, (process, count, port)),
      ],
      stdout=subprocess.PIPE,
      text=True,
      env={k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'},
    )
    for process in range(count)
  ]
  texts = [process.communicate()[0] for process in started]
  assert [process.returncode for process in started] == [0] * count
  return [
    json.loads(line.removeprefix('FACTS '))
    for text in texts
    for line in text.splitlines()
    if line.startswith('FACTS ')
  ]


@pytest.mark.slow
def test_several_processes_lower_to_the_collectives_of_one():
  (alone,) = facts(1)
  assert alone['sent'] and alone['local'] == 8
  for count in (2, 4):
    first, *others = facts(count)
    assert first == alone | {'local': 8 // count}
    assert others == [first | {'sent': []}] * (count - 1)


_HOSTS = """
import hashlib, json, pathlib, sys, tempfile
from composer_jax.plan import topologies
topologies.prepare('v5p:2x2x2')
from jax.experimental import topologies as jax_topologies
from composer_jax.parallel import rounds
from composer_jax.plan import aot, programs
from composer_jax.plan.hlo import overlap
from tests.plan import compiled_test
subject = compiled_test.case_of('v5p:2x2x2', '2,2,2', compute_dtype='bfloat16')
for bounds in ((2, 2, 1), (1, 1, 1)):
  devices = jax_topologies.get_topology_desc(
    platform='tpu', topology_name='v5p:2x2x2', chips_per_host_bounds=bounds
  ).devices
  options = programs.StepOptions(seq_len=256, optimizer='adam')
  traced, lowered = programs.lower(subject, 'train', options, devices)
  with tempfile.TemporaryDirectory() as folder:
    made = aot.compile_lowered(traced, lowered, pathlib.Path(folder))
  even = lambda scope: 0.0 if rounds.FURTHER in scope else 1.0
  sent = sorted(
    (c.kind, sorted(map(sorted, c.groups)), c.bytes, c.count)
    for c in overlap.read(made.text, dynamic_trips=even).collectives
  )
  print('FACTS', json.dumps([len({d.process_index for d in devices}), sent]))
"""


@pytest.mark.slow
def test_hosts_of_a_slice_do_not_change_what_a_step_sends():
  if importlib.util.find_spec('libtpu') is None:
    pytest.skip('no libtpu')
  done = subprocess.run(
    [sys.executable, '-c', _HOSTS], capture_output=True, text=True, check=True
  )
  (two, sent), (eight, others) = (
    json.loads(line.removeprefix('FACTS '))
    for line in done.stdout.splitlines()
    if line.startswith('FACTS ')
  )
  assert (two, eight) == (2, 8)
  assert sent == others != []
