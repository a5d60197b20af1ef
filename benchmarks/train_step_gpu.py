"""The whole training step of a 7B-A1B mixture that fills one accelerator.

`python -m benchmarks.train_step --gpu`: OLMoE's layers (64 experts, 8 of them
active, bfloat16 over float32 masters, AdamW, recomputation), as many of its 16
as the memory holds, on rows of 4,096 tokens: tokens/s against the device's peak
(MFU, attention counted unmasked), then where the time goes by named scope. The
profiler's trace stays in a folder, for xprof or TensorBoard. `--tiny` runs the
same code at a size whose figures mean nothing, on any device.
"""

import dataclasses
import os
import sys

import jax

from benchmarks import interleaved
from benchmarks import train_step_case as case
from benchmarks import train_step_profile as profile
from composer_jax.models import config as model_config
from composer_jax.models import flops

_GOAL = 0.5  # share of the peak
# A parameter's master, two moments and gradient in float32, and its bfloat16
# copy.
_BYTES_PER_PARAMETER = 18
# The remaining memory is for activations, logits and temporaries.
_SHARE_OF_STATE = 0.8
_ROWS, _LENGTH = 4, 4096


def run(*, is_tiny: bool, folder: str) -> None:
  """Prints the step's line and the parts of its time.

  Args:
    is_tiny: true for a small model.
    folder: folder for the profiler's trace.
  """
  # The default leaves a quarter of the card to others.
  os.environ.setdefault('XLA_PYTHON_CLIENT_MEM_FRACTION', '0.95')
  interleaved.need_accelerator('train_step --gpu', is_tiny=is_tiny)
  device = jax.devices()[0]
  rows, length = (2, 64) if is_tiny else (_ROWS, _LENGTH)
  config = _tiny() if is_tiny else _that_fits(device.memory_stats())
  batch = case.half_rows(rows, length, config.vocab_size)
  trained = case.Trained(config, case.adam(config), batch)
  model = 'a tiny model' if is_tiny else 'OLMoE 7B-A1B'
  name = (
    f'{config.num_layers} layers of {model}, '
    f'{flops.params_total(config) / 1e9:.2f}B parameters, {rows} x {length} '
    'tokens'
  )
  limit = interleaved.peak() / flops.train_per_token(config, length)
  rates = interleaved.rates(trained, trained, 2 if is_tiny else 10)
  interleaved.report(
    'train_step',
    name,
    (rates[0] + rates[1], []),
    limit=limit,
    goal=f'>= {_GOAL} of the limit (MFU)',
    met=lambda rate, _: rate >= _GOAL * limit,
    note=f'{_memory(trained.compiled):.1f} GB',
  )
  for part in profile.split(trained.compiled, trained, 3, folder=folder):
    print(part.line('train_step', name), flush=True)
  print(f'The trace is in {folder}.', file=sys.stderr)


def _olmoe() -> model_config.ModelConfig:
  from configs.models import olmoe_7b_a1b

  fields = olmoe_7b_a1b.get_config().to_dict()
  return model_config.ModelConfig.from_dict(fields)


def _that_fits(memory: dict[str, int]) -> model_config.ModelConfig:
  """Returns OLMoE with the layers whose state fits into a device's memory."""
  full_config = _olmoe()
  allowed = _SHARE_OF_STATE * memory['bytes_limit'] / _BYTES_PER_PARAMETER
  for layers in range(full_config.num_layers, 0, -1):
    config = dataclasses.replace(full_config, num_layers=layers)
    if flops.params_total(config) <= allowed:
      return config
  raise ValueError(
    f'No layer of OLMoE fits: its state needs {_BYTES_PER_PARAMETER} bytes a '
    f'parameter, and the device has {memory["bytes_limit"] / 1e9:.0f} GB.'
  )


def _tiny() -> model_config.ModelConfig:
  olmoe = _olmoe()
  assert isinstance(olmoe.attention, model_config.GQAConfig)
  return dataclasses.replace(
    olmoe,
    vocab_size=512,
    embed_dim=64,
    num_layers=2,
    attention=dataclasses.replace(
      olmoe.attention, num_heads=4, num_kv_heads=4, head_dim=16
    ),
    moe=dataclasses.replace(olmoe.moe, num_experts=16, ffw_dim=32),
  )


def _memory(compiled) -> float:
  """Returns the compiled step's GB: state and temporaries."""
  sizes = compiled.memory_analysis()
  return (sizes.argument_size_in_bytes + sizes.temp_size_in_bytes) / 1e9
