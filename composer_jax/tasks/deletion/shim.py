"""Modules from which a deleted name can be imported, though not used.

A file of tests that imports what is gone fails as a whole. With a shim its
tests fail one by one, for want of the feature. No task ever contains one.
"""

from collections.abc import Collection

from composer_jax.tasks.deletion import edit

_SHIM = """

class _Deleted(type):
    def _raise(self, *args, **kwargs):
        raise NotImplementedError('deleted')

    __call__ = __getattr__ = __getitem__ = __iter__ = __len__ = _raise
    __add__ = __or__ = __contains__ = __instancecheck__ = _raise
    __enter__ = __subclasscheck__ = __mro_entries__ = _raise


_deleted_before = globals().get('__getattr__')


def __getattr__(name):
    if {test}:
        return type.__new__(_Deleted, name, (), {{}})
    if _deleted_before is not None:
        return _deleted_before(name)
    raise AttributeError(name)
"""


def shim(text: str, names: Collection[str]) -> str:
  """The text of a module, and stand-ins for these names in it.

  Args:
    text: of the module; '' for one that was removed.
    names: that it lost, with `tasks.deletion.edit.EVERYTHING` all it had.
  """
  if edit.EVERYTHING in names:
    return text + _SHIM.format(test="not name.startswith('__')")
  return text + _SHIM.format(test=f'name in {sorted(names)!r}')
