"""What training tells a compiler beyond its defaults, and why.

Each was kept for what it does to the schedule of a step compiled for many
devices (`experiments.plan --what=compile`), not for a measured second.
"""

# Of TPUs with sparse cores: all but v5e.
_SPARSE_CORES: dict[str, str | bool] = {
  # Gathers of weights become calls of the sparse cores, which run beside
  # products. By default v5p and v6e stop at every one of them.
  'xla_tpu_enable_sparse_core_collective_offload_all_gather': 'true',
  # Likewise for gradients. It also keeps reduce-scatters that would become an
  # all-reduce of the whole and a slice, which moves twice as much.
  'xla_tpu_enable_sparse_core_collective_offload_reduce_scatter': 'true',
  # Keeps the others too: over all devices of a slice (gradients of weights
  # without replicas, sums of the ring), or of wide arrays in two dimensions.
  'xla_tpu_check_legacy_constraints_in_reduce_scatter_legalizer': 'false',
  # Likewise for sums over replicas: 81 % of all transfers are hidden without it
  # and 89 % with it (Kimi K2, 5 layers, 64 v5p).
  'xla_tpu_enable_sparse_core_collective_offload_all_reduce': 'true',
}

OPTIONS: dict[str, dict[str, str | bool]] = {
  'tpu': {
    # XLA waits for an all-to-all at once unless told otherwise: tokens would
    # travel, and Muon's matrices, before and after products, not meanwhile.
    'xla_tpu_enable_async_all_to_all': 'true',
    # Likewise for tokens whose number the data decide.
    'xla_tpu_enable_async_ragged_all_to_all': 'true',
  },
  'gpu': {
    # Gathers of weights begin one layer ahead, with 57 % of their time beside
    # products for 47 % (Qwen3-235B, 6 layers, 128 H200).
    'xla_gpu_enable_pipelined_all_gather': True,
    # Likewise a layer's gradients end one layer later: 45 % for 34 %.
    'xla_gpu_enable_pipelined_reduce_scatter': True,
  },
}


def of(platform: str, device_kind: str = '') -> dict[str, str | bool] | None:
  """Returns the options for a kind of device; None where there are none."""
  options = OPTIONS.get(platform, {})
  if platform == 'tpu' and 'v5 lite' not in device_kind:
    options = options | _SPARSE_CORES
  return options or None
