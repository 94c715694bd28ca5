"""HTTP listeners: who may connect, and what a request may cost."""
