#!/usr/bin/env bash
# Starts a rollout worker on each host of a list, in a checkout at the same path:
#   docs/how_to/hosts/workers.sh s3://BUCKET/run delta.key gpu-1 gpu-2 gpu-3
# It ends with the run. `pkill -TERM -f experiments.worker` on a host lets its
# episodes end first; another call adds hosts.
set -eu
store=$1 key=$2
shift 2
here=$PWD
for host in "$@"; do
  ssh "$host" "mkdir -p ~/.composer_jax && umask 077 &&
    cat > ~/.composer_jax/delta.key" < "$key"
  ssh "$host" "cd '$here' && nohup .venv/bin/python -m experiments.worker \
    --store='$store' --key=\$HOME/.composer_jax/delta.key \
    > ~/.composer_jax/worker.log 2>&1 < /dev/null &"
done
