"""Pure decisions about the places of trajectories, one question in each file."""
