"""Starts a program and kills it when the host process ends for any reason.

Run by path, standard library only. The kernel's signal at a parent's death does
not serve: it comes when a *thread* ends, and a program that changes its user
never gets it.

Waits for: the program; the end of standard input, which the host holds open.
"""

import os
import select
import subprocess
import sys


def main() -> None:
  # The program inherits the descriptors, all of which the host chose to pass.
  child = subprocess.Popen(
    sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False
  )
  pidfd = os.pidfd_open(child.pid)
  for descriptor in range(3, 64):  # or the host would not see them close
    try:
      if descriptor != pidfd:
        os.close(descriptor)
    except OSError:
      continue
  select.select([sys.stdin.fileno(), pidfd], [], [])
  child.kill()
  sys.exit(child.wait() != 0)


if __name__ == '__main__':
  main()
