"""A server on one accelerator, for imported models of some billion parameters.

  python -m experiments.serve --config=configs/serve/gpu.py \
      --source=runs/import/qwen3

Not measured. Fit num_slots and num_pages to the memory that the weights leave.
"""

import ml_collections

from configs.serve import tiny


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  if arg:
    raise ValueError(f'configs/serve/gpu.py takes no argument, not {arg!r}.')
  c = tiny.get_config()
  c.engine.update(
    num_slots=64,
    prefill_chunk=512,
    decode_steps=8,
    num_top=20,  # OpenAI's limit
  )
  c.limits.update(
    max_queue=256,
    max_body_bytes=8 << 20,
    default_max_tokens=1024,
    request_timeout_s=600.0,
  )
  return c
