"""Has a model read the transcripts of an evaluation, blind to their verdicts.

  ./run.sh audit --evaluation=runs/eval_chat --model=NAME \
      --url=http://localhost:8001/v1

Any endpoint of OpenAI's form serves; the key is COMPOSER_JAX_TOKEN. The
findings are in EVALUATION/audit.jsonl, one line an episode, and change no
verdict. The same command reads the episodes that have no line yet.
"""

import pathlib

from absl import flags, logging

from experiments import start

_EVALUATION = flags.DEFINE_string(
  'evaluation', '', 'Folder of an evaluation (experiments.evaluate).'
)
_URL = flags.DEFINE_string('url', '', 'URL of the endpoint, up to /v1.')
_MODEL = flags.DEFINE_string('model', '', 'Name of the model at the endpoint.')
_THREADS = flags.DEFINE_integer('threads', 4, 'Episodes at a time.')


def run() -> None:
  logging.set_verbosity(logging.WARNING)
  # After the flags: this import loads jax.
  from composer_jax.tasks import judges
  from composer_jax.tasks.practice import auditing, evaluation

  folder = pathlib.Path(_EVALUATION.value)
  if not _EVALUATION.value or not (folder / evaluation.EPISODES).is_file():
    raise ValueError(
      f'--evaluation={_EVALUATION.value!r} must be a folder that '
      f'`./run.sh evaluate --out=FOLDER` made: it has no {evaluation.EPISODES}.'
    )
  if not _URL.value or not _MODEL.value or _THREADS.value < 1:
    raise ValueError(
      f'--url ({_URL.value!r}) and --model ({_MODEL.value!r}) name the model '
      f'that reads, and --threads ({_THREADS.value}) must be at least 1.'
    )
  judge = judges.open_judge(_URL.value, _MODEL.value)
  try:
    counts = auditing.audit(folder, judge, _THREADS.value)
  finally:
    judge.close()
  print(
    f'{counts["read"]} episodes read, findings in {counts["found"]}; of '
    f'{counts["passed"]} that passed in {counts["passed_found"]}, of '
    f'{counts["flagged"]} that monitors flagged in {counts["flagged_found"]}'
  )
  print(folder / auditing.AUDIT)
  if counts['failed']:
    raise RuntimeError(
      f'The model gave no answer for {counts["failed"]} episodes, as said '
      'above; the same command asks again for those.'
    )


if __name__ == '__main__':
  start.run(run, errors=(ValueError, OSError, RuntimeError))
