"""The code that runs inside a sandbox: an action server and its tools. The whole folder
needs Python 3.9 and its standard library alone.

`python3 .../inside --fd N` serves the socket N until its other end closes. The host
uses `frames`, too.
"""
