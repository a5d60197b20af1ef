"""A trial of a candidate on some users, with a test that may end at any time.

Users are divided by a hash of their pseudonym and the trial's name, so that a
user meets one arm throughout a trial and arms of two trials are independent.
The n-th judged user of one arm is paired with the n-th of the other. A bettor
who stakes a share of her capital on each pair's difference, in a game that is
fair or worse if the hypothesis holds, multiplies it by 1 / alpha with
probability alpha at most, whenever one looks (Ville's inequality). The capital
is the mean over several shares: the mixture of a mixture SPRT, exact for
bounded differences and without a variance to estimate (Waudby-Smith and Ramdas,
arXiv 2010.09686).
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np

from composer_jax.core import checks, files

CONTROL, CANDIDATE = 'control', 'candidate'
PROMOTE, ROLL_BACK, GO_ON = 'promote', 'roll_back', 'go_on'
_FILE = 'trial.json'
# Shares of the capital that bettors stake; none can lose all of it.
_STAKES = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8])


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialOptions:
  """A trial on users.

  Attributes:
    share: share of users who meet the candidate.
    margin: loss of satisfaction, from 0 to 1, that a candidate may not have.
    alpha: chance of promoting a candidate that loses `margin`, and of calling
      one worse that is not.
    most_users: users of each arm after which a trial without a result ends, and
      the candidate is rolled back.
  """

  share: float = 0.5
  margin: float = 0.1
  alpha: float = 0.05
  most_users: int = 500

  def __post_init__(self):
    for name in ('share', 'margin', 'alpha'):
      value = getattr(self, name)
      checks.require(self, name, 0 < value < 1, 'lie between 0 and 1')
    checks.at_least(self, 1, 'most_users')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
  """A trial under way: its name, which salts the hash, and its share."""

  name: str
  share: float


def begin(folder: pathlib.Path, running: Running) -> None:
  """Makes servers of a folder of episodes divide their users."""
  files.write_json(folder / _FILE, dataclasses.asdict(running))


def end(folder: pathlib.Path) -> None:
  """Gives all users the control again."""
  (folder / _FILE).unlink(missing_ok=True)


def running(folder: pathlib.Path) -> Running | None:
  """Returns the trial under way in a folder of episodes."""
  try:
    return Running(**files.read_json(folder / _FILE))
  except FileNotFoundError:
    return None


def arm_of(user: str, running: Running | None) -> str:
  """Returns the arm of a user, who keeps it for the whole trial."""
  if running is None:
    return CONTROL
  digest = hashlib.sha256(f'{running.name}/{user}'.encode()).digest()
  place = int.from_bytes(digest[:8], 'big') / 2**64
  return CANDIDATE if place < running.share else CONTROL


def capital(differences: Sequence[float] | np.ndarray) -> np.ndarray:
  """Returns the bettors' mean capital after each difference in [-1, 1].

  It begins at 1. While every difference has a mean of at most 0, given those
  before it, the chance that it ever reaches 1 / alpha is at most alpha.
  """
  bets_NS = 1 + np.asarray(differences, float)[:, None] * _STAKES
  return np.cumprod(bets_NS, axis=0).mean(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialResult:
  """Where a trial stands.

  Attributes:
    decision: PROMOTE, ROLL_BACK or GO_ON.
    pairs: number of pairs of users.
    control, candidate: mean satisfaction of the paired users of each arm.
    not_worse: always-valid p-value of a candidate that loses the margin.
    worse: always-valid p-value of a candidate that is no worse.
    reason: one sentence for people.
  """

  decision: str
  pairs: int
  control: float
  candidate: float
  not_worse: float
  worse: float
  reason: str


def judge(
  control: Sequence[float],
  candidate: Sequence[float],
  options: TrialOptions,
) -> TrialResult:
  """Judges the satisfaction of users, from 0 to 1, in the order of judgement.

  It may be called whenever there is something new: what it decides first is the
  decision of the trial.
  """
  count = min(len(control), len(candidate), options.most_users)
  gained_N = np.subtract(candidate[:count], control[:count])
  margin = options.margin
  not_worse_N = capital((gained_N + margin) / (1 + margin))
  worse_N = capital(-gained_N)
  limit = 1 / options.alpha
  first = lambda capital_N: int(
    np.argmax(capital_N >= limit) if (capital_N >= limit).any() else count
  )
  shown, harmed = first(not_worse_N), first(worse_N)
  decision, reason = GO_ON, 'Neither is shown yet.'
  if shown < min(harmed, count):
    decision = PROMOTE
    reason = f'No loss of {margin:g} or more, shown by {shown + 1} pairs.'
  elif harmed < count:
    decision = ROLL_BACK
    reason = f'Users are less satisfied, shown by {harmed + 1} pairs.'
  elif count == options.most_users:
    decision = ROLL_BACK
    reason = f'{count} pairs do not show that less than {margin:g} is lost.'
  mean = lambda values: float(np.mean(values[:count])) if count else 0.0
  as_p = lambda capital_N: min(1.0, 1 / float(capital_N.max(initial=1.0)))
  return TrialResult(
    decision=decision,
    pairs=count,
    control=mean(control),
    candidate=mean(candidate),
    not_worse=as_p(not_worse_N),
    worse=as_p(worse_N),
    reason=reason,
  )
