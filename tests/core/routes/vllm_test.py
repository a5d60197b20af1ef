"""Routes in the JSON of vLLM's token route."""

import base64

import numpy as np
import pytest

from composer_jax.core import records
from composer_jax.core.routes import vllm


@pytest.mark.parametrize('largest', [255, 256, records.NO_ROUTE])
def test_ids_have_the_smallest_dtype_that_holds_them(largest):
  ids_TMA = np.zeros((3, 1, 2), np.uint16)
  ids_TMA[1] = largest
  routes = vllm.routed_experts(ids_TMA, 1)
  assert routes['dtype'] == ('uint8' if largest == 255 else 'uint16')
  data = base64.b64decode(routes['data'])
  read = np.frombuffer(data, routes['dtype']).reshape(routes['shape'])
  np.testing.assert_array_equal(read, ids_TMA[1:])
