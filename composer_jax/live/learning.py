"""Cycles of learning from live use: collect, train, gate, try, promote.

  WORKDIR/live/promoted     store of what all users get: follow it to serve
              candidates   store of what a trial's users get
              cycles/NNNN  plan.json, result.json
              checkpoints  training states of promoted versions
              metrics.jsonl

Consumes: recorded episodes that are ripe.
Waits for: episodes of at least `least_steps` steps; then users of both arms.
Woken by: its own looks at the folder of episodes.
Produces: a promoted version, or a rollback, and a line of metrics each cycle.

A version that is rejected never reaches the store of promoted ones; candidates
are rewound to the version before. A cycle that was interrupted is trained anew
from the same weights on the same plan, and its trial goes on.
"""

import contextlib
import dataclasses
import functools
import logging
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from composer_jax.core import files, processes
from composer_jax.delta import publisher, transport
from composer_jax.live import episodes as episodes_lib
from composer_jax.live import grouping, plans, pricing, shipping, trial
from composer_jax.live import options as options_lib
from composer_jax.models import decoder
from composer_jax.pipeline import job as jobs
from composer_jax.pipeline import reinforce
from composer_jax.rl import update
from composer_jax.tasks import scoring
from composer_jax.telemetry import writer as writers
from composer_jax.train.checkpoints import export, manager

FOLDER, STAGE = 'live', 'live'
PROMOTED, CANDIDATES = 'promoted', 'candidates'
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LivePorts:
  """What a learner needs of the world.

  Attributes:
    play: (values, version, identity) -> rows of the pinned suites, by domain.
    wait: waits for users; returns false if no more will come.
    now: seconds of the clock that events are stamped by.
    say: tells people how a cycle goes.
    judge: judges follow-ups that came as texts; None where none do.
  """

  play: Callable[[Any, int, str], Mapping[str, Sequence[shipping.Row]]]
  wait: Callable[[], bool]
  now: Callable[[], float] = time.time
  say: Callable[[str], None] = _log.info
  judge: scoring.Scorer | None = None


class Starved(RuntimeError):
  """No more episodes will come, and those there are do not suffice."""


class Learner:
  """Trains a run's policy by cycles; alone in its workdir."""

  def __init__(
    self,
    job: jobs.Job,
    episodes: episodes_lib.Episodes,
    options: options_lib.LiveOptions,
    ports: LivePorts,
  ):
    """Restores the last promoted version, or begins with the run's policy.

    Raises:
      ValueError: several processes share the run, or another learner has the
        folder of episodes.
    """
    if processes.count() > 1:
      raise ValueError(
        f'Live learning runs in one process, and {processes.count()} share '
        'this run: leave out --launch.'
      )
    self._stack = contextlib.ExitStack()
    # Servers share the folder; another learner would end this one's trial.
    self._stack.enter_context(files.alone(episodes.folder))
    # What has no end has no schedule that leads to one.
    endless = dataclasses.replace(job.spec.rl, decay_steps=0)
    spec = dataclasses.replace(job.spec, rl=endless)
    self._job, self._episodes = dataclasses.replace(job, spec=spec), episodes
    self._options, self._ports = options, ports
    self._folder = job.workdir / FOLDER
    self._plans = plans.Plans(self._folder / 'cycles')
    self._size = job.spec.rl.prompts * job.spec.rl.rollouts_per_prompt
    self._writer = self._stack.enter_context(writers.Writer(self._folder))
    self._checkpoints = self._stack.enter_context(
      contextlib.closing(
        manager.Checkpoints(self._folder / 'checkpoints', keep=2)
      )
    )
    key = job.workdir / transport.KEY
    promoted = publisher.Publisher(
      self._folder / PROMOTED,
      key,
      transport.RUN_ID,
      job.spec.systems['delta'],
    )
    self._promoted = self._stack.enter_context(contextlib.closing(promoted))
    # A server looks for the key in the workdir, and so do candidates.
    kept = self._folder / transport.KEY
    if not kept.exists():
      shutil.copy(key, kept)
    self._restore()
    if self._checkpoints.latest_step() is None:
      self._checkpoints.save(0, self._state.own())
    self._promote()

  def close(self) -> None:
    self._candidates.close()
    self._stack.close()

  @property
  def version(self) -> int:
    """Version of the candidate; the promoted one, outside of a trial."""
    return int(self._state.step)

  def served(self) -> dict[str, int]:
    """Returns the versions of the stores that servers follow, by arm."""
    return {trial.CONTROL: self._base, trial.CANDIDATE: self.version}

  def cycle(self, number: int) -> dict[str, Any]:
    """Runs a cycle to its end; returns its line, at once if it has ended.

    Raises:
      Starved: `ports.wait` says that no more users will come.
    """
    if (known := self._plans.result(number)) is not None:
      return known
    began, seconds = time.monotonic(), {}

    def timed(name: str) -> None:
      nonlocal began
      seconds[f'{name}_s'] = time.monotonic() - began
      began = time.monotonic()

    plan = self._plans.load(number)
    if plan is not None and plan.base < self.version:
      # It was promoted, and then interrupted before its last line.
      return self._finish(plan, trial.PROMOTE, {'reason': 'resumed'}, seconds)
    if plan is None:
      plan = self._collect(number)
    timed('collect')
    base = plan.base
    before = self._play()
    timed('suites_before')
    self._train(plan)
    timed('train')
    if self.version == base:
      about = {'reason': 'All of its episodes were withdrawn.'}
      return self._finish(plan, trial.ROLL_BACK, about, seconds)
    after = self._play()
    judged = shipping.judge(
      before, after, self._options.prices, self._options.gate
    )
    timed('gate')
    about: dict[str, Any] = {
      'findings': [dataclasses.asdict(f) for f in judged.findings],
      'reason': ' '.join(judged.reasons),
    }
    decision = trial.ROLL_BACK
    if judged.ships:
      decision, of_trial = self._try(plan)
      about |= of_trial
      timed('trial')
    if decision == trial.PROMOTE:
      self._checkpoints.save(self.version, self._state.own())
      self._checkpoints.wait()
      self._promote()
    else:
      self._restore()
    timed('publish')
    return self._finish(plan, decision, about, seconds)

  def _collect(self, number: int) -> plans.CyclePlan:
    if self._options.keep_days:
      oldest = self._ports.now() - 86400 * self._options.keep_days
      self._episodes.expire(oldest)
    least = self._size * self._options.least_steps
    needed = f'cycle {number} needs {least} judged episodes'
    self._ports.say(needed)
    while True:
      plan = plans.draw(
        self._episodes,
        self._plans,
        self._options,
        cycle=number,
        base=self.version,
        size=self._size,
        now=self._ports.now(),
        fault_of=self._candidates.fault_of,
        judge=self._ports.judge,
      )
      if plan is not None:
        self._plans.save(plan)
        return plan
      if not self._ports.wait():
        raise Starved(f'No more users come, and {needed}; fewer are ripe.')

  def _train(self, plan: plans.CyclePlan) -> None:
    """Trains on a plan, and publishes the result to the candidates."""
    spec = self._job.spec
    self._writer.truncate('rl', plan.base)
    for step in range(len(plan.steps)):
      # Read when it is due: what is withdrawn until then is in no batch.
      groups, baselines = plans.read_step(
        self._episodes, plan, step, self._options
      )
      if not groups:  # All of them were withdrawn.
        continue
      self._state, metrics = update.update(
        self._state,
        groups,
        self._functions,
        spec.update_options(),
        spec.batch_shape(),
        reference=self._reference,
        compare=grouping.advantages(baselines),
      )
      self._writer.write('rl', self.version, **metrics)
    # Nobody is served what is half trained.
    if self.version > plan.base:
      self._candidates.publish(self._state, self.version)
      self._candidates.wait()

  def _try(self, plan: plans.CyclePlan) -> tuple[str, dict[str, Any]]:
    """Lets users of both arms decide; returns the decision, and about it."""
    options, folder = self._options, self._episodes.folder
    running = trial.Running(
      name=f'cycle-{plan.cycle}', share=options.trial.share
    )
    known: dict[str, Any] = {}
    self._ports.say(
      f'cycle {plan.cycle}: version {self.version} is tried on '
      f'{100 * running.share:g} % of the users'
    )
    trial.begin(folder, running)
    try:
      while True:
        rows = self._outcomes(running.name, self.served(), known)
        of = lambda arm, rows=rows: _first_of_users(
          [r for r in rows if r['arm'] == arm]
        )
        control, candidate = of(trial.CONTROL), of(trial.CANDIDATE)
        decision, about = look(control, candidate, options)
        if decision != trial.GO_ON or not self._ports.wait():
          break
    finally:
      trial.end(folder)
    if decision == trial.GO_ON:
      decision, about['reason'] = trial.ROLL_BACK, 'No more users came.'
    return decision, about

  def _outcomes(
    self, name: str, versions: Mapping[str, int], known: dict[str, Any]
  ) -> list[dict[str, Any]]:
    """Returns rows of the judged episodes of a trial, oldest first.

    A server may take a moment to get the weights of its arm: what it answered
    with others says nothing of the trial.

    Args:
      name: name of the trial.
      versions: version of each arm.
      known: rows by name of the episode, None for one that does not count; new
        ones are added.
    """
    for claim in self._episodes.ripe(self._ports.now(), but=known):
      episode = self._episodes.read(claim) if claim.trial == name else None
      if episode is None:
        known[claim.episode] = None
        continue
      sampled = {
        int(v)
        for window in episode.windows
        for v in window.policy_version_T[window.loss_mask_T]
      }
      judged = pricing.judged(episode, self._options.prices, self._ports.judge)
      made = judged.rollout
      if self._ports.judge and made.not_judged.startswith(pricing.FOLLOW_UP):
        continue  # It waits for its judge.
      known[claim.episode] = None
      calls = [e for e in episode.events if e.kind == 'tool_call']
      group = grouping.group_of(0, [judged], claim.episode)
      is_of_arm = sampled == {versions[claim.arm]}
      # A version's number may come again, of another candidate.
      is_of_arm = is_of_arm and not self._candidates.fault_of(group)
      if made.is_judged and is_of_arm:
        known[claim.episode] = {
          'user': claim.user,
          'arm': claim.arm,
          'domain': claim.domain,
          'satisfied': float(made.verdict.passed),
          'num_invalid': made.num_invalid,
          'num_failed': sum(e.outcome == 'failed' for e in calls),
          'tools': list(made.tools),
          'done': [e.tool for e in calls if e.outcome == 'ok'],
        }
    return [row for row in known.values() if row is not None]

  def _play(self) -> Mapping[str, Sequence[shipping.Row]]:
    """Plays the pinned suites with the state, which is published."""
    policy = self._functions.policy(self._state)
    identity = self._candidates.identity(self.version)
    return self._ports.play(policy, self.version, identity)

  def _restore(self) -> None:
    """Takes up the last promoted version, and voids candidates after it."""
    finished = export.finished_step(self._job.workdir, 'rl') is not None
    start = reinforce.prepare(
      self._job, self._checkpoints, 'rl' if finished else 'sft'
    )
    self._state, self._functions = start.state, start.functions
    self._reference = start.reference
    if hasattr(self, '_candidates'):
      self._candidates.close()
    spec = self._job.spec
    store = str(self._folder / CANDIDATES)
    carrier = transport.PolicyTransport(
      self._folder,
      spec.model,
      dataclasses.replace(spec.systems['delta'], store=store),
    )
    self._candidates = carrier.publisher(self._writer, self.version)
    # The version that a trial begins with, for servers of candidates.
    self._candidates.publish(self._state, self.version)
    self._candidates.wait()

  def _promote(self) -> None:
    """Publishes the state to all users; again, if it was interrupted."""
    # As `transport.Publication` does: with codes, if the bundles carry them.
    cast = functools.partial(decoder.policy, config=self._job.spec.model)
    policy = jax.jit(cast)(self._state.variables())
    self._promoted.publish(policy, self.version)
    self._promoted.wait()
    self._base = self.version

  def _finish(
    self,
    plan: plans.CyclePlan,
    decision: str,
    about: dict[str, Any],
    seconds: dict[str, float],
  ) -> dict[str, Any]:
    rewards = [sum(terms.values()) for terms in plan.terms.values()]
    row = {
      'cycle': plan.cycle,
      'base': plan.base,
      'version': self.version,
      'decision': decision,
      'episodes': len(plan.terms),
      'steps': len(plan.steps),
      'satisfied': plan.satisfied,
      'reward': sum(rewards) / len(rewards),
      'left_out': {k: len(names) for k, names in plan.left_out.items()},
      'fates': self._episodes.fates(),
      **seconds,
      'cycle_s': sum(seconds.values()),
      **about,
    }
    self._plans.finish(plan.cycle, row)
    plain = {k: v for k, v in row.items() if not isinstance(v, (dict, list))}
    plain.pop('cycle')
    self._writer.write(STAGE, plan.cycle, **plain)
    self._ports.say(
      f'cycle {plan.cycle}: {len(plan.terms)} episodes, '
      f'{100 * plan.satisfied:.0f} % satisfied, version {row["version"]} '
      f'after {decision} in {row["cycle_s"]:.0f} s. {row.get("reason", "")}'
    )
    return row


def look(
  control: Sequence[shipping.Row],
  candidate: Sequence[shipping.Row],
  options: options_lib.LiveOptions,
) -> tuple[str, dict[str, Any]]:
  """Looks at a trial; returns the decision by now, and about it.

  Args:
    control, candidate: first rows of the users of each arm, in their order.
  """
  result = trial.judge(
    [r['satisfied'] for r in control],
    [r['satisfied'] for r in candidate],
    options.trial,
  )
  watched = shipping.judge_arms(
    control, candidate, options.prices, options.gate
  )
  decision, reason = result.decision, result.reason
  if not watched.ships:
    decision, reason = trial.ROLL_BACK, ' '.join(watched.reasons)
  about = {
    'trial': dataclasses.asdict(result),
    'canaries': [dataclasses.asdict(f) for f in watched.findings],
    'reason': reason,
  }
  return decision, about


def _first_of_users(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns the first row of each user: later ones are not independent."""
  # In the order of first rows: by that of last ones, who came again would have
  # a say in how users are paired, and the test would not hold.
  firsts: dict[str, dict[str, Any]] = {}
  for row in rows:
    firsts.setdefault(row['user'], row)
  return list(firsts.values())


def served_from(workdir: pathlib.Path, arm: str) -> str:
  """Returns the store that a server of an arm follows."""
  name = CANDIDATES if arm == trial.CANDIDATE else PROMOTED
  return str(workdir / FOLDER / name)
