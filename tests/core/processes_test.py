"""What process 0 decides, the others learn; in the order of their calls."""

import json
import os

import pytest

from composer_jax.core import processes


@pytest.fixture
def member(monkeypatch, tmp_path):
  """Makes this process number `index` of two."""

  def become(index):
    monkeypatch.setattr(
      processes,
      '_self',
      processes._Membership(index=index, count=2, folder=tmp_path),
    )

  return become


def test_a_process_alone_decides_and_writes_nothing(tmp_path):
  assert processes.lead(lambda: 3) == 3
  assert processes.in_turn(lambda: [1]) == [1]
  assert processes.own_folder(tmp_path) == tmp_path
  assert not list(tmp_path.iterdir())


def test_others_learn_what_the_first_decided(member, tmp_path):
  member(0)
  assert processes.lead(lambda: (1, 2)) == [1, 2]  # As JSON has it, in all.
  assert processes.in_turn(lambda: 'made') == 'made'
  assert processes.own_folder(tmp_path) == tmp_path
  member(1)
  assert processes.lead(lambda: pytest.fail('decided twice')) == [1, 2]
  assert processes.in_turn(lambda: 'made') == 'made'
  assert processes.own_folder(tmp_path) == tmp_path / 'process_1'


def test_the_first_makes_before_the_others(member, tmp_path):
  order = []
  member(0)
  processes.in_turn(lambda: order.append(list(tmp_path.iterdir())))
  assert order == [[]]  # Nobody else could have begun.


def test_what_differs_between_processes_is_told(member):
  member(0)
  processes.check_equal('documents', 'abc')
  member(1)
  with pytest.raises(
    ValueError, match="Process 1 has other documents than process 0: 'abd'"
  ):
    processes.check_equal('documents', 'abd')


def test_old_decisions_are_removed(member, tmp_path, monkeypatch):
  monkeypatch.setattr(processes, '_KEPT', 3)
  member(0)
  for number in range(6):
    processes.lead(lambda number=number: number)
  kept = sorted(json.loads(p.read_text()) for p in tmp_path.iterdir())
  assert kept == [3, 4, 5]


def test_waiting_and_progress_are_shown(monkeypatch, tmp_path):
  beat = tmp_path / 'beat'
  beat.touch()
  os.utime(beat, (1, 1))
  monkeypatch.setattr(processes, '_self', processes._Membership(beat=str(beat)))
  processes.beat()
  assert beat.stat().st_mtime > 1
  os.utime(beat, (1, 1))
  processes.beat()  # Too soon to cost a write.
  assert beat.stat().st_mtime == 1
