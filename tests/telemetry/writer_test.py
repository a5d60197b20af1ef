"""metrics.jsonl survives kills, full disks and resumed runs."""

import json
import signal
import struct
import subprocess
import sys

import numpy as np
import pytest
from tensorboardX import record_writer
from tensorboardX.proto import event_pb2

from composer_jax.telemetry import writer
from tests import programs


def lines(path):
  return [(row['stage'], row['step']) for row in writer.read(path)]


def test_what_is_written_is_read(tmp_path):
  with writer.Writer(tmp_path, tensorboard=False) as out:
    out.write(
      'cpt',
      np.int32(3),
      loss=np.float32(0.5),
      bad=float('nan'),
      expert_load=np.arange(4).reshape(2, 2),
      name='sft',
    )
  (row,) = writer.read(tmp_path)
  assert row.pop('time') > 1e9
  assert row == {
    'stage': 'cpt',
    'step': 3,
    'loss': 0.5,
    'bad': 'nan',
    'expert_load': [[0, 1], [2, 3]],
    'name': 'sft',
  }
  assert np.isnan(float(row['bad']))


def test_a_torn_line_is_skipped_and_then_cut_off(tmp_path):
  path = tmp_path / writer.METRICS
  for torn in ('{"stage": "cpt", "st', '{"stage": "cpt", "step": 2}'):
    path.write_text('{"stage": "cpt", "step": 1}\n' + torn)
    assert lines(path) == [('cpt', 1)]
    with writer.Writer(tmp_path, tensorboard=False) as out:
      out.write('cpt', 2)
    assert lines(path) == [('cpt', 1), ('cpt', 2)]


def test_a_damaged_line_is_named(tmp_path):
  path = tmp_path / writer.METRICS
  path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
  with pytest.raises(ValueError, match=r'metrics\.jsonl, line 2 is not JSON'):
    writer.read(path)


def test_no_file_reads_as_no_lines(tmp_path):
  assert writer.read(tmp_path) == []


def test_truncate_drops_later_lines_of_one_stage(tmp_path):
  with writer.Writer(tmp_path, tensorboard=False) as out:
    for step in range(4):
      out.write('cpt', step)
      out.write('sft', step)
    out.truncate('cpt', 1)
    out.write('cpt', 2)
  kept = [step for stage, step in lines(tmp_path) if stage == 'cpt']
  assert kept == [0, 1, 2]
  assert [s for stage, s in lines(tmp_path) if stage == 'sft'] == [0, 1, 2, 3]


def test_resumed_run_leaves_the_lines_of_an_uninterrupted_one(tmp_path):
  def play(folder, spans):
    for start, end in spans:
      with writer.Writer(folder, tensorboard=False) as out:
        out.truncate('cpt', start)
        for step in range(start + 1, end + 1):
          out.write('cpt', step, loss=1 / step)
    return [(r['step'], r['loss']) for r in writer.read(folder)]

  whole = play(tmp_path / 'a', [(0, 9)])
  assert play(tmp_path / 'b', [(0, 7), (4, 6), (5, 9)]) == whole


def test_reserved_names_are_refused(tmp_path):
  with (
    writer.Writer(tmp_path, tensorboard=False) as out,
    pytest.raises(ValueError, match="cannot be called 'time'"),
  ):
    out.write('cpt', 1, time=3.0)


def test_a_killed_process_leaves_whole_lines(tmp_path):
  program = (
    'import itertools, sys\n'
    'from composer_jax.telemetry import writer\n'
    'out = writer.Writer(sys.argv[1], tensorboard=False)\n'
    'for step in itertools.count():\n'
    '  out.write("cpt", step, loss=1.0)\n'
    '  if step == 50: print("go", flush=True)\n'
  )
  with subprocess.Popen(
    [sys.executable, '-c', program, str(tmp_path)], stdout=subprocess.PIPE
  ) as process:
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
  steps = [step for _, step in lines(tmp_path)]
  assert len(steps) > 50
  assert steps == list(range(len(steps)))


# A metric takes more bytes in an event than in a line, the rest fewer: with one
# metric the lines fill the disk first, with twenty the events do.
@pytest.mark.parametrize(
  'num_metrics, board, named',
  [
    (1, 'none', writer.METRICS),
    (1, 'board', writer.METRICS),
    (20, 'board', 'tensorboard/cpt/events.out.tfevents.'),
  ],
)
def test_a_full_disk_is_an_error_that_keeps_what_is_there(
  tmp_path, num_metrics, board, named
):
  # A limit on the file's size stands in for the disk: the same short write.
  program = (
    'import resource, signal, sys\n'
    'from composer_jax.telemetry import writer\n'
    'signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
    'resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n'
    'with writer.Writer(sys.argv[1], tensorboard="board" in sys.argv) as out:\n'
    '  losses = {f"l{i}": 1.0 for i in range(int(sys.argv[2]))}\n'
    '  for step in range(100): out.write("cpt", step, **losses)\n'
  )
  imports = ['tensorboardX'] if board == 'board' else []
  arguments = (str(tmp_path), str(num_metrics), board)
  result = programs.run_code(program, *arguments, imports=imports)
  assert result.returncode == 1
  # The last error is the one that the run ends with.
  error = result.stderr.splitlines()[-1]
  assert error.startswith('OSError: [Errno ')
  assert str(tmp_path / named) in error
  assert 'what is there already is untouched' in error
  text = (tmp_path / writer.METRICS).read_text()
  assert text.endswith('\n')
  rows = [json.loads(line) for line in text.splitlines()]
  assert [row['step'] for row in rows] == list(range(len(rows)))


def test_tensorboard_gets_the_scalars(tmp_path):
  with writer.Writer(tmp_path) as out:
    out.write('rl', 1, reward=0.5, expert_load=[[1, 2]])
  (events,) = (tmp_path / 'tensorboard' / 'rl').iterdir()
  data = events.read_bytes()
  assert b'rl/reward' in data
  assert b'expert_load' not in data


def events(path):
  """Returns the events of a file; checks both checksums of every record."""
  data, parsed = path.read_bytes(), []
  while data:
    (size,) = struct.unpack('<Q', data[:8])
    parts = data[:8], data[12 : 12 + size]
    sums = data[8:12], data[12 + size : 16 + size]
    for part, expected in zip(parts, sums, strict=True):
      crc = record_writer.masked_crc32c(part)
      assert struct.pack('<I', crc) == expected
    parsed.append(event_pb2.Event.FromString(parts[1]))
    data = data[16 + size :]
  return parsed


def test_tensorboard_forgets_the_steps_that_are_written_again(tmp_path):
  with writer.Writer(tmp_path) as out:
    for step in (1, 2, 3):
      out.write('rl', step, reward=0.5 * step, turns=step)
    # Within the second in which the first file began.
    out.truncate('rl', 1)
    out.write('rl', 2, reward=7.0)
  first, second = sorted((tmp_path / 'tensorboard' / 'rl').iterdir())
  assert [
    (e.step, {v.tag: v.simple_value for v in e.summary.value})
    for e in events(first)[1:]
  ] == [(s, {'rl/reward': 0.5 * s, 'rl/turns': s}) for s in (1, 2, 3)]
  header, purge, again = events(second)
  assert header.file_version == 'brain.Event:2'
  assert purge.step == 2
  assert purge.session_log.status == event_pb2.SessionLog.START
  assert (again.step, again.summary.value[0].simple_value) == (2, 7.0)
  rows = writer.read(tmp_path)
  assert again.wall_time == rows[-1]['time']


def test_the_first_error_is_the_one_that_leaves(tmp_path, monkeypatch):
  closed = []

  def fail(board):
    closed.append(board)
    raise OSError('second')

  monkeypatch.setattr(writer.board.Board, 'close', fail)
  with pytest.raises(ZeroDivisionError), writer.Writer(tmp_path) as out:
    out.write('cpt', 1, loss=1.0)
    out.write('sft', 1, loss=1.0)
    raise ZeroDivisionError
  assert len(closed) == 2
  # Where nothing went wrong before, it is not hidden.
  with pytest.raises(OSError, match='second'), writer.Writer(tmp_path) as out:
    out.write('cpt', 2, loss=1.0)


def test_wandb_without_its_package_names_the_extra(tmp_path, monkeypatch):
  # None in sys.modules is how Python itself marks a module as not importable.
  monkeypatch.setitem(sys.modules, 'wandb', None)
  with pytest.raises(ValueError, match=r"pip install -e '\.\[wandb\]'"):
    writer.Writer(tmp_path, wandb=True)
