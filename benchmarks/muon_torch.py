"""`torch.optim.Muon`, one parameter per matrix, as a process of its own.

`benchmarks.muon --gpu` runs it before JAX takes the device's memory. It reads
one line of JSON (sides and counts of the matrices, their dtype, the number of
steps) and prints the seconds of each step, on a CPU in processor time. torch's
Muon takes only matrices, so each expert and head is a parameter.
"""

import json
import sys
import time

import torch


def main() -> None:
  task = json.loads(sys.stdin.readline())
  device = 'cuda' if torch.cuda.is_available() else 'cpu'
  clock = time.perf_counter if device == 'cuda' else time.process_time
  torch.set_num_threads(1)
  torch.manual_seed(0)
  parameters = []
  for rows, columns, count in task['matrices']:
    for _ in range(count):
      parameter = torch.nn.Parameter(
        torch.zeros(rows, columns, dtype=getattr(torch, task['dtype'])).to(
          device
        )
      )
      parameter.grad = torch.randn_like(parameter)
      parameters.append(parameter)
  optimizer = torch.optim.Muon(
    parameters, lr=1e-3, weight_decay=0.1, adjust_lr_fn='match_rms_adamw'
  )
  seconds = []
  for step in range(task['steps'] + 1):
    start = clock()
    optimizer.step()
    if device == 'cuda':
      torch.cuda.synchronize()
    if step:  # the first step creates the momentum
      seconds.append(clock() - start)
  print(json.dumps({'device': device, 'seconds': seconds}), flush=True)


if __name__ == '__main__':
  main()
