"""What a run measured, one JSON line at a time.

`metrics.jsonl` is the record that everything else (the report, the studies,
TensorBoard) is derived from. Appending is one write of whole lines, so `kill
-9` loses at most the line being written, which `read` skips and the next
`Writer` cuts off. TensorBoard and Weights & Biases receive the same numbers.

Metrics, by stage; a line tells of the one step that it names. In RL they are of
all the step's rollouts, but for those marked *: these cover only what the step
trains on, the trajectories with an advantage, or all where none has one.

| stage    | name                     | meaning                                |
|----------|--------------------------|----------------------------------------|
| cpt, sft | loss                     | mean over weighted tokens, nats        |
| cpt, sft | heldout_loss             | same, on documents that training skips |
| cpt, sft | aux_loss                 | load balancing, before its weight,     |
|          |                          | summed over MoE layers                 |
| cpt, sft | z_loss                   | mean squared log-sum-exp of the        |
|          |                          | router's logits, before its weight,    |
|          |                          | summed over MoE layers                 |
| cpt, sft | grad_norm                | global, before clipping                |
| cpt, sft | update_norm              | global, of what was added to the       |
|          |                          | masters                                |
| cpt, sft | lr                       | learning rate of the step              |
| cpt, sft | tokens_per_s             | real tokens, padding excluded, since   |
|          |                          | the line before; no compilation        |
| cpt, sft | mfu                      | share of peak FLOP/s, attention        |
|          |                          | unmasked (every query meets the whole  |
|          |                          | row); absent where no peak is known.   |
|          |                          | On a CPU the peak is an estimate of    |
|          |                          | idle cores (`telemetry.mfu`), so that  |
|          |                          | other work on them lowers it           |
| cpt, sft | max_logit                | largest attention logit of the batch;  |
|          |                          | QK-clip scales a head above            |
|          |                          | muon.qk_clip down to it; absent if     |
|          |                          | that is 0                              |
| cpt, sft | max_logit_layers         | same, of each layer                    |
| cpt, sft | muon_matrices            | that Muon orthogonalises; this and the |
|          |                          | next five, of its plan, at step 0 only |
| cpt, sft | muon_groups              | of matrices of one shape and placement |
| cpt, sft | muon_flops               | of Newton-Schulz, of a device and step |
| cpt, sft | muon_flops_ideal         | an even share of it by the standard    |
|          |                          | method                                 |
| cpt, sft | muon_bytes               | received by a device in a step, where  |
|          |                          | muon.period is over 1 in a step of     |
|          |                          | whole matrices                         |
| cpt, sft | muon_seconds             | modelled, by published peak figures    |
| cpt, sft | expert_load              | tokens per expert, a list for each MoE |
|          |                          | layer                                  |
| cpt, sft | expert_load_max          | busiest expert over the mean, worst    |
|          |                          | layer                                  |
| cpt, sft | mesh                     | text: its axes, at step 0 only         |
| cpt, sft | transport                | text: of tokens to experts, likewise;  |
|          |                          | absent if no devices share the experts |
| cpt, sft | shard_load_max           | rows of the busiest expert shard over  |
|          |                          | the mean, worst layer: what the others |
|          |                          | wait for                               |
| cpt, sft | needed_rows              | that an expert shard needed room for,  |
|          |                          | of the fullest layer                   |
| cpt, sft | received_rows            | that it had room for                   |
| cpt, sft | retry                    | text, on a line of its own: a step     |
|          |                          | that overflowed and was repeated       |
| cpt, sft | retry_needed_rows        | that it needed                         |
| cpt, sft | retry_capacity           | that it had                            |
| cpt, sft | executed_share           | rows that the experts' kernel computed |
|          |                          | over routed ones; absent with          |
|          |                          | accumulate or where it does not know   |
| rl       | groups                   | their ids                              |
| rl       | reward                   | mean, penalties of invalid calls       |
|          |                          | included                               |
| rl       | pass_rate                | share of judged rollouts that passed   |
| rl       | passed                   | rollouts whose hidden tests all passed |
| rl       | failed                   | rollouts graded of which a test failed |
| rl       | unfinished               | rollouts that never called finish      |
| rl       | infrastructure           | rollouts not judged: the sandbox       |
|          |                          | failed                                 |
| rl       | informative_groups       | share of groups with an advantage      |
| rl       | turns                    | tool calls per rollout                 |
| rl       | invalid_rate             | invalid tool calls over all calls      |
| rl       | tokens                   | per rollout, the harness's included    |
| rl       | flags                    | rollouts in which monitors found       |
|          |                          | anything                               |
| rl       | sandbox_ms               | wall time in the sandbox per rollout   |
| rl       | staleness                | trainer version minus the oldest that  |
|          |                          | sampled in a trajectory, largest       |
| rl       | staleness_mean           | same, mean over trajectories           |
| rl       | sampled_tokens           | * of the policy, which the loss is of  |
| rl       | microbatches             | * packed                               |
| rl       | loss                     | * policy gradient's, per rollout of    |
|          |                          | the step; its value says little, its   |
|          |                          | gradient is what counts                |
| rl       | grad_norm                | global, before clipping                |
| rl       | entropy                  | * of the sampled distribution, nats a  |
|          |                          | token                                  |
| rl       | mismatch_kl              | * mean k3 of rollout against training  |
|          |                          | log-probs in float64, nats, as trained |
|          |                          | on: replayed if rl.replay              |
| rl       | mismatch_p99             | * same, its 99th percentile over       |
|          |                          | tokens                                 |
| rl       | mismatch_max             | * largest difference of a log-prob     |
| rl       | mismatch_large           | * share of tokens that one side finds  |
|          |                          | twice as likely or more                |
| rl       | fresh_tokens             | * sampled by the very version that is  |
|          |                          | trained (`rl.mismatch.ages`); the next |
|          |                          | four are of these, absent where there  |
|          |                          | are none                               |
| rl       | mismatch_kl_fresh        | * as mismatch_kl                       |
| rl       | mismatch_p99_fresh       | * as mismatch_p99                      |
| rl       | mismatch_max_fresh       | * as mismatch_max                      |
| rl       | mismatch_large_fresh     | * as mismatch_large                    |
| rl       | truncated                | * share of tokens at rl.ratio_cap      |
| rl       | mismatch_kl_replay       | * every rl.mismatch_every steps: as    |
|          |                          | mismatch_kl, routes replayed           |
| rl       | mismatch_p99_replay      | * same, as mismatch_p99                |
| rl       | mismatch_max_replay      | * same, as mismatch_max                |
| rl       | mismatch_large_replay    | * same, as mismatch_large              |
| rl       | mismatch_kl_no_replay    | * the same batch, every token routed   |
|          |                          | afresh                                 |
| rl       | mismatch_p99_no_replay   | * same, as mismatch_p99                |
| rl       | mismatch_max_no_replay   | * same, as mismatch_max                |
| rl       | mismatch_large_no_replay | * same, as mismatch_large              |
| rl       | route_agreement          | * every rl.mismatch_every steps: share |
|          |                          | of tokens whose recorded experts are   |
|          |                          | those of the trainer, all routed       |
|          |                          | afresh; lowest layer                   |
| rl       | route_agreement_layers   | * same, of each MoE layer              |
| rl       | routed_differently       | * share of tokens that differ in at    |
|          |                          | least one layer                        |
| rl       | replay_agreement         | * share of recorded routes that the    |
|          |                          | trainer would choose after replayed    |
|          |                          | ones, lowest layer; this and the next  |
|          |                          | three of a replay                      |
| rl       | replay_agreement_layers  | * same, of each MoE layer              |
| rl       | replay_replaced          | * share of recorded experts that       |
|          |                          | model.moe.replay_alpha replaced,       |
|          |                          | highest layer                          |
| rl       | replay_no_route          | * share of tokens without a record,    |
|          |                          | highest layer; the last of a           |
|          |                          | trajectory never has                   |
| rl       | gate_breaches            | measures out of their bands; absent if |
|          |                          | rl.gate is off                         |
| rl       | gate                     | list of texts: which they are, and     |
|          |                          | what to look at                        |
| rl       | expert_load              | * as above                             |
| rl       | expert_load_max          | * as above                             |
| rl       | repeated_microbatches    | * whose buffers overflowed; absent if  |
|          |                          | none                                   |
| rl       | wait_s                   | for the step's groups                  |
| rl       | train_s                  | in the update                          |
| rl       | publish_s                | handing over the policy, the one       |
|          |                          | before awaited if still under way      |
| delta    | target_id                | text: Merkle root of the policy that   |
|          |                          | is published under the step as version |
| delta    | kind                     | text: 'delta' to the version before,   |
|          |                          | or 'key', which stands alone           |
| delta    | bytes                    | of the bundle, its manifest included   |
| delta    | full_bytes               | of the whole policy                    |
| delta    | changed                  | share of elements that differ from the |
|          |                          | version before                         |
| delta    | cut_bytes                | exchanged to complete chunks that lie  |
|          |                          | across shards                          |
| delta    | keyframe_bytes           | of a keyframe made beside the delta,   |
|          |                          | for receivers that join late           |
| delta    | skip_bytes               | of deltas to versions further back     |
| delta    | encode_s                 | in the background: encoding, decoding  |
|          |                          | again and comparing                    |
| delta    | upload_s                 | same, writing to the store             |
| eval     | name                     | text: which policy, 'sft' or 'rl'      |
| eval     | episodes                 | held-out ones that were judged         |
| eval     | passed                   | of these                               |
| eval     | pass_rate                | their share                            |
| eval     | pass_low                 | end of its 95 % interval               |
|          |                          | (`telemetry.intervals`)                |
| eval     | pass_high                | the other end                          |
| eval     | infrastructure           | episodes not judged: the sandbox       |
|          |                          | failed                                 |
| eval     | unfinished_rate          | share that never called finish         |
| eval     | invalid_rate             | invalid tool calls over all calls      |
| eval     | valid_episodes           | finished, without an invalid call      |
| eval     | passed_valid             | of these, passed                       |
| eval     | temperature              | that the policy sampled at             |
"""

import contextlib
import json
import math
import os
import pathlib
import time
from typing import Any

from composer_jax.core import files
from composer_jax.telemetry import append, board

METRICS = 'metrics.jsonl'
_OWN_FIELDS = ('stage', 'step', 'time')


def _plain(value: Any) -> Any:
  """Turns numpy and device scalars and arrays into JSON values.

  JSON has no NaN or infinity; they become their names, which `float` reads.
  """
  if hasattr(value, 'tolist'):
    value = value.tolist()
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  return value


def _whole_lines(path: pathlib.Path) -> tuple[list[str], int]:
  """Returns the complete lines of a JSONL file and their length in bytes."""
  try:
    data = path.read_bytes()
  except FileNotFoundError:
    return [], 0
  end = data.rfind(b'\n') + 1
  return data[:end].decode().splitlines(), end


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Reads a JSONL file, without the line that a crash tore, if any.

  Args:
    path: the file, or a workdir that holds `metrics.jsonl`; absent reads as
      empty.

  Raises:
    ValueError: a line other than the last is damaged, with its number.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    path = path / METRICS
  lines, _ = _whole_lines(path)
  rows = []
  for number, line in enumerate(lines, 1):
    try:
      rows.append(json.loads(line))
    except ValueError as error:
      raise ValueError(
        f'{path}, line {number} is not JSON ({error}); delete that line.'
      ) from error
  return rows


class Writer:
  """Appends metrics of a run to its workdir.

  One process writes to a workdir; several stages of it may share a Writer.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    tensorboard: bool = True,
    wandb: bool = False,
    wandb_project: str = 'composer_jax',
  ):
    """Opens the workdir's metrics, cutting off a line that a crash tore.

    Raises:
      ValueError: wandb is wanted but not installed.
    """
    self._workdir = pathlib.Path(workdir)
    self._workdir.mkdir(parents=True, exist_ok=True)
    self._path = self._workdir / METRICS
    self._wandb_run = None
    if wandb:
      self._wandb_run = _open_wandb(self._workdir, wandb_project)
    self._tensorboard = tensorboard
    self._boards: dict[str, board.Board] = {}
    _, end = _whole_lines(self._path)
    self._file = self._open()
    self._file.truncate(end)

  def _open(self) -> append.AppendFile:
    return append.AppendFile(self._path, 'a line of metrics')

  def write(self, stage: str, step: int, **metrics: Any) -> None:
    """Appends one line; values are scalars, text or (nested) lists.

    Raises:
      ValueError: a metric takes the name of one of the line's own fields.
      OSError: the disk is full, with the path; earlier lines are untouched,
        and TensorBoard has at most what the lines have.
    """
    now = time.time()
    row: dict[str, Any] = {'stage': stage, 'step': int(step), 'time': now}
    for name in _OWN_FIELDS:
      if name in metrics:
        raise ValueError(f'A metric cannot be called {name!r}: lines use it.')
    row |= {name: _plain(value) for name, value in metrics.items()}
    self._file.append((json.dumps(row) + '\n').encode())
    scalars = {
      f'{stage}/{name}': float(value)
      for name, value in row.items()
      if name not in _OWN_FIELDS and isinstance(value, (int, float))
    }
    if self._tensorboard and scalars:
      self._board(stage).write(int(step), scalars, walltime=now)
    if self._wandb_run is not None:
      self._wandb_run.log(scalars | {f'{stage}/step': int(step)})

  def truncate(self, stage: str, step: int, name: str | None = None) -> None:
    """Drops the stage's lines after `step`, those a resumed run writes again.

    TensorBoard is told to purge the same steps; not where `name` is given,
    since a purge would take the lines of other names too.

    Args:
      stage: of the lines.
      step: the last to keep.
      name: drops only lines whose metric `name` is this one; None drops all.
    """
    rows = read(self._path)
    kept = [
      r
      for r in rows
      if r['stage'] != stage
      or r['step'] <= step
      or (name is not None and r.get('name') != name)
    ]
    if len(kept) == len(rows):
      return
    text = ''.join(json.dumps(row) + '\n' for row in kept)
    files.write_atomic(self._path, text.encode())
    self._file.close()
    self._file = self._open()
    if self._tensorboard and name is None:
      if stage in self._boards:
        self._boards.pop(stage).close()
      self._board(stage, purge_step=step + 1)

  def _board(self, stage: str, purge_step: int | None = None) -> board.Board:
    if stage not in self._boards:
      self._boards[stage] = board.Board(
        self._workdir / 'tensorboard' / stage, purge_step=purge_step
      )
    return self._boards[stage]

  def flush(self) -> None:
    self._file.sync()
    for each in self._boards.values():
      each.sync()

  def close(self) -> None:
    # All of them, also where one fails.
    with contextlib.ExitStack() as stack:
      stack.callback(self._file.close)
      for each in self._boards.values():
        stack.callback(each.close)
      self._boards = {}
      if self._wandb_run is not None:
        stack.callback(self._wandb_run.finish)
        self._wandb_run = None

  def __enter__(self) -> 'Writer':
    return self

  def __exit__(self, kind: type[BaseException] | None, *unused) -> None:
    if kind is None:
      self.close()
      return
    # What ended the run is the error to show, not what follows from it.
    with contextlib.suppress(OSError):
      self.close()


def _open_wandb(workdir: pathlib.Path, project: str) -> Any:
  try:
    import wandb
  except ImportError as error:
    raise ValueError(
      'wandb=True needs the Weights & Biases client, which is not installed; '
      'run `pip install -e .[wandb]`, or set wandb to False.'
    ) from error
  # One id per workdir: a resumed run continues its own curves.
  return wandb.init(
    project=project,
    dir=str(workdir),
    id=files.sha256(str(workdir.resolve()).encode())[:16],
    resume='allow',
  )
