"""The embedded engine, the clients of all engines, and the interface to engines that
are servers of other programs.
"""
