"""Peers of benchmarks that run in processes of their own."""

import ctypes
import pathlib
import sys

import pytest

from benchmarks import peer_process

_CODE = """
import sys
from benchmarks import peer_process

def prepare(task):
  if task['fails']:
    sys.exit('no such variant')
  return lambda: sum(i * 0 for i in range(task['work'])) + 1.0

peer_process.serve(prepare)
"""


def _start(work: int = 10, *, fails: bool = False) -> peer_process.Peer:
  task = {'work': work, 'fails': fails}
  return peer_process.Peer([sys.executable, '-c', _CODE], task)


def test_a_peer_measures_its_own_rate():
  peer = _start()
  assert peer.rate() > 0
  ours, peers = peer_process.in_turns(lambda: 2.0, peer.rate, 3)
  assert len(ours) == len(peers) == 3
  peer.close()
  with pytest.raises((peer_process.PeerError, ValueError)):
    peer.rate()


def test_the_fastest_that_can_is_chosen_and_others_are_named(capsys):
  peers = {
    'fails': lambda: _start(fails=True),
    'slow': lambda: _start(3_000_000),
    'fast': lambda: _start(10),
  }
  assert peer_process.fastest(peers, 2) == 'fast'
  assert 'fails: no such variant' in capsys.readouterr().err
  with pytest.raises(peer_process.PeerError, match=r"None of \['fails'\]"):
    peer_process.fastest({'fails': peers['fails']}, 1)


def test_mkl_is_told_that_the_processor_is_intels():
  variables = peer_process.unlocked()
  if variables is None:
    pytest.skip('no C compiler, or not Linux')
  path = variables['LD_PRELOAD']
  assert pathlib.Path(path).exists()
  assert ctypes.CDLL(path).mkl_serv_intel_cpu_true() == 1
  assert [*peer_process.libraries()] == ['MKL unlocked', 'MKL as shipped']
