#!/usr/bin/env bash
# Trains on this machine and rolls out on others, which have a checkout of the
# same commit at the same path, and reach the store:
#   docs/how_to/hosts/machines.sh s3://BUCKET/run runs/elastic gpu-1 gpu-2
set -eu
store=$1 workdir=$2
shift 2
here=$PWD
./run.sh --workdir="$workdir" --config.delta.store="$store" \
  --config.delta.poll_s=1.0 --config.fleet.workers=1 &
trainer=$!
until [[ -s "$workdir/delta.key" ]]; do
  kill -0 "$trainer"
  sleep 1
done
for host in "$@"; do
  ssh "$host" "mkdir -p ~/.composer_jax && umask 077 &&
    cat > ~/.composer_jax/delta.key" < "$workdir/delta.key"
  ssh "$host" "cd '$here' && nohup .venv/bin/python -m experiments.fleet \
    --store='$store' --key=\$HOME/.composer_jax/delta.key \
    --workers=2 --boxes=16 > ~/.composer_jax/fleet.log 2>&1 < /dev/null &"
done
# Their workers end with the run.
wait "$trainer"
