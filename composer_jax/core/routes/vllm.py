"""Sampled tokens and their routes in the JSON of vLLM's token route."""

import base64
from typing import Any

import numpy as np


def entry(token: int, logprob: float) -> dict[str, Any]:
  """Returns a sampled token with its log-probability."""
  more = {'bytes': None, 'top_logprobs': []}
  return {'token': f'token_id:{token}', 'logprob': logprob, **more}


def routed_experts(ids_TMA: np.ndarray, start: int) -> dict[str, Any]:
  """Returns routes of a window from token `start` on.

  Args:
    ids_TMA: uint16 routes of all tokens that a pass consumed.
  """
  ids_TMA = ids_TMA[start:]
  largest = int(ids_TMA.max(initial=0))
  kept_TMA = ids_TMA.astype(np.uint8 if largest < 256 else '<u2')
  return {
    'data': base64.b64encode(kept_TMA.tobytes()).decode(),
    'dtype': kept_TMA.dtype.name,
    'shape': list(kept_TMA.shape),
    'start': start,
  }
