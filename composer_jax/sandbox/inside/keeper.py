"""The process inside the sandbox that keeps the files of the boxes.

It is a process of its own because programs begin as copies of the zygote: they
must not inherit memory with other boxes' files or tests that are hidden from
them. Standard library only.

Consumes: requests of the host on its socket, one at a time. The host asks
  nothing of a box while a program runs in it.
Woken by: a request; end of file, upon which it ends.
Produces: one answer per request; the boxes' folders, in the mount namespace
  that it shares with the zygote.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import struct

from composer_jax.sandbox.inside import beneath, confine, trees, wire

_PR_SET_PDEATHSIG = 1


class Keeper:
  """All boxes of one zygote, by number."""

  def __init__(self, config: dict, overlay: str | None):
    """Starts without boxes.

    Args:
      config: configuration of the zygote.
      overlay: options by which overlayfs works here; None where it does not.
    """
    self.top, self.images = config['boxes'], config['images']
    self.limits, self.owner = config['limits'], config['uid']
    self.namespaces = config['level'] != 'rlimits'
    self.overlay = overlay if self.namespaces else None
    self.trees: dict[int, trees.Tree] = {}
    self._copies: dict[str, tuple[str, int]] = {}

  def open(self, box: int, image: str) -> trees.Tree:
    lower, num_bytes = self._copy_of(image) if image else (None, 0)
    folder = os.path.join(self.top, f'{box}')
    os.mkdir(folder, 0o711)
    try:
      tree = self._make(folder, lower, num_bytes + self.limits['file_bytes'])
    except OSError:
      self._forget(folder)
      raise
    self.trees[box] = tree
    return tree

  def _make(self, folder: str, lower: str | None, num_bytes: int) -> trees.Tree:
    if self.namespaces:
      confine.mount_workspace(folder, num_bytes, 1024 + num_bytes // 4096)
      os.chmod(folder, 0o711)
    top, upper, opaque = os.path.join(folder, 'merged'), None, ''
    if lower and not self.overlay:
      trees.copy_image(lower, top, self.owner)
    else:
      os.mkdir(top, 0o755)
      self._give(top)
    if lower and self.overlay:
      upper, work = f'{folder}/upper', f'{folder}/work'
      for path in (upper, work):
        os.mkdir(path, 0o755)
        self._give(path)
      # Programs see the layers' names, which must not tell boxes apart.
      os.symlink(lower, f'{folder}/image')
      os.chdir(folder)
      confine.mount_overlay('image', 'upper', 'work', top, self.overlay)
      os.chdir('/')
      opaque = confine.opaque_mark(self.overlay)
    return trees.Tree(top, lower, upper, self.owner, opaque)

  def _give(self, path: str) -> None:
    if self.owner is not None:
      os.chown(path, self.owner, self.owner)

  def _copy_of(self, image: str) -> tuple[str, int]:
    """Returns the copy of an image, made at its first use, and its size.

    The image is copied because its files must belong to the uid of the programs
    and because layers below an overlay must not change.
    """
    if image not in self._copies:
      if self.images is None:
        raise beneath.RefusedError(
          f'image {image!r}: the sandbox was opened without images'
        )
      names = beneath.parts(image)
      source = os.path.join(self.images, *names)
      if not names or not os.path.isdir(source):
        raise beneath.RefusedError(
          f'image {image!r} is no folder below the folder of images'
        )
      target = os.path.join(self.top, f'image-{len(self._copies)}')
      try:
        num_bytes = trees.copy_image(source, target, self.owner)
      except (OSError, beneath.RefusedError):
        shutil.rmtree(target, ignore_errors=True)
        raise
      self._copies[image] = (target, num_bytes)
    return self._copies[image]

  def close(self, box: int) -> None:
    if self.trees.pop(box, None):
      self._forget(os.path.join(self.top, f'{box}'))

  def _forget(self, folder: str) -> None:
    if self.namespaces:
      if os.path.ismount(folder):
        confine.unmount(folder)
      os.rmdir(folder)
    else:
      shutil.rmtree(folder, ignore_errors=True)

  def answer(self, request: dict, blobs: list[bytes]) -> tuple[dict, bytes]:
    """Carries out a request; returns the answer's header and bytes."""
    box, operation = request['box'], request['do']
    if operation == 'open':
      self._open_changed(box, request, blobs)
      return {}, b''
    if operation == 'close':
      self.close(box)
      return {}, b''
    if box not in self.trees:
      raise beneath.RefusedError('there is no such box')
    tree = self.trees[box]
    one_name = not self.namespaces
    match operation:
      case 'read':
        path, most = request['path'], request['max_bytes']
        return {}, beneath.read(tree.top, path, most, one_name)
      case 'write':
        path, owner = request['path'], self.owner
        beneath.write(tree.top, path, blobs[0], owner, one_name=one_name)
      case 'remove':
        beneath.remove(tree.top, request['path'])
      case 'files':
        return {}, json.dumps(_files(tree.top, request['path'])).encode()
      case 'changes':
        return {}, json.dumps(trees.changes(tree)).encode()
      case unknown:
        raise AssertionError(unknown)
    return {}, b''

  def _open_changed(self, box: int, request: dict, blobs: list[bytes]) -> None:
    tree = self.open(box, request['image'])
    try:
      contents = iter(blobs)
      for path, is_kept in request['changes']:
        if is_kept:
          beneath.write(tree.top, path, next(contents), self.owner)
        else:
          beneath.remove(tree.top, path)
    except (OSError, beneath.RefusedError):
      self.close(box)
      raise


def _files(top: str, folder: str) -> list[str]:
  start = '/'.join(beneath.parts(folder))
  if start:
    with beneath.parent_of(top, f'{start}/x'):
      pass  # it is a folder, with no link on the way
  return sorted(
    path
    for path, status in beneath.walk(top, start)
    if beneath.kind_of(status.st_mode) == 'file' and beneath.is_text(path)
  )


def serve(keeper: Keeper, channel: socket.socket) -> None:
  """Answers requests until the host closes its end."""
  ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  while True:
    try:
      request, blobs, _ = wire.receive(channel)
    except (ConnectionError, struct.error):
      return
    # Unmounting waits for the kernel; who comes next waits for it here.
    is_answered = keeper.namespaces and request['do'] == 'close'
    if is_answered:
      wire.send(channel, {}, [b''])
    try:
      header, data = keeper.answer(request, blobs)
    except beneath.RefusedError as error:
      header, data = {'refused': str(error)}, b''
    except OSError as error:
      header, data = {'failed': str(error)}, b''
    if len(data) > wire.MAX_FRAME:
      refusal = f'an answer of {len(data)} bytes exceeds {wire.MAX_FRAME}'
      header, data = {'refused': refusal}, b''
    if not is_answered:
      wire.send(channel, header, [data])
