"""Compiler options of training steps, with the reason of each.

They were chosen by the schedule of steps compiled for many devices
(`experiments.plan --what=compile`), not by measured time.
"""

# For TPUs with sparse cores: all but v5e.
_SPARSE_CORES: dict[str, str | bool] = {
  # Gathers of weights run on the sparse cores, beside matrix products. By
  # default v5p and v6e wait for each of them.
  'xla_tpu_enable_sparse_core_collective_offload_all_gather': 'true',
  # The same for gradients. It also keeps reduce-scatters that would become an
  # all-reduce and a slice, which moves twice the bytes.
  'xla_tpu_enable_sparse_core_collective_offload_reduce_scatter': 'true',
  # Keeps the reduce-scatters over all devices of a slice and of wide arrays in
  # two dimensions too.
  'xla_tpu_check_legacy_constraints_in_reduce_scatter_legalizer': 'false',
  # The same for sums over replicas: hides 89 % of all transfers, 81 % without
  # (Kimi K2, 5 layers, 64 v5p).
  'xla_tpu_enable_sparse_core_collective_offload_all_reduce': 'true',
}

OPTIONS: dict[str, dict[str, str | bool]] = {
  'tpu': {
    # By default XLA waits for each all-to-all (of tokens, of Muon's matrices)
    # instead of running matrix products meanwhile.
    'xla_tpu_enable_async_all_to_all': 'true',
    'xla_tpu_enable_async_ragged_all_to_all': 'true',
  },
  'gpu': {
    # Gathers of weights begin one layer ahead: 57 % of their time is beside
    # products, 47 % without (Qwen3-235B, 6 layers, 128 H200).
    'xla_gpu_enable_pipelined_all_gather': True,
    # Gradients are reduced one layer later: 45 %, 34 % without.
    'xla_gpu_enable_pipelined_reduce_scatter': True,
  },
}


def of(platform: str, device_kind: str = '') -> dict[str, str | bool] | None:
  """Returns the options for a kind of device; None where there are none."""
  options = OPTIONS.get(platform, {})
  if platform == 'tpu' and 'v5 lite' not in device_kind:
    options = options | _SPARSE_CORES
  return options or None
