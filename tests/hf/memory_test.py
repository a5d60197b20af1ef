"""The memory of an import is that of pieces of tensors, whatever its arrays."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from composer_jax.hf.tensors import files
from tests.hf import checkpoints, tiny

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
QWEN = tiny.MODELS['qwen3_moe']


def _run(program, *args):
  return subprocess.run(
    [sys.executable, '-c', textwrap.dedent(program), *map(str, args)],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    env=os.environ | {'JAX_PLATFORMS': 'cpu'},
  )


# Prints the peak memory in MiB of a tiny import and of a larger one after it.
_MEASURED = """
  import resource, sys
  from composer_jax.hf import importing as hf_import

  def peak():
    if sys.platform != 'linux':
      return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    # On Linux getrusage starts from the memory of the parent process.
    with open('/proc/self/status') as status:
      return int(status.read().split('VmHWM:')[1].split()[0])

  tiny, source, out = sys.argv[1:]
  hf_import.convert(tiny, out + '_tiny')
  before = peak()
  hf_import.convert(source, out)
  print('peak', before // 1024, peak() // 1024)
"""


def _peaks(tmp_path, num_experts, ffw_dim, embed_dim):
  """Returns MiB (of a tiny import, of one with these experts)."""
  tiny_source = checkpoints.write(
    tmp_path / 'tiny', QWEN, checkpoints.tensors(QWEN)
  )
  fields = QWEN | {
    'num_hidden_layers': 1,
    'num_experts': num_experts,
    'moe_intermediate_size': ffw_dim,
    'hidden_size': embed_dim,
  }
  source = tmp_path / 'hf'
  source.mkdir()
  (source / 'config.json').write_text(json.dumps(fields))
  header = files.new_header(
    [
      (name, 'BF16', tensor.shape, 2 * int(np.prod(tensor.shape)))
      for name, tensor in checkpoints.table_of(fields).items()
    ],
    None,
  )
  head = files.head(files.render_header(header))
  size = max(entry['data_offsets'][1] for entry in header.values())
  with open(source / files.SINGLE, 'wb') as file:
    file.write(head)
    file.truncate(len(head) + size)  # All zeros, without being written.
  run = _run(_MEASURED, tiny_source, source, tmp_path / 'ours')
  assert run.returncode == 0, run.stderr
  line = next(x for x in run.stdout.splitlines() if x.startswith('peak'))
  shutil.rmtree(tmp_path / 'ours')
  return [int(number) for number in line.split()[1:]]


def test_memory_is_that_of_two_tensors_not_of_an_array(tmp_path):
  """24 experts of 4 MiB: gate and up are an array of 192 MiB."""
  before, after = _peaks(tmp_path, 24, 1024, 2048)
  assert after - before <= 2 * 4 + 4 + 40


@pytest.mark.slow
def test_memory_of_a_frontier_checkpoint(tmp_path):
  """Tensors of 64 MiB, an array of 20 times that, with the interpreter."""
  _, after = _peaks(tmp_path, 10, 4096, 8192)
  assert after <= 2 * 64 + 31 + 512
