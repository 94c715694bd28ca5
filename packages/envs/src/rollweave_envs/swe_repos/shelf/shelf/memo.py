"""Functions that remember what they returned."""

import functools

from shelf.cache import LRU, MISSING


def key_of(args, kwargs, *, typed=False):
    """Equal for equal calls: the order of keyword arguments does not matter, their names do."""
    named = tuple(sorted(kwargs.items()))
    key = (args, named)
    if typed:
        key += (tuple(type(value) for value in args), tuple(type(value) for _, value in named))
    return key


def memoize(size=128, *, typed=False):
    """A decorator. None is remembered too; an exception is not."""

    def decorate(function):
        kept = LRU(size)

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            key = key_of(args, kwargs, typed=typed)
            value = kept.get(key, MISSING)
            if value is MISSING:
                value = function(*args, **kwargs)
                kept.put(key, value)
            return value

        wrapper.cache = kept
        return wrapper

    return decorate


class lazy:
    """An attribute that is computed once for each object, under its own name."""

    def __init__(self, function):
        self._function = function
        self._name = function.__name__

    def __set_name__(self, owner, name):
        self._name = name

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        kept = instance.__dict__
        if self._name not in kept:
            kept[self._name] = self._function(instance)
        return kept[self._name]
