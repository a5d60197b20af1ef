"""Starts a program and ends it when its host goes, however that goes.

Run by path, standard library only. The kernel's own signal at a parent's death
is no way: it comes when a *thread* ends, and a program that changes its user
never gets it.

Waits for: the program; the end of standard input, which the host holds open.
"""

import os
import select
import subprocess
import sys


def main() -> None:
  # Descriptors are meant to pass: only those the host chose come here.
  child = subprocess.Popen(
    sys.argv[1:], stdin=subprocess.DEVNULL, close_fds=False
  )
  pidfd = os.pidfd_open(child.pid)
  for descriptor in range(3, 64):  # it holds them; their ends must show
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
