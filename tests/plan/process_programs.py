"""Prints what a train step of all processes sends, as one process lowers it.

  python -m tests.plan.process_programs PROCESS COUNT PORT

Eight emulated devices are divided among COUNT processes.
"""

import hashlib
import json
import os
import sys


def main() -> None:
  process, count, port = map(int, sys.argv[1:])
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = (
    f'--xla_force_host_platform_device_count={8 // count}'
  )
  import jax

  from composer_jax.core import processes
  from composer_jax.plan import programs
  from composer_jax.plan.hlo import overlap
  from tests import compiling
  from tests.plan import compiled_test

  if count > 1:
    ticket = processes.Ticket(
      folder='', address=f'localhost:{port}', process=process, count=count
    )
    processes.join(ticket)
  subject = compiled_test.case_of('cpu:8', '2,2,2')
  traced, lowered = programs.lower(
    subject, 'train', compiled_test.OPTIONS, jax.devices()
  )
  text = lowered.as_text()
  sent = []
  if process == 0:  # The text is the same in the others.
    made = lowered.compile(compiler_options=compiling.QUICKLY)
    sent = [
      (c.kind, sorted(map(sorted, c.groups)), c.bytes, c.count)
      for c in overlap.read(
        made.as_text(), dynamic_trips=lambda _: 1.0
      ).collectives
    ]
  facts = {
    'local': jax.local_device_count(),
    'devices': jax.device_count(),
    'arguments': traced.arguments,
    'lowered': hashlib.sha256(text.encode()).hexdigest(),
    'sent': sorted(sent),
  }
  print('FACTS', json.dumps(facts), flush=True)


if __name__ == '__main__':
  main()
