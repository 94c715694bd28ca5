"""The live page over a directory of runs (`rollweave ui`): it reads what runs write,
and writes nothing.
"""
