#!/usr/bin/env bash
# sbatch docs/how_to/hosts/slurm.sh, in a checkout that all nodes see.
#SBATCH --job-name=composer_jax
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -euo pipefail
# A process that ends with an error must not end the others' supervisors.
exec srun --kill-on-bad-exit=0 .venv/bin/python -m experiments.composer \
  --launch=env \
  --config=configs/composer/gpu.py \
  --config.mesh.fsdp=32 --config.rl.mesh.fsdp=32 --config.rl.rows=32 \
  --config.rl.placement=colocated \
  --workdir="${COMPOSER_JAX_WORKDIR:-runs/slurm}" "$@"
