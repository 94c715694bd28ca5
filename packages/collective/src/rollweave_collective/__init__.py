"""Weights by a collective group of the trainer and the engines (RollArt §6.3), over
NCCL between GPUs and Gloo otherwise.

The trainer's first rank has a `Sender`, and each engine is a `Member`. A member says
which version it wants, on a channel with a secret (`weights/tcp`). The first version of
a member comes over that channel. For later versions the sender waits a moment until all
members want the same one, and broadcasts its bytes to those that do, in buckets. A
group is kept for as long as the same engines come; engines that join, or that are
missing, change it between two broadcasts.

Invariants: a member has a version only if its digest is right; each operation of a
group ends within a deadline, and after a failure the group is not used again; who could
not receive a broadcast, or comes late, requests the version over the channel; the
trainer's thread waits for nothing here. `server` is for inference servers, each in a
group of its own, whose code verifies no digest.
"""
