"""Imports of a Hugging Face checkpoint beside `safetensors` reading it.

  python -m benchmarks.hf_import [--quick]

The checkpoint is a layer of Qwen3-30B-A3B in bfloat16 with its embedding: 128
experts of three 2048 x 768 matrices (--quick: 16, and fewer words), in one
file that the page cache holds. The import also transposes every matrix, hashes
it and writes it to an orbax checkpoint.

The goal is a ratio to the bandwidth at which `safetensors` reads that file:
every tensor through `safe_open`, dropped at once, as the import does. It is
judged twice: by CPU seconds, which other processes disturb little and which do
not count waiting for the disk, and by the wall clock, with every fsync. Peak
memory is measured in child processes; there the peer keeps all tensors.
"""

import argparse
import functools
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import interleaved

GOAL = 0.3
NAME = 'model.safetensors'


def fields(is_quick: bool) -> dict:
  """Returns the config.json of a slice of Qwen3-30B-A3B."""
  return {
    'model_type': 'qwen3_moe',
    'vocab_size': 20_000 if is_quick else 151_936,
    'hidden_size': 2048,
    'num_hidden_layers': 1,
    'num_attention_heads': 32,
    'num_key_value_heads': 4,
    'head_dim': 128,
    'intermediate_size': 6144,
    'moe_intermediate_size': 768,
    'num_experts': 16 if is_quick else 128,
    'num_experts_per_tok': 8,
    'norm_topk_prob': True,
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e6,
    'tie_word_embeddings': True,
  }


def write(folder: pathlib.Path, is_quick: bool) -> None:
  from composer_jax.hf.architecture import config as hf_config
  from composer_jax.hf.tensors import files, names

  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(fields(is_quick)))
  config, family, _ = hf_config.from_hf(fields(is_quick))
  table = names.tensors(config, family)
  rng = np.random.default_rng(0)
  header = files.new_header(
    [
      (name, 'BF16', tensor.shape, 2 * int(np.prod(tensor.shape)))
      for name, tensor in table.items()
    ],
    {'format': 'pt'},
  )
  writer = files.SafetensorsWriter(folder / NAME, header)
  for name, tensor in table.items():
    values = 0.02 * rng.standard_normal(tensor.shape, np.float32)
    writer.write(name, files.as_bytes(values.astype(ml_dtypes.bfloat16)))
  writer.close()


def read_peer(folder: pathlib.Path, keeps: bool) -> float:
  import safetensors

  tensors = {}
  with safetensors.safe_open(folder / NAME, framework='np') as file:
    for name in file.keys():  # noqa: SIM118  The file is no dictionary.
      tensor = file.get_tensor(name)
      if keeps:
        tensors[name] = tensor
  return gigabytes(folder)


def convert(folder: pathlib.Path) -> float:
  from composer_jax.hf import importing

  importing.convert(folder, folder.parent / 'ours')
  return gigabytes(folder)


def gigabytes(folder: pathlib.Path) -> float:
  return (folder / NAME).stat().st_size / 1e9


def timed(walls: list[float], run: Callable[..., float], *args: Any) -> float:
  """Runs a function and appends its units per wall-clock second to `walls`."""
  start = time.perf_counter()
  units = run(*args)
  walls.append(units / (time.perf_counter() - start))
  return units


CHILDREN = {
  'peer': functools.partial(read_peer, keeps=True),
  'checkpoint': convert,
}


def own_peak_mib() -> float:
  """Returns this process's peak; Linux's getrusage adds its parent's."""
  try:
    status = pathlib.Path('/proc/self/status').read_text()
    return float(status.split('VmHWM:')[1].split()[0]) / 1024
  except OSError:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def peak_mib(folder: pathlib.Path, child: str) -> float:
  """Returns the peak memory of a child process that does the job once."""
  shutil.rmtree(folder.parent / 'ours', ignore_errors=True)
  run = subprocess.run(
    [sys.executable, '-m', 'benchmarks.hf_import', f'--child={child}'],
    input=str(folder),
    capture_output=True,
    text=True,
    check=True,
  )
  return float(run.stdout.split()[-1])


def compare(folder: pathlib.Path, rounds: int) -> None:
  walls: tuple[list[float], list[float]] = ([], [])
  processor = interleaved.rates(
    functools.partial(timed, walls[0], convert, folder),
    functools.partial(timed, walls[1], read_peer, folder, False),
    rounds,
    before=lambda: shutil.rmtree(folder.parent / 'ours', ignore_errors=True),
  )
  for clock, rates in (
    ('CPU seconds', processor),
    ('wall clock', (walls[0][1:], walls[1][1:])),
  ):
    interleaved.report(
      'hf_import',
      f'import of {gigabytes(folder):.2f} GB in bfloat16, {clock}',
      rates,
      against='safetensors that drops its tensors',
      limit=None,
      goal=f'ratio >= {GOAL}',
      met=lambda _, ratio: ratio >= GOAL,
      unit='GB/s',
    )


def measure_memory(folder: pathlib.Path) -> None:
  from composer_jax.hf.tensors import blocks, files

  with files.Folder(folder) as checkpoint:
    largest = max(raw.num_bytes for raw in checkpoint.tensors.values())
  limit = (2 * largest + blocks.PIECE_BYTES) / 2**20 + 512
  interleaved.report(
    'hf_import',
    f'peak memory of an import of {gigabytes(folder):.2f} GB in bfloat16',
    ([peak_mib(folder, 'checkpoint')], [peak_mib(folder, 'peer')]),
    against='safetensors that keeps its tensors',
    limit=limit,
    goal=f'<= {limit:.0f} MiB',
    met=lambda ours, _: ours <= limit,
    unit='MiB',
    note='the goal is twice the largest tensor, a chunk and 512 MiB',
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--quick', action='store_true')
  parser.add_argument('--child', choices=CHILDREN, help=argparse.SUPPRESS)
  args = parser.parse_args()
  interleaved.pin_to_one_core()
  if args.child:
    CHILDREN[args.child](pathlib.Path(sys.stdin.read()))
    print(own_peak_mib())
    return
  with tempfile.TemporaryDirectory() as root:
    folder = pathlib.Path(root) / 'hf'
    write(folder, args.quick)
    compare(folder, 3 if args.quick else 7)
    measure_memory(folder)


if __name__ == '__main__':
  main()
