"""A store of keys and values with nested transactions and watchers."""

import copy

_GONE = object()


class NoTransactionError(RuntimeError):
    """Nothing was begun that could be ended."""


class Store:
    """What is put in and what is taken out are copies. Inside a transaction changes are seen at once, and can be taken back."""

    def __init__(self, initial=None):
        self._data = copy.deepcopy(dict(initial or {}))
        self._layers = []
        self._watchers = {}

    def get(self, key, default=None):
        for layer in reversed(self._layers):
            if key in layer:
                return default if layer[key] is _GONE else copy.deepcopy(layer[key])
        return copy.deepcopy(self._data[key]) if key in self._data else default

    def set(self, key, value):
        self._write(key, copy.deepcopy(value))

    def delete(self, key):
        """Raises KeyError where there is none."""
        if key not in self:
            raise KeyError(key)
        self._write(key, _GONE)

    def increment(self, key, by=1):
        """A number, 0 where there was none; the new one."""
        value = self.get(key, 0) + by
        self.set(key, value)
        return value

    def __contains__(self, key):
        return self.get(key, _GONE) is not _GONE

    def keys(self):
        """Sorted."""
        names = set(self._data)
        for layer in self._layers:
            names.update(layer)
        return sorted(name for name in names if name in self)

    def begin(self):
        self._layers.append({})

    def rollback(self):
        """Take back the innermost transaction."""
        if not self._layers:
            raise NoTransactionError("nothing to roll back")
        self._layers.pop()

    def commit(self):
        """The innermost transaction becomes part of the one around it, or of the store: then watchers hear of it."""
        if not self._layers:
            raise NoTransactionError("nothing to commit")
        layer = self._layers.pop()
        for key, value in layer.items():
            self._write(key, value)

    def watch(self, key, call):
        """`call(key, value)` after each change that lasts; value None: deleted. A function that ends the watch."""
        self._watchers.setdefault(key, []).append(call)
        return lambda: self._watchers[key].remove(call)

    def _write(self, key, value):
        if self._layers:
            self._layers[-1][key] = value
            return
        if value is _GONE:
            self._data.pop(key, None)
        else:
            self._data[key] = value
        for call in list(self._watchers.get(key, ())):
            call(key, None if value is _GONE else copy.deepcopy(value))
