"""Writes report.html of whatever a workdir holds.

  python -m experiments.report --workdir=runs/tiny

Every run writes its own at its end, also when it is interrupted. This is for a
run that was killed, and for a look at one that is still going: it only reads
what is there and replaces the page.
"""

from absl import flags

from composer_jax.report import document
from experiments import start

_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/tiny', 'Folder of the run, into which the page is written.'
)


def _main() -> None:
  try:
    path = document.write_report(_WORKDIR.value)
  except (ValueError, OSError) as error:
    start.fail(error)
  print(f'Report: {path}')


if __name__ == '__main__':
  start.run(_main)
