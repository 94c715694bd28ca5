"""The decisions about places of trajectories, pure, one question a file."""
