"""Adapters of a service to others: ProRL's HTTP contract, and other trainers that train
on its rollouts (`docs/TRAINERS.md`). The rest of the service does not know them; its
launch adds ProRL's routes.
"""
