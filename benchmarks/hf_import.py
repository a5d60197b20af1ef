"""Imports of a Hugging Face checkpoint beside `safetensors` reading it.

  python -m benchmarks.hf_import [--quick]

The checkpoint is a layer of Qwen3-30B-A3B in bfloat16 with its embedding: 128
experts of three 2048 x 768 matrices (--quick: 16, and fewer words), in one
file that the page cache holds. The peer gets every tensor with `safe_open`,
and keeps all of them as loading a model does, or none. Ours also transposes
every matrix, and for a checkpoint hashes and writes it.

Rates are of the processor: waiting for the disk, which bounds conversions here,
is not in them and has a line of its own. Peak memory is of child processes.
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
  from composer_jax.checkpoint import hf_config, hf_io, hf_names

  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps(fields(is_quick)))
  config, family, _ = hf_config.from_hf(fields(is_quick))
  table = hf_names.tensors(config, family, expert_layout='per_expert')
  rng = np.random.default_rng(0)
  header = hf_io.new_header(
    [
      (name, 'BF16', tensor.shape, 2 * int(np.prod(tensor.shape)))
      for name, tensor in table.items()
    ],
    {'format': 'pt'},
  )
  writer = hf_io.Writer(folder / NAME, header)
  for name, tensor in table.items():
    values = 0.02 * rng.standard_normal(tensor.shape, np.float32)
    writer.write(name, hf_io.as_bytes(values.astype(ml_dtypes.bfloat16)))
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

  from composer_jax.checkpoint import hf_blocks, hf_import, hf_source

  source = hf_source.open_source(folder)
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shardings = dict.fromkeys(hf_blocks.shapes(source.table), place)
  arrays = hf_import.load_sharded(source, source.config, shardings)
  jax.block_until_ready(arrays)
  source.close()
  return gigabytes(folder)


def convert(folder: pathlib.Path, walls: list[float] | None = None) -> float:
  from composer_jax.checkpoint import hf_import

  start = time.perf_counter()
  hf_import.convert(folder, folder.parent / 'ours')
  if walls is not None:
    walls.append(gigabytes(folder) / (time.perf_counter() - start))
  return gigabytes(folder)


def gigabytes(folder: pathlib.Path) -> float:
  return (folder / NAME).stat().st_size / 1e9


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
  report = functools.partial(interleaved.report, 'hf_import', limit=None)
  shape = f'{gigabytes(folder):.2f} GB bfloat16, page cache warm'
  walls: list[float] = []
  runs = (
    ('arrays', read_arrays, True),
    ('checkpoint', functools.partial(convert, walls=walls), True),
    ('checkpoint', convert, False),
  )
  for what, ours, keeps in runs:
    found = interleaved.rates(
      lambda ours=ours: ours(folder),
      lambda keeps=keeps: read_peer(folder, keeps),
      rounds,
      before=lambda: shutil.rmtree(folder.parent / 'ours', ignore_errors=True),
    )
    goal = GOALS[what]
    report(
      f'{shape}: to {what}; peer safetensors '
      f'{"keeping" if keeps else "dropping"} its tensors',
      found,
      goal=f'ratio >= {goal}',
      met=lambda _, ratio, goal=goal: ratio >= goal,
      unit='GB/s',
    )
  report(
    f'{shape}: to checkpoint, wall clock with fsync',
    (walls[1:], []),
    goal='none',
    met=lambda *_: True,
    unit='GB/s',
  )


def measure_memory(folder: pathlib.Path) -> None:
  from composer_jax.checkpoint import hf_blocks, hf_io

  with hf_io.Folder(folder) as found:
    largest = max(raw.num_bytes for raw in found.tensors.values())
  limit = (2 * largest + hf_blocks.PIECE_BYTES) / 2**20 + 512
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
