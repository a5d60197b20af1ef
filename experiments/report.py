"""Writes report.html from what a workdir holds.

  python -m experiments.report --workdir=runs/tiny

Every run writes its page at its end, also when it is interrupted. This main is
for a run that was killed or still goes on; it reads the workdir and replaces
the page only.
"""

from absl import flags

from composer_jax.report import document
from experiments import start

_WORKDIR = flags.DEFINE_string(
  'workdir', 'runs/tiny', 'Folder of the run, into which the page is written.'
)


def _main() -> None:
  print(f'Report: {document.write_report(_WORKDIR.value)}')


if __name__ == '__main__':
  start.run(_main, errors=(ValueError, OSError))
