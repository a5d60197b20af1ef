#!/usr/bin/env bash
# Runs composer_jax; `./run.sh help` explains.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

VENV=.venv
TORCH_CPU=https://download.pytorch.org/whl/cpu
# XLA's temporaries are fresh maps: with 4 KiB pages, faults take about a tenth
# of a train step on CPU. Without effect before glibc 2.35 and off Linux.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
MAIN_CONFIG=configs/composer/tiny.py

usage() {
  cat <<'TEXT'
Usage:
  ./run.sh [flags]               the main job: pretraining, SFT and RL of a
                                 coding agent on 2 CPU cores, then a report
  ./run.sh <experiment> [flags]  python -m experiments.<experiment> [flags]
  ./run.sh config [flags]        every field of a config, its default, meaning
  ./run.sh test [--slow] [args]  ruff, pyrefly, then pytest with these args;
                                 --no-isolation where namespaces are refused
  ./run.sh bench [NAME...]       benchmarks, all or some: keeps their results
                                 and renders benchmarks/README.md
  ./run.sh gpu_day --out=DIR     all that needs a GPU, in 35 minutes
  ./run.sh lint                  ruff and pyrefly only
  ./run.sh docs                  the pages of docs/, in runs/docs
  ./run.sh install               only make .venv
  ./run.sh doctor [flags]        what of a config would work on this machine
  ./run.sh help                  this text

Flags of the main job:
  --config=FILE[:ARG]      default configs/composer/tiny.py
  --config.rl.steps=N      changes one value; a misspelt name is an error
  --workdir=DIR            default runs/<name of the config>; running again
                           with the same DIR continues where it stopped

The first run makes .venv with the versions in constraints.txt. It needs
Python >= 3.11 (PYTHON=/path/to/python chooses one) or uv, and the network.
Where a GPU or TPU is found, jax for it is installed (JAX_PLATFORMS=cpu: not).
TEXT
}

say() { printf '[run.sh] %s\n' "$*"; }
fail() { printf '[run.sh] %s\n' "$*" >&2; exit 1; }

recent_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# Prints a Python >= 3.11; the versions that are tested come first.
find_python() {
  if [[ -n "${PYTHON:-}" ]]; then
    recent_enough "$PYTHON" || fail "PYTHON=$PYTHON is not Python >= 3.11."
    echo "$PYTHON"
    return
  fi
  local name
  for name in python3.11 python3.12 python3.13 python3 python python3.14; do
    if command -v "$name" >/dev/null && recent_enough "$name"; then
      command -v "$name"
      return
    fi
  done
  # uv brings a Python of its own.
  if command -v uv >/dev/null; then
    uv python find 3.11 2>/dev/null && return
    uv python install 3.11 >&2 && uv python find 3.11 && return
  fi
  fail "No Python >= 3.11 found (python3 is $(python3 --version 2>&1 ||
    true)). Install one from python.org, your package manager or uv
(https://docs.astral.sh/uv), or set PYTHON=/path/to/python3."
}

make_venv() {
  local python=$1
  if command -v uv >/dev/null; then
    uv venv --quiet --clear --python "$python" "$VENV"
  elif "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv --clear "$VENV"
  elif "$python" -m pip --version >/dev/null 2>&1; then
    # Some distributions leave ensurepip out but bring pip.
    "$python" -m venv --clear --without-pip "$VENV"
    "$python" -m pip --python "$VENV/bin/python" install --quiet pip
  else
    fail "$python cannot make environments: it has neither ensurepip nor pip.
On Debian or Ubuntu: sudo apt-get install python3-venv. Or install uv."
  fi
}

# answers <python> <url>: whether the address can be reached at once.
answers() {
  "$1" -c 'import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5)' "$2/" >/dev/null 2>&1
}

# is_installed <marker> <key>
is_installed() {
  [[ -x "$VENV/bin/python" && "$(cat "$1" 2>/dev/null)" == "$2" ]]
}

# install <marker> <what pip installs>; done once per setup.py + constraints.
install() {
  local marker="$VENV/composer_jax.$1" what=$2 sum key
  sum=$(cat setup.py constraints.txt | cksum)
  key="$what $sum"
  if is_installed "$marker" "$key"; then
    return
  fi
  # What the tests need includes all that the jobs need.
  if [[ "$what" != *docs* && "$what" != *gpu* && "$what" != *tpu* ]] &&
    is_installed "$VENV/composer_jax.test" ".[test] $sum"; then
    return
  fi
  local python
  python=$(find_python)
  # The lock belongs to this shell's descriptor 9 and ends with the shell,
  # however it ends; it is on a file that is here anyway and never written.
  # Python takes it because macOS has no flock command.
  exec 9>>constraints.txt
  if ! "$python" -c 'import fcntl
fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
    say 'Another run.sh is installing; waiting for it.'
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
  fi
  if ! is_installed "$marker" "$key"; then
    # A first installation that was killed left files that pip would trust.
    if [[ -f "$VENV/composer_jax.unfinished" || ! -x "$VENV/bin/python" ]]; then
      say "Making $VENV with $("$python" --version) ($python)."
      make_venv "$python"
      touch "$VENV/composer_jax.unfinished"
    fi
    say "Installing $what and its dependencies: several hundred MB, once."
    local started=$SECONDS
    # torch is only compared with; its default wheels on Linux bring gigabytes
    # of CUDA.
    local uv_extra=() pip_extra=()
    if [[ "$what" == *test* && "$what" != *gpu* ]] &&
      answers "$python" "$TORCH_CPU"; then
      uv_extra=(--torch-backend cpu)
      pip_extra=(--extra-index-url "$TORCH_CPU")
    fi
    if command -v uv >/dev/null; then
      uv pip install --python "$VENV/bin/python" \
        ${uv_extra[@]+"${uv_extra[@]}"} -c constraints.txt -e "$what"
    else
      "$VENV/bin/python" -m pip --version >/dev/null 2>&1 ||
        "$VENV/bin/python" -m ensurepip >/dev/null
      "$VENV/bin/python" -m pip install --disable-pip-version-check \
        --progress-bar on ${pip_extra[@]+"${pip_extra[@]}"} \
        -c constraints.txt -e "$what"
    fi || fail 'The installation failed (see above); is the network there?
Run the same command again to go on.'
    rm -f "$VENV/composer_jax.unfinished"
    printf '%s' "$key" >"$marker.new.$$"
    mv "$marker.new.$$" "$marker"
    say "Installed in $((SECONDS - started)) s."
  fi
  exec 9>&-
}

# install_jobs <marker> <extras>: with jax for the accelerator that is here.
install_jobs() {
  local python="$VENV/bin/python" here
  [[ -x "$python" ]] || python=$(find_python)
  here=$("$python" configs/hardware.py)
  install "$1" ".[$2${here:+,$here}]"
}

# The module's own flag parser reports misspelt flags; this only sees whether
# the user chose a config or a workdir.
main_job() {
  local config='' workdir='' previous='' flag
  for flag in "$@"; do
    case "$flag" in
      --config=* | -config=*) config=${flag#*=} ;;
      --workdir=* | -workdir=*) workdir=${flag#*=} ;;
    esac
    case "$previous" in
      --config | -config) config=$flag ;;
      --workdir | -workdir) workdir=$flag ;;
    esac
    previous=$flag
  done
  local defaults=()
  if [[ -z "$config" ]]; then
    config=$MAIN_CONFIG
    defaults+=("--config=$config")
  fi
  if [[ -z "$workdir" ]]; then
    # configs/composer/tiny.py:smoke -> runs/tiny_smoke
    workdir=$(basename "$config")
    workdir="runs/${workdir/.py/}"
    defaults+=("--workdir=${workdir//:/_}")
  fi
  exec "$VENV/bin/python" -m experiments.composer \
    ${defaults[@]+"${defaults[@]}"} "$@"
}

lint() {
  say 'ruff check'
  "$VENV/bin/ruff" check .
  say 'ruff format --check'
  "$VENV/bin/ruff" format --check --quiet . || {
    "$VENV/bin/ruff" format --check . | tail -n 1
    fail "Not formatted; run $VENV/bin/ruff format ."
  }
  say 'pyrefly check'
  "$VENV/bin/pyrefly" check
}

command=${1:-}
case "$command" in
  help | --help | -h | -help)
    usage
    ;;
  test)
    shift
    install test '.[test]'
    lint
    # Workers and commands would compile every module again.
    unset PYTHONDONTWRITEBYTECODE
    say 'pytest'
    # Files stay whole, so that what a file compiles is compiled once. Three
    # workers keep two cores busy while tests wait for processes.
    exec "$VENV/bin/python" -m pytest -n 3 --dist loadfile \
      --no-loadscope-reorder --durations 15 "$@"
    ;;
  bench)
    shift
    install test '.[test]'  # has the libraries that peers are made of
    exec "$VENV/bin/python" -m benchmarks "$@"
    ;;
  gpu_day)
    shift
    [[ " $* " == *' --out'* ]] || fail 'gpu_day needs --out=DIR.'
    if [[ " $* " == *' --tiny '* ]]; then
      install test '.[test]'
    else
      install gpu '.[gpu,test]'
    fi
    exec "$VENV/bin/python" -m benchmarks.gpu_day "$@"
    ;;
  lint)
    install test '.[test]'
    lint
    ;;
  docs)
    install docs '.[docs]'
    # mkdocs 1 is kept by its pins; its plugins warn of a version 2.
    NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true JAX_PLATFORMS=cpu \
      "$VENV/bin/python" -m mkdocs build --strict --quiet
    say "Pages: $PWD/runs/docs/index.html"
    ;;
  install)
    install_jobs base tasks
    ;;
  '' | -* | composer)
    [[ "$command" == composer ]] && shift
    install_jobs base tasks
    main_job "$@"
    ;;
  *)
    if [[ ! -f "experiments/$command.py" ]]; then
      known=$(cd experiments && ls ./*.py 2>/dev/null |
        sed -E 's|^\./||; s|\.py$||; /^(__|launch$|files_main$|joined$|start$|tiny_checkpoint$)/d' |
        tr '\n' ' ' || true)
      fail "Unknown experiment '$command'; there are: ${known}
and the commands test, bench, gpu_day, lint, docs, install and help."
    fi
    shift
    if [[ "$command" == serve || "$command" == live ]]; then
      install_jobs serve serve,tasks
    else
      install_jobs base tasks
    fi
    exec "$VENV/bin/python" -m "experiments.$command" "$@"
    ;;
esac
