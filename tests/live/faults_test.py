"""What kills, full disks, returning users and late withdrawals may not do."""

import shutil

import pytest

from composer_jax.live import episodes, learning


def test_users_stand_in_the_order_of_their_first_rows():
  """Whoever comes again changes nothing of what was there."""
  rows = [{'user': u, 'number': i} for i, u in enumerate('abcab')]
  for count in range(len(rows) + 1):
    firsts = learning._first_of_users(rows[:count])
    assert firsts == rows[: min(count, 3)]


def test_a_killed_withdrawal_is_ended_by_the_next_one(folder):
  class Killed(BaseException):
    pass

  def die(*_, **__):
    raise Killed

  made = folder.episodes
  left = lambda: list(made.folder.glob('withdrawn.*'))
  for end in (
    lambda: made.withdraw('nobody'),
    lambda: episodes.Episodes(made.folder),
  ):
    claim = folder.judged()
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(shutil, 'rmtree', die)
      with pytest.raises(Killed):
        made.withdraw(claim.user)
    assert left() and made.read(claim) is None
    end()
    assert not left()
