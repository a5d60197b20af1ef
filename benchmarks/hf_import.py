"""Imports of a Hugging Face checkpoint beside `safetensors` reading it.

  python -m benchmarks.hf_import [--quick]

The checkpoint is a layer of Qwen3-30B-A3B in bfloat16 with its embedding: 128
experts of three 2048 x 768 matrices (--quick: 16, and fewer words), in one
file that the page cache holds. Ours also transposes every matrix, and for a
checkpoint hashes and writes it.

The goals are ratios to the bandwidth at which `safetensors` reads that file:
every tensor through `safe_open`, held on to as ours does. To arrays ours keeps
them all, so its peer does; to a checkpoint ours drops each, so its peer does,
which is the faster of the two. Each goal is judged twice: by processor seconds,
which neighbours disturb little and which leave out waiting for the disk, and by
the wall clock, with every fsync. Peak memory is of child processes.
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

GOALS = {'arrays': 0.5, 'checkpoint': 0.3}
NAME = 'model.safetensors'


def fields(is_quick: bool) -> dict:
  """The config.json of a slice of Qwen3-30B-A3B."""
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
  table = names.tensors(config, family, expert_layout='per_expert')
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

  kept = {}
  with safetensors.safe_open(folder / NAME, framework='np') as file:
    for name in file.keys():  # noqa: SIM118  It is no dictionary.
      tensor = file.get_tensor(name)
      if keeps:
        kept[name] = tensor
  return gigabytes(folder)


def read_arrays(folder: pathlib.Path) -> float:
  import jax

  from composer_jax.hf import sharded
  from composer_jax.hf.tensors import blocks
  from composer_jax.hf.tensors import source as hf_source

  source = hf_source.open_source(folder)
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shardings = dict.fromkeys(blocks.shapes(source.table), place)
  arrays = sharded.load(source, source.config, shardings)
  jax.block_until_ready(arrays)
  source.close()
  return gigabytes(folder)


def convert(folder: pathlib.Path) -> float:
  from composer_jax.hf import importing

  importing.convert(folder, folder.parent / 'ours')
  return gigabytes(folder)


def gigabytes(folder: pathlib.Path) -> float:
  return (folder / NAME).stat().st_size / 1e9


def timed(walls: list[float], run: Callable[..., float], *args: Any) -> float:
  """Runs it, and notes its units per second of the wall clock."""
  start = time.perf_counter()
  units = run(*args)
  walls.append(units / (time.perf_counter() - start))
  return units


CHILDREN = {
  'peer': functools.partial(read_peer, keeps=True),
  'arrays': read_arrays,
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
  """Returns the peak memory of a process that does it once."""
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
  shape = f'{gigabytes(folder):.2f} GB bfloat16, page cache warm'
  for what, ours, keeps in (
    ('arrays', read_arrays, True),
    ('checkpoint', convert, False),
  ):
    walls: tuple[list[float], list[float]] = ([], [])
    processor = interleaved.rates(
      functools.partial(timed, walls[0], ours, folder),
      functools.partial(timed, walls[1], read_peer, folder, keeps),
      rounds,
      before=lambda: shutil.rmtree(folder.parent / 'ours', ignore_errors=True),
    )
    goal = GOALS[what]
    for clock, found in (
      ('processor seconds', processor),
      ('wall clock', (walls[0][1:], walls[1][1:])),
    ):
      interleaved.report(
        'hf_import',
        f'{shape}: to {what}, {clock}; peer safetensors '
        f'{"keeping" if keeps else "dropping"} its tensors',
        found,
        limit=None,
        goal=f'ratio >= {goal}',
        met=lambda _, ratio, goal=goal: ratio >= goal,
        unit='GB/s',
      )


def measure_memory(folder: pathlib.Path) -> None:
  from composer_jax.hf.tensors import blocks, files

  with files.Folder(folder) as found:
    largest = max(raw.num_bytes for raw in found.tensors.values())
  limit = (2 * largest + blocks.PIECE_BYTES) / 2**20 + 512
  peer = peak_mib(folder, 'peer')
  for what in GOALS:
    is_streamed = what == 'checkpoint'
    interleaved.report(
      'hf_import',
      f'{gigabytes(folder):.2f} GB bfloat16, largest tensor '
      f'{largest / 2**20:.0f} MiB: peak memory to {what}; peer keeping all',
      ([peak_mib(folder, what)], [peer]),
      limit=limit if is_streamed else None,
      goal='<= twice the largest tensor, a chunk and 512 MiB'
      if is_streamed
      else 'none',
      met=lambda ours, _, streamed=is_streamed: not streamed or ours <= limit,
      unit='MiB',
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
