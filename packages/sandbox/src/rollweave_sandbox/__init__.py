"""Sandboxes of this machine, for Rollweave: the back ends that start them, the server
inside, and the images of a host.
"""
