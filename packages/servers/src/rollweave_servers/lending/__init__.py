"""What runs in the process of a serving engine that lends."""
