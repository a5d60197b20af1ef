"""What a step trains on: staleness, order, and that nothing is lost."""

import hypothesis
import pytest
from hypothesis import strategies as st

from composer_jax.pipeline import consumption


def window_of(prompts=2, max_staleness=2, overtake=0, steps=6):
  return consumption.GroupWindow(
    prompts=prompts, max_staleness=max_staleness, overtake=overtake, steps=steps
  )


@hypothesis.given(
  prompts=st.integers(1, 5),
  max_staleness=st.integers(0, 4),
  steps=st.integers(1, 12),
  data=st.data(),
)
@hypothesis.settings(max_examples=80, deadline=None)
def test_staleness_is_bounded_and_every_group_trained_once(
  prompts, max_staleness, steps, data
):
  # A simulated clock: at each tick either the worker starts or finishes some
  # admitted group with whatever version it serves, or the trainer steps.
  overtake = data.draw(st.integers(0, prompts * max_staleness))
  window = window_of(prompts, max_staleness, overtake, steps)
  queue = consumption.GroupQueue(window)
  version, served = 0, 0
  started, running, finished, trained = set(), {}, {}, []
  while version < steps:
    is_ready = lambda groups: [g for g in groups if g in finished]
    picked = queue.pick(version, is_ready)
    admitted = [g for g in queue.open(served) if g not in started]
    moves = ['start'] * bool(admitted) + ['finish'] * bool(running)
    moves += ['follow'] * (served < version)
    moves += ['train'] * (len(picked) == prompts)
    assert moves, 'deadlock'
    assert len(queue.open(version)) <= window.open_groups
    match data.draw(st.sampled_from(moves)):
      case 'start':
        group = data.draw(st.sampled_from(admitted))
        assert served >= window.min_version(group)
        running[group] = served
        started.add(group)
      case 'finish':
        group = data.draw(st.sampled_from(sorted(running)))
        finished[group] = running.pop(group)
      case 'follow':
        served = data.draw(st.integers(served + 1, version))
      case _:
        for group in picked:
          assert 0 <= version - finished[group] <= max_staleness
          assert sum(g > group for g in trained) <= overtake
        trained += picked
        queue.take(picked)
        version += 1
  assert sorted(trained) == list(range(steps * prompts))
  if not overtake:
    assert trained == sorted(trained)


def test_one_slow_group_holds_up_nothing_until_its_bound():
  """Oversampling by whole groups: the first that are ready are trained.

  At most 6 groups of 2 a step are under way, of which 3 may overtake group 0.
  """
  queue = consumption.GroupQueue(window_of(max_staleness=3, overtake=3))
  others = lambda groups: [g for g in groups if g != 0]
  assert queue.open(0) == [0, 1, 2, 3, 4]
  taken = []
  while len(picked := queue.pick(len(taken), others)) == 2:
    queue.take(picked)
    taken.append(picked)
  # By step 1, since (0 + 3) // 2 is 1.
  assert taken == [[1, 2]] and picked == [3]
  assert queue.pick(1, lambda groups: groups) == [0, 3]
  # What is left over stays, and is trained later.
  queue.take([0, 3])
  assert (queue.first, queue.ahead) == (4, set())
  assert queue.open(2) == [4, 5, 6, 7, 8]


def test_without_overtaking_only_the_next_groups_are_trained():
  queue = consumption.GroupQueue(window_of())
  assert queue.pick(0, lambda groups: [1, 2, 3]) == [1]
  assert queue.pick(0, lambda groups: [0, 1, 2, 3]) == [0, 1]
  window = queue.window
  assert [window.min_version(g) for g in range(10)] == [0] * 6 + [1, 1, 2, 2]
  assert [window.admitted(v) for v in (0, 1, 9)] == [6, 8, 12]
  assert window.lag == window.max_staleness


@hypothesis.given(
  prompts=st.integers(1, 5),
  max_staleness=st.integers(0, 4),
  data=st.data(),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_the_bounds_of_a_group_are_as_far_apart_as_staleness_allows(
  prompts, max_staleness, data
):
  overtake = data.draw(st.integers(0, prompts * max_staleness))
  window = window_of(prompts, max_staleness, overtake, 1000)
  for group in range(4 * window.open_groups):
    last = next(v for v in range(1000) if group < window.due(v + 1))
    first = next(v for v in range(1000) if group < window.admitted(v))
    assert window.min_version(group) == first
    assert last <= first + max_staleness
    # Tasks are drawn by whole steps, when the first of theirs is admitted.
    drawn = group // prompts
    assert drawn - window.lag <= next(
      v for v in range(1000) if drawn * prompts < window.admitted(v)
    )


def test_a_queue_goes_on_where_it_was():
  queue = consumption.GroupQueue(window_of(max_staleness=3, overtake=3))
  queue.take([1, 2])
  again = consumption.GroupQueue(queue.window, [2, 1])
  assert (again.first, again.ahead) == (queue.first, queue.ahead) == (0, {1, 2})
  assert again.open(1) == [0, 3, 4, 5, 6]


@pytest.mark.parametrize('overtake', [0, 3])
def test_groups_below_what_is_due_are_counted_for_good(overtake):
  window = window_of(max_staleness=3, overtake=overtake)
  queue = consumption.GroupQueue(window)
  for step in range(4):
    late = lambda groups: [g for g in groups if g or len(groups) < 4]
    picked = queue.pick(step, late)
    if len(picked) < 2:
      picked = queue.pick(step, lambda groups: groups)
    queue.take(picked)
    assert window.due(step + 1) <= queue.first
