"""The chart, and the commands around it."""
