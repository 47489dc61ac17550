"""The shared vocabulary: configuration, trajectories and their wire form, logging, metrics, the command."""
