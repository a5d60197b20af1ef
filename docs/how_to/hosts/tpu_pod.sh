#!/usr/bin/env bash
# Run on every worker of a TPU pod, in a checkout with an environment:
#   gcloud compute tpus tpu-vm ssh NAME --worker=all \
#     --command='cd composer_jax && docs/how_to/hosts/tpu_pod.sh'
# COMPOSER_JAX_WORKDIR is a folder that all workers see (Filestore, NFS).
set -euo pipefail
metadata() {
  curl -sf -H 'Metadata-Flavor: Google' \
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}
if [[ -z "${COMPOSER_JAX_HOST:-}" ]]; then
  COMPOSER_JAX_HOST=$(metadata agent-worker-number)
  # id:unused:address of each worker, divided by commas.
  COMPOSER_JAX_HOSTS=$(metadata worker-network-endpoints | tr ',' '\n' | wc -l)
fi
export COMPOSER_JAX_HOST COMPOSER_JAX_HOSTS=$((COMPOSER_JAX_HOSTS))
exec .venv/bin/python -m experiments.composer \
  --launch=env \
  --config=configs/composer/gpu.py \
  --config.mesh.fsdp=16 --config.rl.mesh.fsdp=16 --config.rl.rows=16 \
  --config.rl.placement=colocated \
  --workdir="${COMPOSER_JAX_WORKDIR:?a folder that all workers see}" "$@"
