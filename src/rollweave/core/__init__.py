"""The state of a run and the one function that changes it: `Core.handle(now, event) ->
commands`.
"""
